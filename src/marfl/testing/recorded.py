"""A recorded set of small runs that must come out the same after every change: ``python -m marfl.testing.recorded``.

Every run goes through the command line, from a config file to a run directory, so that it knows nothing of how the
package is built inside. `tests/recorded.json` holds for each run its model hash, bytes by kind, messages, epsilons
and a few more numbers, one line a run. The command compares and prints one line for every difference; ``--write``
records anew, ``--short`` takes the part that the tests take, ``--only`` takes runs by name ('privacy/*').

Float training gives the same bits only on one type of CPU and one build of torch. On another machine the command says
so and compares losses up to rounding instead of hashes, and which runs end on the same model; all else as ever.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from marfl.cli import main as command_line
from marfl.errors import BrokenPromise, InputError, MarflError
from marfl.runs import checkpoint
from marfl.runs.writer import CHECKPOINT

FILE = Path(__file__).parents[3] / "tests" / "recorded.json"
ROUNDING = 1e-3  # by how much losses, bounds and distances may differ, relatively, between two machines
EXACTLY = 1e-9  # and what is computed from the settings alone, such as epsilons

Settings = Mapping[str, Any]  # by dotted name, as in a config file
Named = Iterator[tuple[str, Settings]]

# --- the runs ---

BASE: Settings = {
    "task": "synthetic", "task_options.features": 6, "task_options.hidden": [4], "task_options.classes": 3,
    "task_options.samples": 400, "task_options.test_samples": 60, "batch": 8, "peers": 11, "group_size": 3,
    "iterations": 3, "workers": 1, "seed": 7,
}  # fmt: skip
TRACE = "time,peer,state\n1.5,0,down\n1.5,4,down\n2,7,up\n2.5,0,up\n3,5,down\n"
HALFWAY: Settings = {"iterations": 5, "checkpoint_every": 3}  # a resumed run goes on from its only checkpoint

GLOBAL = ("mar", "fedavg", "arfl", "rdfl", "ring", "butterfly")  # techniques whose average is exact
LOCAL = ("saps", "braintorrent", "gossip")  # and those that have none
ENGINES = ("bitwise", "protocol", "fast")
EXCHANGES = ("grid", "chunked", "full")

PAPER: Settings = {"semantics": "paper"}
PROTOCOL: Settings = {"engine": "protocol"}
NOISE: Settings = {"privacy.noise_multiplier": 1.0}
LESS_NOISE: Settings = {"privacy.noise_multiplier": 0.5}  # as much as half of the peers can carry
MASKS: Settings = {"privacy.masks": True}
DEATHS: Settings = {"churn.death": 0.1, "iterations": 4}
HALVED: Settings = {"churn.participation": 0.5, "churn.dropout": 0.2, "iterations": 5}
SAPS: Settings = {"technique": "saps", "technique_options.compression": 3, "technique_options.window": 5}
DISTILLED: Settings = {"distill.iterations": 2, "distill.epochs": 2}


def _techniques() -> Named:
    for name in GLOBAL:
        for engine in ENGINES:
            yield f"technique/{name}/{engine}", {"technique": name, "engine": engine}
        yield f"technique/{name}/deaths", {"technique": name, **DEATHS}
        yield f"technique/{name}/deaths-protocol", {"technique": name, **DEATHS, **PROTOCOL}
    for name in (*GLOBAL, *LOCAL):
        yield f"technique/{name}/paper", {"technique": name, **PAPER}
        yield f"technique/{name}/paper-halved", {"technique": name, **PAPER, **HALVED}
        yield f"technique/{name}/paper-deaths", {"technique": name, **PAPER, **DEATHS}
    yield "technique/saps/options", {**SAPS, **PAPER}
    yield "technique/gossip/options", {"technique": "gossip", "technique_options.fanout": 3, **PAPER}


def _groups() -> Named:
    """Who meets whom, and what travels in a group."""
    for exchange in EXCHANGES:
        for engine in ENGINES:
            yield f"exchange/{exchange}/{engine}", {"exchange": exchange, "engine": engine}
        yield f"exchange/{exchange}/deaths", {"exchange": exchange, **DEATHS}
        yield f"exchange/{exchange}/deaths-protocol", {"exchange": exchange, **DEATHS, **PROTOCOL}
        yield f"plan/exact/{exchange}", {"plan": "exact", "exchange": exchange, **PAPER}
    for plan in ("keys", "random"):
        for exchange in ("chunked", "full"):
            yield f"plan/{plan}/{exchange}", {"plan": plan, "exchange": exchange, **PAPER}
    yield "plan/keys/one-round", {"plan": "keys", "rounds": 1, **PAPER}
    yield "plan/random/four-rounds", {"plan": "random", "rounds": 4, **PAPER}
    for peers in (1, 2, 5, 8, 9, 16, 27):
        yield f"peers/{peers}/bitwise", {"peers": peers}
        yield f"peers/{peers}/protocol", {"peers": peers, **PROTOCOL}
        yield f"peers/{peers}/paper", {"peers": peers, **PAPER}


def _values() -> Named:
    """How values travel: on which wire, under masks, with the momentum or without."""
    for exchange in EXCHANGES:
        for engine in ENGINES:
            yield f"wire/fixed/{exchange}-{engine}", {"wire": "fixed", "exchange": exchange, "engine": engine}
        for engine in ENGINES:
            yield f"masks/{exchange}/{engine}", {**MASKS, "exchange": exchange, "engine": engine}
        yield f"masks/{exchange}/deaths-protocol", {**MASKS, "exchange": exchange, **DEATHS, **PROTOCOL}
    yield "wire/fp32/bitwise", {"wire": "fp32"}
    yield "masks/deaths/bitwise", {**MASKS, **DEATHS}
    yield "masks/halved/bitwise", {**MASKS, **HALVED}
    yield "masks/halved/protocol", {**MASKS, **HALVED, **PROTOCOL}
    for peers, name in ((27, "many"), (40, "sparse")):  # from 34 peers on, nobody shares masks with all
        yield f"masks/{name}/bitwise", {**MASKS, "peers": peers, "iterations": 2}
        yield f"masks/{name}/protocol", {**MASKS, "peers": peers, "iterations": 2, **PROTOCOL}
    for momentum in ("derive", "send"):
        for engine in ENGINES:
            yield f"momentum/{momentum}/{engine}", {"momentum": momentum, "engine": engine}
    yield "momentum/send/fixed", {"momentum": "send", "wire": "fixed"}
    yield "momentum/local/bitwise", {"momentum": "local", **HALVED}
    yield "momentum/local/fast", {"momentum": "local", "engine": "fast"}
    yield "momentum/send/paper", {"momentum": "send", **PAPER}
    yield "momentum/local/paper", {"momentum": "local", **PAPER, **HALVED}


def _small_integers() -> Named:
    """Values of a few bits: their own scales, and what is left of them."""
    for wire in ("int8", "int4"):
        for exchange in EXCHANGES:
            for engine in ENGINES:
                yield f"wire/{wire}/{exchange}-{engine}", {"wire": wire, "exchange": exchange, "engine": engine}
        for name, more in {"halved": HALVED, "deaths": DEATHS, "masks": MASKS}.items():
            yield f"wire/{wire}/{name}", {"wire": wire, **more}
            yield f"wire/{wire}/{name}-protocol", {"wire": wire, **more, **PROTOCOL}
        yield f"wire/{wire}/fedavg", {"wire": wire, "technique": "fedavg"}
        yield f"wire/{wire}/distill", {"wire": wire, **DISTILLED}
        yield f"wire/{wire}/links", {"wire": wire, "links": "nb-iot"}
        yield f"wire/{wire}/digits", {"wire": wire, "task": "digits", "batch": 16}
        yield f"wire/{wire}/momentum-local", {"wire": wire, "momentum": "local", **HALVED}
    yield "wire/int4/down-8", {"wire": "int4", "wire_down": 8, "task": "digits", "batch": 16}


def _privacy() -> Named:
    for engine in ENGINES:
        yield f"privacy/sound/{engine}", {**NOISE, "engine": engine}
        yield f"privacy/masks/{engine}", {**NOISE, **MASKS, "engine": engine}
    lossy = {**LESS_NOISE, "privacy.tolerated_loss": 0.3, **HALVED}
    yield "privacy/lossy/bitwise", lossy
    yield "privacy/lossy/protocol", {**lossy, **PROTOCOL}
    yield "privacy/deaths/protocol", {**NOISE, **MASKS, **DEATHS, **PROTOCOL, "privacy.tolerated_loss": 0.3}
    yield "privacy/fedavg/bitwise", {**NOISE, "technique": "fedavg"}
    yield "privacy/fixed/bitwise", {**NOISE, "wire": "fixed"}
    tuned = {"privacy.clip": 0.5, "privacy.target_quantile": 0.7, "privacy.clip_step": 0.1, "privacy.shares": 9}
    yield "privacy/tuned/bitwise", {**NOISE, **tuned, "privacy.indicator_noise": 1.5, "privacy.delta": 0.01}
    budget = {**NOISE, "privacy.target_epsilon": 4.0, "privacy.target_observer": "outsider", "iterations": 9}
    yield "privacy/budget/bitwise", budget
    yield "privacy/budget/protocol", {**budget, **PROTOCOL}
    record = {**NOISE, "privacy.unit": "record", "privacy.records": 20, "privacy.delta": 1e-4}
    for engine in ("bitwise", "protocol"):
        yield f"privacy/record/{engine}", {**record, "engine": engine}
        yield f"privacy/record/masks-{engine}", {**record, **MASKS, "engine": engine, "privacy.colluders": 2}
    yield "privacy/record/fedavg", {**record, "technique": "fedavg"}
    yield "privacy/fixed-bound/bitwise", {**NOISE, "privacy.clip_step": 0.0}
    for technique in ("mar", "fedavg"):
        as_published = {**LESS_NOISE, "privacy.mode": "paper", **PAPER, "technique": technique}
        yield f"privacy/paper/{technique}", as_published
        yield f"privacy/paper/{technique}-halved", {**as_published, **HALVED, "privacy.indicator_noise": 1.0}


def _distillation() -> Named:
    """Distillation with each teacher, and the baseline of the same compute."""
    previous, matched = {"distill.teacher": "previous"}, {"distill.match_local_steps": True}
    for engine in ENGINES:
        yield f"distill/group/{engine}", {**DISTILLED, "engine": engine}
        yield f"distill/previous/{engine}", {**DISTILLED, **previous, "engine": engine}
        yield f"distill/matched/{engine}", {**DISTILLED, **matched, "engine": engine}
    yield "distill/group/paper", {**DISTILLED, **PAPER}
    yield "distill/group/halved", {**DISTILLED, **HALVED}
    yield "distill/group/halved-protocol", {**DISTILLED, **HALVED, **PROTOCOL}
    yield "distill/group/deaths-protocol", {**DISTILLED, **DEATHS, **PROTOCOL}
    yield "distill/group/tuned", {**DISTILLED, "distill.temperature": 2.0, "distill.keep": 1.0, "distill.batches": 2}
    yield "distill/matched/paper", {**DISTILLED, **matched, **PAPER}
    yield "distill/previous/fedavg", {**DISTILLED, **previous, "technique": "fedavg"}
    yield "distill/previous/masks", {**DISTILLED, **previous, **MASKS}
    yield "distill/previous/noise", {**DISTILLED, **previous, **NOISE}


def _worlds() -> Named:
    """Who is there, over which links."""
    apart = {"churn.update_participation": 0.6, "churn.aggregate_participation": 0.7, "iterations": 5}
    churns: dict[str, Settings] = {
        "halved": HALVED, "deaths": DEATHS, "apart": apart, "trace": {"churn.trace": "trace.csv", "iterations": 5},
        "sessions": {"churn.sessions.up": 3.0, "churn.sessions.down": 2.0, "iterations": 5},
    }  # fmt: skip
    for name, churn in churns.items():
        for engine in ENGINES:
            yield f"churn/{name}/{engine}", {**churn, "engine": engine}
        yield f"churn/{name}/paper", {**churn, **PAPER}
    for profile in ("lan", "wifi", "5g", "lte", "nb-iot", "mixed"):
        yield f"links/{profile}/bitwise", {"links": profile}
    for technique in (*GLOBAL, *LOCAL):
        semantics = PAPER if technique in LOCAL else {}
        yield f"links/mixed/{technique}", {"links": "mixed", "technique": technique, **semantics}
    for exchange in EXCHANGES:
        yield f"links/mixed/{exchange}-protocol", {"links": "mixed", "exchange": exchange, **PROTOCOL}
    yield "links/lte/halved", {"links": "lte", **HALVED}
    yield "links/lte/deaths-protocol", {"links": "lte", **DEATHS, **PROTOCOL}
    yield "links/wifi/masks-protocol", {"links": "wifi", **MASKS, **PROTOCOL}
    yield "links/wifi/distill", {"links": "wifi", **DISTILLED}
    yield "links/wifi/paper", {"links": "wifi", "compute_seconds": 0.5, **PAPER}


def _training() -> Named:
    digits = {"task": "digits", "batch": 16}
    yield "training/digits/bitwise", digits
    yield "training/digits/protocol", {**digits, **PROTOCOL}
    yield "training/digits/fast", {**digits, "engine": "fast"}
    yield "training/digits/paper", {**digits, **PAPER}
    yield "training/digits/masks", {**digits, **MASKS}
    yield "training/batches/bitwise", {"local_batches": 3}
    yield "training/batches/fast", {"local_batches": 3, "engine": "fast"}
    yield "training/dropout/bitwise", {"task_options.dropout": 0.3}
    yield "training/dropout/fast", {"task_options.dropout": 0.3, "engine": "fast"}
    yield "training/optimizer/bitwise", {"optimizer.learning_rate": 0.05, "optimizer.decay": 0.5}
    yield "training/split/iid", {"partition.kind": "iid"}
    yield "training/split/skewed", {"partition.alpha": 0.1, "partition.min_samples": 5}
    yield "training/seed/other", {"seed": 8}
    yield "training/processes/exact", {"workers": 2}
    yield "training/processes/paper", {"workers": 2, **PAPER}
    yield "training/stop/target", {"target_accuracy": 0.1, "test_every": 2, "iterations": 5}
    yield "training/stop/patience", {"patience": 1, "test_every": 1, "iterations": 9, "optimizer.learning_rate": 1e-6}


def _resumed() -> Named:
    yield "resume/exact", {}
    yield "resume/exact-halved", {**HALVED, "momentum": "local"}
    yield "resume/fast", {"engine": "fast"}
    yield "resume/protocol", PROTOCOL
    yield "resume/protocol-halved", {**HALVED, **PROTOCOL}
    yield "resume/masks", {**MASKS, **HALVED}
    yield "resume/noise", {**LESS_NOISE, **HALVED, "privacy.tolerated_loss": 0.3}
    yield "resume/noise-paper", {**NOISE, "privacy.mode": "paper", **PAPER}
    yield "resume/distill", {**DISTILLED, "distill.iterations": 4}
    yield "resume/links", {"links": "mixed"}
    for technique in ("mar", *LOCAL):
        yield f"resume/paper-{technique}", {"technique": technique, **PAPER, **HALVED}


VAGUE = {"masks/sparse/protocol": ("control",)}  # keys are drawn anew, and with them who is named to whom


@dataclass(frozen=True)
class RecordedCase:
    """One run: its settings, and how it is run."""

    settings: Settings
    way: Literal["simulate", "resume", "swarm"] = "simulate"
    vague: tuple[str, ...] = ()  # kinds of bytes, and "messages", that chance decides: they are not recorded


def _cases() -> Iterator[tuple[str, RecordedCase]]:
    for part in (_techniques, _groups, _values, _small_integers, _privacy, _distillation, _worlds, _training):
        for name, settings in part():
            yield name, RecordedCase({**BASE, **settings}, vague=VAGUE.get(name, ()))
    for name, settings in _resumed():
        yield name, RecordedCase({**BASE, **settings, **HALFWAY}, "resume")
    few = {**BASE, "peers": 4, "iterations": 2}
    yield "swarm/simulated", RecordedCase(few)
    by_chance = ("control", "repair", "sync", "messages")  # when do messages arrive?
    yield "swarm/real", RecordedCase(few, "swarm", vague=by_chance)


CASES = dict(_cases())
SHORT = (
    "technique/*/bitwise", "technique/*/paper", "exchange/*/protocol", "plan/*/full", "wire/fixed/grid-*",
    "masks/grid/*", "momentum/*", "privacy/sound/*", "privacy/paper/*", "distill/*/bitwise", "distill/group/*",
    "churn/*/bitwise", "churn/deaths/*", "links/mixed/mar", "links/mixed/grid-protocol", "resume/exact",
    "resume/protocol", "resume/paper-mar", "peers/27/*",
)  # fmt: skip

# --- what comes out of a run ---


@dataclass(frozen=True)
class CaseResult:
    """What a run is known by; None where it does not apply."""

    model: str  # the beginning of the final model's hash
    iterations: int
    members: int  # that aggregated, over all iterations
    bytes: dict[str, int]  # by kind, those that are not zero
    messages: int | None
    checks: int  # remarks in the rows, such as who died
    test_loss: float | None
    disagreement: float | None
    clip: float | None
    epsilons: dict[str, float] | None  # by observer, after the last iteration
    virtual_seconds: float | None

    def as_row(self) -> dict[str, Any]:
        """The fields that apply, as plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> CaseResult:
        """The inverse of `as_row`."""
        fields: dict[str, Any] = {name: row.get(name) for name in cls.__dataclass_fields__}
        return cls(**fields)


