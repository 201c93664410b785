"""A real peer's ledger: one vector per iteration, on the disk before it leaves, and never less than it gave away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marfl.config import load
from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.errors import InputError
from marfl.peer.privacy_ledger import Account
from marfl.peer.state_dir import StateDir
from marfl.protocol.roster import VOID

CONFIG = load(overrides={"peers": 5, "privacy.noise_multiplier": 0.4})
PLAN = NoisePlan(0.4, 5)
RECORDS = {"privacy.unit": "record", "privacy.records": 640}
BASE, OTHER = b"\1" * 32, b"\2" * 32
HERE, GONE = (1.0, 1.0, 1.0), (None, 1.0, 1.0)  # weights of me and two others; None: not in the roster


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateDir]:
    made = StateDir(tmp_path, "run")
    yield made
    made.close()


def make(value: float = 1.0) -> Any:
    return lambda: torch.full((3,), value)


def roster(iteration: int, base: bytes, weights: tuple[float | None, ...], exchange: str = VOID) -> Any:
    names = [name for name, weight in zip(("me", "you", "they"), weights, strict=True) if weight is not None]
    members = [SimpleNamespace(weight=weight) for weight in weights if weight is not None]
    ranks = {name: rank for rank, name in enumerate(names)}
    contributions = sum(bool(member.weight) for member in members)
    return SimpleNamespace(
        iteration=iteration, base=base, ranks=ranks, members=members, contributions=contributions,
        exchange="grid" if contributions else exchange, is_sum=contributions > 0,
    )  # fmt: skip


def voter(at: int, *decided: Any, began: Any = None, helped: Any = None) -> Any:
    """A peer whose record is at this iteration, which knows these rosters, last began this one, and unmasked that."""
    return SimpleNamespace(
        net=SimpleNamespace(me="me"),
        record=SimpleNamespace(iteration=at),
        history={each.iteration: SimpleNamespace(roster=each) for each in decided},
        last_roster=began,
        helped={helped.iteration: helped} if helped else {},
    )


def spent(*arrived: int) -> PrivacyLedger:
    ledger = PrivacyLedger()
    for count in arrived:
        ledger = ledger.add(PLAN.release(count))
    return ledger


def test_a_second_try_of_an_iteration_sends_the_very_same_vector(store):
    account = Account(CONFIG, store)
    first = account.draw(1, BASE, make(1.0))
    assert account.draw(1, BASE, make(2.0)) is first
    assert account.spending.ledger == spent()


def test_what_is_drawn_is_on_the_disk_before_it_can_leave(store):
    Account(CONFIG, store).draw(1, BASE, make())
    opened = {"iteration": 1, "base": BASE.hex(), "fewest": 0, "peer": ""}
    assert store.load_account() == {"unit": "peer", "releases": [], "open": opened}


def test_a_committed_iteration_counts_the_shares_that_arrived(store):
    account, sealed = Account(CONFIG, store), roster(1, BASE, (1.0, 1.0, 0.0))  # one only helps, without noise
    account.draw(1, BASE, make())
    checks = account.settle(voter(1, sealed, began=sealed))
    assert account.spending.ledger == spent(2) == Account(CONFIG, store).spending.ledger
    assert checks == ["only 2 shares of noise arrived, 5 are needed for the noise multiplier"]
    assert account.settle(voter(1, sealed, began=sealed)) == []
    assert account.spending.ledger == spent(2)


def test_an_undecided_iteration_stays_open(store):
    account = Account(CONFIG, store)
    first = account.draw(1, BASE, make())
    account.settle(voter(0, began=roster(1, BASE, HERE)))
    assert account.spending.ledger == spent()
    assert account.draw(1, BASE, make(2.0)) is first


def test_a_peer_left_out_after_it_began_to_send_counts_what_its_group_saw(store):
    account = Account(CONFIG, store)
    account.draw(1, BASE, make())
    account.settle(voter(1, roster(1, BASE, GONE), began=roster(1, BASE, HERE)))
    assert account.spending.ledger == spent(0)


def test_a_vector_that_never_left_costs_nothing(store):
    account = Account(CONFIG, store)
    account.draw(1, BASE, make())
    account.settle(voter(1, roster(1, BASE, GONE)))
    account.draw(2, OTHER, make())
    account.settle(voter(7, began=roster(1, BASE, HERE)))
    assert account.spending.ledger == spent()


def test_where_nobody_tells_how_much_noise_joined_its_own_none_is_counted(store):
    account = Account(CONFIG, store)
    account.draw(1, BASE, make())
    checks = account.settle(voter(7, began=roster(1, BASE, HERE)))
    assert account.spending.ledger == spent(1)
    assert "is not known" in checks[0]


def test_another_lineages_roster_says_nothing_about_mine(store):
    account = Account(CONFIG, store)
    account.draw(3, BASE, make())
    account.settle(voter(3, roster(3, OTHER, HERE), began=roster(3, BASE, HERE)))
    assert account.spending.ledger == spent(1)


def test_a_vector_that_left_counts_though_the_run_went_back_and_this_peer_only_helped_since(store):
    account = Account(CONFIG, store)
    account.draw(3, BASE, make())
    account.settle(voter(2, began=roster(3, BASE, HERE)))  # undecided, then the run goes back
    account.settle(voter(3, roster(3, OTHER, GONE), began=roster(3, OTHER, GONE)))
    assert account.spending.ledger == spent(1)


def test_after_a_crash_the_forgotten_vector_counts_beside_the_new_one(store):
    Account(CONFIG, store).draw(1, BASE, make(1.0))
    again = Account(CONFIG, store)
    again.draw(1, BASE, make(2.0))
    sealed = roster(1, BASE, HERE)
    again.settle(voter(1, sealed, began=sealed))
    assert again.spending.ledger == spent(0, 3)


def test_after_a_crash_an_iteration_that_was_decided_meanwhile_is_counted(store):
    Account(CONFIG, store).draw(1, BASE, make())
    again = Account(CONFIG, store)
    again.settle(voter(1, roster(1, BASE, HERE)))  # it remembers no attempt, but the roster says that it was in
    assert again.spending.ledger == spent(3)
    Account(CONFIG, store).draw(2, OTHER, make())
    last = Account(CONFIG, store)
    last.draw(9, BASE, make())
    assert last.spending.ledger == spent(3, 1)


NOBODY = (0.0, 0.0, 0.0)  # the iteration was abandoned
MASKED = load(overrides={"peers": 5, "privacy.noise_multiplier": 0.4, "privacy.masks": True})


def test_a_total_whose_masks_came_off_counts_though_the_run_went_back_in_that_iteration(store):
    account, seen = Account(MASKED, store), roster(1, BASE, HERE)
    account.draw(1, BASE, make())
    account.settle(voter(1, roster(1, BASE, NOBODY, "back to 0"), began=seen, helped=seen))
    assert account.spending.ledger == spent(3)


def test_a_total_whose_masks_came_off_counts_though_the_iteration_was_abandoned(store):
    account, sealed = Account(MASKED, store), roster(1, BASE, HERE)
    account.draw(1, BASE, make())
    account.settle(voter(1, roster(1, BASE, NOBODY), began=sealed, helped=sealed))
    account.draw(2, OTHER, make())
    account.settle(voter(2, roster(2, OTHER, NOBODY), began=roster(2, OTHER, HERE)))  # nobody took anything off
    assert account.spending.ledger == spent(3, 0)


@pytest.mark.parametrize("redrawn", [False, True])
def test_after_a_crash_masks_may_have_come_off_an_abandoned_total_of_three_at_least(store, redrawn):
    Account(MASKED, store).draw(1, BASE, make())
    again = Account(MASKED, store)
    if redrawn:
        again.draw(1, BASE, make())
    checks = again.settle(voter(1, roster(1, BASE, NOBODY)))
    assert again.spending.ledger == (spent(0, 3) if redrawn else spent(3))
    assert checks == ["how much noise joined this peer's own is not known: counted as the fewest that it can be, 3"]


def test_a_vector_that_left_under_an_earlier_name_is_found_under_it(store):
    Account(CONFIG, store, name="you").draw(1, BASE, make())
    again = Account(CONFIG, store, name="me")
    again.settle(voter(1, roster(1, BASE, GONE)))  # you and they, without me
    assert again.spending.ledger == spent(2)


def test_a_peer_stops_before_its_budget_is_exceeded_also_after_a_restart(store):
    config = load(overrides={"peers": 5, "privacy.noise_multiplier": 0.4, "privacy.target_epsilon": 40.0})
    for iteration in range(1, 20):
        account = Account(config, store)  # as if it were killed after every iteration
        if not account.affords(iteration, BASE):
            break
        account.draw(iteration, BASE, make())
        sealed = roster(iteration, BASE, HERE)
        account.settle(voter(iteration, sealed, began=sealed))
    assert 1 < iteration < 19
    assert account.spending.columns()["epsilon_insider"] <= 40.0
    assert account.spending.ledger.entries[0][1] == iteration - 1


def test_a_ledger_of_another_unit_is_refused_because_the_two_do_not_add_up(store):
    Account(CONFIG, store).draw(1, BASE, make())
    of_records = load(overrides={"peers": 5, "privacy.noise_multiplier": 0.4, **RECORDS})
    with pytest.raises(InputError, match=r"privacy.unit = record: .* holds a ledger of what was told about one peer"):
        Account(of_records, store)


def test_colluders_that_are_assumed_later_know_their_shares_of_earlier_releases(store):
    account, sealed = Account(CONFIG, store), roster(1, BASE, HERE)
    account.draw(1, BASE, make())
    account.settle(voter(1, sealed, began=sealed))
    before = account.spending.columns()["epsilon_outsider"]
    later = Account(load(overrides={"peers": 5, "privacy.noise_multiplier": 0.4, "privacy.colluders": 1}), store)
    assert later.spending.columns()["epsilon_outsider"] == PrivacyLedger().add(
        NoisePlan(0.4, 5, colluders=1).release(3)
    ).epsilon(Observer.OUTSIDER, later.spending.delta)
    assert later.spending.columns()["epsilon_outsider"] > before
