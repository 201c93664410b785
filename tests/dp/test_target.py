"""A target ε is never exceeded, whoever is lost: a sum that would carry too little noise is not made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marfl.config import Config, load
from marfl.dp.accounting import Observer
from marfl.dp.ledger import Spending
from marfl.peer.privacy_ledger import Account
from marfl.peer.state_dir import StateDir
from marfl.protocol import leader
from marfl.protocol import mask_pledges as pledges
from marfl.protocol import masked_rounds as rounds
from marfl.protocol.ballot import TOO_SMALL
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import ABANDONED
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import VOID, Record
from marfl.sim.engine import Simulation
from marfl.testing.world import World
from stages.masks import Death, Stage

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
BASE = {"task": "synthetic", "task_options": SMALL, "peers": 12, "group_size": 3, "iterations": 8, "batch": 8}
TARGET = 4.0
WIRES = ("fixed", "masked")


def budget(**more: Any) -> Config:
    common = {"test_every": 8, "privacy.noise_multiplier": 0.9, "privacy.target_epsilon": TARGET, "churn.death": 0.05}
    return load(overrides=BASE | common | more)


@pytest.mark.parametrize("engine", ["bitwise", "fast", "protocol"])
@pytest.mark.parametrize("observer", [Observer.OUTSIDER, Observer.INSIDER_MASKED])
def test_deaths_in_the_exchange_never_take_a_run_past_its_target(engine, observer, monkeypatch):
    masks = observer is Observer.INSIDER_MASKED
    given = budget(engine=engine, seed=4, liars=0, **{"privacy.target_observer": observer, "privacy.masks": masks})
    column = f"epsilon_{observer}"
    before, passed = Simulation(given).rows()
    assert ABANDONED in "; ".join(passed["checks"])
    assert passed["aggregators"] == 0
    assert 0 < passed[column] == before[column] <= TARGET
    assert passed["clip"] == before["clip"]
    assert passed["epsilon_insider"] > before["epsilon_insider"]  # group members may have seen what was sent in vain
    monkeypatch.setattr(Spending, "fewest", lambda _: 0)
    assert list(Simulation(given).rows())[-1][column] > TARGET  # the same deaths, and nobody minds


def test_a_masked_total_that_was_seen_counts_though_the_iteration_went_by(monkeypatch):
    """A sum out of range is abandoned, but by then its masks are off."""
    real = rounds.lift
    monkeypatch.setattr(rounds, "lift", lambda total, *rest: real(total, *rest) + 2**30)
    given = budget(engine="protocol", iterations=2, **{"privacy.masks": True, "churn.death": 0, "privacy.delta": 0.1})
    rows = list(Simulation(given).rows())
    assert [row["aggregators"] for row in rows] == [0, 0]
    ledger = Spending(given).ledger.add(Spending(given).noise.release(12))
    assert rows[0]["epsilon_insider_masked"] == ledger.epsilon(Observer.INSIDER_MASKED, 0.1)


# --- rosters ---


def stage(wire: str, count: int = 8, **more: Any) -> Stage:
    return Stage(count, settings=Settings(wire=wire, group_size=3, exchange="full", on_minority="wait"), **more)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("fewest", "summed"), [(7, True), (8, False)])
def test_a_roster_is_sealed_again_only_with_as_many_contributions_as_all_demand(wire, fewest, summed):
    """One of eight dies before it has sent anything."""
    played = stage(wire, fewest=(fewest,) * 8, deaths=(Death("p5", "reduce"),))
    outcomes = played.play()
    rosters = {person.record.roster for person in played.living}
    assert [roster.exchange == VOID for roster in rosters] == [not summed]
    assert {o.present for o in outcomes.values()} == {next(iter(rosters)).ids if summed else ()}
    if not summed:
        assert {person.state.vectors["theta"].abs().sum().item() for person in played.living} == {0.0}
        assert played.helped == {}


@pytest.mark.parametrize("wire", WIRES)
def test_whoever_demands_more_than_there_are_is_left_out_by_name_until_all_agree(wire):
    """p0 wants nine of eight; without it seven are too few for p1; the other six are content."""
    played = stage(wire, fewest=(9, 8, 6, 6))
    outcomes = played.play()
    assert {outcome.status for outcome in outcomes.values()} == {"committed"}
    roster = played.people["p2"].record.roster
    assert set(roster.ids) == set(played.people) - {"p0", "p1"}
    assert dict(roster.omitted) == {"p0": TOO_SMALL, "p1": TOO_SMALL}
    assert {elector.id for elector in roster.voters} == set(played.people)  # they still vote
    assert {event.source for event, _ in played.seen} == set(roster.ids)
    assert {person.state.hash for person in played.living if person.net.me in roster.ids} == {played.expected(roster)}


def test_those_who_only_help_count_for_nothing_and_demand_nothing():
    played = stage("fixed", count=4, weights=(1.0, 1.0, 0.0, 0.0), fewest=(3, 3, 9))
    played.play()
    assert {person.record.roster.exchange for person in played.living} == {VOID}


@pytest.mark.parametrize("wire", WIRES)
def test_a_member_sends_nothing_to_a_roster_smaller_than_it_demands_whatever_its_leader_says(wire, monkeypatch):
    for module in (leader, pledges):
        monkeypatch.setattr(module, "willing", lambda roster, _: roster)
    played = stage(wire, fewest=(0, 9))
    played.play()
    assert "p1" not in {event.source for event, _ in played.seen}
    assert len(played.seen) > 0
    rosters = [person.record.roster for person in played.living if person.record.roster]
    assert all("p1" not in roster.ids or roster.exchange == VOID for roster in rosters)


def demand(record: Record) -> int:
    return record.hash[0] % 6


class Demanding(World):
    """In every iteration all demand the same of the sum, from nothing to five of the five peers or more there are."""

    def contribution(self, index: int, record: Record) -> Contribution:
        return replace(super().contribution(index, record), fewest=demand(record))


def play_demanding(seed: int, wire: str) -> int:
    """A world of the soak; how many iterations went by in it."""
    world = Demanding(seed, wire)
    passed_by = "an attempt failed though all were well"  # an iteration that goes by is none
    assert [said for said in world.run().broken if passed_by not in said] == [], seed
    records = {record.hash: record for record in (world.record, *(each.record for each in world.decisions))}
    rosters = {record.roster for record in records.values() if record.roster}
    summed = [roster for roster in rosters if roster.exchange != VOID]
    assert all(roster.contributions >= demand(records[roster.base]) for roster in summed), seed
    return len(rosters) - len(summed)


@pytest.mark.parametrize("wire", ["fp32", "masked"])
def test_whatever_strikes_every_sum_is_as_large_as_demanded_and_no_promise_is_broken(wire):
    assert sum(play_demanding(seed, wire) for seed in range(5)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["fp32", "masked"])
@pytest.mark.parametrize("seed", range(5, 150))
def test_many_more_worlds_keep_what_is_demanded(wire, seed):
    play_demanding(seed, wire)


# --- a real peer's own ledger ---


def decided(iteration: int, base: bytes, shares: int) -> Any:
    members = [SimpleNamespace(weight=1.0)] * shares
    return SimpleNamespace(
        iteration=iteration, base=base, ranks={"me": 0}, members=members, contributions=shares, exchange="grid"
    )


def voter(at: int, roster: Any = None, began: Any = None) -> Any:
    return SimpleNamespace(
        net=SimpleNamespace(me="me"), record=SimpleNamespace(iteration=at),
        history={roster.iteration: SimpleNamespace(roster=roster)} if roster else {},
        last_roster=began,
    )  # fmt: skip


def live_through(account: Account, reopen: Any, iteration: int, draw: Random) -> Account:
    """One iteration of a peer: committed with as many as it demands or more, never heard of, or survived by a crash."""
    base = bytes([iteration]) * 32
    account.draw(iteration, base, lambda: torch.zeros(3))
    roster = decided(iteration, base, draw.randint(max(1, account.fewest), 6))
    end = draw.choice(["committed", "unheard", "crash", "elsewhere"])
    if end == "committed":
        account.settle(voter(iteration, roster, began=roster))
    elif end == "unheard":
        account.settle(voter(iteration, began=roster))
    return reopen() if end == "crash" else account  # otherwise it stays open, and another lineage's comes next


@pytest.mark.parametrize("observer", Observer)
def test_whatever_becomes_of_its_vectors_a_peers_own_ledger_keeps_the_target(tmp_path: Path, observer):
    target = {Observer.OUTSIDER: 11.0, Observer.INSIDER: 60.0, Observer.INSIDER_MASKED: 11.0}[observer]
    given = {"peers": 6, "iterations": 30, "privacy.noise_multiplier": 0.5, "privacy.tolerated_loss": 0.2}
    config = load(overrides=given | {"privacy.target_epsilon": target, "privacy.target_observer": observer})
    spent = []
    for seed in range(12):
        draw = Random(seed)
        store = StateDir(tmp_path / str(seed), "run")
        reopen = partial(Account, config, store)
        account, iteration = reopen(), 1
        while account.affords(iteration, bytes([iteration]) * 32):
            account = live_through(account, reopen, iteration, draw)
            iteration += 1
        account.settle(voter(iteration))  # the last one's end, if it is still open
        spent.append(account.spending.ledger.epsilon(observer, account.spending.delta))
        store.close()
    assert max(spent) <= target
    assert min(spent) > 0


def test_a_vector_that_a_crash_left_open_is_reserved_before_the_next_one_is_drawn(tmp_path: Path):
    """A budget for two iterations: one is spent, one may have been, so there is nothing left for a third vector."""
    given = {"peers": 5, "iterations": 9, "privacy.noise_multiplier": 0.4, "privacy.target_observer": "insider"}
    config = load(overrides=given | {"privacy.target_epsilon": 40.0})
    store = StateDir(tmp_path, "run")
    assert Spending(config).horizon == 2
    account = Account(config, store)
    account.draw(1, b"a" * 32, lambda: torch.zeros(3))
    account.settle(voter(1, decided(1, b"a" * 32, 5)))
    assert account.affords(2, b"b" * 32)
    account.draw(2, b"b" * 32, lambda: torch.zeros(3))
    assert not Account(config, store).affords(2, b"b" * 32)
    assert not Account(config, store).affords(2, b"c" * 32)
    store.close()


def test_without_a_target_any_number_of_contributions_will_do():
    config = replace_target(None)
    assert Spending(config).fewest() == 0
    assert 0 < Spending(replace_target(TARGET)).fewest() < 12


def replace_target(target: float | None) -> Config:
    return budget(**{"privacy.target_epsilon": target, "privacy.target_observer": "outsider"})