def play(case: RecordedCase) -> CaseResult:
    """Run one case through the command line, in this process, and read its run directory."""
    with tempfile.TemporaryDirectory(prefix="marfl-recorded-") as place:
        config, out = _write_config(case.settings, Path(place)), Path(place) / "run"
        common = ("--config", str(config), "--out", str(out))
        if case.way == "swarm":
            _command("swarm", *common, "--network", "phase_timeout=60")
        else:
            with _first_checkpoint_kept():
                _command("simulate", *common)
        outcome = _outcome(_rows(out), case.vague)
        if case.way == "resume":
            _forget_the_second_half(out, case.settings["checkpoint_every"])
            _command("simulate", *common, "--resume")
            resumed = _outcome(_rows(out), case.vague)
            if resumed != outcome:
                raise BrokenPromise(f"resumed, it ends on {resumed.as_row()} instead of {outcome.as_row()}")
        return outcome


def _write_config(settings: Settings, folder: Path) -> Path:
    """The settings as a config file: a value in JSON is one in TOML. Options of `synthetic` go with that task only."""
    if settings["task"] != BASE["task"]:
        settings = {name: value for name, value in settings.items() if not name.startswith("task_options.")}
    if "churn.trace" in settings:
        trace = folder / str(settings["churn.trace"])
        trace.write_text(TRACE)
        settings = {**settings, "churn.trace": str(trace)}
    path = folder / "config.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    return path


