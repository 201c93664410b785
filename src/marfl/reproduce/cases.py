"""What is run: cases (one setting under several seeds), and the three scales that give experiments their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from marfl.config import TEXT_ENCODER, Config, load, paper_batches
from marfl.runs import config_hash, flattened
from marfl.settings import Optimizer

PAPER = {"semantics": "paper"}  # θ and m travel whole, absentees keep stale models, groups by the paper's keys
EXACT = {"semantics": "exact"}  # only updates travel, absentees catch up, exact for any number of peers
RIVALS = ("fedavg", "rdfl", "arfl")
TASKS = ("vision", "text")
DATA_TASKS = ("mnist", "20ng")
DATA = {"vision": "MNIST", "text": "20NG"}  # what the paper calls them
NAMES = {"mar": "MAR-FL", "fedavg": "FedAvg", "rdfl": "RDFL", "arfl": "AR-FL", "ring": "ring all-reduce"}  # in legends


@dataclass(frozen=True)
class Calculation:
    """A result that needs no training: a function of `marfl.reproduce.calculations` by name, and its arguments."""

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def settings(self) -> dict[str, Any]:
        return {"calculation": self.function, "arguments": dict(self.arguments)}


Source = Config | Calculation


@dataclass(frozen=True)
class Case:
    """One setting: a source for each seed."""

    sources: tuple[Source, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(map(key_of, self.sources))


def key_of(source: Source) -> str:
    """What names a source: a hash over the settings that are not at their defaults.

    So a setting that comes into being later, with a default that changes nothing, makes no finished run stale.
    """
    if isinstance(source, Calculation):
        return config_hash(source.settings())[:12]
    return config_hash(settings_apart(source))[:12]


def settings_apart(config: Config) -> dict[str, Any]:
    """The settings that are not at their defaults."""
    usual = _defaults()
    return {name: value for name, value in flattened(config.as_dict()).items() if usual.get(name) != value}


@cache
def _defaults() -> Mapping[str, Any]:
    return flattened(Config().resolved().as_dict())


def calculated(function: str, **arguments: Any) -> Case:
    """A case of one calculation."""
    return Case((Calculation(function, tuple(sorted(arguments.items()))),))


def simulated(settings: Mapping[str, Any], seeds: tuple[int, ...], **more: Any) -> Case:
    """A case of simulations: `settings`, then `more` (`churn__dropout=0.2` for churn.dropout), for each seed."""
    chosen = dict(settings) | {name.replace("__", "."): value for name, value in more.items()}
    return Case(tuple(load(overrides=chosen | {"seed": seed}) for seed in seeds))


def departures(source: Source) -> Iterator[str]:
    """In which settings a run differs from the paper's own (docs/reproduction.md lists those), in a few words each."""
    if isinstance(source, Calculation):
        return
    if source.task not in DATA_TASKS:
        yield f"{source.task} instead of its data"
        return
    encoder = source.task_options.get("encoder", TEXT_ENCODER)
    if source.task == "20ng" and encoder != TEXT_ENCODER:
        yield f"{encoder} instead of {TEXT_ENCODER}"
    if source.task == "mnist" and source.task_options.get("dropout", True):
        yield "dropout in the network"
    rows = source.local_batches * (source.global_batch or source.batch * source.peers)
    paper = paper_batches(source.task, 125)["global_batch"]
    if source.peers in (16, 64, 125) and rows not in (paper, 2 * paper):  # its text, and its code
        yield f"{rows:,} rows in an iteration"
    if (source.optimizer.learning_rate, source.optimizer.decay) != (Optimizer.learning_rate, Optimizer.decay):
        yield "another optimizer"
    if source.partition.alpha != 1:
        yield f"α = {source.partition.alpha:g}"
    if source.distill.iterations and source.distill.batches != 8:
        yield f"{source.distill.batches} batches in a round of MKD"


# --- scales ---


@dataclass(frozen=True)
class Crowd:
    """How many peers, in groups of how many."""

    peers: int
    group_size: int

    def settings(self) -> dict[str, int]:
        return {"peers": self.peers, "group_size": self.group_size}


