"""BrainTorrent: one peer at a time takes in what is new.

Roy, Siddiqui, Pölsterl, Navab, Wachinger: BrainTorrent: A Peer-to-Peer Environment for Decentralized Federated
Learning, 2019 (arXiv 1905.06731), algorithm 1. In each iteration a random initiator asks everyone's version, fetches
the models that are newer than what it has seen, takes the mean of these and its own, weighted by samples, and raises
its version. The others keep their models. At first everything is new: n−1 vectors. Later each of the others has had a
turn since the initiator's last one with probability ½: (n−1)/2 vectors on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from marfl.plan.cost import Messages, phase
from marfl.rng import key
from marfl.techniques.technique import MixContext, Mixed, NoGlobalAverage, sum_in_rank_order

NEVER = -1  # the version of a peer that one has not seen yet; versions begin with 0


class Fetched(NamedTuple):
    """A newer model, and what came with it."""

    value: Tensor
    samples: int
    version: int


@dataclass(frozen=True)
class BrainTorrent(NoGlobalAverage):
    """One phase; one peer receives at most n−1 vectors."""

    name: ClassVar[str] = "braintorrent"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        """The most that an initiator fetches: everything is new to it."""
        yield from phase(np.arange(1, n), np.zeros(n - 1, dtype=np.int64), length)

    def initiator(self, ctx: MixContext) -> int:
        """The position of the peer whose turn it is."""
        return Random(key(ctx.seed, "braintorrent", ctx.iteration)).randrange(len(ctx.members))

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        own, mixed = self.initiator(ctx), list(values)
        fetched = {
            place: Fetched(values[place], ctx.samples(place), _version(ctx.memory, peer))
            for place, peer in enumerate(ctx.members)
            if place != own and _version(ctx.memory, peer) > _seen(ctx.memory, ctx.members[own], peer)
        }
        mixed[own] = _merge(values[own], own, ctx.samples(own), fetched)
        sent = [(place, own, values[own].numel()) for place in fetched]
        return Mixed(mixed, _remember(ctx, own, fetched), [Messages.of(sent)] if sent else [])


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
