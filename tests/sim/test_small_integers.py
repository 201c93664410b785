"""`wire = "int8"` and `"int4"` in the simulator: the same bits in every engine, the plan's bytes, and nothing lost."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.learn.small_integers import IntegerUpdates, SmallIntegers
from marfl.plan.cost import cost
from marfl.plan.grid import plan
from marfl.protocol.protocol_settings import EXCHANGES
from marfl.runs import RunDir
from marfl.sim.engine import Simulation
from marfl.wire.error_feedback import CommittedSum
from marfl.wire.packing import integer_wire
from marfl.wire.quantiser import SCALES, UNSET
from marfl.wire.rounded_sum import round_back

TINY = {"task": "digits", "peers": 7, "group_size": 3, "iterations": 4, "batch": 8, "test_every": 4}
BYTES = ("bytes_payload", "payload_down", "bytes_sync", "bytes_masks", "bytes_distill")
SAME = ("model_hash", "aggregators", "bits_up", "bits_down", "checks", *BYTES)


def config(**changes: Any) -> Config:
    return load(overrides=TINY | changes)


def played(given: Config) -> tuple[Simulation, list[Any]]:
    simulation = Simulation(given)
    return simulation, list(simulation.rows())


def same_in_both(**changes: Any) -> list[Any]:
    """The rows of the default engine, which the protocol on the virtual network repeats."""
    one, other = (played(config(engine=engine, **changes))[1] for engine in ("bitwise", "protocol"))
    for field in SAME:
        assert [row.get(field) for row in one] == [row.get(field) for row in other], field
    return one


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("wire", "down", "peers"), [("int8", None, 7), ("int4", None, 9), ("int4", 8, 14), ("int8", 4, 2)]
)
def test_the_engines_end_on_the_same_bits_and_on_the_bytes_of_the_plan(exchange, wire, down, peers):
    rows = same_in_both(wire=wire, wire_down=down, exchange=exchange, peers=peers)
    length = Simulation(config(peers=peers)).world.values
    integers = integer_wire(wire, down)
    usual, first = (cost(exchange, plan(peers, 3), length, each) for each in (integers, integers.first))
    assert [row["bytes_payload"] for row in rows] == [first.bytes_total, *[usual.bytes_total] * 3]
    assert [row.get("payload_down", 0) for row in rows] == [first.bytes_down, *[usual.bytes_down] * 3]


def test_the_exchanges_and_fedavg_with_the_same_quantiser_end_on_one_hash():
    ways = [{"exchange": exchange} for exchange in EXCHANGES] + [{"technique": "fedavg"}]
    assert len({played(config(wire="int4", **way))[1][-1]["model_hash"] for way in ways}) == 1


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_fedavg_over_the_network_ends_on_the_same_bits(wire):
    same_in_both(wire=wire, technique="fedavg")


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_masked_integers_end_on_the_hash_of_the_run_without_masks(wire):
    plain = played(config(wire=wire))[1]
    masked = same_in_both(wire=wire, **{"privacy.masks": True})
    assert [row["model_hash"] for row in masked] == [row["model_hash"] for row in plain]
    wide = played(config(**{"privacy.masks": True}))[1]
    assert 3.9 < wide[-1]["bytes_payload"] / masked[-1]["bytes_payload"] <= 4


@pytest.mark.parametrize("momentum", ["derive", "send"])
@pytest.mark.parametrize(("wire", "down"), [("int8", None), ("int4", None), ("int8", 16)])
def test_absentees_keep_what_is_left_and_catch_up_at_the_same_price_in_both_engines(wire, down, momentum):
    churn = {"churn.participation": 0.5, "churn.dropout": 0.2, "iterations": 8, "peers": 12, "momentum": momentum}
    rows = same_in_both(wire=wire, wire_down=down, **churn)
    assert [row["bits_up"] for row in rows] == [32, *[int(wire.removeprefix("int"))] * 7]
    assert sum(row["bytes_sync"] for row in rows) > 0
    assert all("lost" not in check for row in rows for check in row["checks"])


@pytest.mark.parametrize("liars", [0, 1])
def test_absentees_under_masks_cost_the_same_in_both_engines(liars):
    """With seed 0 half of the electors, with the first of them, are the members of two iterations."""
    churn = {"churn.participation": 0.5, "churn.dropout": 0.2, "iterations": 4, "peers": 12}
    rows = same_in_both(wire="int4", liars=liars, **{"privacy.masks": True}, **churn)
    assert 6 in [row["aggregators"] for row in rows]


def test_helpers_that_bring_no_update_change_nothing_of_what_is_left():
    same_in_both(wire="int4", iterations=6, **{"churn.update_participation": 0.5, "churn.aggregate_participation": 1.0})


@pytest.mark.parametrize("teacher", ["group", "previous"])
def test_distilled_updates_travel_in_a_few_bits(teacher):
    same_in_both(wire="int4", **{"distill.iterations": 2, "distill.teacher": teacher})


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_deaths_in_the_exchange_leave_one_model_and_are_survived(wire):
    for engine in ("bitwise", "protocol"):
        rows = played(config(wire=wire, engine=engine, peers=12, iterations=6, **{"churn.death": 0.05}))[1]
        assert len(rows) == 6
        assert any("died" in check for row in rows for check in row["checks"])


class Left(NamedTuple):
    """What a peer sent to a roster, and what was left of its updates before and after."""

    followed: tuple[bytes, ...]  # the newest records that the peer knew of then
    before: torch.Tensor | None
    sent: torch.Tensor
    after: torch.Tensor


@pytest.mark.parametrize("more", [{}, {"exchange": "full", "churn.participation": 0.7}, {"privacy.masks": True}])
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_dies_every_contribution_counts_once_and_is_followed_by_what_it_left(seed, more, monkeypatch):
    """Of attempts that are lost, of lineages that end and of peers that come back, only what was committed counts."""
    sent: dict[tuple[bytes, int], Left] = {}
    sums: dict[bytes, tuple[torch.Tensor, int, int]] = {}
    quantise, advance = IntegerUpdates.quantise, SmallIntegers.advance

    def noted(self, sender, update, weight, roster):
        found, record = quantise(self, sender, update, weight, roster), world.people[self.peer].record
        after = next(each.value for each in self.memory.on_its_way if each.roster == roster.digest)
        followed = (record.hash, record.roster.base) if record.roster else (record.hash,)
        sent[roster.digest, self.peer] = Left(followed, sender.left, found.clone(), after)
        return found

    def summed(self, state, total, weight, contributions):
        following = advance(self, state, total, weight, contributions)
        sums[following.hash] = total.to(torch.int64), self.wire_at(state).down, contributions
        return following

    monkeypatch.setattr(IntegerUpdates, "quantise", noted)
    monkeypatch.setattr(SmallIntegers, "advance", summed)
    deaths = {"task": "synthetic", "peers": 9, "iterations": 8, "churn.death": 0.12, "engine": "protocol"}
    simulation = Simulation(config(wire="int4", seed=seed, **deaths, **more))
    world: Any = simulation.world
    decided: dict[int, CommittedSum] = {}
    for _ in simulation.rows():
        decided |= {each.iteration: each for each in world._newest().standing.decisions}
    newest: dict[int, tuple[bytes, torch.Tensor]] = {}  # by peer, what is left and of which record
    counted = 0
    for _, (_, roster, record, _) in sorted(decided.items()):
        brought = {peer: what for (digest, peer), what in sent.items() if digest == roster}
        total, down, contributions = sums.get(record, (torch.zeros(0), 0, -1))
        if len(brought) == contributions:
            whole = torch.stack([what.sent.to(torch.int64) for what in brought.values()]).sum(0).to(torch.int32)
            assert torch.equal(total, (whole if down == 32 else round_back(whole, down)).to(torch.int64))
            counted += 1
        for peer, what in brought.items():
            known, left = newest.get(peer, (b"", None))
            if left is None or (what.before is None and known not in what.followed):
                assert what.before is None, "of something that was not committed"
            else:
                assert what.before is not None, "of a record that everybody knows, and yet it is lost"
                assert torch.equal(what.before, left)
            newest[peer] = record, what.after
    assert counted >= 4


def test_own_momentum_and_the_fast_engine_take_small_integers_too():
    usual = played(config(wire="int4"))[1]
    own = played(config(wire="int4", momentum="local"))[1]
    assert [row["bytes_payload"] for row in own] == [row["bytes_payload"] for row in usual]
    assert own[-1]["model_hash"] != usual[-1]["model_hash"]
    simulation, fast = played(config(wire="int4", engine="fast"))
    assert "not pooled because of wire = int4" in simulation.world.reason
    assert [row["model_hash"] for row in fast] == [row["model_hash"] for row in usual]


def test_worker_processes_give_the_bits_of_one_process():
    one, two = (played(config(wire="int4", workers=count))[1][-1]["model_hash"] for count in (1, 2))
    assert one == two


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_resumed_run_ends_on_the_hash_of_one_that_was_never_stopped(tmp_path, engine):
    given = config(wire="int4", engine=engine, iterations=6, checkpoint_every=1, **{"churn.participation": 0.7})
    whole = played(given)[1]
    run = RunDir.create(tmp_path / "run", given.as_dict())
    stopped = Simulation(given, run).rows()
    for _ in range(3):
        next(stopped)
    stopped.close()
    run.close()
    again = RunDir.create(tmp_path / "run", given.as_dict(), resume=True)
    rest = list(Simulation(given, again, resume=True).rows())
    again.close()
    assert [row["model_hash"] for row in rest] == [row["model_hash"] for row in whole[3:]]
    assert [row["bytes_sync"] for row in rest] == [row["bytes_sync"] for row in whole[3:]]


def test_what_was_sent_and_what_is_left_is_what_was_learned():
    """One peer of one block: the model has moved by what was learned, but for what is left."""
    given = config(wire="int8", peers=1, iterations=5, momentum="local")
    simulation = Simulation(given)
    world: Any = simulation.world
    before, learned = world.state.vectors["theta"].double(), torch.zeros(world.length, dtype=torch.float64)
    for _ in simulation.rows():
        learned += world.matrices.updates[0].double()
    moved = world.state.vectors["theta"].double() - before
    left = world.left[0]
    assert float((learned - moved - left).abs().max()) < 1e-6  # θ itself is fp32


def test_scales_are_part_of_the_agreed_state_from_the_second_iteration_on():
    simulation = Simulation(config(wire="int4"))
    world: Any = simulation.world
    assert (world.state.vectors[SCALES] == UNSET).all()
    for _ in simulation.rows():
        assert (world.state.vectors[SCALES] < 0).all()


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_an_update_that_is_not_finite_or_too_large_abstains(wire):
    rows = played(config(wire=wire, iterations=1, **{"optimizer.learning_rate": 1e9}))[1]
    assert any("beyond ±4096" in check for check in rows[0]["checks"])


WIDTHS = {  # settings: the wire and its bits, up and down, once there are scales
    "fp32": ({}, ("fp32", 32, 32)),
    "paper": ({"semantics": "paper"}, ("fp32", 32, 32)),
    "int4, 8 back": ({"wire": "int4", "wire_down": 8}, ("int4", 4, 8)),
    "int8 under masks": ({"wire": "int8", "privacy.masks": True}, ("masked-int8", 16, 16)),
    "masks": ({"privacy.masks": True}, ("masked", 64, 64)),
    "private": ({"privacy.noise_multiplier": 1.0}, ("fixed", 32, 32)),
    "private under masks": ({"privacy.noise_multiplier": 1.0, "privacy.masks": True}, ("masked", 32, 32)),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [pair for pair in product(WIDTHS, ("bitwise", "protocol")) if pair != ("paper", "protocol")],  # which is refused
)
def test_rows_and_the_summary_say_how_wide_values_were(name, engine):
    settings, (wire, up, down) = WIDTHS[name]
    simulation, rows = played(config(engine=engine, iterations=2, **settings))
    summary, scaled = simulation.summary(), wire.endswith(("int8", "int4"))
    assert (summary["wire"], summary["bits_up"], summary["bits_down"]) == (wire, up, down)
    assert [(row["bits_up"], row["bits_down"]) for row in rows] == [(32, 32) if scaled else (up, down), (up, down)]
    if not scaled and name != "paper":
        expected = cost("grid", plan(7, 3), simulation.world.values).with_values_of(up // 8)
        assert rows[1]["bytes_payload"] == expected.bytes_total


def test_links_turn_fewer_bytes_into_fewer_seconds():
    seconds = {}
    for wire in ("fp32", "int8", "int4"):
        given = config(wire=wire, links="nb-iot", compute_seconds=0.0, **{"optimizer.learning_rate": 0.01})
        seconds[wire] = played(given)[1][-1]["virtual_seconds"]
    assert seconds["int4"] < seconds["int8"] < seconds["fp32"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"technique": "ring"}, "needs technique = mar"),
        ({"semantics": "paper"}, "semantics = exact"),
        ({"privacy.noise_multiplier": 0.1}, "private runs take fixed"),
        ({"technique": "fedavg", "privacy.masks": True}, "privacy.masks = true: needs technique = mar"),
        ({"wire": "fp32", "wire_down": 8}, "wire_down = 8: is for wire = int8 or int4, not for fp32"),
        ({"wire_down": 12}, "wire_down = 12: must be 4, 8 or 16"),
        ({"wire_down": 3}, "wire_down = 3: must be"),
        ({"peers": 65_537}, "sums of integers (wire = int4) are over at most 65,536; choose wire = fp32"),
        ({"wire": "int3"}, "must be one of fp32, fixed, int8, int4"),
    ],
)
def test_what_cannot_be_had_together_is_refused_with_one_line(given, said):
    with pytest.raises(InputError) as refusal:
        config(**{"wire": "int4", "peers": 30} | given)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
