"""How long an iteration takes on given links: virtual seconds from the very messages of the plan.

The profiles are typical figures, rounded; nothing in them was measured by us. Rates are what an application gets, so
packet headers are in them. Latency is one way and one end: a message between two peers pays both, a ping all of it
twice. Sources:
- `lan`: gigabit Ethernet (IEEE 802.3ab), 0.2 ms between two hosts of one building.
- `wifi`: IEEE 802.11ac, two streams of 80 MHz: 867 Mbit/s on the air, of which a room or two away about 200 reach an
  application; the air is half duplex, so 100 each way when both are busy.
- `5g`: global medians of 166 Mbit/s down and 21 up (Ookla, "Growing and Slowing: The State of 5G Worldwide in 2021");
  pings of 47 ms with the quickest US carrier (Ookla, first half of 2024).
- `lte`: averages of 21.3 Mbit/s down and 6.3 up, pings of 44 to 66 ms (Opensignal, "State of Mobile: USA", May 2019).
- `nb-iot`: 3GPP Release 13, category NB1: 26 kbit/s down and 62 up (multi-tone), latency quoted as 1.6 to 10 s: we
  take pings of 1.6 s. Its half duplex is not modelled.
- `mixed`: 50 % wifi, 30 % lte, 20 % 5g: our choice, as are all the losses (what the radio's own retransmissions leave
  over) and spreads: a lognormal sigma of 0.5 has 95 % of the peers within a factor of 2.7 of the median.
- FedAvg's server: 1 Gbit/s both ways; in a data centre with pings of 20 ms, for `lan` in the same building.

The model. An uplink sends one message after the other, a downlink takes in all that arrives at no more than its rate,
and a message passes through both at once (cut-through), so a peer waits for the slower of the two. With connections
that stay open there is no hand-shake. Packet loss p_s at the sender and p_d at the receiver is repaired by sending
again: size/((1−p_s)(1−p_d)) bytes leave the uplink and size/(1−p_d) pass the downlink. Only the last packet's repeats
cannot hide behind others: they take max(0.2 s, a ping)·p/(1−p) on average, p = 1−(1−p_s)(1−p_d); 0.2 s is Linux's
shortest time-out. Averages, never draws: a schedule on given links always takes the same time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.errors import InputError
from marfl.plan.cost import Ints, Messages
from marfl.rng import churn_stream

Floats: TypeAlias = NDArray[np.float64]

NO_HEAD_START: Mapping[int, float] = MappingProxyType({})
_MBIT = 1e6 / 8  # bytes
_TIMEOUT = 0.2  # seconds until a lost last packet is sent again, at least


@dataclass(frozen=True)
class AccessKind:
    """One kind of access to the network: medians over the peers, and how far these are spread."""

    up: float  # bytes a second
    down: float
    latency: float  # seconds, one way, this end
    loss: float = 0.0  # share of packets
    rate_spread: float = 0.0  # sigma of a lognormal factor, one per peer for both directions
    latency_spread: float = 0.0  # likewise

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0):
            raise InputError(f"link rates up = {self.up}, down = {self.down}: must be above 0 bytes a second")
        if not 0 <= self.loss < 1:
            raise InputError(f"link loss = {self.loss}: must be at least 0 and below 1")
        for name in ("latency", "rate_spread", "latency_spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"link {name} = {getattr(self, name)}: must be a number of at least 0")


@dataclass(frozen=True)
class LinkProfile:
    """What the peers' links are like."""

    mix: tuple[tuple[float, AccessKind], ...]  # (share of the peers, their access); the shares add up to 1
    server: AccessKind  # FedAvg's, shared by all
    compute_spread: float  # sigma of a lognormal factor on the time of a local update

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.mix]
        if min(shares, default=0) <= 0 or not math.isclose(sum(shares), 1):
            raise InputError(f"link mix with shares {shares}: must be above 0 and add up to 1")
        if not 0 <= self.compute_spread < math.inf:
            raise InputError(f"link compute_spread = {self.compute_spread}: must be a number of at least 0")


