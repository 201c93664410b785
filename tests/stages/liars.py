"""Liars on the virtual network: peers that say by hand what they like, each with its own key and no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgpack
import torch

from marfl.errors import NetError, WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.chain import Founded, Hop, Next, encode_proof
from marfl.protocol.commits import electors_of
from marfl.protocol.messages import Ack, Head, Propose, Seal, State, Sync, status_of
from marfl.protocol.participant import Participant
from marfl.protocol.roster import DecisionId, Elector, Member, Record, Roster, brief, ranked
from marfl.protocol.seniority import parted
from marfl.protocol.statements import (
    Certificate,
    SignedPromise,
    cast,
    certificate,
    lineage_after,
    link_of,
    pack_promises,
    seal_parts,
    statement,
)
from marfl.protocol.voting import promise_of
from marfl.state import Snapshot
from stages.virtual import LAYOUT, Swarm, leaders

FAR = 600.0  # virtual seconds that honest peers may need for three iterations, whatever is done to them


class Scene:
    """A swarm with one liar. The honest do as daemons do: catch up, take part, again until an iteration is theirs."""

    def __init__(self, n: int, rank: int = 0, *, liars: int = 1, first: int = 1, **settings: Any) -> None:
        """The liar has this rank among the leaders of the iteration after the first ones; no rank: nobody lies."""
        self.swarm = Swarm(n, liars=liars, **settings)
        self.first, self.rank = first, rank
        self.target = first
        self.liar: Liar | None = None
        self.honest: list[PeerId] = list(self.swarm.names)

    @property
    def people(self) -> dict[PeerId, Participant]:
        return self.swarm.people

    @property
    def record(self) -> Record:
        """The newest record that an honest peer holds."""
        return max((self.people[name].record for name in self.honest), key=lambda record: record.iteration)

    async def begin(self) -> Liar:
        """The first iterations, in which nobody lies yet; then who will."""
        await self.go_on(0)
        name = leaders(self.swarm)[self.rank]
        self.honest.remove(name)
        self.liar = Liar(self, name)
        return self.liar

    async def go_on(self, iterations: int = 1) -> None:
        """Until all who are honest hold what comes of so many more iterations."""
        self.target += iterations
        work = [self.swarm.network.spawn(name, self.reach(name, self.target)) for name in self.honest]
        await asyncio.gather(*work, return_exceptions=True)
        for done in work:
            if not done.cancelled():
                done.result()

    async def reach(self, name: PeerId, iteration: int) -> None:
        """One honest peer, until it holds the state of an iteration."""
        me = self.people[name]
        while me.record.iteration < iteration or me.behind:
            if await me.catch_up() and me.record.iteration < iteration:
                await me.run_iteration(self.swarm.mine(name))
            else:
                await me.net.sleep_until(me.net.now() + 1.0)

    def refused(self, liar: PeerId = "") -> Counter[str]:
        """What the honest have refused of the liar, or of another one: counted by its name."""
        senders = (self.people[name].net.refused.senders for name in self.honest)
        return sum((each.get(liar or self.liar.name, Counter()) for each in senders), Counter())

    def models(self) -> set[bytes]:
        return self.swarm.hashes(self.honest)

    def named(self) -> set[PeerId]:
        """Whom the honest have refused something of, or proven to lie."""
        return named_by(self.people[name] for name in self.honest)

    def check_names(self) -> None:
        """Somebody who lies is named, and nobody who does not."""
        named = self.named()
        assert named - {*self.honest}, "nobody is named"
        assert not named & {*self.honest}, {name: self.refused(name) for name in self.honest}


def named_by(people: Iterable[Participant]) -> set[PeerId]:
    """Whom these have refused something of, or proven to lie."""
    return {name for me in people for name in (*me.net.refused.senders, *me.standing.banned)}


Attack = Callable[["Liar"], Awaitable[None]]


async def nothing(_: Liar) -> None:
    """The attack of a liar that is silent."""


async def takes_part(liar: Liar) -> None:
    """No attack: it goes on as the others do."""
    await liar.scene.reach(liar.name, liar.iteration + 1)


def play(
    attack: Attack, n: int, rank: int = 0, *, before: bool = False, quiet: Attack = nothing, liars: int = 1
) -> Scene:
    """An attack while the honest decide two iterations (or `before` they begin); the model is that without it.

    The liar is named, or somebody that it made up; nobody honest is.
    `quiet` is what the liar does in the run that it is compared with.
    """
    scene = played(attack, n, rank, before=before, liars=liars)
    model, lineage = without(n, rank, liars, quiet)
    assert scene.models() == {model}, [scene.people[name].record.iteration for name in scene.honest]
    assert {scene.people[name].record.lineage for name in scene.honest} == {lineage}
    return scene


def played(attack: Attack, n: int, rank: int = 0, *, before: bool = False, **settings: Any) -> Scene:
    """The same, whatever model comes of it."""
    scene = staged(attack, n, rank, before=before, **settings)
    scene.check_names()
    return scene


def staged(attack: Attack, n: int, rank: int = 0, *, before: bool = False, **settings: Any) -> Scene:
    """The same, whoever is named."""

    async def all_of_it() -> Scene:
        scene = Scene(n, rank, **settings)
        liar = await scene.begin()
        if before:
            await attack(liar)
            await liar.pause(1.0)
        lying = asyncio.create_task(nothing(liar) if before else attack(liar))
        async with asyncio.timeout(FAR):
            await scene.go_on(2)
        if lying.done():
            lying.result()
        lying.cancel()
        return scene

    return run_virtual(all_of_it())


@cache
def without(n: int, rank: int, liars: int = 1, quiet: Attack = nothing) -> tuple[bytes, bytes]:
    """The model that the honest end on where nobody lies, and its lineage."""
    scene = staged(quiet, n, rank, liars=liars)
    assert len(scene.models()) == 1
    assert not scene.named() & {*scene.honest}
    return scene.models().pop(), scene.record.lineage


class Liar:
    """An elector that brings nothing more, and says what it likes."""

    def __init__(self, scene: Scene, name: PeerId) -> None:
        self.scene, self.swarm, self.name = scene, scene.swarm, name
        self.me = scene.people[name]
        self.net = self.me.net
        self.before = self.me.record  # the newest when it began to lie
        self.iteration = self.before.iteration + 1
        self.electors = ranked("test", self.iteration, self.before.electors)
        self.others = tuple(elector.id for elector in self.electors if elector.id != name)
        self.acks: dict[int, dict[PeerId, Ack]] = {}

    async def pause(self, seconds: float) -> None:
        await self.net.sleep_until(self.net.now() + seconds)

    async def ask(
        self, channel: str, parcel: Parcel | Callable[[PeerId], Parcel], to: Iterable[PeerId] = ()
    ) -> dict[PeerId, Parcel]:
        """What these (or all others) answer to a question; who does not answer is left out."""
        return await ask_all(self.net, channel, parcel, tuple(to) or self.others)

    # --- as a leader ---

    async def propose(self, attempt: int, to: Iterable[PeerId] = (), **changes: Any) -> dict[PeerId, Ack]:
        """Ask for votes; who promises."""
        record, standing = self.before, self.me.standing
        proposal = Propose(
            record.iteration + 1, attempt, attempt - 1, record.lineage, record.hash, False,
            standing.incarnation, standing.terms.digest, True,
        )  # fmt: skip
        answers = await self.ask("propose", replace(proposal, **changes).parcel(), to)
        acks = {peer: Ack.decode(answer.header) for peer, answer in answers.items()}
        self.acks[attempt] = {peer: ack for peer, ack in acks.items() if ack.status == "ack"}
        return acks

    def promises(self, attempt: int, only: Collection[PeerId] | None = None) -> bytes:
        """The signed promises of an attempt, or only some of them, as a leader shows them."""
        acks = self.acks.get(attempt, {})
        rows = [
            SignedPromise(place, promise_of(acks[elector.id]), acks[elector.id].signature)
            for place, elector in enumerate(self.electors)
            if elector.id in acks and (only is None or elector.id in only)
        ]
        return pack_promises(rows)

    def roster(self, members: Collection[PeerId], attempt: int = 0, **changes: Any) -> Roster:
        """A roster of these, each of whom brings one update; all other electors witness it."""
        people = tuple(Member(e.id, e.index, 1.0) for e in self.electors if e.id in members)
        rest = tuple(elector for elector in self.electors if elector.id not in members)
        roster = Roster(
            "test", self.iteration, attempt, self.before.lineage, self.before.hash, LAYOUT, "full", 3, people, rest,
            (), (),
        )  # fmt: skip
        return replace(roster, **changes)

    async def seal(
        self, roster: Roster, attempt: int | None = None, to: Iterable[PeerId] = (), **said: Any
    ) -> dict[PeerId, str]:
        """Publish a roster; what each of its members answers."""
        at = roster.attempt if attempt is None else attempt
        parcel = Seal(
            brief(roster, self.electors), at, said.get("adopt"), said.get("holders", ()),
            said.get("promises", b""), said.get("votes", b""), self.seal_of(roster, at, said.get("promises", b"")),
        ).parcel()  # fmt: skip
        told = tuple(to) or tuple(peer for peer in roster.ids if peer != self.name)
        return {peer: _status(answer) for peer, answer in (await self.ask("seal", parcel, told)).items()}

    @property
    def decision(self) -> DecisionId:
        """Which decision this is, as it is signed."""
        return DecisionId("test", self.iteration, link_of(self.before), self.before.lineage)

    def seal_of(self, roster: Roster, attempt: int, shown: bytes = b"") -> bytes:
        """My signature of a roster that I seal, and of the promises that I show with it."""
        parts = seal_parts(self.decision, attempt, roster.digest, parted(shown)[0])
        return self.net.sign(statement("seal", *parts))

    def record_of(self, roster: Roster, digest: bytes) -> Record:
        return self.before.after(roster, digest)

    def signed(self, roster: Roster, digest: bytes, attempt: int | None = None) -> bytes:
        """My vote for what came of a roster."""
        at = roster.attempt if attempt is None else attempt
        return self.net.sign(cast(roster, at, self.before, digest).statement)

    def alone(self, record: Record) -> Certificate:
        """A certificate of a record with my signature in my place."""
        return signed_by([self.net], self.before, record)

    # --- a chain of its own ---

    def state(self, version: int = 1, value: float = 66.0) -> Snapshot:
        """A state that nobody computed."""
        return Snapshot(version, {"theta": torch.full((self.swarm.length,), value)}, {})

    def donate(self, record: Record, state: Snapshot, proof: bytes = b"", **changes: Any) -> None:
        """From now on answer everybody who syncs with this."""

        async def answer(_: PeerId, request: Parcel) -> Parcel:
            return given(record, state, proof, light=Sync.decode(request.header).light, **changes)

        self.net.serve("sync", answer)

    async def announce(self, record: Record, ttl: float = 1e6, **changes: Any) -> None:
        """A head in the DHT, which lives long."""
        await announce(self.net, record, self.me.standing.terms.digest, ttl, **changes)


# --- what strangers can do as well ---


@dataclass(frozen=True)
class Fork:
    """A lineage that its founders made up among themselves on top of a record."""

    records: tuple[Record, ...]
    certificates: tuple[Certificate, ...]
    states: tuple[Snapshot, ...]
    before: Record

    @property
    def head(self) -> Record:
        return self.records[-1]

    @property
    def proof(self) -> bytes:
        """From the record on top of which it is founded."""
        return packed(self.hops)

    @property
    def hops(self) -> list[Hop]:
        before, hops = self.before, []
        for record, proof in zip(self.records, self.certificates, strict=True):
            hops.append(hop(before, record, proof))
            before = record
        return hops


def fork(
    nets: Sequence[Net], before: Record, length: int = 1, *, named: Collection[Elector] = (), salt: bytes = b"made up"
) -> Fork:
    """These found a lineage on top of a record, which names them alone as its electors, and sign so many iterations."""
    founders = tuple(Elector(net.me, 100 + at) for at, net in enumerate(nets))
    founders = tuple(next((e for e in named if e.id == founder.id), founder) for founder in founders)
    lineage = lineage_after(link_of(before), salt)
    records, proofs, states, at = [], [], [], before
    for step in range(length):
        iteration = at.iteration + 1
        people = tuple(Member(e.id, e.index, 1.0) for e in ranked("test", iteration, founders))
        electors = ranked("test", iteration, founders) if step == 0 else ()
        roster = Roster(
            "test", iteration, 0, lineage, at.hash, LAYOUT, "full", 3, people, (), electors, (),
        )  # fmt: skip
        states.append(Snapshot(iteration, {"theta": torch.full((60,), 66.0 + iteration)}, {}))
        record = at.after(roster, states[-1].hash)
        proofs.append(signed_by(nets, at, record))
        records.append(record)
        at = record
    return Fork(tuple(records), tuple(proofs), tuple(states), before)


def signed_by(nets: Iterable[Net], before: Record, record: Record, attempt: int | None = None) -> Certificate:
    """What these sign of a record, each in its own place."""
    assert record.roster is not None
    said = cast(record.roster, record.roster.attempt if attempt is None else attempt, before, record.hash)
    return certificate(electors_of(before, record), said.attempt, {n.me: n.sign(said.statement) for n in nets})


def hop(before: Record, record: Record, proof: Certificate) -> Hop:
    assert record.roster is not None
    named = brief(record.roster, ranked("test", record.iteration, before.electors))
    return (Founded if record.roster.electors else Next)(named, record.hash, proof)


def packed(hops: Iterable[Hop], place: int = 0) -> bytes:
    """A proof as `sync` carries it."""
    data: bytes = msgpack.packb([place, encode_proof(hops)])
    return data


def given(record: Record, state: Snapshot, proof: bytes = b"", *, light: bool = False, **changes: Any) -> Parcel:
    """The answer of a donor."""
    names = tuple(sorted(state.vectors))
    lengths = tuple(state.vectors[name].numel() for name in names)
    said = State("full", names, lengths, record.encoded, (), state.version, dict(state.scalars), proof, True)
    said = replace(said, **changes)
    if light:
        return replace(said, mode="light", names=(), lengths=(), scalars={}).parcel()
    return said.parcel(torch.cat([state.vectors[name] for name in names]).numpy().tobytes())


async def announce(net: Net, record: Record, terms: bytes, ttl: float = 1e6, **changes: Any) -> None:
    head = Head(record.iteration, record.hash, record.lineage, terms)
    await net.announce("head/test", replace(head, **changes).encoded, ttl=ttl)


async def ask_all(
    net: Net, channel: str, parcel: Parcel | Callable[[PeerId], Parcel], to: Sequence[PeerId]
) -> dict[PeerId, Parcel]:
    async def one(peer: PeerId) -> Parcel | None:
        try:
            asked = parcel if isinstance(parcel, Parcel) else parcel(peer)
            return await net.call(peer, channel, asked, deadline=net.now() + 3.0)
        except NetError:
            return None

    answers = await asyncio.gather(*map(one, to))
    return {peer: answer for peer, answer in zip(to, answers, strict=True) if answer is not None}


def _status(answer: Parcel) -> str:
    try:
        return status_of(answer)
    except WireError:
        return ""
