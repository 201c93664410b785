"""One tree of frozen settings: from a preset, a TOML file and flags, in this order; validated and resolved."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from marfl.errors import InputError
from marfl.plan.grid import MAX_PEERS
from marfl.schema import nearest, validated
from marfl.settings import (
    AuditRate,
    Churn,
    Distill,
    ExchangeName,
    GroupSize,
    Liars,
    OnFraud,
    Optimizer,
    Partition,
    Privacy,
    Seniority,
    WireDown,
    WireName,
)
from marfl.wire.packing import check_down, check_members, is_small

TEXT_ENCODER = "distilbert-base-uncased"  # the paper's, for 20ng: in the settings, so that a result names what made it


LATER: dict[str, Any] = {  # settings that came later, and what they are where nobody sets them
    "strategy": "plain", "strategy_options": {}, "local": [], "overlap": False,
}  # fmt: skip
FEWEST_MASKED = 3  # peers whose sum does not show one of them to another


class Config(BaseModel):
    """Everything that decides a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(
        "digits", description="what is learned: digits, mnist, 20ng, synthetic, or module:Class of your own"
    )
    task_options: dict[str, Any] = Field(default_factory=dict, description="arguments of the task's constructor")
    technique: str = Field(
        "mar",
        description="how: mar, fedavg, arfl, rdfl, ring, butterfly, saps, braintorrent, gossip, or module:Class of "
        "your own",
    )
    technique_options: dict[str, Any] = Field(default_factory=dict, description="compression, fanout, …")
    strategy: str = Field(
        "plain",
        description="what a mean does, and local steps: plain, diloco, fedadam, fedyogi, fedprox, scaffold, or "
        "module:Class of your own",
    )
    strategy_options: dict[str, Any] = Field(default_factory=dict, description="learning_rate, mu, …")
    semantics: Literal["exact", "paper"] = Field("exact", description="exact average of live peers, or as published")
    exchange: ExchangeName | None = Field(
        None, description="what travels in a group (mar); default grid, with semantics = paper full"
    )
    plan: Literal["exact", "keys", "random"] | None = Field(
        None, description="who meets whom (mar); default exact, with semantics = paper keys"
    )
    coordination: Literal["roster", "paper"] | None = Field(
        None, description="how real peers form groups: by a roster that they vote on, or by the paper's keys in the DHT"
    )
    peers: int = Field(16, ge=1, le=MAX_PEERS, description="N: peers of the run")
    group_size: GroupSize = 5
    liars: Liars = 1
    seniority: Seniority = 2
    audit: AuditRate = 0.0
    on_fraud: OnFraud = "go on"
    rounds: int | None = Field(None, ge=1, description="group rounds (paper); fewer than needed: approximate")
    iterations: int = Field(50, ge=1, description="T: local updates and averages, one after the other")
    local_batches: int = Field(1, ge=1, description="B: mini-batches per peer and iteration")
    batch: int = Field(64, ge=1, description="rows of a mini-batch")
    global_batch: int | None = Field(
        None, ge=1, description="or: rows of a mini-batch of all peers together; the last take one more each"
    )
    momentum: Literal["derive", "send", "local"] | None = Field(
        None, description="how the momentum is agreed on; default derive, or send where models travel"
    )
    local: tuple[str, ...] = Field(
        (), description="layers that stay at home, by name or pattern such as head.*: nothing of them travels"
    )
    overlap: bool = Field(
        False, description="train on while the last updates are averaged; each mean is of work from one state before"
    )
    optimizer: Optimizer = Field(default_factory=Optimizer)
    partition: Partition = Field(default_factory=Partition)
    churn: Churn = Field(default_factory=Churn)
    distill: Distill = Field(default_factory=Distill)
    privacy: Privacy = Field(default_factory=Privacy)
    wire: WireName | None = Field(
        None, description="values as fp32 (default), fixed: 64-bit integers (with masks), or int8, int4: a few bits"
    )
    wire_down: WireDown = None
    links: str | None = Field(
        None, description="the peers' links, for virtual seconds: lan, wifi, 5g, lte, nb-iot or mixed"
    )
    compute_seconds: float = Field(0.1, ge=0, description="of one local mini-batch on a typical peer, for virtual time")
    seed: int = Field(0, ge=0, lt=2**62, description="of everything drawn at random: the same seed, the same run")
    engine: Literal["bitwise", "fast", "protocol"] = Field(
        "bitwise", description="the exact bits, the same curve in less time, or the protocol on a virtual network"
    )
    device: str = Field("cpu", description="where local steps run: auto, cpu, cuda, cuda:N or mps")
    workers: int = Field(0, ge=0, description="processes; 0: one per core where a step is long enough")
    cluster: str | None = Field(
        None, description="compute on a Ray cluster: auto, local for one of this machine alone, or HOST:PORT"
    )
    other_nodes: Literal["refuse", "name"] | None = Field(
        None,
        description="cluster nodes with another CPU or torch, whose last bits may differ: refuse them, or only name "
        "them; default refuse with engine = bitwise",
    )
    test_every: int = Field(5, ge=1, description="iterations between two tests; the last is always tested")
    test_on: Literal["whole", "shards"] = Field(
        "whole", description="the test set, or the mean over the peers' own shards of it, as the paper's code has it"
    )
    share_tests: bool = Field(False, description="real peers average their own test results, along with the next model")
    target_accuracy: float | None = Field(None, gt=0, le=1, description="stop when the test accuracy reaches this")
    patience: int | None = Field(None, ge=1, description="stop after so many tests without a better accuracy")
    checkpoint_every: int = Field(10, ge=1, description="iterations between two checkpoints")

    def resolved(self) -> Config:
        """Fill in what depends on the semantics, and refuse what contradicts itself."""
        paper = self.semantics == "paper"
        exchange = self.exchange or ("full" if paper else "grid")
        plan = self.plan or ("keys" if paper else "exact")
        private = self._resolved_privacy().mode != "off"
        sends = paper or self.meet_until or (self.learns_in_groups and not private)  # the baseline sends what MKD sends
        momentum = self.momentum or ("send" if sends else "derive")
        if paper and momentum == "derive":
            raise InputError("momentum = derive: paper semantics sends the momentum; choose send or local")
        if not paper and plan != "exact":
            raise InputError(
                f"plan = {plan}: exact semantics needs plan = exact; approximate plans need semantics = paper"
            )
        if not paper and self.rounds is not None:
            raise InputError("rounds: exact semantics takes as many as the plan needs; set them with semantics = paper")
        if self.engine == "protocol" and paper:
            raise InputError("engine = protocol: runs exact semantics; paper semantics is simulated by bitwise or fast")
        self._check_device()
        self._check_distill(momentum)
        self._check_local()
        self._check_overlap(momentum, private=private)
        self._check_slowing()
        self._check_coordination(exchange, plan, momentum)
        self._check_slow(momentum)
        self._check_shared_tests()
        if self.audit and (self.technique != "mar" or paper):
            raise InputError(f"audit = {self.audit:g}: only sums of technique = mar and semantics = exact are signed")
        options = {"encoder": TEXT_ENCODER} | self.task_options if self.task == "20ng" else self.task_options
        filled: dict[str, Any] = {"exchange": exchange, "plan": plan, "momentum": momentum, "task_options": options}
        if self.global_batch is not None:
            filled["batch"] = self._smallest_batch(self.global_batch)
        resolved = self.model_copy(update=filled | {"wire": self._checked_wire(), "privacy": self._resolved_privacy()})
        asks = resolved.privacy.target_epsilon is not None or resolved.privacy.unit == "record"
        if resolved.privacy.mode != "off" or asks:
            from marfl.dp.privacy_settings import check_privacy  # torch takes a second: only when it is needed

            check_privacy(resolved)
        return resolved

    def _check_device(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?|mps", self.device):
            raise InputError(f"device = {self.device!r:.60}: must be auto, cpu, cuda, cuda:N or mps")
        if self.device != "cpu" and self.privacy.unit == "record":
            raise InputError(f"device = {self.device}: gradients of single records (privacy.unit) need device = cpu")
        if self.device != "cpu" and self.cluster is not None:
            raise InputError(f"device = {self.device}: the nodes of a cluster compute with device = cpu")

    def _smallest_batch(self, together: int) -> int:
        """The rows of the first peer's mini-batch, when all peers together have so many."""
        if together < self.peers:
            raise InputError(f"global_batch = {together}: must be at least {self.peers}, a row for each peer")
        if self.privacy.unit == "record":
            raise InputError("global_batch: with privacy.unit = record all peers sample at one rate; set batch instead")
        return together // self.peers

    def batch_of(self, peer: int) -> int:
        """Rows of a peer's mini-batch; where a global batch does not divide, the last peers have one more."""
        if self.global_batch is None:
            return self.batch
        least, more = divmod(self.global_batch, self.peers)
        return least + (peer >= self.peers - more)

    def _check_slowing(self) -> None:
        above = self.optimizer.slow_above
        if above is not None and (self.semantics, self.test_on) != ("paper", "shards"):
            raise InputError(
                f"optimizer.slow_above = {above:g}: every peer goes by the accuracy of its own model on its own "
                "shard; needs semantics = paper and test_on = shards"
            )

    def _checked_wire(self) -> str:
        """How values travel; `InputError` for what cannot be summed as integers, or is shown despite masks."""
        masks, mode = self.privacy.masks, self._resolved_privacy().mode
        private = mode == "sound" and self.semantics == "exact"
        wire = self.wire or ("fixed" if masks or private else "fp32")
        if masks and wire == "fp32":
            raise InputError("wire = fp32: privacy.masks adds integers; leave wire out, or choose fixed, int8 or int4")
        if private and wire == "fp32":
            raise InputError(
                "wire = fp32: with privacy integers travel, because noise in floating point tells what it was added "
                "to; leave wire out, or choose fixed"
            )
        fits = self.technique == "mar" or (not masks and (private or (self.technique == "fedavg" and is_small(wire))))
        if wire != "fp32" and (self.semantics == "paper" or not fits):
            asked = "privacy.masks = true" if masks else f"wire = {wire}"
            needed = "mar or fedavg" if is_small(wire) and not masks else "mar"
            raise InputError(
                f"{asked}: needs technique = {needed} and semantics = exact, where one sum is over all members; "
                "others send fp32"
            )
        if is_small(wire) and self._resolved_privacy().mode != "off":
            raise InputError(f"wire = {wire}: what it leaves for later would tell of the data; private runs take fixed")
        check_down(wire, self.wire_down)
        share = self.churn.participation * (self.churn.aggregate_participation or 1)
        check_members(wire, math.ceil(self.peers * share))
        if self.privacy.masks and self.peers < FEWEST_MASKED:
            raise InputError(f"peers = {self.peers}: privacy.masks needs {FEWEST_MASKED}; two would show each other")
        if self.privacy.masks and self.learns_in_groups and not self.distill.match_local_steps:
            raise InputError("privacy.masks = true: distill.teacher = group shows whole models; choose previous")
        return wire

    @property
    def learns_in_groups(self) -> bool:
        """Whether group members teach each other, or a baseline of the same compute stands in for it."""
        return self.distill.iterations > 0 and self.distill.teacher == "group"

    @property
    def meet_until(self) -> int:
        """In iterations up to this one, groups show each other their models before they average."""
        return self.distill.iterations if self.learns_in_groups and not self.distill.match_local_steps else 0

    def _check_distill(self, momentum: str) -> None:
        if self.distill.match_local_steps and not self.distill.iterations:
            raise InputError("distill.match_local_steps: there is nothing to match; set distill.iterations (--distill)")
        if not self.meet_until:
            return
        if self.technique != "mar":
            raise InputError(
                f"distill.teacher = group: technique {self.technique} has no groups; take mar, or teacher = previous"
            )
        if self.wire == "fixed":
            raise InputError(
                "wire = fixed: with distill.teacher = group an update may leave its range after the roster is sealed; "
                "choose fp32, or teacher = previous"
            )
        if self.semantics == "exact" and momentum != "send":
            raise InputError(
                f"momentum = {momentum}: with distill.teacher = group it cannot be derived or kept; choose send"
            )

    def _check_local(self) -> None:
        if self.local and self.semantics == "paper":
            raise InputError("local: in the paper's semantics whole models travel; choose semantics = exact")
        if self.local and self.distill.iterations:
            raise InputError("local: models without their personal layers cannot teach; leave distill.iterations out")
        if self.local and (self.device != "cpu" or self.cluster is not None):
            raise InputError("local: what stays at home is in one process on the CPU; leave device and cluster out")
        if self.local and self.privacy.unit == "record":
            raise InputError("local: with privacy.unit = record no layer stays at home; choose unit = peer")

    def _check_overlap(self, momentum: str, *, private: bool) -> None:
        """Work that is under way is nobody's state: what a peer keeps beside the state cannot be begun twice."""
        for holds, why in (
            (self.semantics == "paper", "in the paper's semantics nothing is decided; choose semantics = exact"),
            (private, "noise is for one iteration; leave privacy out"),
            (self.distill.iterations > 0, "groups teach before they average; leave distill.iterations out"),
            (momentum == "local", "a peer's own momentum is of its last update; choose momentum = derive or send"),
            (bool(self.local), "personal layers are those of the last update; leave local out"),
            (bool(self.churn.slow), "slow peers are late already; leave churn.slow out"),
            (self.cluster is not None, "a cluster begins every update from one state; leave cluster out"),
        ):
            if self.overlap and holds:
                raise InputError(f"overlap: {why}")

    def _check_coordination(self, exchange: str, plan: str, momentum: str) -> None:
        """The paper's coordination forms the paper's groups and averages what the paper does; nothing else."""
        if self.coordination != "paper":
            return
        for name, value, needed in (
            ("technique", self.technique, "mar"), ("semantics", self.semantics, "paper"), ("plan", plan, "keys"),
            ("exchange", exchange, "full"), ("momentum", momentum, "send"),
            ("distill.iterations", self.distill.iterations, 0), ("privacy.mode", self._resolved_privacy().mode, "off"),
            ("audit", self.audit, 0), ("optimizer.slow_above", self.optimizer.slow_above, None),
        ):  # fmt: skip
            if value != needed:
                raise InputError(f"{name} = {value}: coordination = paper needs {name} = {needed}")
        if self.churn != Churn():
            raise InputError("churn: with coordination = paper everybody takes part; simulate it with marfl simulate")

    def _check_shared_tests(self) -> None:
        private = self._resolved_privacy().mode != "off"
        if self.share_tests and (private or is_small(self.wire or "fp32") or self.coordination == "paper"):
            raise InputError("share_tests = true: needs a roster, no privacy, and fp32 or fixed as the wire")

    def _check_slow(self, momentum: str) -> None:
        """What comes late counts where an average takes it for what it is: an update from an earlier state."""
        asked = f"churn.slow = {self.churn.slow:g}"
        if self.churn.slow and momentum == "derive":
            raise InputError(
                f"{asked}: a derived momentum takes no update that comes late; set momentum = send or local"
            )
        paper, private = self.semantics == "paper", self._resolved_privacy().mode != "off"
        if self.churn.slow and (paper or private or self.distill.iterations or is_small(self.wire or "fp32")):
            raise InputError(
                f"{asked}: late updates need exact semantics, no privacy, no distillation, and wire = fp32 or fixed"
            )

    def _resolved_privacy(self) -> Privacy:
        given = self.privacy
        mode = given.mode or ("off" if given.noise_multiplier is None else "sound")
        observer = given.target_observer
        if given.target_epsilon is not None and observer is None:
            observer = "insider_masked" if given.masks else "insider"
        of_record = given.unit == "record"
        clip = given.clip if given.clip is not None else 1.0 if of_record else 0.1
        step = given.clip_step if given.clip_step is not None else 0.0 if of_record else 0.2
        return replace(given, mode=mode, target_observer=observer, clip=clip, clip_step=step)

    @property
    def run_name(self) -> str:
        """The name that shuffles the roster: the same for a simulated and a real run of one seed."""
        return f"seed-{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The tree as plain values, without what was not set.

        A setting that earlier versions did not have is left out where it changes nothing: their runs can be resumed.
        """
        tree = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in tree.items() if name not in LATER or value != LATER[name]}


_BENCH = {"peers": 125, "group_size": 5}  # the paper's largest: 125 = 5³

# As the paper's authors run it; where their text and their code differ, as the text has it (docs/reproduction.md).
# Their runs end at an accuracy, and they test every peer on a shard of its own.
_PUBLISHED = {"semantics": "paper", "test_on": "shards"}
_CNN = {"task": "mnist", "task_options": {"dropout": False}}
_PAPER_MNIST = _BENCH | _PUBLISHED | _CNN | {"batch": 64, "iterations": 500, "target_accuracy": 0.95}
_PAPER_20NG = _BENCH | _PUBLISHED | {"task": "20ng", "batch": 16, "iterations": 1000, "target_accuracy": 0.5}
_GLOBAL_BATCH = {"mnist": 8000, "20ng": 2000}  # rows of all peers in an iteration, for every number of peers
_STEPS = {125: 1, 64: 2, 16: 5}  # in which a peer takes its part of them


def paper_batches(task: str, peers: int) -> dict[str, int]:
    """How many mini-batches of how many rows a peer trains on, so that all numbers of peers train on as many rows."""
    return {"local_batches": _STEPS[peers], "global_batch": _GLOBAL_BATCH[task] // _STEPS[peers]}


def _distilling(iterations: int) -> dict[str, Any]:
    """Moshpit-KD on every batch of a peer's shard, which its code ends at eight."""
    return {"distill": {"iterations": iterations, "batches": 8}}


PRESETS: dict[str, dict[str, Any]] = {
    "paper-mnist": _PAPER_MNIST,
    "paper-mnist-64": _PAPER_MNIST | {"peers": 64, "group_size": 4} | paper_batches("mnist", 64),
    "paper-mnist-16": _PAPER_MNIST | {"peers": 16, "group_size": 4} | paper_batches("mnist", 16),
    "paper-mnist-mkd8": _PAPER_MNIST | _distilling(8),  # with two batches an iteration: sees a peer's data twice
    "paper-mnist-mkd40": _PAPER_MNIST | _distilling(40),  # ten times
    "paper-20ng": _PAPER_20NG,
    "paper-20ng-64": _PAPER_20NG | {"peers": 64, "group_size": 4} | paper_batches("20ng", 64),
    "paper-20ng-16": _PAPER_20NG | {"peers": 16, "group_size": 4} | paper_batches("20ng", 16),
    "paper-20ng-mkd6": _PAPER_20NG | _distilling(6),
    "paper-20ng-mkd30": _PAPER_20NG | _distilling(30),
    "paper-digits": _BENCH | {"task": "digits", "semantics": "paper", "batch": 16, "iterations": 150},
    "exact-mnist": _BENCH | {"task": "mnist", "semantics": "exact", "batch": 64, "iterations": 100},
    "demo": _BENCH | {"task": "digits", "engine": "fast", "links": "wifi", "batch": 16, "iterations": 150},
}


def load(preset: str | None = None, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """A resolved config: the preset, then the TOML file, then the overrides, each overriding the one before.

    An override is named as in the file, with dots: ``load("demo", overrides={"peers": 27, "churn.dropout": 0.2})``.
    """
    tree: dict[str, Any] = {}
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"--preset {preset}: {nearest(preset, PRESETS)}")
        _merge(tree, PRESETS[preset])
    if path is not None:
        _merge(tree, read_toml(path))
    for name, value in (overrides or {}).items():
        if value is not None:
            _set(tree, name.split("."), value)
    return parse(tree).resolved()


def parse(tree: Mapping[str, Any]) -> Config:
    """Validate a tree of plain values; the first thing wrong is one clear line."""
    return validated(Config, tree)


def read_toml(path: Path) -> dict[str, Any]:
    """The tree of a config file; `InputError` when there is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read ({reason})") from None


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