_LAN = AccessKind(1000 * _MBIT, 1000 * _MBIT, 0.0001)
_WIFI = AccessKind(100 * _MBIT, 100 * _MBIT, 0.0025, loss=0.005, rate_spread=0.4, latency_spread=0.3)
_5G = AccessKind(21 * _MBIT, 166 * _MBIT, 0.024, loss=0.001, rate_spread=0.5, latency_spread=0.3)
_LTE = AccessKind(6.3 * _MBIT, 21 * _MBIT, 0.027, loss=0.005, rate_spread=0.5, latency_spread=0.3)
_NB_IOT = AccessKind(0.062 * _MBIT, 0.026 * _MBIT, 0.8, loss=0.01, rate_spread=0.3, latency_spread=0.3)
_DATA_CENTRE = AccessKind(1000 * _MBIT, 1000 * _MBIT, 0.01)

PROFILES = {
    "lan": LinkProfile(((1.0, _LAN),), server=_LAN, compute_spread=0.1),
    "wifi": LinkProfile(((1.0, _WIFI),), server=_DATA_CENTRE, compute_spread=0.3),
    "5g": LinkProfile(((1.0, _5G),), server=_DATA_CENTRE, compute_spread=0.5),
    "lte": LinkProfile(((1.0, _LTE),), server=_DATA_CENTRE, compute_spread=0.5),
    "nb-iot": LinkProfile(((1.0, _NB_IOT),), server=_DATA_CENTRE, compute_spread=0.5),
    "mixed": LinkProfile(((0.5, _WIFI), (0.3, _LTE), (0.2, _5G)), server=_DATA_CENTRE, compute_spread=0.5),
}


@dataclass(frozen=True, eq=False)
class Links:
    """Every node's link, by peer index; the last entry of each array is the server's."""

    up: Floats  # bytes a second
    down: Floats
    latency: Floats  # seconds, one way, this end
    loss: Floats  # share of packets
    slowness: Floats  # a local update takes so many times the usual

    @property
    def peers(self) -> int:
        return len(self.up) - 1

    def speed(self, one: int, other: int) -> float:
        """Bytes a second at which two peers exchange models: the slowest of the four ways decides."""
        return float(min(self.up[one], self.down[one], self.up[other], self.down[other]))


def links(profile: str | LinkProfile, peers: int, seed: int) -> Links:
    """The links of all peers under a profile, by name or of your own; one more peer changes no other peer's link."""
    kind = find_profile(profile) if isinstance(profile, str) else profile
    if peers < 1:
        raise InputError(f"peers = {peers}: must be at least 1")
    marks = np.cumsum([share for share, _ in kind.mix[:-1]])
    chosen = np.searchsorted(marks, churn_stream(seed, "links", "access").random(peers), side="right")
    access = [kind.mix[index][1] for index in chosen.tolist()]

    def column(name: str) -> Floats:
        return np.array([getattr(node, name) for node in access])

    rate, delay, slowness = churn_stream(seed, "links", "spread").standard_normal((peers, 3)).T
    speed_up = np.exp(column("rate_spread") * rate)
    return Links(
        up=np.append(column("up") * speed_up, kind.server.up),
        down=np.append(column("down") * speed_up, kind.server.down),
        latency=np.append(column("latency") * np.exp(column("latency_spread") * delay), kind.server.latency),
        loss=np.append(column("loss"), kind.server.loss),
        slowness=np.append(np.exp(kind.compute_spread * slowness), 1.0),
    )


def find_profile(name: str) -> LinkProfile:
    """A profile by its name."""
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"links = {name!r}: {hint}must be one of {', '.join(PROFILES)}")
    return PROFILES[name]