@dataclass(frozen=True)
class Bench:
    """One of the paper's two tasks at a scale."""

    name: str  # vision or text
    title: str
    task: Mapping[str, Any]  # settings
    iterations: int
    seeds: tuple[int, ...]
    crowd: Crowd  # where the paper has 125 peers
    target: float  # accuracy, for what it takes to get there
    distilled: tuple[int, int]  # K, few and many
    distill_iterations: int
    noise: tuple[float, float, float]  # σ of differential privacy: little, much, extreme
    batch: int | None = None  # rows of a mini-batch; by default the paper's, which depend on the number of peers
    test_every: int = 5
    early: float = 0.0  # a target that is reached in `iterations`, where those of MKD are more; by default `target`
    brief: int = 0  # iterations where nothing but the bytes of one is asked; by default all of them
    apart: int = 0  # of techniques that are each trained by themselves
    private: int = 0  # of private runs, whose exact noise is dear
    sizes: tuple[Crowd, ...] = (Crowd(16, 4), Crowd(64, 4), Crowd(125, 5))

    def settings(self, crowd: Crowd | None = None, iterations: int = 0) -> dict[str, Any]:
        """What all runs of this task have in common: as the paper has it, `fast` where that is the same."""
        chosen = self.crowd if crowd is None else crowd
        own = {"iterations": iterations or self.iterations, "test_every": self.test_every}
        return {**self.task, **chosen.settings(), **self._batches(chosen), **own, "engine": "fast", "workers": 1}

    def _batches(self, crowd: Crowd) -> dict[str, int]:
        """How many mini-batches of how many rows; a number of peers that the paper does not have trains as 125 do."""
        if self.batch is not None:
            return {"batch": self.batch}
        if crowd.peers in (16, 64):
            return paper_batches(str(self.task["task"]), crowd.peers)
        return {"batch": paper_batches(str(self.task["task"]), 125)["global_batch"] // 125}


@dataclass(frozen=True, eq=False)  # itself alone: what was made for it is found again by it
class Scale:
    """A size that fits a machine and a patience."""

    name: str
    about: str
    vision: Bench
    text: Bench

    @property
    def benches(self) -> tuple[Bench, Bench]:
        return self.vision, self.text


_SYNTHETIC = {"features": 48, "hidden": [32], "classes": 20, "samples": 4000, "test_samples": 500}
_MNIST = {"task": "mnist", "task_options": {"dropout": False}}
_MINILM = {"encoder": "all-MiniLM-L6-v2-fp16", "pooling": "mean"}
_PAPER_CROWD = Crowd(125, 5)
_THREE = (0, 1, 2)

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "quick",
            "a check that everything works, on stand-ins: scikit-learn's digits for MNIST, a synthetic task for "
            "20 Newsgroups, few iterations, one seed. Its verdicts are no evidence",
            Bench(
                "vision", "digits", {"task": "digits"}, iterations=20, seeds=(0,), crowd=Crowd(27, 3), target=0.3,
                distilled=(2, 8), distill_iterations=40, noise=(0.3, 1.0, 2.5), batch=16,
            ),
            Bench(
                "text", "synthetic", {"task": "synthetic", "task_options": _SYNTHETIC}, iterations=20, seeds=(0,),
                crowd=Crowd(27, 3), target=0.1, distilled=(2, 8), distill_iterations=40, noise=(0.3, 1.0, 2.5),
                batch=16,
            ),
        ),
        Scale(
            "laptop",
            "a day on two cores, most of it for MNIST; the paper's network for MNIST, and MiniLM instead of DistilBERT "
            "for 20 Newsgroups",
            Bench(
                "vision", "MNIST", _MNIST, iterations=50, seeds=_THREE, crowd=_PAPER_CROWD, target=0.95, early=0.9,
                distilled=(8, 40), distill_iterations=300, noise=(0.03, 0.3, 3.0), brief=5, apart=20, private=30,
            ),
            Bench(
                "text", "20NG (MiniLM)", {"task": "20ng", "task_options": _MINILM}, iterations=600, seeds=_THREE,
                crowd=_PAPER_CROWD, target=0.5, distilled=(6, 30), distill_iterations=600, noise=(0.1, 1.0, 10.0),
                test_every=10, brief=60, apart=200,
            ),
        ),
        Scale(
            "paper",
            "the paper's own size: 125 peers, its networks, DistilBERT, as many iterations as its code allows, three "
            "seeds",
            Bench(
                "vision", "MNIST", _MNIST, iterations=500, seeds=_THREE, crowd=_PAPER_CROWD, target=0.95,
                distilled=(8, 40), distill_iterations=500, noise=(0.1, 1.0, 10.0),
            ),
            Bench(
                "text", "20NG (DistilBERT)", {"task": "20ng"}, iterations=1000, seeds=_THREE, crowd=_PAPER_CROWD,
                target=0.5, distilled=(6, 30), distill_iterations=1000, noise=(0.1, 1.0, 10.0),
            ),
        ),
    )
}  # fmt: skip