def _command(*arguments: str) -> None:
    """Run a command of `marfl` without showing what it prints; `MarflError` with its last words where it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command_line(arguments)
    if code != 0:
        raise MarflError(f"code {code}: {(said.getvalue().strip().splitlines() or ['no word'])[-1]}")


def _forget_the_second_half(out: Path, iterations: int) -> None:
    """Leave the run directory as a kill after so many iterations would have left it."""
    rows = out / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:iterations]))
    (out / "summary.json").unlink()
    _kept(out / CHECKPOINT).replace(out / CHECKPOINT)


def _kept(path: Path) -> Path:
    return path.with_name("first-" + path.name)


@contextlib.contextmanager
def _first_checkpoint_kept() -> Iterator[None]:
    """A run's first checkpoint stays beside the later ones: a finished run has one of its end."""
    save = checkpoint.save

    def save_and_copy(path: Path, *rest: Any) -> None:
        save(path, *rest)
        if not _kept(path).exists():
            shutil.copyfile(path, _kept(path))

    with patch.object(checkpoint, "save", save_and_copy):
        yield


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _outcome(rows: list[dict[str, Any]], vague: tuple[str, ...]) -> CaseResult:
    last, prefix = rows[-1], "bytes_"
    kinds = [name.removeprefix(prefix) for name in last if name.startswith(prefix) and name != f"{prefix}total"]
    sent = {kind: sum(row[prefix + kind] for row in rows) for kind in sorted(kinds)}
    observers = {name.removeprefix("epsilon_"): value for name, value in last.items() if name.startswith("epsilon_")}
    seconds = [row["virtual_seconds"] for row in rows if row["virtual_seconds"] is not None]
    return CaseResult(
        model=last["model_hash"][:16],
        iterations=len(rows),
        members=sum(row["aggregators"] for row in rows),
        bytes={kind: count for kind, count in sent.items() if count and kind not in vague},
        messages=None if "messages" in vague else sum(row["messages"] for row in rows),
        checks=sum(len(row["checks"]) for row in rows),
        test_loss=last["test_loss"],
        disagreement=last["disagreement"],
        clip=last["clip"],
        epsilons={name: value for name, value in observers.items() if value is not None} or None,
        virtual_seconds=sum(seconds) if seconds else None,
    )


