"""The door of a closed run: messages, questions and DHT records of peers without a token are refused and counted.

A peer shows its token in a "hello" before its first message to another, and carries it in front of every DHT record,
so that a node which never met it can judge the record as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from marfl.byte_kinds import ByteKind
from marfl.errors import InputError, PeerGone
from marfl.net.base import Parcel, PeerId, Tag
from marfl.net.libp2p import Libp2pNet
from marfl.net.libp2p_frames import Code, Frame, Opening, Refusal, Wire
from marfl.net.libp2p_identity import load_identity
from marfl.net.libp2p_records import HEAD, Place, Validator, unpacked
from marfl.net.libp2p_settings import Libp2pSettings
from marfl.tokens import TOKEN_BYTES, Gate

HELLO = "hello"


class ClosedNet(Libp2pNet):
    """`Libp2pNet` among token holders only. Set up by `start_closed`."""

    gate: Gate
    token: bytes

    def close_door(self, gate: Gate, token: bytes, settings: Libp2pSettings) -> None:
        """From now on only those whom the gate admits are heard; must come before the net starts."""
        self.gate, self.token = gate, token
        self._greeted: set[PeerId] = set()
        self._records._validator = TokenValidator(gate, self.refused, settings)
        self.serve(HELLO, self._on_hello)

    async def _take(self, source: PeerId, wire: Wire, opening: Opening) -> Frame:
        hello = opening.code is Code.CALL and opening.tag == HELLO
        if not hello and not self.gate.admits(source):
            raise Refusal("not allowed")
        return await super()._take(source, wire, opening)

    async def _on_hello(self, sender: PeerId, request: Parcel) -> Parcel:
        if not self.gate.admit(sender, request.header):
            self.refused["bad token"] += 1
            return Parcel(b"")
        return Parcel(self.token)

    async def _greet(self, to: PeerId, deadline: float, *, again: bool = False) -> None:
        """Show my token to a peer that has not seen it from me, and look at its own."""
        if to == self.me or (to in self._greeted and not again):
            return
        answer = await super().call(to, HELLO, Parcel(self.token), deadline=deadline)
        if not self.gate.admit(to, answer.header):
            self.refused["bad token"] += 1
            raise PeerGone(f"{to} has no valid token of this run, or does not take mine")
        self._greeted.add(to)

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        await self._greet(to, deadline)
        try:
            await super().send(to, tag, parcel, kind=kind, deadline=deadline)
        except PeerGone as error:
            if "not allowed" not in str(error):
                raise
            await self._greet(to, deadline, again=True)  # it has restarted, and knows nobody
            await super().send(to, tag, parcel, kind=kind, deadline=deadline)

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        await self._greet(to, deadline)
        try:
            return await super().call(to, channel, parcel, kind=kind, deadline=deadline)
        except PeerGone as error:
            if "not allowed" not in str(error):
                raise
            await self._greet(to, deadline, again=True)
            return await super().call(to, channel, parcel, kind=kind, deadline=deadline)

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        await super().announce(key, self.token + value, ttl=ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        return {peer: value[TOKEN_BYTES:] for peer, value in (await super().lookup(key)).items()}


class TokenValidator(Validator):
    """Believes records whose owner's token is in front of the value."""

    def __init__(self, gate: Gate, refused: Any, settings: Libp2pSettings) -> None:
        super().__init__(gate.admits, refused, settings.limits)
        self._gate = gate

    def _check(self, place: Place, value: Any) -> None:
        if isinstance(value, bytes) and isinstance(place.owner, str):
            record = unpacked(value, bytes)
            self._gate.admit(place.owner, record[HEAD.size : HEAD.size + TOKEN_BYTES])
        super()._check(place, value)


async def start_closed(settings: Libp2pSettings, gate: Gate, token: bytes) -> ClosedNet:
    """Start a peer of a closed run. `InputError` if its own token is not valid: nobody would talk to it."""
    if settings.identity is None:
        raise InputError("token: belongs to an identity; name its file with --identity or --state-dir")
    me = load_identity(settings.identity)
    expires = gate.expiry(me.peer, token)
    if expires is None:
        raise InputError(f"token: the authority has not signed it for {me.peer} in run {gate.run!r}")
    if not gate.admit(me.peer, token):
        raise InputError(f"token: of {me.peer} has expired; ask the authority for a new one")
    net = ClosedNet(me, dataclasses.replace(settings, join=()), lambda _: True)
    net.close_door(gate, token, settings)
    try:
        await net._begin()
    except BaseException:
        await net.close()
        raise
    return net
