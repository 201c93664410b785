"""Where and when faults strike: the `Injector` listens to the virtual network, and nothing in the protocol knows of it.

It strikes at the moment the victim (or, for faults without one, anybody) reaches the phase of the `Strike`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import NamedTuple

from marfl.net.base import Parcel, PeerId
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.protocol.messages import Propose, Ready
from marfl.testing.faults import (
    DEADLY,
    MASKED_PHASES,
    ON_MESSAGES,
    PHASE_OF,
    SLOW,
    WAYS,
    WEATHER,
    Backup,
    Fault,
    Strike,
    corrupted,
)

FAREWELL = 0.5  # seconds between a goodbye and the end
SPOILT_SECONDS = 60.0  # how long a peer's messages of a phase stay corrupt: several attempts

LATEST = 20.0  # seconds by which a message may come late, or again


@dataclass
class Hooks:
    """What only the harness can do."""

    restart: Callable[[PeerId, float, Backup], None]  # whom, when, and with what
    join: Callable[[], None]
    rival: Callable[[PeerId, int], None]
    faulty: Callable[[PeerId], None]
    until: Callable[[float], None]  # a fault lasts until then
    storm: Callable[[], None]  # nobody's links are well
    farewell: Callable[[PeerId], None] | None = None  # in a world where nobody dies without a word


@dataclass(frozen=True)
class Weather:
    """What may happen to every message for a while, or to every message from and to one peer."""

    fault: Fault
    until: float
    chance: float
    peer: PeerId | None

    @property
    def over(self) -> float:
        """When the last message that it strikes has come."""
        return self.until if self.fault is Fault.LOSSY else self.until + LATEST

    def strikes(self, event: Departure, time: float, random: Random) -> bool:
        near = self.peer is None or self.peer in (event.source, event.dest)
        return time < self.until and near and random.random() < self.chance


class Ailing(NamedTuple):
    """A peer whose links are not well for a while."""

    peer: PeerId
    since: float
    until: float


@dataclass
class Injector:
    """Strikes when the moment comes. Plug into `VirtualNetwork.intercept`."""

    strikes: list[Strike]
    random: Random
    hooks: Hooks
    masked: bool = False  # then nobody can tell a wrong value from a right one
    hits: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    weather: list[Weather] = field(default_factory=list)
    ailing: list[Ailing] = field(default_factory=list)
    _iteration: dict[PeerId, int] = field(default_factory=dict)
    _passed: Counter[tuple[PeerId | None, int, str]] = field(default_factory=Counter)
    _leader: PeerId | None = None
    _spoils: dict[tuple[PeerId, int, str], str] = field(default_factory=dict)  # whose messages of which phase, and how
    _spoilt_until: dict[PeerId, float] = field(default_factory=dict)  # a garbled vote that never ended would be a death

    def straggles(self, network: VirtualNetwork, peer: PeerId, iteration: int) -> float:
        """By how many seconds this peer's training takes too long."""
        for strike in self.strikes:
            if strike.fault is Fault.STRAGGLER and strike.victim == peer and strike.iteration == iteration:
                self.strikes.remove(strike)
                self.hooks.faulty(peer)
                self.hits[strike.fault, strike.phase] += 1
                self.hooks.until(network.time + strike.seconds)
                return strike.seconds
        return 0.0

    def set_clocks(self, network: VirtualNetwork) -> None:
        """Clocks differ from the start: a monotonic clock never jumps."""
        for strike in [s for s in self.strikes if s.fault is Fault.CLOCK_SKEW]:
            assert strike.victim is not None
            network.skew(strike.victim, rate=self.random.uniform(0.8, 1.25), offset=self.random.uniform(-1e4, 1e4))
            self.hooks.faulty(strike.victim)
            self.hits[strike.fault, strike.phase] += 1
            self.strikes.remove(strike)

    def __call__(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "announce" and event.tag.channel == "ready":
            self._iteration[event.source] = int(event.dest.split("/")[1])
        if event.op == "call" and event.tag.channel in ("ready", "propose"):  # a leader only tells itself
            message = Ready if event.tag.channel == "ready" else Propose
            self._iteration[event.source] = message.decode(delivery.parcel.header).iteration
        if event.op == "call" and event.tag.channel == "propose":
            self._leader = event.source
        self._blow(network, event, delivery)
        phase = PHASE_OF.get(event.tag.channel)
        if phase is None or event.op == "lookup":
            return
        # Whoever syncs is at another iteration than the rest: any will do.
        iteration = 0 if phase == "sync" else event.tag.iteration or self._iteration.get(event.source, 0)
        for strike in [s for s in self.strikes if self._due(s, event, phase, iteration)]:
            self.strikes.remove(strike)
            self._strike(network, strike, event, delivery)
            if strike.fault is Fault.CORRUPT:
                ways = WAYS[2:] if self.masked else (*WAYS[:2] * 3, *WAYS[2:])  # mostly what only values show
                self._spoils[event.source, iteration, phase] = self.random.choice(ways)
                self._spoilt_until[event.source] = network.time + SPOILT_SECONDS
        if network.time < self._spoilt_until.get(event.source, 0.0):
            self._spoil(event, delivery, (event.source, iteration, phase))
        for sender in (event.source, None):  # None: anybody
            self._passed[sender, iteration, phase] += 1

    def _blow(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        """What the weather does to a message."""
        if event.op not in ("send", "call", "answer"):
            return
        for weather in self.weather:
            if not weather.strikes(event, network.time, self.random):
                continue
            if weather.fault is Fault.LOSSY:
                delivery.copies = 0
            elif weather.fault is Fault.ECHO:
                delivery.copies, delivery.later = 2 * delivery.copies, self.random.uniform(0.1, LATEST)
            else:
                delivery.delay = self.random.choice([self.random.uniform(0.05, 2.0), self.random.uniform(2.0, LATEST)])

    def _spoil(self, event: Departure, delivery: Delivery, whose: tuple[PeerId, int, str]) -> None:
        """Corrupt a message of a peer that is to send bad ones in this phase."""
        if whose in self._spoils and event.op in ("send", "call", "answer"):
            if event.tag.channel == "shares":
                delivery.parcel = Parcel(delivery.parcel.header, self.random.randbytes(len(delivery.parcel.payload)))
            else:
                delivery.parcel = corrupted(delivery.parcel, event.op == "send", self._spoils[whose], self.random)
            if event.tag.channel == "sync":  # a donor that never gave a good state would be a liar
                del self._spoils[whose]

    def _due(self, strike: Strike, event: Departure, phase: str, iteration: int) -> bool:
        if strike.fault is Fault.STRAGGLER or (phase != "sync" and not strike.iteration <= iteration <= strike.last):
            return False
        if strike.fault in (*ON_MESSAGES, Fault.CORRUPT) and event.op not in ("send", "call", "answer"):
            return False
        if strike.fault is Fault.SEALER_DIES and self._leader is None:
            return False
        if strike.victim is not None and strike.victim != event.source:
            return False
        if strike.fault is Fault.CRASH_AFTER:
            return MASKED_PHASES.index(phase) > MASKED_PHASES.index(strike.phase) or (strike.phase == phase == "commit")
        passed = self._passed[event.source, iteration, phase], self._passed[None, iteration, phase]
        return strike.phase == phase and passed[0] >= strike.skip and passed[1] >= strike.others

    def _strike(self, network: VirtualNetwork, strike: Strike, event: Departure, delivery: Delivery) -> None:
        self.hits[strike.fault, strike.phase] += 1
        victim = self._leader if strike.fault is Fault.SEALER_DIES else (strike.victim or event.source)
        assert victim is not None
        if strike.fault not in (*ON_MESSAGES, Fault.LATE_JOINER, Fault.ECHO):
            self.hooks.faulty(victim)
        if strike.fault in (*DEADLY, Fault.STALE_REJOIN, Fault.OLD_BACKUP):
            if victim == event.source and self.hooks.farewell is None:
                delivery.copies = 0
            self._end(network, victim)
            if strike.fault not in DEADLY:
                old = self.random.choice([Backup.STATE, Backup.WHOLE]) if strike.fault is Fault.OLD_BACKUP else None
                self.hooks.restart(victim, strike.seconds, old or Backup.LAST)
                # Of a majority that forgets its votes nobody could promise anything.
                if old is not Backup.WHOLE and self.random.random() < 0.2:
                    self._power_cut(network, strike)
        elif strike.fault in ON_MESSAGES:
            self._tamper(strike.fault, delivery)
        elif strike.fault in WEATHER:
            self._change_weather(network, strike, victim)
        elif strike.fault in (Fault.ONE_WAY, Fault.PARTIAL_CUT, Fault.DHT_STALE, Fault.DAEMON_DIES):
            self._cut_off(network, strike, victim)
        elif strike.fault is not Fault.CORRUPT:
            self._disturb(network, strike, victim, delivery)

    def _power_cut(self, network: VirtualNetwork, strike: Strike) -> None:
        """Half of the others die too, and come back one by one."""
        others = [peer for peer in sorted(network.ports) if network.alive(peer)]
        for peer in self.random.sample(others, (len(others) + 1) // 2):
            self.hooks.faulty(peer)
            self._end(network, peer)
            after = strike.seconds * self.random.uniform(0.5, 1.5)
            self.hooks.restart(peer, after, Backup.STATE if strike.fault is Fault.OLD_BACKUP else Backup.LAST)

    def _end(self, network: VirtualNetwork, peer: PeerId) -> None:
        """A process dies; where it says goodbye it has a moment for that, in which it goes on as before."""
        if self.hooks.farewell is None:
            network.crash(peer)
        else:
            self.hooks.farewell(peer)
            asyncio.get_running_loop().call_later(FAREWELL, network.crash, peer)

    def _tamper(self, fault: Fault, delivery: Delivery) -> None:
        """Change one message on its way."""
        if fault is Fault.LOST:
            delivery.copies = 0
        elif fault is Fault.DUPLICATED:
            delivery.copies = 2
        else:
            delivery.delay = self.random.uniform(0.05, 1.0)

    def _disturb(self, network: VirtualNetwork, strike: Strike, victim: PeerId, delivery: Delivery) -> None:
        """Change a peer or the whole network for a while."""
        end = network.time + strike.seconds
        loop = asyncio.get_running_loop()
        if strike.fault is Fault.HANG:
            network.hang(victim, strike.seconds)
            self.hooks.until(end)
        elif strike.fault is Fault.DHT_SILENT:
            network.silence_dht(victim, strike.seconds)
            self.hooks.until(end)
        elif strike.fault is Fault.SLOW_LINK:
            network.relink(victim, Link(up=SLOW, down=SLOW, latency=network.link.latency))
            loop.call_at(end, network.relink, victim, network.link)
            self.hooks.until(end)
        elif strike.fault is Fault.PARTITION:
            self._part(network, end)
            if self.random.random() < 0.5:
                loop.call_at(network.time + strike.seconds / 2, self._part, network, end)
            loop.call_at(end, network.heal)
            self.hooks.until(end)
        elif strike.fault is Fault.TWO_ROSTERS:
            for rival in sorted({victim, self.random.choice(sorted(network.ports))}):
                self.hooks.rival(rival, strike.iteration)
        elif strike.fault is Fault.LATE_JOINER:
            self.hooks.join()

    def _change_weather(self, network: VirtualNetwork, strike: Strike, victim: PeerId) -> None:
        """From now on messages are lost, late or doubled: everybody's, or those from and to the victim."""
        end = network.time + strike.seconds
        everybody = strike.fault is Fault.ECHO or self.random.random() < 0.5
        chance = self.random.choice([0.05, 0.15, 0.3])
        weather = Weather(strike.fault, end, chance, None if everybody else victim)
        self.weather.append(weather)
        if everybody and strike.fault is not Fault.ECHO:
            self.hooks.storm()
        if weather.peer is not None:
            self.ailing.append(Ailing(weather.peer, network.time, weather.over))
        self.hooks.until(weather.over)

    def _cut_off(self, network: VirtualNetwork, strike: Strike, victim: PeerId) -> None:
        """Some messages do not pass, or a peer's own means fail, for a while."""
        end = network.time + strike.seconds
        self.hooks.until(end)
        if strike.fault is not Fault.DHT_STALE:
            self.ailing.append(Ailing(victim, network.time, end))
        others = sorted(peer for peer in network.ports if peer != victim)
        if strike.fault is Fault.DAEMON_DIES:
            network.sever(victim, strike.seconds)
        elif strike.fault is Fault.DHT_STALE:
            hidden = self.random.sample(others, self.random.randint(0, len(others)))
            lag, refuses = self.random.choice([0.0, 5.0, 30.0]), self.random.random() < 0.5
            network.blur_dht(victim, strike.seconds, lag=lag, hidden=hidden, refuses=refuses)
        elif strike.fault is Fault.ONE_WAY:
            whom = others if self.random.random() < 0.5 else self.random.sample(others, self.random.randint(1, 3))
            mute = self.random.random() < 0.5
            network.cut([(victim, peer) if mute else (peer, victim) for peer in whom], strike.seconds)
            self._at_fault(whom if whom is not others else (), network.time, end)
        else:
            pairs = list(combinations([victim, *others], 2))
            cut = self.random.sample(pairs, self.random.randint(1, len(others)))
            network.cut([way for one, other in cut for way in ((one, other), (other, one))], strike.seconds)
            self._at_fault([peer for pair in cut for peer in pair], network.time, end)

    def _at_fault(self, peers: Iterable[PeerId], since: float, end: float) -> None:
        """Of two that cannot talk nobody can tell whose link it is."""
        for peer in peers:
            self.hooks.faulty(peer)
            self.ailing.append(Ailing(peer, since, end))

    def _part(self, network: VirtualNetwork, end: float) -> None:
        """Cut one or two islands off, of which two may leave no majority anywhere; the leader is often on one."""
        peers = sorted(network.ports)
        islands = self.random.choice([1, 1, 2])
        cut = self.random.sample(peers, self.random.randint(1, islands * len(peers) // (islands + 1)))
        if self._leader in peers and self.random.random() < 0.5:
            cut[0] = self._leader
        self._at_fault(cut, network.time, end)
        network.partition({peer: 1 + place % islands for place, peer in enumerate(dict.fromkeys(cut))})