# --- the record ---


@dataclass(frozen=True)
class RecordedSet:
    """What a set of runs came to, and on which machine."""

    machine: str
    runs: dict[str, CaseResult]

    @classmethod
    def read(cls, path: Path) -> RecordedSet:
        """The record in a file; `InputError` where there is none."""
        try:
            tree = json.loads(path.read_text())
            return cls(tree["machine"], {name: CaseResult.of_row(row) for name, row in tree["runs"].items()})
        except (OSError, ValueError, LookupError) as error:
            raise InputError(f"{path}: holds no recorded runs ({error!r:.80}); --write makes them") from None

    def write(self, path: Path) -> None:
        """Write it sorted, one line a run, so that a difference reads well."""
        lines = [f"  {json.dumps(name)}: {json.dumps(self.runs[name].as_row())}" for name in sorted(self.runs)]
        path.write_text(f'{{"machine": {json.dumps(self.machine)}, "runs": {{\n' + ",\n".join(lines) + "\n}}\n")


def this_machine() -> str:
    """What decides the bits of float training: the type of the CPU, what torch uses of it, and torch's version."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):  # there is no such file outside Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    named = [facts[name] for name in ("model name", "cpu family", "model") if name in facts]
    cpu = "/".join(named) or platform.processor() or platform.machine()
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def differences(recorded: RecordedSet, now: RecordedSet) -> list[str]:
    """One line for every number of the runs in `now` that is not as recorded; hashes on the same machine only."""
    found = [f"{name}: is not recorded" for name in now.runs if name not in recorded.runs]
    common = [name for name in now.runs if name in recorded.runs]
    same_machine = recorded.machine == now.machine
    for name in common:
        old, new = recorded.runs[name], now.runs[name]
        found += [f"{name}: {line}" for line in _changed(old, new, same_machine)]
    if not same_machine:
        bitwise = [name for name in common if not _only_up_to_rounding(name)]
        before, after = (_first_of_a_model({name: each.runs[name] for name in bitwise}) for each in (recorded, now))
        for name in bitwise:
            if before[name] != after[name]:
                found.append(f"{name}: ended on the model of {before[name]}, now on that of {after[name]}")
    return found


def _only_up_to_rounding(name: str) -> bool:
    """Whether a run does not promise the bits of others: what the fast engine shares with them, it shares by luck."""
    return name in CASES and CASES[name].settings.get("engine") == "fast"


def _changed(old: CaseResult, new: CaseResult, same_machine: bool) -> Iterator[str]:
    """The fields that differ."""
    rounding = 0.0 if same_machine else ROUNDING
    tolerances = {"test_loss": rounding, "disagreement": rounding, "clip": rounding}
    before, after = old.as_row(), new.as_row()
    for name in CaseResult.__dataclass_fields__:
        if name == "model" and not same_machine:
            continue
        if not _alike(before.get(name), after.get(name), tolerances.get(name, EXACTLY)):
            yield f"{name} was {before.get(name)}, is {after.get(name)}"


def _alike(old: Any, new: Any, tolerance: float) -> bool:
    """Whether two values are the same, floats up to a relative tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_alike(old[key], new[key], tolerance) for key in old)
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=tolerance)
    return bool(old == new)


