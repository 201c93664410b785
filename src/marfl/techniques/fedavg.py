"""FedAvg: a server averages.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017 (arXiv 1602.05629). Every client sends its update to the server, which sends the mean back.
Among peers (`star`) the server is a peer without data. An attempt is all or nothing there, as in every exchange: a
lost client means another attempt without it, a lost server means no result until there is one again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marfl.plan.cost import FP32, Messages, phase
from marfl.techniques.technique import ABSORBED, GlobalSum, Loss, one_group
from marfl.wire.packing import IntegerWire

if TYPE_CHECKING:
    from torch import Tensor

    from marfl.protocol.attempt import Attempt


@dataclass(frozen=True)
class FedAvg(GlobalSum):
    """Two messages and two vectors per client."""

    wire: IntegerWire | None = None  # values as integers of a few bits; fp32 without

    name: ClassVar[str] = "fedavg"
    server: ClassVar[bool] = True

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        """Everyone sends its model to the server, rank n, which sends the mean back."""
        clients, server = np.arange(n), np.full(n, n)
        up, down = (self.wire.partial(1, n), self.wire.result(n)) if self.wire else (FP32, FP32)
        yield from phase(clients, server, length, up)
        yield from phase(server, clients, length, down, down=True)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """The server averages those who are there."""
        return ABSORBED

    def protocol(self, n: int) -> dict[str, Any]:
        return one_group("star")


async def star(attempt: Attempt, value: Tensor) -> Tensor:
    """To the server and back. The server is the member with the highest index, and brings weight 0."""
    from marfl.protocol.attempt import Stuck
    from marfl.techniques.hops import receive  # torch takes a second: only where peers run it

    members = attempt.roster.members
    hub = max(range(len(members)), key=lambda rank: members[rank].index)
    if members[hub].weight:
        raise Stuck("no server in the roster: the member with the highest index brings an update of its own")
    up, down = attempt.tag("reduce", 0), attempt.tag("gather", 0)
    clients = [rank for rank in range(len(members)) if rank != hub]
    if attempt.rank != hub:
        async with attempt.sending(0, "reduce", 0, [(hub, value)]):
            return await receive(attempt, 1, down, hub, attempt.length)
    total: Tensor | None = None
    for rank in clients:  # in rank order, never in order of arrival; its own zeros are not added
        update = await receive(attempt, 0, up, rank, attempt.length)
        total = update if total is None else total + update
    assert total is not None
    mean = attempt.averaged(total)
    async with attempt.sending(1, "gather", 0, [(rank, mean) for rank in clients]):
        return mean