def iteration_seconds(
    phases: Iterable[Messages],
    links: Links,
    *,
    roster: Sequence[int],
    updaters: Collection[int] = (),
    compute_seconds: float = 0.0,
    head_start: Mapping[int, float] = NO_HEAD_START,
) -> float:
    """Run a schedule of fp32 values on the links; the virtual seconds until everybody has what it waits for.

    `roster` is the peer at each rank; the rank after the last is the server.
    Of the roster, the `updaters` first train for `compute_seconds` times their slowness, less the `head_start` that a
    peer had. Then a peer begins to send a
    phase when it has its inputs of the phases before, to the ranks after its own first: in a ring nobody is everybody's
    first target, and all-to-all takes as long as on connections that share fairly. Takes about 150 bytes of memory for
    each message of the largest phase.
    """
    peer_at = np.asarray(roster, dtype=np.int64)
    if np.any((peer_at < 0) | (peer_at >= links.peers)):
        raise InputError(f"roster: peers must be between 0 and {links.peers - 1}, as many as there are links for")
    work = np.isin(peer_at, list(updaters)) * compute_seconds * links.slowness[peer_at]
    begun = np.array([head_start.get(peer, 0.0) for peer in peer_at.tolist()])
    trained = np.append(np.maximum(work - begun, 0.0), 0.0)
    clock = _Clock(links, np.append(peer_at, links.peers), trained)
    for messages in phases:
        if len(messages.source):
            clock.run(messages)
    return float(clock.ready.max())


class _Clock:
    """When each rank has its inputs, and when its uplink and downlink are free."""

    def __init__(self, links: Links, nodes: Ints, ready: Floats) -> None:
        self.up, self.down = links.up[nodes], links.down[nodes]
        self.latency, self.loss = links.latency[nodes], links.loss[nodes]
        self.ready = ready.copy()
        self.up_free = np.zeros_like(ready)
        self.down_free = np.zeros_like(ready)

    def run(self, messages: Messages) -> None:
        """Carry one phase, of one message or more."""
        turn = np.lexsort(((messages.dest - messages.source) % len(self.ready), messages.source))
        source, dest = messages.source[turn], messages.dest[turn]
        arriving = messages.sizes[turn] / (1 - self.loss[dest])
        out = arriving / (1 - self.loss[source]) / self.up[source]
        begins = np.maximum(self.ready, self.up_free)[source] + _queue(out, _heads(source))
        self.up_free[source] = begins + out  # of a rank's messages the last one counts
        delay = self._delay(source, dest)
        self._receive(dest, begins + delay, begins + out + delay, arriving / self.down[dest])

    def _delay(self, source: Ints, dest: Ints) -> Floats:
        """Latency, and the repeats of the last packet."""
        latency = self.latency[source] + self.latency[dest]
        arrives = (1 - self.loss[source]) * (1 - self.loss[dest])
        delay: Floats = latency + np.maximum(_TIMEOUT, 2 * latency) * (1 - arrives) / arrives
        return delay

    def _receive(self, dest: Ints, first: Floats, last: Floats, work: Floats) -> None:
        """Take in messages, given when their first and last bytes arrive and how long they keep the downlink busy.

        The downlink serves them in order of arrival, so it is done at the maximum over j of first_j + Σ_{i≥j} work_i;
        and no message ends before its last byte.
        """
        order = np.lexsort((first, dest))
        heads = _heads(dest[order])
        waiting = first[order] - _queue(work[order], heads)
        who = dest[order][heads]
        idle = np.maximum(self.down_free[who], np.maximum.reduceat(waiting, heads))
        self.down_free[who] = idle + np.add.reduceat(work[order], heads)
        complete = np.maximum(self.down_free[who], np.maximum.reduceat(last[order], heads))
        self.ready[who] = np.maximum(self.ready[who], complete)


def _heads(keys: Ints) -> Ints:
    """Where each run of equal keys begins."""
    return np.append(0, np.flatnonzero(np.diff(keys)) + 1)


def _queue(work: Floats, heads: Ints) -> Floats:
    """How much work of the same run comes before each entry."""
    before = np.cumsum(work) - work
    ahead: Floats = before - np.repeat(before[heads], np.diff(heads, append=len(work)))
    return ahead
