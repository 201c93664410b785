"""Before a run: what is refused because no guarantee exists, the noise for a budget, the report of `marfl privacy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from marfl.dp.accounting import ADJACENCY, Observer, PrivacyLedger, Release
from marfl.dp.calibration import NoisePlan, least_arrived
from marfl.errors import InputError
from marfl.plan.grid import check_size
from marfl.plan.schedule import EXCHANGES

PAPER_CNN_PARAMETERS = 1_199_882
MULTIPLIER_PRECISION = 1e-4  # relative, upwards


def default_delta(peers: int) -> float:
    """δ = N^−1.1, the paper's choice: a little below one over the number of peers."""
    return float(peers**-1.1)


def check_sound(*, exact_plan: bool, teacher: str | None, momentum: str) -> None:
    """Refuse settings for which sound mode has no guarantee, and say why; `teacher` is None without distillation."""
    if not exact_plan:
        raise InputError(
            "privacy with an approximate plan: the plan must be exact, because a model that misses some peers' shares "
            "of the noise is protected by the others alone"
        )
    if teacher not in (None, "previous"):
        raise InputError(
            f"distill.teacher = {teacher} with privacy: must be previous, because other peers' models travel raw"
        )
    if momentum == "send":
        raise InputError(
            "momentum = send with privacy: must be derive or local, because momentum travels neither clipped nor noised"
        )


def noise_for_budget(
    target_epsilon: float,
    peers: int,
    iterations: int,
    *,
    delta: float | None = None,
    observer: Observer = Observer.INSIDER,
    indicator_noise: float | None = None,
    tolerated_loss: float = 0.0,
) -> NoisePlan:
    """The least noise that keeps the observer's ε within the target, even if all of the tolerated loss happens."""
    if not 0 < target_epsilon < math.inf:
        raise InputError(f"target_epsilon = {target_epsilon:g}: must be a number above 0")
    check_run(peers, iterations)
    delta = default_delta(peers) if delta is None else delta
    arrived = least_arrived(peers, tolerated_loss)

    def within(noise_multiplier: float) -> bool:
        # A release, not a plan: the search may pass what a plan allows, to say how much would be needed.
        release = Release(noise_multiplier, peers, arrived, tolerated_loss)
        return PrivacyLedger().add(release, iterations).epsilon(observer, delta) <= target_epsilon

    if observer is Observer.INSIDER_MASKED and arrived < 2:
        raise InputError(f"tolerated_loss = {tolerated_loss:g}: must leave a masked insider one other peer of {peers}")
    needed = _least(within)
    if indicator_noise is not None and needed >= 2 * indicator_noise:
        raise InputError(
            f"target_epsilon = {target_epsilon:g} for the {observer}: needs noise_multiplier = {needed:.4g}, but "
            f"indicator_noise = {indicator_noise:g} allows only less than {2 * indicator_noise:g}"
        )
    return NoisePlan(needed, peers, indicator_noise, tolerated_loss)


def privacy_report(
    noise: NoisePlan,
    iterations: int,
    *,
    delta: float | None = None,
    group_size: int = 5,
    exchange: str = "full",
    parameters: int = PAPER_CNN_PARAMETERS,
) -> dict[str, Any]:
    """What a run of so many iterations at full participation would give away, as `marfl privacy --json` prints it.

    An ε can be infinite: print it as null in strict JSON.
    """
    check_run(noise.peers, iterations)
    check_size(noise.peers, group_size)
    if exchange not in EXCHANGES:
        raise InputError(f"exchange = {exchange}: must be one of {', '.join(EXCHANGES)}")
    if parameters < 1:
        raise InputError(f"parameters = {parameters}: must be at least 1")
    delta = default_delta(noise.peers) if delta is None else delta
    release = noise.release(least_arrived(noise.peers, noise.tolerated_loss))
    ledger = PrivacyLedger().add(release, iterations)
    return {
        **{f"epsilon_{observer}": epsilon for observer, epsilon in ledger.epsilons(delta).items()},
        "delta": delta,
        "adjacency": ADJACENCY,
        "noise_to_clip_ratio": noise.noise_to_clip_ratio(parameters),
        "assumptions": _assumptions(noise, delta, group_size, exchange, parameters),
        "noise_multiplier": noise.noise_multiplier,
        "update_noise_multiplier": noise.update_multiplier,
        "indicator_noise": noise.indicator_deviation,
        "peers": noise.peers,
        "iterations": iterations,
    }


def _assumptions(noise: NoisePlan, delta: float, group_size: int, exchange: str, parameters: int) -> list[str]:
    shown = "whole" if exchange == "full" else "in parts, of which one may hold the whole norm"
    return [
        f"delta = {delta:.3g}: beside the factor e^epsilon, any event may be this much more probable",
        "the peer took part in every iteration; who takes part, and who is lost, does not depend on data",
        f"at least {least_arrived(noise.peers, noise.tolerated_loss)} of {noise.peers} shares of noise arrive in every "
        "iteration, all drawn independently and by peers that follow the protocol",
        "outsider: sees the global models and clipping bounds of every iteration, nothing else",
        f"insider: is in the peer's group of {group_size} in every iteration, where exchange {exchange} shows it the "
        f"peer's noised update and indicator {shown}",
        "insider_masked: sees only totals, and knows the one share of noise it drew itself; every further peer that "
        "colludes takes away one more share",
        "the roster is public, so that being left out of it amplifies nothing",
        "noise is an exact discrete Gaussian on integers; that no more is lost than with a continuous one is proven "
        "(marfl.dp.lattice)",
        f"noise_to_clip_ratio is for a model of {parameters:,} parameters",
    ]


def check_run(peers: int, iterations: int) -> None:
    if peers < 2:
        raise InputError(f"peers = {peers}: must be at least 2, because one peer alone has nobody's noise but its own")
    if iterations < 1:
        raise InputError(f"iterations = {iterations}: must be at least 1")


def _least(within: Callable[[float], bool]) -> float:
    """The least number that is within, if all larger ones are too: by doubling or halving, then bisection, upwards."""
    high = 1.0
    while not within(high):
        high *= 2
    low = high / 2
    while within(low):
        low, high = low / 2, low
    while high - low > MULTIPLIER_PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) else (middle, high)
    return high
