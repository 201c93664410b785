"""Runs that have the same models by construction: one is trained, the ledgers of the others are computed apart.

Where everybody who takes part ends on the exact mean, the models do not depend on how it was computed. So the
techniques of exact semantics share one training run, and so do those of the paper's semantics that average exactly;
at full participation, with one batch each, the two semantics agree as well (m̄ = μm + (1−μ)ḡ is what is derived).
All of it holds up to the order of additions; the experiment `equality` trains every technique apart to show it.
Sums of small integers do not depend on the order: `mar` and FedAvg with the same wire have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from marfl.config import Config, load
from marfl.errors import BrokenPromise
from marfl.from_config import integers_of, technique_of, wire_of
from marfl.learn import Metrics
from marfl.plan.grid import order
from marfl.runs import Row, Run
from marfl.settings import Churn
from marfl.sim.churn import Participation
from marfl.sim.iteration import IterationResult
from marfl.techniques.technique import Technique
from marfl.wire.packing import FieldBits, SliceFormat, blocks_of, small_bits

_TRAINED: dict[str, Any] = {
    "links": None, "technique_options": {}, "rounds": None, "group_size": 5, "target_accuracy": None,
}  # fmt: skip
_EXACT = {"semantics": "exact", "technique": "mar", "exchange": "grid", "plan": "exact", "momentum": "derive"}
_PAPER = {"semantics": "paper", "technique": "fedavg", "exchange": "full", "plan": "keys", "momentum": "send"}
_MORE_THAN_AVERAGES = ("distill", "privacy", "strategy", "local", "overlap")


def training_of(config: Config) -> Config:
    """The settings of the run that trains this one's models; the same settings when nobody else can.

    Only `engine = fast` shares: the others ask for the bits of the very technique.
    """
    if config.engine != "fast" or not _plain(config):
        return config
    technique = technique_of(config)
    exact = technique.exact or (config.churn == Churn() and technique.exact_for(config.peers))
    if config.semantics == "exact" or (exact and _agree(config)):
        found = _EXACT
    elif exact:
        found = _PAPER
    else:
        return config
    return load(overrides=config.model_dump(exclude_unset=True) | _TRAINED | found)


def _agree(config: Config) -> bool:
    """Whether the two semantics agree: all peers take part in all iterations, with one batch and one step size each."""
    return config.churn == Churn() and config.local_batches == 1 and config.optimizer.slow_above is None


def _plain(config: Config) -> bool:
    """Whether nothing happens to the models but an average when it is due, and nobody dies on the way to it."""
    ordinary = Config().resolved()
    averages = all(getattr(config, name) == getattr(ordinary, name) for name in _MORE_THAN_AVERAGES)
    sent = {"exact": "derive", "paper": "send"}[config.semantics]
    return averages and config.wire != "fixed" and config.momentum == sent and not config.churn.death


class Replayed:
    """A world whose models are those of a finished run; what travels is computed for this technique.

    It tells the same story as the worlds of `marfl.sim.iteration` would; a test compares them row by row.
    """

    def __init__(self, config: Config, source: Run) -> None:
        if source.summary is None or not source.finished:
            raise BrokenPromise(f"{source.path}: is not finished, so nobody can have its models")
        self.config = config
        self.technique = technique_of(config)
        self.length = int(source.summary["model_bytes"]) // 4
        self.values = self.length * (1 if config.semantics == "exact" else 2)
        self.reason = f"the models of run {source.path.name}, the same by construction; the ledger is this technique's"
        self._rows: dict[int, Row] = {row["iteration"]: row for row in source.rows}
        self._row: Mapping[str, Any] = {}
        self._version = 0
        self._held = dict.fromkeys(range(config.peers), 0)
        self._missed = 4 * self.length  # bytes of one missed iteration
        self.wire = wire_of(config)
        wire = integers_of(config)
        self._scales = blocks_of(self.length) if wire else 0
        self._wires = [wire.first] if wire else []  # how the next iterations travel, where that is unusual

    def step(self, iteration: int, who: Participation) -> IterationResult:
        self._row = self._rows[iteration]
        if self._row["aggregators"] != len(who.aggregators):
            raise BrokenPromise(f"iteration {iteration}: somebody abstained, so nobody else has these models")
        step = IterationResult(losses=[self._row["train_loss"]])
        if self.config.semantics == "exact":
            self._catch_up(who, step)
        if not who.aggregators:
            return step
        integers = self._wires[0] if self._wires else integers_of(self.config)
        step.bits = small_bits(integers, len(who.aggregators)) if integers else FieldBits(32, 32)
        cost = self._technique(step, len(who.aggregators)).cost(len(who.aggregators), self.values)
        step.bytes.payload, step.bytes.messages = cost.bytes_total, step.bytes.messages + cost.messages
        step.bytes.down = cost.bytes_down
        step.members = self._members(who)
        self._version += 1
        self._held |= dict.fromkeys(step.members, self._version)
        return step

    def _technique(self, step: IterationResult, members: int) -> Technique:
        """How this iteration travels: integers of a few bits have no scales in the first, as in `ExactWorld`."""
        usual = integers_of(self.config)
        if usual is None:
            return self.technique
        wire = self._wires.pop() if self._wires else usual
        self._missed = SliceFormat(wire.down, rounded=wire.down != 32).size(self.length)
        if wire == usual:
            return self.technique
        first = technique_of(self.config, wire)
        step.phases = list(first.messages(members, self.values))
        return first

    def _members(self, who: Participation) -> tuple[int, ...]:
        if self.config.semantics == "paper":
            return tuple(sorted(who.aggregators))
        names = [(peer, "") for peer in sorted(who.aggregators)]
        return tuple(peer for peer, _ in order(self.config.run_name, self._version + 1, names))

    def _catch_up(self, who: Participation, step: IterationResult) -> None:
        """One missed iteration costs Δ̄, more cost θ and m; FedAvg's server sends the model anyway."""
        stale = sorted(peer for peer in who.updaters | who.aggregators if self._held[peer] < self._version)
        for peer in stale:
            if not self.technique.server:
                one = self._version - self._held[peer] == 1
                step.bytes.sync += self._missed if one else 4 * (2 * self.length + self._scales)
                step.bytes.messages += 1
            self._held[peer] = self._version
        step.stale = tuple(stale)

    def evaluate(self) -> Metrics:
        loss = self._row["test_loss"]
        return Metrics(float("nan") if loss is None else loss, self._row["test_accuracy"], 1)

    def model_hash(self) -> bytes:
        return bytes.fromhex(self._row["model_hash"]) if self._row else b""

    def clip(self) -> float | None:
        return None

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}  # over in seconds: it starts anew rather than resumes

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        raise BrokenPromise("a replayed run is over in seconds and has no checkpoints")

    def close(self) -> None:
        self._rows.clear()
