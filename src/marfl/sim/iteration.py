"""One iteration of a simulation: what a world must do, what it came to, and the distillation (Moshpit-KD) within it.

A world holds the models of all peers: `exact_world` by exact semantics, `paper_world` by the paper's, `protocol_world`
by the real protocol on a virtual network.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from marfl.learn import Metrics
from marfl.net.base import Traffic
from marfl.plan.cost import Messages
from marfl.plan.grid import Plan
from marfl.sim.churn import Participation
from marfl.sim.executor import Executor, Job
from marfl.techniques.technique import Technique
from marfl.wire.packing import FieldBits

NOBODY = "nobody brought an update: the model stays as it is"


class ClipRange(NamedTuple):
    """The clipping bounds of an iteration in which every peer moves its own."""

    lowest: float
    highest: float


@dataclass
class IterationResult:
    """What one iteration came to."""

    members: tuple[int, ...] = ()  # whose updates are in the new model, in plan order
    sent: int = 0  # updates that peers brought to the exchange
    arrived: int = 0  # updates in the new model: members that only help to aggregate bring none
    losses: list[float] = field(default_factory=list)
    bytes: Traffic = field(default_factory=Traffic)
    disagreement: float = 0.0
    update_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    checks: list[str] = field(default_factory=list)  # what the robustness checks found
    distillation: list[Messages] = field(default_factory=list)  # the models that travelled before the averaging
    phases: Iterable[Messages] | None = None  # the messages, when the technique chose them this time
    stale: tuple[int, ...] = ()  # who caught up first
    ahead: frozenset[int] = frozenset()  # whose update was made, or begun, while the last ones were averaged
    seconds: float | None = None  # virtual, when a network told it
    bits: FieldBits | None = None  # of a value on its way, where something was summed
    clips: ClipRange | None = None  # where every peer has a bound of its own

    def note_distillation(self, result: DistillationResult, length: int) -> None:
        """Count the models that were shown, and say who could not use them."""
        self.distillation += result.phases
        self.bytes.distill += 4 * length * result.messages
        self.bytes.messages += result.messages
        self.checks += [f"peer {peer}: distillation led to NaN or infinity and was undone" for peer in result.undone]


class SimulatedWorld(Protocol):
    """The models of all peers, and how an iteration changes them."""

    technique: Technique
    reason: str  # which way was taken, and why
    length: int  # values of the model
    values: int  # values that a peer sends
    wire: str  # how they travel, as the protocol calls it

    def step(self, iteration: int, who: Participation) -> IterationResult: ...

    def evaluate(self) -> Metrics: ...

    def model_hash(self) -> bytes: ...

    def clip(self) -> float | None:
        """The clipping bound of the next iteration, in a private run."""

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


# --- distillation: before they average, the groups of a plan exchange models and learn from them ---


class DistillationResult(NamedTuple):
    """What the distillation of one iteration came to."""

    phases: list[Messages]  # the models that travelled, round by round
    undone: list[int]  # peers of whom a round led to NaN or infinity, and was undone

    @property
    def messages(self) -> int:
        return sum(len(phase.source) for phase in self.phases)


def distill_groups(
    executor: Executor, layout: Plan, jobs: Mapping[int, Job], length: int, *, in_place: bool
) -> DistillationResult:
    """All rounds of an iteration over the plan's groups. Ranks without a job neither teach nor learn."""
    phases, undone = [], list[int]()
    for round, groups in enumerate(layout.rounds):
        present = list(_with_models(groups, jobs))
        learning = [[jobs[rank] for rank in ranks] for ranks in present]
        undone += executor.distill_groups(learning, round, in_place=in_place)
        shown = [(source, dest, length) for ranks in present for source in ranks for dest in ranks if source != dest]
        phases.append(Messages.of(shown))
    return DistillationResult(phases, sorted(set(undone)))


def models_shown(layout: Plan, present: Container[int]) -> int:
    """How many models travel in all rounds when these ranks have one to show."""
    return sum(len(ranks) * (len(ranks) - 1) for groups in layout.rounds for ranks in _with_models(groups, present))


def _with_models(groups: Sequence[Sequence[int]], jobs: Container[int]) -> Iterator[list[int]]:
    """Those of each group that have a model to show, where they are at least two."""
    for group in groups:
        ranks = [rank for rank in group if rank in jobs]
        if len(ranks) > 1:
            yield ranks
