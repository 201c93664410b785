"""What becomes of the mean of the updates, and what a peer does locally: a strategy.

A strategy is a small frozen dataclass of pure functions. `init` and `apply` are the pair that every peer computes
alike: the strategy's part of the agreed state, and how a mean moves the model and that part. `drift` changes the local
steps.

    @dataclass(frozen=True)
    class Halved(marfl.Strategy):
        def apply(self, step):
            return step.theta + step.delta / 2, {}

is a complete one: `--strategy my_module:Halved`. No peer is special and nobody checks another's arithmetic: all of them
compare the hash of what follows, so the same arguments must give the same bits. The built-in ones are in
`marfl.learn.strategies`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.loading import construct, find_class
from marfl.schema import Checked, validated
from marfl.state import all_finite

Vectors: TypeAlias = Mapping[str, Tensor]
PLAIN = "plain"
BUILT_IN = {
    PLAIN: "marfl.learn.strategy:Plain",
    "diloco": "marfl.learn.strategies:DiLoCo",
    "fedadam": "marfl.learn.strategies:FedAdam",
    "fedyogi": "marfl.learn.strategies:FedYogi",
    "fedprox": "marfl.learn.strategies:FedProx",
    "scaffold": "marfl.learn.strategies:Scaffold",
}
PREFIX = "strategy."  # before the names of its vectors in the agreed state


class StrategyStep(NamedTuple):
    """A mean update and what it is applied to: trainable values alone. None of it may be changed in place."""

    theta: Tensor  # θ
    delta: Tensor  # Δ̄, the mean of the updates
    state: Vectors  # what `init` began and `apply` returned last
    iteration: int  # from 1
    contributions: int  # updates in the mean
    peers: int  # of the run; 0 where nobody knows
    news: Tensor | None = None  # the mean of what travelled behind the updates, where peers remember something


class Strategy:
    """The base of every strategy. It is plain averaging until something is overridden."""

    remembers: ClassVar[bool] = False  # every peer keeps a vector of its own, and `news` of it travels

    def init(self, theta: Tensor) -> Vectors:
        """The strategy's part of the agreed state at the beginning: fp32 vectors by name."""
        return {}

    def apply(self, step: StrategyStep) -> tuple[Tensor, Vectors]:
        """(θ, the strategy's part of the state) after a mean update."""
        return step.theta + step.delta, {}

    def drift(self, moved: Tensor, state: Vectors, own: Tensor | None) -> Tensor:
        """What is added to the gradient of every local step; `moved` is how far the peer is from where it began."""
        raise NotImplementedError

    def news(self, gradient: Tensor, own: Tensor) -> Tensor:
        """What a peer that remembers something sends behind its update; once that counts, it is added to `own`.

        `gradient` is the mean of the gradients of the local steps, without the drift.
        """
        raise NotImplementedError

    @property
    def is_local(self) -> bool:
        """Whether local steps are other ones under it."""
        return self.remembers or type(self).drift is not Strategy.drift

    @property
    def is_built_in(self) -> bool:
        return type(self).__module__.startswith("marfl.")

    def __str__(self) -> str:
        names = {path: name for name, path in BUILT_IN.items()}
        path = f"{type(self).__module__}:{type(self).__qualname__}"
        return names.get(path, path)


@dataclass(frozen=True)
class Plain(Strategy):
    """The mean update is added: federated averaging."""


