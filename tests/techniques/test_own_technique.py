"""Techniques from outside the package: Epidemic Learning by hand, an exact one, and what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.plan.cost import Messages
from marfl.sim.engine import simulate
from marfl.techniques.catalogue import technique
from marfl.techniques.technique import GlobalSum, MixContext, Mixed, NoGlobalAverage, Span

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
EPIDEMIC = "epidemic:EpidemicLearning"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


def config(**overrides: Any) -> Config:
    base = {"task": "synthetic", "task_options": SMALL, "peers": 7, "group_size": 3, "iterations": 3, "batch": 8}
    return load(overrides=base | overrides)


def context(iteration: int = 1) -> MixContext:
    return MixContext(tuple(range(7)), iteration, 0, {}, samples=lambda _: 1, speed=None)


def test_epidemic_learning_averages_what_arrives() -> None:
    made = technique(EPIDEMIC, fanout=2)
    values = [torch.full((3,), float(2**peer)) for peer in range(7)]
    mixed = made.mix(values, context())
    assert mixed.phases is not None
    pairs = list(zip(mixed.phases[0].source.tolist(), mixed.phases[0].dest.tolist(), strict=True))
    assert [source for source, _ in pairs] == [peer for peer in range(7) for _ in range(2)], "everybody sends to two"
    assert all(source != dest for source, dest in pairs)
    assert len(set(pairs)) == 14
    for peer in range(7):
        got = [2**peer] + [2**source for source, dest in pairs if dest == peer]
        torch.testing.assert_close(mixed.values[peer], torch.full((3,), sum(got) / len(got)))
    assert made.cost(7, 3).bytes_total == 4 * 3 * 14
    again, later = made.mix(values, context()), made.mix(values, context(2))
    assert all(map(torch.equal, mixed.values, again.values))
    assert not all(map(torch.equal, mixed.values, later.values))


def test_it_runs_in_the_simulator_and_its_bytes_are_counted() -> None:
    given = config(technique=EPIDEMIC, technique_options={"fanout": 2}, semantics="paper")
    summary = simulate(given)
    assert summary["bytes_total"] == 3 * 7 * 2 * summary["model_bytes"]
    assert summary["disagreement"] > 0
    assert summary["model_hash"] == simulate(given)["model_hash"]


@dataclass(frozen=True)
class Hub(GlobalSum):
    """Everybody sends to the first, who sends the sum back."""

    name: ClassVar[str] = "hub"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        if n > 1:
            yield Messages.of((peer, 0, length) for peer in range(1, n))
            yield Messages.of((0, peer, length) for peer in range(1, n))


class BrokenSum(Hub):
    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        return values[0] * torch.nan


class BrokenMix(NoGlobalAverage):
    name: ClassVar[str] = "broken"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        yield Messages.of([(0, 1, length)])

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        return Mixed([value[:2] for value in values], {}, [])


def test_an_exact_one_ends_on_the_sum_and_costs_its_messages() -> None:
    own, star = (simulate(config(technique=name)) for name in ("test_own_technique:Hub", "fedavg"))
    assert own["model_hash"] == star["model_hash"], "both add in rank order"
    assert own["bytes_total"] == 3 * 12 * own["model_bytes"]
    hurt = simulate(config(technique="test_own_technique:Hub", **{"churn.death": 0.2}))
    assert hurt["bytes_by_kind"]["repair"] >= 0
    assert importlib.util.find_spec("epidemic") is not None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"technique": "no_such:Thing"}, "technique no_such:Thing: cannot import no_such"),
        (
            {"technique": "epidemic:Epidemic"},  # the classes that it imports are none of its own
            "technique epidemic:Epidemic: epidemic has no class 'Epidemic'. "
            "Did you mean EpidemicLearning? There are EpidemicLearning",
        ),
        ({"technique": "test_own_technique:Path"}, "Path must derive from GlobalSum or NoGlobalAverage"),
        ({"technique": EPIDEMIC, "technique_options": {"speed": 1}}, "it takes fanout"),
        ({"technique": EPIDEMIC}, "technique = epidemic: has no exact average; run it with semantics = paper"),
        ({"technique": "test_own_technique:Hub", "wire": "int8"}, "mar or fedavg and semantics = exact"),
        ({"technique": "test_own_technique:Hub", "engine": "protocol"}, "has no messages for real peers"),
        ({"technique": "test_own_technique:BrokenSum"}, "technique = hub: its sum has [106] of [106] values, or NaN"),
        ({"technique": "test_own_technique:BrokenMix", "semantics": "paper"}, "technique = broken: its mix has [2] of"),
    ],
)
def test_what_cannot_run_is_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        simulate(config(**settings))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