def _first_of_a_model(runs: Mapping[str, CaseResult]) -> dict[str, str]:
    """For each run the first one that ends on the same model: the same on every machine."""
    first: dict[str, str] = {}
    for name in sorted(runs):
        first.setdefault(runs[name].model, name)
    return {name: first[outcome.model] for name, outcome in runs.items()}


# --- the command ---


def chosen(patterns: Iterable[str]) -> list[str]:
    """The names of the runs that match one of the patterns; `InputError` for a pattern that matches none."""
    wanted: set[str] = set()
    for pattern in patterns:
        matching = {name for name in CASES if fnmatch(name, pattern)}
        if not matching:
            raise InputError(f"--only {pattern}: is none of the {len(CASES)} runs; '*' matches any part of a name")
        wanted |= matching
    return [name for name in CASES if name in wanted]


def run(names: Iterable[str], say: Callable[[str], None] = lambda _: None) -> tuple[RecordedSet, list[str]]:
    """Run these cases now: what came out, and a line for each that failed. `say` hears how long each took."""
    runs, failed = {}, []
    for name in names:
        begun = time.perf_counter()
        try:
            runs[name] = play(CASES[name])
        except MarflError as error:
            failed.append(f"{name}: fails: {error}")
        say(f"{time.perf_counter() - begun:6.2f} s  {name}")
    return RecordedSet(this_machine(), runs), failed


