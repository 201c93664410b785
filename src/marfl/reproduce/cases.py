"""What is run: cases (one setting under several seeds), and the three scales that give experiments their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from marfl.config import Config, load
from marfl.runs import config_hash, flattened

PAPER = {"semantics": "paper"}  # θ and m travel whole, absentees keep stale models, groups by the paper's keys
EXACT = {"semantics": "exact"}  # only updates travel, absentees catch up, exact for any number of peers
RIVALS = ("fedavg", "rdfl", "arfl")
TASKS = ("vision", "text")
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
    usual = _defaults()
    given = {name: value for name, value in flattened(source.as_dict()).items() if usual.get(name) != value}
    return config_hash(given)[:12]


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
    batch: int
    iterations: int
    test_every: int
    seeds: tuple[int, ...]
    crowd: Crowd  # where the paper has 125 peers and trains each from its own model, which costs most
    target: float  # accuracy, for what it takes to get there
    distilled: tuple[int, int]  # K, few and many
    distill_crowd: Crowd
    distill_iterations: int
    noise: tuple[float, float, float]  # σ of differential privacy: little, much, extreme
    sizes: tuple[Crowd, ...] = (Crowd(16, 4), Crowd(64, 4), Crowd(125, 5))

    def settings(self, crowd: Crowd | None = None) -> dict[str, Any]:
        """What all runs of this task have in common."""
        chosen = self.crowd if crowd is None else crowd
        return {
            **self.task, **chosen.settings(), "batch": self.batch, "iterations": self.iterations,
            "test_every": self.test_every, "engine": "fast", "workers": 1,
        }  # fmt: skip


@dataclass(frozen=True)
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
_MINILM = {"encoder": "all-MiniLM-L6-v2-fp16", "pooling": "mean"}
_PAPER_CROWD = Crowd(125, 5)

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "quick",
            "a check that everything works, on stand-ins: scikit-learn's digits for MNIST, a synthetic task for "
            "20 Newsgroups, few iterations, one seed. Its verdicts are no evidence",
            Bench(
                "vision", "digits", {"task": "digits"}, batch=16, iterations=20, test_every=5, seeds=(0,),
                crowd=Crowd(27, 3), target=0.4, distilled=(2, 8), distill_crowd=Crowd(8, 2), distill_iterations=40,
                noise=(0.3, 1.0, 2.5),
            ),
            Bench(
                "text", "synthetic", {"task": "synthetic", "task_options": _SYNTHETIC}, batch=16, iterations=20,
                test_every=5, seeds=(0,), crowd=Crowd(27, 3), target=0.12, distilled=(2, 8), distill_crowd=Crowd(8, 2),
                distill_iterations=40, noise=(0.3, 1.0, 2.5),
            ),
        ),
        Scale(
            "laptop",
            "hours on two cores, with the paper's network for MNIST and MiniLM instead of DistilBERT for 20 Newsgroups",
            Bench(
                "vision", "MNIST", {"task": "mnist"}, batch=64, iterations=50, test_every=10, seeds=(0,),
                crowd=Crowd(64, 4), target=0.95, distilled=(8, 40), distill_crowd=Crowd(16, 4), distill_iterations=300,
                noise=(0.03, 0.3, 3.0),
            ),
            Bench(
                "text", "20NG (MiniLM)", {"task": "20ng", "task_options": _MINILM}, batch=16, iterations=600,
                test_every=10, seeds=(0, 1, 2), crowd=_PAPER_CROWD, target=0.5, distilled=(6, 30),
                distill_crowd=_PAPER_CROWD, distill_iterations=600, noise=(0.1, 1.0, 10.0),
            ),
        ),
        Scale(
            "paper",
            "the paper's own size: 125 peers, its networks, DistilBERT, three seeds",
            Bench(
                "vision", "MNIST", {"task": "mnist"}, batch=64, iterations=200, test_every=5, seeds=(0, 1, 2),
                crowd=_PAPER_CROWD, target=0.95, distilled=(8, 40), distill_crowd=_PAPER_CROWD, distill_iterations=200,
                noise=(0.1, 1.0, 10.0),
            ),
            Bench(
                "text", "20NG (DistilBERT)", {"task": "20ng"}, batch=16, iterations=500, test_every=5, seeds=(0, 1, 2),
                crowd=_PAPER_CROWD, target=0.5, distilled=(6, 30), distill_crowd=_PAPER_CROWD, distill_iterations=500,
                noise=(0.1, 1.0, 10.0),
            ),
        ),
    )
}  # fmt: skip
