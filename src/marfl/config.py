"""One tree of frozen settings: from a preset, a TOML file and flags, in this order; validated and resolved."""

from __future__ import annotations

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
from marfl.wire.packing import check_down, is_small

TEXT_ENCODER = "distilbert-base-uncased"  # the paper's, for 20ng: in the settings, so that a result names what made it


FEWEST_MASKED = 3  # peers whose sum does not show one of them to another


class Config(BaseModel):
    """Everything that decides a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(
        "digits", description="what is learned: digits, mnist, 20ng, synthetic, or module:Class of your own"
    )
    task_options: dict[str, Any] = Field(default_factory=dict, description="arguments of the task's constructor")
    technique: str = Field(
        "mar", description="how: mar, fedavg, arfl, rdfl, ring, butterfly, saps, braintorrent, gossip"
    )
    technique_options: dict[str, Any] = Field(default_factory=dict, description="compression, fanout, …")
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
    momentum: Literal["derive", "send", "local"] | None = Field(
        None, description="how the momentum is agreed on; default derive, or send where models travel"
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
    device: Literal["cpu"] = Field("cpu", description="where local updates run")
    workers: int = Field(0, ge=0, description="processes; 0: one per core where a step is long enough")
    test_every: int = Field(5, ge=1, description="iterations between two tests; the last is always tested")
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
        self._check_distill(momentum)
        self._check_coordination(exchange, plan, momentum)
        if self.audit and (self.technique != "mar" or paper):
            raise InputError(f"audit = {self.audit:g}: only sums of technique = mar and semantics = exact are signed")
        options = {"encoder": TEXT_ENCODER} | self.task_options if self.task == "20ng" else self.task_options
        filled = {"exchange": exchange, "plan": plan, "momentum": momentum, "task_options": options}
        resolved = self.model_copy(update=filled | {"wire": self._checked_wire(), "privacy": self._resolved_privacy()})
        asks = resolved.privacy.target_epsilon is not None or resolved.privacy.unit == "record"
        if resolved.privacy.mode != "off" or asks:
            from marfl.dp.privacy_settings import check_privacy  # torch takes a second: only when it is needed

            check_privacy(resolved)
        return resolved

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
            raise InputError(f"{asked}: needs technique = mar and semantics = exact, where one sum is over all members")
        if is_small(wire) and self._resolved_privacy().mode != "off":
            raise InputError(f"wire = {wire}: what it leaves for later would tell of the data; private runs take fixed")
        check_down(wire, self.wire_down)
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

    def _check_coordination(self, exchange: str, plan: str, momentum: str) -> None:
        """The paper's coordination forms the paper's groups and averages what the paper does; nothing else."""
        if self.coordination != "paper":
            return
        for name, value, needed in (
            ("technique", self.technique, "mar"), ("semantics", self.semantics, "paper"), ("plan", plan, "keys"),
            ("exchange", exchange, "full"), ("momentum", momentum, "send"),
            ("distill.iterations", self.distill.iterations, 0), ("privacy.mode", self._resolved_privacy().mode, "off"),
            ("audit", self.audit, 0),
        ):  # fmt: skip
            if value != needed:
                raise InputError(f"{name} = {value}: coordination = paper needs {name} = {needed}")
        if self.churn != Churn():
            raise InputError("churn: with coordination = paper everybody takes part; simulate it with marfl simulate")

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
        """The tree as plain values, without what was not set."""
        return self.model_dump(mode="json", exclude_none=True)


_BENCH = {"peers": 125, "group_size": 5}  # the paper's largest: 125 = 5³

_PAPER_MNIST = _BENCH | {"task": "mnist", "semantics": "paper", "batch": 64, "iterations": 100}
_PAPER_20NG = _BENCH | {"task": "20ng", "semantics": "paper", "batch": 16, "iterations": 100}

PRESETS: dict[str, dict[str, Any]] = {
    "paper-mnist": _PAPER_MNIST,
    "paper-mnist-mkd8": _PAPER_MNIST | {"distill": {"iterations": 8}},  # sees a peer's data twice
    "paper-mnist-mkd40": _PAPER_MNIST | {"distill": {"iterations": 40}},  # ten times
    "paper-20ng": _PAPER_20NG,
    "paper-20ng-mkd6": _PAPER_20NG | {"distill": {"iterations": 6}},
    "paper-20ng-mkd30": _PAPER_20NG | {"distill": {"iterations": 30}},
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
        raise InputError(f"--config {path}: cannot be read ({error})") from None


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
