"""What attackers do to real peers on loopback: frames and records that honest peers never send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or whoever imports this is skipped
from marfl.errors import NetError
from marfl.net.base import Parcel, PeerId, Tag
from marfl.net.libp2p.connection import Limits
from marfl.net.libp2p.frames import MAGIC, PREFIX, Code, Hangup, Wire
from marfl.net.libp2p.records import DHTID, PeerID, Place, sign_record
from marfl.net.libp2p.transport import HELLO, Libp2pNet
from marfl.protocol.messages import Head, Ok, Seal, Sync
from marfl.protocol.roster import Elector, Member, Roster, brief

CUT_OFF = "cut off"  # the stream ended without a word
PATIENCE = 60.0  # seconds for an answer: a slow loris is heard for ten
AT_ONCE = 8  # random blobs under way


def prefix(code: int = Code.SEND, tag: int = 0, header: int = 0, payload: int = 0) -> bytes:
    return PREFIX.pack(MAGIC, code, tag, header, payload)


def opening(tag: object, code: int = Code.SEND, header: int = 0, payload: int = 0) -> bytes:
    """A frame up to its tag, whatever follows."""
    packed = msgpack.packb(tag)
    return prefix(code, len(packed), header, payload) + packed


async def put(attacker: Libp2pNet, victim: PeerId, key: str, owner: object, value: bytes, ends: float) -> list[bool]:
    """Ask the victim's node to store a record that the attacker made up."""
    peer, keys = PeerID.from_base58(victim), [DHTID.generate(key)]
    return list(await attacker._records._node.protocol.call_store(peer, keys, [value], [ends], subkeys=[owner]))


async def provoke(attacker: Libp2pNet, victim: PeerId, data: bytes, *, ends: bool = False) -> str:
    """Write these bytes on a new stream, and end it there if so asked; the reason for which they are refused."""
    stream = await attacker._daemon.open_stream(victim)
    with stream:
        with contextlib.suppress(OSError):  # it may be thrown out before it has finished
            await asyncio.get_running_loop().sock_sendall(stream, data)
            if ends:
                stream.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await Wire(stream, Limits()).read()
        except Hangup:
            return CUT_OFF
    return str(answer.tag) if answer.code is Code.REFUSED else f"answered: {answer.tag}"


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.crater),)


@dataclass
class Stranger:
    """Somebody without a token, or with one that is not its own."""

    net: Libp2pNet
    victims: tuple[PeerId, ...]
    run: str
    bomb: bytes
    stolen: bytes  # another peer's token
    wrong: bytes  # of another authority, for this peer
    refusals: Counter[str] = field(default_factory=Counter)

    async def say_everything(self) -> dict[str, set[str]]:
        """All its lies to everybody at once; by lie, how it was refused."""
        said: dict[str, set[str]] = {}
        for words in await asyncio.gather(*map(self._lie_to, self.victims)):
            for name, how in words.items():
                said.setdefault(name, set()).update(how)
        return said

    async def _lie_to(self, victim: PeerId) -> dict[str, set[str]]:
        lies = self._lies()
        words = await asyncio.gather(*(provoke(self.net, victim, data, ends=ends) for data, ends in lies.values()))
        said = {name: {how} for name, how in zip(lies, words, strict=True)}
        return said | {"record": await self._forge_records(victim), "token": await self._show_tokens(victim)}

    def _lies(self) -> dict[str, tuple[bytes, bool]]:
        nan = bytes.fromhex("0000c07f") * 100
        data = Tag("reduce", 1, 0, 0, 0)
        seal = Seal(roster=b"", attempt=0, adopt=None, holders=()).encoded
        sync = Sync(have=bytes(32), want=None).encoded
        return {
            "no token, a message": (opening(data, payload=len(nan)) + nan, False),
            "no token, a roster": (opening("seal", Code.CALL, header=len(seal)) + seal, False),
            "no token, a sync request": (opening("sync", Code.CALL, header=len(sync)) + sync, False),
            "no token, a pickle": (opening("ready", Code.CALL, header=len(self.bomb)) + self.bomb, False),
            "oversized": (prefix(payload=2**63), False),
            "oversized header": (prefix(header=2**32 - 1), False),
            "truncated": (prefix()[:-1], True),
            "slow loris": (prefix()[:5], False),
            "a bare pickle": (self.bomb.ljust(PREFIX.size), False),
        }

    async def _forge_records(self, victim: PeerId) -> set[str]:
        """Records in an honest peer's name and in my own, where rosters and states are found."""
        later = time.time() + 600
        taken = []
        for name in ("ready/2", "head", "peers"):
            key = f"{name}/{self.run}"
            for owner in (victim, self.net.me):
                place = Place(DHTID.generate(key).to_bytes(), owner, later)
                record = sign_record(self.net._daemon.identity, place, self.stolen + self.bomb, later)
                taken += await put(self.net, victim, key, owner, msgpack.packb(record), later)
        return {"taken" if each else "refused" for each in taken}

    async def _show_tokens(self, victim: PeerId) -> set[str]:
        tokens = (self.stolen, self.wrong, b"", self.bomb)
        deadline = self.net.now() + PATIENCE
        answers = [await self.net.call(victim, HELLO, Parcel(token), deadline=deadline) for token in tokens]
        return {"taken" if answer.header else "refused" for answer in answers}

    async def throw_blobs(self, count: int, seed: int) -> None:
        """Random bytes at everybody in turn; how each was refused goes to `refusals`."""
        dice = random.Random(seed)
        work = iter(range(count))

        async def throw() -> None:
            for turn in work:
                blob = dice.choice([b"", MAGIC]) + dice.randbytes(dice.randint(PREFIX.size, 5000))
                self.refusals[await provoke(self.net, self.victims[turn % len(self.victims)], blob)] += 1

        await asyncio.gather(*(throw() for _ in range(AT_ONCE)))


async def forge_rosters(insider: Libp2pNet, victims: tuple[PeerId, ...], run: str) -> Counter[tuple[PeerId, str]]:
    """A token holder that leads nothing makes a roster of itself and each victim, on top of the newest state.

    What whom answered, and how often.
    """
    heads = [Head.decode(value) for value in (await insider.lookup(f"head/{run}")).values()]
    answers: Counter[tuple[PeerId, str]] = Counter()
    for head, victim in ((head, victim) for head in heads for victim in victims):
        me = insider.me
        roster = Roster(
            run, head.iteration + 1, 0, head.lineage, head.hash, bytes(32), "grid", 5,
            (Member(me, 0, 1.0), Member(victim, 1, 1.0)), (), (Elector(me, 0),), (),
        )  # fmt: skip
        seal = Parcel(Seal(roster=brief(roster, ()), attempt=0, adopt=None, holders=()).encoded)
        deadline = insider.now() + PATIENCE
        with contextlib.suppress(NetError):
            answer = await insider.call(victim, "seal", seal, deadline=deadline)
            answers[victim, Ok.decode(answer.header).status] += 1
    return answers
