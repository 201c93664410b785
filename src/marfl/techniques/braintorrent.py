"""BrainTorrent: one peer at a time takes in what is new.

Roy, Siddiqui, Pölsterl, Navab, Wachinger: BrainTorrent: A Peer-to-Peer Environment for Decentralized Federated
Learning, 2019 (arXiv 1905.06731), algorithm 1. In each iteration a random initiator asks everyone's version, fetches
the models that are newer than what it has seen, takes the mean of these and its own, weighted by samples, and raises
its version. The others keep their models. At first everything is new: n−1 vectors. Later each of the others has had a
turn since the initiator's last one with probability ½: (n−1)/2 vectors on average.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from marfl.errors import BadPayload, WireError
from marfl.learn.randomness import key
from marfl.net.base import Net, Parcel
from marfl.plan.schedule import Transfer
from marfl.protocol.messages import Hash, Message
from marfl.techniques.base import MixContext, Mixed, Traits
from marfl.techniques.families import NoGlobalAverage, sum_in_rank_order
from marfl.techniques.talk import Circle, Turn, Voice

NEVER = -1  # the version of a peer that one has not seen yet; versions begin with 0


@dataclass(frozen=True)
class Newer(Message):
    """The initiator asks for what is newer than this version."""

    digest: Hash
    than: int


@dataclass(frozen=True)
class Version(Message):
    """The answer; a newer model follows."""

    digest: Hash
    version: int
    samples: int


M = TypeVar("M", Newer, Version)


class Fetched(NamedTuple):
    """A newer model, and what came with it."""

    value: Tensor
    samples: int
    version: int


@dataclass(frozen=True)
class BrainTorrent(NoGlobalAverage):
    """One phase; one peer receives at most n−1 vectors."""

    name: ClassVar[str] = "braintorrent"
    title: ClassVar[str] = "BrainTorrent"
    citation: ClassVar[str] = "Roy et al. 2019, arXiv 1905.06731"
    traits: ClassVar[Traits] = Traits(True, False, True, True, False)

    def options(self, n: int) -> dict[str, int]:
        """The most that an initiator fetches: everything is new to it."""
        return {"fetched": n - 1}

    def initiator(self, ctx: MixContext) -> int:
        """The position of the peer whose turn it is."""
        return Random(key(ctx.seed, "braintorrent", ctx.iteration)).randrange(len(ctx.members))

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        own, mixed = self.initiator(ctx), list(values)
        fetched = {
            place: Fetched(values[place], ctx.samples[place], _version(ctx.memory, peer))
            for place, peer in enumerate(ctx.members)
            if place != own and _version(ctx.memory, peer) > _seen(ctx.memory, ctx.members[own], peer)
        }
        mixed[own] = _merge(values[own], own, ctx.samples[own], fetched)
        sent = tuple(Transfer(place, own, 0, values[own].numel()) for place in fetched)
        return Mixed(mixed, _remember(ctx, own, fetched), [sent] if sent else [])

    async def converse(self, net: Net, circle: Circle, value: Tensor) -> Turn:
        """One peer's iteration; of the memory it needs its own version, and what it has seen itself."""
        voice, ctx = Voice(net, circle), circle.ctx
        own = self.initiator(ctx)
        if voice.position != own:
            await _answer(voice, own, value)
            return Turn(value, ctx.memory, voice.missing)
        others = [place for place in range(len(ctx.members)) if place != own]
        answers = await asyncio.gather(*(_fetch(voice, place, value.numel()) for place in others))
        fetched = {place: got for place, got in zip(others, answers, strict=True) if got is not None}
        merged = _merge(value, own, ctx.samples[own], fetched)
        return Turn(merged, _remember(ctx, own, fetched), voice.missing)


async def _fetch(voice: Voice, place: int, count: int) -> Fetched | None:
    """Ask one peer for its model; None when it is not newer, or does not come."""
    circle = voice.circle
    seen = _seen(circle.ctx.memory, circle.ctx.members[voice.position], circle.ctx.members[place])
    await voice.tell(place, "newer", Newer(circle.digest, seen).parcel())
    answer = None if circle.names[place] in voice.missing else await voice.hear(place, "version")
    if answer is None:
        return None
    said = _read(voice, place, Version, answer)
    if said is None or said.version <= seen:
        return None
    value = await voice.hear_vector(place, "model", count)
    return None if value is None else Fetched(value, max(0, said.samples), said.version)


async def _answer(voice: Voice, initiator: int, value: Tensor) -> None:
    """Tell the initiator my version, and send it my model if that is newer than what it has seen."""
    circle, ctx = voice.circle, voice.circle.ctx
    request = await voice.hear(initiator, "newer")
    asked = None if request is None else _read(voice, initiator, Newer, request)
    if asked is None:
        return
    version = _version(ctx.memory, ctx.members[voice.position])
    await voice.tell(initiator, "version", Version(circle.digest, version, ctx.samples[voice.position]).parcel())
    if version > asked.than:
        await voice.tell_vector(initiator, "model", value)


def _read(voice: Voice, place: int, kind: type[M], parcel: Parcel) -> M | None:
    """A header of this very circle; anything else is noted, and None."""
    try:
        said = kind.decode(parcel.header)
        if said.digest != voice.circle.digest:
            raise BadPayload(f"a {kind.name()} message for another circle")
    except WireError as error:
        voice.refuse(place, error)
        return None
    return said


def _merge(value: Tensor, own: int, samples: int, fetched: Mapping[int, Fetched]) -> Tensor:
    """Σ samples·model / Σ samples over the initiator and the newer ones, in the order of their positions."""
    if not fetched:
        return value
    parts = {own: (value, samples)} | {place: (got.value, got.samples) for place, got in fetched.items()}
    weight = sum(count for _, count in parts.values())
    if weight == 0:
        return value  # nobody has trained on anything
    return sum_in_rank_order([parts[place][0] * parts[place][1] for place in sorted(parts)]) / weight


def _version(memory: Mapping[str, Any], peer: int) -> int:
    return int(memory.get("versions", {}).get(str(peer), 0))


def _seen(memory: Mapping[str, Any], peer: int, other: int) -> int:
    return int(memory.get("seen", {}).get(str(peer), {}).get(str(other), NEVER))


def _remember(ctx: MixContext, own: int, fetched: Mapping[int, Fetched]) -> dict[str, Any]:
    """The initiator has seen these versions, and has a newer one itself; keys are peer indices."""
    memory, me = ctx.memory, str(ctx.members[own])
    seen, versions = memory.get("seen", {}), memory.get("versions", {})
    news = {str(ctx.members[place]): got.version for place, got in fetched.items()}
    return {
        "versions": {**versions, me: _version(memory, ctx.members[own]) + 1},
        "seen": {**seen, me: {**seen.get(me, {}), **news}},
    }
