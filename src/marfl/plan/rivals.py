"""The messages of the techniques that marfl is compared with, in the form of `marfl.plan.schedule`.

Ranks are 0…n−1. Where the messages depend on chance (whom a peer gossips with) or on history (who is newer), the
schedule has the right number of messages and values, between stand-in peers: SAPS, BrainTorrent and gossip.
Their parameters have no default: what they cost is what they were told to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from marfl.errors import InputError
from marfl.plan.grid import split
from marfl.plan.schedule import Phase, Transfer


def fedavg(n: int, length: int) -> Iterator[Phase]:
    """McMahan et al. 2017: everyone sends its model to a server, rank n, which sends the mean back."""
    yield tuple(Transfer(peer, n, 0, length) for peer in range(n))
    yield tuple(Transfer(n, peer, 0, length) for peer in range(n))


def arfl(n: int, length: int) -> Iterator[Phase]:
    """All-reduce FL: everyone sends its whole model to everyone."""
    yield tuple(Transfer(source, dest, 0, length) for source in range(n) for dest in range(n) if source != dest)


def rdfl(n: int, length: int) -> Iterator[Phase]:
    """Ring FL (Yang et al. 2021): n−1 hops, in each of which everyone forwards a whole model to its successor."""
    for _ in range(n - 1):
        yield tuple(Transfer(peer, (peer + 1) % n, 0, length) for peer in range(n))


def ring(n: int, length: int) -> Iterator[Phase]:
    """Chunked ring all-reduce (Patarasuk and Yuan 2009): reduce-scatter, then all-gather, a chunk a hop."""
    chunks = split(length, n)
    for first in (0, 1):  # the reduce starts with a peer's own chunk, the gather with the one it has completed
        for hop in range(n - 1):
            yield tuple(Transfer(peer, (peer + 1) % n, *chunks[(peer + first - hop) % n]) for peer in range(n))


def butterfly(n: int, length: int) -> Iterator[Phase]:
    """Butterfly all-reduce: peer j sums part j of everyone's vector and sends it back to everyone."""
    parts = list(enumerate(split(length, n)))
    yield tuple(Transfer(peer, owner, *part) for owner, part in parts for peer in range(n) if peer != owner)
    yield tuple(Transfer(owner, peer, *part) for owner, part in parts for peer in range(n) if peer != owner)


def saps(n: int, length: int, compression: int) -> Iterator[Phase]:
    """SAPS-PSGD (Tang et al. 2020): pairs exchange one value in `compression`; with odd n somebody is left over."""
    _check("compression", compression, 1, None)
    kept = -(-length // compression)
    pairs = [(peer, peer + 1) for peer in range(0, n - 1, 2)]
    yield tuple(Transfer(a, b, 0, kept) for pair in pairs for a, b in (pair, pair[::-1]))


def braintorrent(n: int, length: int, fetched: int) -> Iterator[Phase]:
    """BrainTorrent (Roy et al. 2019): one initiator fetches the `fetched` models newer than what it has seen."""
    _check("fetched", fetched, 0, n - 1)
    yield tuple(Transfer(peer, 0, 0, length) for peer in range(1, fetched + 1))


def gossip(n: int, length: int, fanout: int) -> Iterator[Phase]:
    """Push gossip: everyone sends its whole model to `fanout` others."""
    _check("fanout", fanout, 0, n - 1)
    yield tuple(Transfer(peer, (peer + step) % n, 0, length) for peer in range(n) for step in range(1, fanout + 1))


_RIVALS: dict[str, Callable[..., Iterator[Phase]]] = {
    "fedavg": fedavg,
    "arfl": arfl,
    "rdfl": rdfl,
    "ring": ring,
    "butterfly": butterfly,
    "saps": saps,
    "braintorrent": braintorrent,
    "gossip": gossip,
}
RIVALS = tuple(_RIVALS)


def rival_phases(technique: str, n: int, length: int, **options: int) -> Iterator[Phase]:
    """The messages of one of `RIVALS` for `n` peers, phase by phase, without empty messages and empty phases."""
    if technique not in _RIVALS:
        raise InputError(f"technique = {technique!r}: must be one of {', '.join(RIVALS)}")
    for phase in _RIVALS[technique](n, length, **options):
        sent = tuple(transfer for transfer in phase if transfer.start < transfer.stop)
        if sent:
            yield sent


def _check(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        raise InputError(f"{name} = {value}: must be at least {low}" + ("" if high is None else f", at most {high}"))