def rewritten(path: Path, now: RecordedSet) -> RecordedSet:
    """The record in `path` with these runs in it; `InputError` where runs would get lost, or machines be mixed."""
    if not path.exists():
        return now
    recorded = RecordedSet.read(path)
    lost = sorted(recorded.runs.keys() - CASES.keys())
    if lost:
        raise InputError(f"--write: {', '.join(lost[:5])} would get lost; delete {path} first if that is meant")
    kept = recorded.runs.keys() - now.runs.keys()
    if kept and recorded.machine != now.machine:
        raise InputError(f"--write: the other {len(kept)} runs are of another machine ({recorded.machine}); write all")
    return RecordedSet(now.machine, {**recorded.runs, **now.runs})


def unrun(recorded: RecordedSet) -> list[str]:
    """A line for each run that is recorded and no longer among the cases."""
    return [f"{name}: is recorded, but no longer run" for name in sorted(recorded.runs.keys() - CASES.keys())]


def remark(recorded: RecordedSet, now: RecordedSet) -> str | None:
    """What to say when hashes could not be compared."""
    if recorded.machine == now.machine:
        return None
    common = [name for name in now.runs if name in recorded.runs]
    other = sum(now.runs[name].model != recorded.runs[name].model for name in common)
    return (
        f"another machine ({now.machine}; recorded on {recorded.machine}): hashes are not compared, "
        f"{other} of {len(common)} differ"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small runs that must come out as recorded in tests/recorded.json.")
    parser.add_argument("--short", action="store_true", help="only the part that the tests run")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these runs, such as 'privacy/*'")
    parser.add_argument("--write", action="store_true", help="record what comes out now")
    parser.add_argument("--verbose", action="store_true", help="say of each run how long it took")
    options = parser.parse_args(argv)
    say = print if options.verbose else lambda _: None
    try:
        names = chosen(options.only or (SHORT if options.short else ["*"]))
        return _write(names, say) if options.write else _compare(names, say)
    except InputError as error:
        print(f"recorded: {error}", file=sys.stderr)
        return 2


def _compare(names: list[str], say: Callable[[str], None]) -> int:
    """Run, print a line for every difference, and return the exit code."""
    recorded = RecordedSet.read(FILE)
    now, lines = run(names, say)
    lines += differences(recorded, now) + unrun(recorded)
    for line in [*lines, *filter(None, [remark(recorded, now)])]:
        print(line)
    print(f"{len(names)} runs, {len(lines)} differences")
    return 1 if lines else 0


def _write(names: list[str], say: Callable[[str], None]) -> int:
    """Run and record; nothing is recorded when a run fails."""
    now, failed = run(names, say)
    for line in failed:
        print(line)
    if not failed:
        rewritten(FILE, now).write(FILE)
        print(f"{len(names)} runs recorded in {FILE}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
