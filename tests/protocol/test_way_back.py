"""Where certificates are long peers go on at their leader's word: if it lied they find the way back by themselves."""

from __future__ import annotations

import pytest

from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol import member
from marfl.protocol.messages import Finish, Ruling
from marfl.protocol.roster import brief_record
from stages.liars import Attack, Liar, Scene, staged
from stages.virtual import Swarm

MANY = 34  # electors: a certificate has more signatures than everybody is shown


def splits(share: float) -> Attack:
    """A leader that seals two rosters, one for this share of the others, and says "commit" to everybody at once."""

    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        cut = round(share * len(liar.others))
        halves = [half for half in (liar.others[:cut], liar.others[cut:]) if half]
        rosters = {peer: liar.roster(half) for half in halves for peer in half}

        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            said = Finish.decode(request.header)
            if said.hash is None:
                return Ruling("retry", None, ()).parcel()
            record = liar.record_of(rosters[sender], said.hash)
            return Ruling("commit", brief_record(record, liar.electors), (sender,)).parcel()

        liar.net.serve("finish", answer)
        for half in halves:
            await liar.seal(rosters[half[0]])
        await liar.pause(20.0)
        liar.swarm.network.crash(liar.name)

    return attack


def certified(scene: Scene) -> None:
    """All who are honest hold one model, and know that it is certified; and they have named the leader that lied.

    Not the leader alone: who goes on at its word tells others of a record that nobody can prove.
    """
    assert scene.liar is not None
    assert scene.liar.name in scene.named()
    assert len(scene.models()) == 1
    for name in scene.honest:
        standing = scene.people[name].standing
        assert not standing.behind
        assert len({scene.people[other].history[3].hash for other in scene.honest}) == 1
        assert not standing.past or not standing.proofs.settled


@pytest.mark.parametrize("share", [0.5, 0.35, 0.1])
def test_two_halves_that_a_leader_sent_on_come_together_again(share: float):
    certified(staged(splits(share), MANY))


@pytest.mark.parametrize("n", [7, 16])
def test_few_peers_would_come_together_again_as_well(n: int):
    """The same as if certificates were long for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "SHORT", 2)
        certified(staged(splits(0.5), n))


def test_the_state_before_is_kept_until_the_next_one_is_certain_and_no_longer():
    swarm = Swarm(40, liars=1)
    kept: list[bool] = []

    async def scene() -> None:
        for _ in range(3):
            await swarm.iterate()
            kept.extend(bool(person.standing.past) for person in swarm.people.values())
            for person in swarm.people.values():
                assert len(person.standing.past) <= 1
                assert bool(person.standing.past) == (not person.standing.proofs.settled)

    run_virtual(scene())
    assert any(kept)
    assert not all(kept)  # its leaders are shown the certificate