def load_strategy(spec: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy that `spec` names: a built-in name or `module:Class`, with options for its fields."""
    found = find_class("strategy", spec, BUILT_IN)
    if issubclass(found, Checked):
        made = validated(found, options or {}, "strategy.")
    else:
        made = construct("strategy", spec, found, options or {})
    if not isinstance(made, Strategy):
        raise InputError(f"strategy {spec}: {found.__name__} is no marfl.Strategy; derive it from that class")
    return made


def strategy_terms(strategy: Strategy) -> dict[str, Any]:
    """What peers compare: which strategy it is, its options, and of one from outside the package its source."""
    options: dict[str, Any] = asdict(strategy) if is_dataclass(strategy) and not isinstance(strategy, type) else {}
    shown = {name: value for name, value in options.items() if isinstance(value, int | float | str)}
    terms = {"strategy": str(strategy), "strategy_options": shown}
    return terms if strategy.is_built_in else terms | {"strategy_source": _source(type(strategy))}


def _source(kind: type) -> str:
    """A hash of the class's text: peers with another one of this name would compute something else."""
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""  # typed into an interpreter: there is no text


# --- applying one, and refusing what no peer could agree on ---


def begin(strategy: Strategy, theta: Tensor) -> dict[str, Tensor]:
    """Its part of the agreed state, by the names that it has there."""
    given = strategy.init(theta.clone()) if not strategy.is_built_in else strategy.init(theta)
    return _checked_state(strategy, given, "init")


def part_of(vectors: Vectors) -> dict[str, Tensor]:
    """The strategy's part of an agreed state, by its own names."""
    return {name.removeprefix(PREFIX): vector for name, vector in vectors.items() if name.startswith(PREFIX)}


def moved_by(strategy: Strategy, step: StrategyStep) -> tuple[Tensor, dict[str, Tensor]]:
    """(θ, its part of the agreed state) after a mean; `InputError` for what peers could not go on with.

    One from outside the package is asked twice: what is not a function of its arguments is found out here, and not by
    peers that disagree for ever.
    """
    if strategy.is_built_in:
        theta, state = strategy.apply(step)
    else:
        theta, state = _twice(strategy, step)
    if not isinstance(theta, Tensor) or theta.shape != step.theta.shape or theta.dtype != torch.float32:
        found = f"{theta.dtype} {list(theta.shape)}" if isinstance(theta, Tensor) else type(theta).__name__
        raise InputError(f"strategy {strategy}: apply gave θ as {found}; it must be float32 {list(step.theta.shape)}")
    if not all_finite(theta):
        raise InputError(f"strategy {strategy}: θ is not finite after iteration {step.iteration}; take smaller steps")
    after = _checked_state(strategy, state, "apply")
    shapes, before = ({name: v.shape for name, v in each.items()} for each in (after, _named(step.state)))
    if shapes != before:
        raise InputError(f"strategy {strategy}: apply gave the vectors {_list(shapes)}; init began {_list(before)}")
    return theta, after


def _twice(strategy: Strategy, step: StrategyStep) -> tuple[Tensor, Vectors]:
    given = [step.theta, step.delta, *step.state.values()]
    kept = [vector.clone() for vector in given]
    first, second = _applied(strategy, step), _applied(strategy, step)
    if not all(map(torch.equal, given, kept)):
        raise InputError(f"strategy {strategy}: apply changed its arguments in place; it must return new vectors")
    same = first[0].shape == second[0].shape and _bits(first[0]) == _bits(second[0])
    same = same and first[1].keys() == second[1].keys()
    if not same or any(_bits(first[1][name]) != _bits(second[1][name]) for name in first[1]):
        raise InputError(f"strategy {strategy}: apply gave two results for one mean; it must be deterministic")
    return first


def _applied(strategy: Strategy, step: StrategyStep) -> tuple[Tensor, Vectors]:
    try:
        theta, state = strategy.apply(step)
        vectors = {name: vector.detach().clone() for name, vector in state.items()}  # not a part of the mean
        return theta.detach(), vectors
    except Exception as error:  # somebody else's code: said in one line
        raise InputError(f"strategy {strategy}: apply failed ({type(error).__name__}: {error})") from error


def _bits(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


def _checked_state(strategy: Strategy, state: Vectors, where: str) -> dict[str, Tensor]:
    for name, vector in state.items():
        if not isinstance(vector, Tensor) or vector.dim() != 1 or vector.dtype != torch.float32:
            found = f"{vector.dtype} {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
            raise InputError(f"strategy {strategy}: {where} gave {name} as {found}; it must be a float32 vector")
        if not all_finite(vector):
            raise InputError(f"strategy {strategy}: {where} gave {name} with NaN or infinity")
    return _named(state)


def _named(state: Vectors) -> dict[str, Tensor]:
    return {f"{PREFIX}{name}": vector for name, vector in state.items()}


def _list(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{name.removeprefix(PREFIX)} {list(shape)}" for name, shape in shapes.items()) or "none"
