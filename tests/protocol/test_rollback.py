"""Going back: after a lie that was proven a run goes on from the state before it, when a quorum has seen the proof."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from marfl.errors import InputError
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.former_states import WINDOW, in_the_model, may_go_back, taking_back, went_back, where_to
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Member, Record, Roster
from marfl.state import Snapshot
from test_audited_sums import PAUSE, Change, Court, adds_to_its_sum, uses_another_input


def careful(n: int = 8, who: dict[str, Change] | None = None, **settings: Any) -> Court:
    return Court(n, who, on_fraud="rollback", **settings)


def theta(person: Participant) -> torch.Tensor:
    return person.state.vectors["theta"]


# --- the rules ---


def records(*exchanges: str) -> dict[int, Record]:
    """The records of iterations from 1 on, with these exchanges."""
    members = (Member("p0", 0, 1.0),)
    found = {}
    for at, exchange in enumerate(exchanges, 1):
        roster = Roster("run", at, 0, bytes(32), bytes(32), bytes(32), exchange, 2, members, (), (), ())
        found[at] = Record(roster, bytes([at]) * 32)
    return found


@pytest.mark.parametrize(
    ("exchanges", "held"),
    [
        (["grid", "grid", "grid"], [3, 2, 1]),
        (["grid", "none", "grid"], [3, 2, 1]),  # what went by is harmless, but it is there
        (["grid", "grid", "back to 1"], [1]),
        (["grid", "grid", "back to 1", "grid"], [4, 1]),
        (["grid", "back to 0", "grid", "back to 2", "grid"], [5]),  # what it went back to had gone back itself
        (["grid", "back to 7"], [1]),  # nobody commits that; it must end all the same
    ],
)
def test_what_a_run_went_back_before_is_not_in_the_model(exchanges: list[str], held: list[int]):
    assert in_the_model(records(*exchanges), len(exchanges)) == held


@pytest.mark.parametrize(
    ("exchanges", "lies", "to"),
    [
        (["grid", "grid"], {2}, 1),
        (["grid", "grid"], {1, 2}, 0),  # before the first of them
        (["grid", "grid", "back to 1"], {2}, None),  # done
        (["grid", "grid", "back to 1"], {1}, 0),  # proven after that
        (["grid", "grid"], set(), None),
        (["grid", "grid"], {3}, None),
        (["grid"] * (WINDOW + 2), {2}, None),  # nobody has the state before it any more
        (["grid"] * (WINDOW + 1), {2}, 1),
    ],
)
def test_a_run_goes_back_before_the_first_lie_that_is_in_its_model(
    exchanges: list[str], lies: Collection[int], to: int | None
):
    known, newest = records(*exchanges), len(exchanges)
    assert where_to(lies, known, newest) == to
    assert all(may_go_back(at, lies, known, newest) == (at + 1 in lies and to is not None) for at in range(newest))


def test_a_roster_that_goes_back_sums_nothing_and_says_where_to():
    roster = records("grid")[1].roster
    assert roster is not None
    back = taking_back(roster, 4)
    assert (back.restores, back.is_sum, back.contributions) == (4, False, 0)
    assert (roster.restores, roster.is_sum) == (None, True)
    assert replace(roster, exchange="back to x").restores is None
    assert replace(roster, exchange="none").is_sum is False


def test_momentum_and_scalars_come_back_with_the_state():
    former = Snapshot(3, {"theta": torch.ones(2), "momentum": torch.full((2,), 7.0)}, {"clip": 0.5})
    now = Snapshot(5, {"theta": torch.zeros(2), "momentum": torch.zeros(2)}, {"clip": 9.0})
    roster = records("back to 3")[1].roster
    assert roster is not None
    after = went_back(former, now, roster)
    assert (after.version, after.scalars) == (6, {"clip": 0.5})
    assert torch.equal(after.vectors["momentum"], former.vectors["momentum"])


def test_another_way_to_answer_a_lie_is_refused():
    with pytest.raises(InputError, match="on_fraud"):
        Settings(on_fraud="forgive")  # type: ignore[arg-type]


# --- in a run ---


@pytest.mark.parametrize("liars", [0, 1])
@pytest.mark.parametrize("wire", ["fp32", "fixed", "masked"])
def test_a_run_goes_on_from_the_state_before_the_lie(wire: str, liars: int):
    court = careful(8, {"p1": adds_to_its_sum(2)}, wire=wire, bear=liars)
    start = theta(court.people["p0"]).clone()
    outcomes = court.hold_court(3)
    honest = court.honest("p1")
    assert {each["p0"].status for each in outcomes} == {"committed"}
    for person in honest:
        assert outcomes[1][person.net.me].restored == 0
        assert outcomes[1][person.net.me].tainted == (1,)
        assert outcomes[1][person.net.me].present == ()
        assert "p1" not in outcomes[2][person.net.me].present
        assert person.standing.proofs.certificate(person.record) is not None or liars == 0
    assert len(court.hashes([person.net.me for person in honest])) == 1
    moved = theta(honest[0]) - start  # one honest mean, of those who did not lie
    assert float(moved.abs().max()) < 100


def test_the_state_after_going_back_is_the_one_before_the_lie():
    court = careful(8, {"p1": adds_to_its_sum(1)})

    async def scene() -> None:
        await court.iterate()
        before = court.people["p0"].standing.past[0]
        await asyncio.sleep(PAUSE)
        await court.iterate()
        for person in court.honest("p1"):
            assert torch.equal(theta(person), before.vectors["theta"])
            assert person.state.version == 2

    run_virtual(scene())


def test_a_run_that_is_to_go_on_does_not_go_back():
    court = Court(8, {"p1": adds_to_its_sum(1)})
    outcomes = court.hold_court(3)
    assert [each["p0"].restored for each in outcomes] == [None, None, None]
    assert not court.people["p0"].standing.past


def test_a_run_goes_back_once_for_two_liars_of_one_iteration():
    court = careful(10, {"p1": adds_to_its_sum(0), "p4": uses_another_input(1)}, group_size=3)
    outcomes = court.hold_court(4)
    assert [each["p0"].restored for each in outcomes] == [None, 0, None, None]
    assert {*court.people["p0"].standing.banned} == {"p1", "p4"}


def test_former_states_are_few_and_go_when_nobody_can_prove_a_lie_any_more():
    court = careful(4)
    court.hold_court(WINDOW + 3)
    for person in court.honest():
        assert sorted(person.standing.past) == list(range(3, WINDOW + 3))


def test_a_leader_that_goes_back_without_a_proof_is_not_followed():
    court = careful(8, bear=1)

    async def scene() -> None:
        await court.iterate()
        await asyncio.sleep(PAUSE)
        for person in court.honest():  # whoever leads says so; the others have seen nothing
            person.standing.lies.clear()
        leader = min(court.honest(), key=lambda person: place(court, person))
        leader.standing.note_lie(leader.record.roster.digest, "p7")
        after = await court.iterate()
        assert {outcome.status for outcome in after.values()} == {"committed"}
        assert {outcome.restored for outcome in after.values()} == {None}
        assert after["p0"].attempt > 0

    run_virtual(scene())


def place(court: Court, person: Participant) -> int:
    """When this peer leads."""
    instance = Instance.after("test", person.record, 0.0)
    rank = instance.rank(person.net.me)
    return rank if rank is not None else len(court.people)


def test_who_has_not_kept_the_state_is_given_it():
    court = careful(8, {"p1": adds_to_its_sum(1)})

    async def scene() -> dict[str, Outcome]:
        await court.iterate()
        await asyncio.sleep(PAUSE)
        court.people["p5"].standing.past.clear()  # it was restarted
        await court.iterate()
        await court.people["p5"].catch_up()
        await asyncio.sleep(PAUSE)
        return await court.iterate()

    outcomes = run_virtual(scene())
    assert "p5" in outcomes["p0"].present
    assert len(court.hashes([person.net.me for person in court.honest("p1")])) == 1
