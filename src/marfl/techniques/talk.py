"""Conversations: one iteration of a technique without a roster to seal, as messages between peers over a `Net`.

Whom a peer talks to follows from what all members know (`Circle`), so nobody has to be asked. A partner that is gone
or sends what must not be used is named in the `Turn`, and the peer goes on without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from marfl.errors import NetError, WireError
from marfl.net.base import Net, Parcel, PeerId, Tag
from marfl.protocol.tensors import tensor_from, tensor_parcel
from marfl.techniques.base import MixContext


class Turn(NamedTuple):
    """What one peer takes away from one iteration."""

    value: Tensor
    memory: Mapping[str, Any]  # for its next iteration
    missing: dict[PeerId, str]  # who did not answer, and why


@dataclass(frozen=True)
class Circle:
    """Who talks in an iteration, and what all of them know before it."""

    names: tuple[PeerId, ...]  # by position, as the members in `ctx`
    ctx: MixContext
    layout: bytes  # hash of the model's layout: other models are refused
    timeout: float = 4.0  # seconds for a message to arrive, from the beginning of the iteration

    @cached_property
    def digest(self) -> bytes:
        """Two views of who takes part never mix."""
        said = f"{self.ctx.seed}:{self.ctx.iteration}:{self.ctx.members}:{self.names}"
        return hashlib.sha256(said.encode()).digest()


@dataclass
class Voice:
    """One peer's messages of one iteration."""

    net: Net
    circle: Circle
    missing: dict[PeerId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = self.circle.names.index(self.net.me)
        self.deadline = self.net.now() + self.circle.timeout

    async def tell(self, position: int, channel: str, parcel: Parcel) -> None:
        """Send to the member at a position; if it is gone, note it."""
        peer = self.circle.names[position]
        try:
            await self.net.send(peer, self._tag(channel), parcel, deadline=self.deadline)
        except NetError as error:
            self.missing[peer] = str(error)

    async def hear(self, position: int, channel: str) -> Parcel | None:
        """The message of the member at a position; None when there is none in time, and that is noted."""
        peer = self.circle.names[position]
        try:
            return await self.net.recv(peer, self._tag(channel), deadline=self.deadline)
        except NetError as error:
            self.missing[peer] = str(error)
            return None

    async def tell_vector(self, position: int, channel: str, vector: Tensor) -> None:
        await self.tell(position, channel, tensor_parcel(vector, self.circle.digest, self.circle.layout))

    async def hear_vector(self, position: int, channel: str, count: int) -> Tensor | None:
        """A vector of so many values; None when it does not come or must not be used, and that is noted."""
        parcel = await self.hear(position, channel)
        if parcel is None:
            return None
        try:
            return tensor_from(parcel, digest=self.circle.digest, layout=self.circle.layout, count=count)
        except WireError as error:
            self.refuse(position, error)
            return None

    def refuse(self, position: int, error: WireError) -> None:
        """Note a message that must not be used."""
        self.missing[self.circle.names[position]] = str(error)

    def _tag(self, channel: str) -> Tag:
        return Tag(channel, self.circle.ctx.iteration, part=int.from_bytes(self.circle.digest[:6]))
