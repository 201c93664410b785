"""What one iteration does to the peers' models: exact semantics (`exact_world`), and the paper's (`paper_world`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from marfl.learn import Metrics
from marfl.net.base import Traffic
from marfl.plan.schedule import Phase
from marfl.sim.churn import Cast
from marfl.sim.lessons import Lessons
from marfl.techniques import Technique

NOBODY = "nobody brought an update: the model stays as it is"


@dataclass
class Step:
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
    lessons: list[Phase] = field(default_factory=list)  # the models that travelled before the averaging
    phases: Iterable[Phase] | None = None  # the messages, when the technique chose them this time
    stale: tuple[int, ...] = ()  # who caught up first
    seconds: float | None = None  # virtual, when a network told it
    facts: dict[str, Any] = field(default_factory=dict)  # further columns of the row

    def note_lessons(self, lessons: Lessons, length: int) -> None:
        """Count the models that were shown, and say who could not use them."""
        self.lessons += lessons.phases
        self.bytes.distill += 4 * length * lessons.messages
        self.bytes.messages += lessons.messages
        self.checks += [f"peer {peer}: distillation led to NaN or infinity and was undone" for peer in lessons.undone]


class World(Protocol):
    """The models of all peers, and how an iteration changes them."""

    technique: Technique
    reason: str  # which way was taken, and why
    length: int  # values of the model
    values: int  # values that a peer sends

    def step(self, iteration: int, cast: Cast) -> Step: ...

    def evaluate(self) -> Metrics: ...

    def model_hash(self) -> bytes: ...

    def clip(self) -> float | None:
        """The clipping bound of the next iteration, in a private run."""

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
