"""A masked sum's leader lies on real sockets: two rosters, an invented identity. Nobody is unmasked, and it is named.

`tests/secagg/test_lying_leaders.py` has every such lie, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator

import pytest
import torch

from marfl.net.base import Net, PeerId
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.fraud import CONTRADICTION
from marfl.protocol.mask_pledges import PledgeProof, card_statement, pledge_statement
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster
from marfl.protocol.standing import Diary
from marfl.protocol.voting import GROUNDLESS, UNFIT
from marfl.secagg.crypto import KeyPair
from marfl.state import Snapshot
from stages.libp2p import Stage, Swarm, hivemind_warnings, open_stage, until
from stages.lying_leader import LyingLeader
from stages.virtual import LAYOUT, advance

pytestmark = [hivemind_warnings, pytest.mark.slow]
LENGTH = 9
PEERS = 7
REAL = Settings(
    run="test", wire="masked", group_size=3, exchange="full", on_minority="wait", liars=1, ready_timeout=8.0,
    takeover=2.0, phase_timeout=8.0, call_timeout=5.0,
)  # fmt: skip


@pytest.fixture
def stage() -> Iterator[Stage]:
    """One of its own: somebody dies in every scene."""
    with open_stage(Swarm) as found:
        yield found


class Helped(Diary):
    """Writes down whose sums somebody helped to unmask."""

    def __init__(self, rosters: dict[bytes, Roster]) -> None:
        self.rosters = rosters

    def helped(self, roster: Roster) -> None:
        self.rosters.setdefault(roster.digest, roster)


class RealPeople:
    """What a `LyingLeader` needs to know of its stage, with real peers on it."""

    def __init__(self, nets: list[Net]) -> None:
        self.settings = REAL
        self.start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        self.record = genesis(self.start, tuple((net.me, index) for index, net in enumerate(nets)))
        self.helped: dict[bytes, Roster] = {}
        self.people = {
            net.me: Participant(net, REAL, index, LAYOUT, self.start, self.record, advance)
            for index, net in enumerate(nets)
        }
        for person in self.people.values():
            person.standing.keep(Helped(self.helped))

    def mine(self, name: PeerId) -> Contribution:
        me = self.people[name]
        value = torch.randn(LENGTH, generator=torch.Generator().manual_seed(me.index))
        return Contribution(me.state.hash, value, 1.0)

    async def iterate(self, names: Collection[PeerId]) -> dict[PeerId, Outcome]:
        done = await asyncio.gather(*(self.people[name].run_iteration(self.mine(name)) for name in names))
        return dict(zip(names, done, strict=True))

    def expected(self, roster: Roster, before: Snapshot) -> bytes:
        mean = replay_mean(roster, {name: self.mine(name) for name in self.people})
        return advance(before, mean, roster).hash


def attacked(stage: Stage, attack: Callable[[LyingLeader], Awaitable[None]]) -> tuple[RealPeople, LyingLeader]:
    """The attack while all others run an iteration; then the liar's daemon is killed, and they run one more."""

    async def scene(world: Swarm) -> tuple[RealPeople, LyingLeader]:
        nets = await world.peers(PEERS)
        people = RealPeople(nets)
        leader = LyingLeader(people)  # type: ignore[arg-type]
        going = asyncio.create_task(people.iterate(leader.others))
        await until(lambda: all(people.people[name].instance is not None for name in leader.others))
        await asyncio.sleep(0.5)
        await attack(leader)
        await world.kill(leader.net)
        outcomes = await going
        assert {outcome.status for outcome in outcomes.values()} == {"committed"}
        for _ in range(2):
            before = {people.people[name].state.hash for name in leader.others}
            assert len(before) == 1
            state = people.people[leader.others[0]].state
            outcomes = await people.iterate(leader.others)
            last = people.people[leader.others[0]].record
            assert last.roster is not None
            if last.roster.is_sum:  # exactly what those brought who are in it, and all who are honest are
                assert set(last.roster.ids) == set(leader.others)
                assert {person.hash for person in outcomes.values()} == {people.expected(last.roster, state)}
                break
        assert last.roster.is_sum
        for person in people.people.values():
            person.talk.drop_asides()
        return people, leader

    return stage.play(scene)


def unmasked(people: RealPeople) -> list[set[PeerId]]:
    """Whose sums were unmasked in the iteration of the attack."""
    return [set(roster.ids) for roster in people.helped.values() if roster.iteration == 1]


def test_a_leader_that_tells_two_rosters_to_different_members_unmasks_nobody_and_is_named(stage: Stage) -> None:
    """One is of all the others, one of all but a victim: the difference of both sums would be the victim's update."""
    proofs: list[PledgeProof | None] = []
    given: list[dict[PeerId, bytes]] = []

    async def attack(leader: LyingLeader) -> None:
        await leader.propose(0)
        rosters = leader.roster(leader.others), leader.roster(leader.others[:-1])
        halves = leader.others[::2], leader.others[1::2]
        for roster, half in zip(rosters, halves, strict=True):
            await leader.seal(roster, to=[name for name in half if name in roster.ranks])
            await leader.ask_pledges(roster, 0, half)
        for roster in rosters:
            signed = leader.pledges(roster, 0) | await leader.ask_pledges(roster, 0, leader.others)
            proofs.append(leader.proof(signed))
            places = tuple(at for at, one in enumerate(leader.electors) if one.id in signed)
            made = proofs[-1] or PledgeProof(places, b"".join(signed[leader.electors[at].id] for at in places))
            given.append(await leader.reveal(roster, 0, made))

    people, leader = attacked(stage, attack)
    assert None in proofs
    assert [len(each) for each, proof in zip(given, proofs, strict=True) if proof is None] == [0] * proofs.count(None)
    assert len(unmasked(people)) <= 1
    for name in leader.others:
        assert CONTRADICTION in people.people[name].standing.banned.get(leader.name, "")


def test_a_leader_with_an_invented_identity_gets_nobody_to_begin_and_is_named(stage: Stage) -> None:
    """A roster of a victim, the leader and somebody who does not exist: its sum less theirs is the victim's update."""
    begun: list[set[PeerId]] = []
    given: list[dict[PeerId, bytes]] = []

    async def attack(leader: LyingLeader) -> None:
        ghost = await stage.swarm.newcomer()
        await leader.propose(0)
        victim = leader.others[0]
        instance = leader.stage.people[victim].instance
        assert instance is not None
        cards = {}
        for net in (ghost, leader.net):
            card = KeyPair().public
            cards[net.me] = card + net.sign(card_statement(instance.decision, 0, card))
        keys = leader.keys[0] | cards
        roster = leader.roster([victim, leader.name, ghost.me], keys=keys)
        begun.append(await leader.seal(roster, to=[victim], keys=keys))
        mine = leader.net.sign(pledge_statement(roster, 0))
        signed = await leader.ask_pledges(roster, 0, leader.others) | {leader.name: mine}
        assert leader.proof(signed) is None
        places = tuple(range(len(leader.electors)))
        given.append(await leader.reveal(roster, 0, PledgeProof(places, mine * len(places))))

    people, leader = attacked(stage, attack)
    assert begun == [set()]
    assert given == [{}]
    assert all(len(names) >= PEERS - 1 for names in unmasked(people))
    for name in leader.others:  # all were asked to pledge themselves, the victim to begin as well
        assert people.people[name].net.refused.senders[leader.name].keys() <= {GROUNDLESS, UNFIT}
    assert people.people[leader.others[0]].net.refused.senders[leader.name][GROUNDLESS] >= 1
