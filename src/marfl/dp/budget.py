"""Before a run: what is refused because no guarantee exists, the noise for a budget, the report of `marfl privacy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from marfl.dp.accounting import (
    ADJACENCY,
    ADJACENCY_OF_RECORDS,
    SECOND_DELTA,
    Observer,
    PrivacyLedger,
    delta_warnings,
)
from marfl.dp.calibration import NoisePlan, least_arrived
from marfl.dp.record_level import Sampling
from marfl.errors import InputError
from marfl.plan.grid import check_size
from marfl.plan.schedule import EXCHANGES

PAPER_CNN_PARAMETERS = 1_199_882
MULTIPLIER_PRECISION = 1e-4  # relative, upwards


def default_delta(peers: int) -> float:
    """δ = N^−1.1, the paper's choice: a little below one over the number of peers, or of records."""
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
    iterations: int,
    plan: NoisePlan,
    *,
    delta: float,
    observer: Observer = Observer.INSIDER,
) -> NoisePlan:
    """The least noise that keeps the observer's ε within the target, even if all of the tolerated loss happens.

    `plan` says all the rest; how much noise it has does not matter.
    """
    if not 0 < target_epsilon < math.inf:
        raise InputError(f"target_epsilon = {target_epsilon:g}: must be a number above 0")
    check_run(plan.peers, iterations)
    loss, indicator_noise = plan.tolerated_loss, plan.indicator_noise
    release = plan.release(least_arrived(plan.peers, loss))

    def within(noise_multiplier: float) -> bool:
        # A release, not a plan: the search may pass what a plan allows, to say how much would be needed.
        upcoming = replace(release, noise_multiplier=noise_multiplier)
        return PrivacyLedger().add(upcoming, iterations).epsilon(observer, delta) <= target_epsilon

    if observer is Observer.INSIDER_MASKED and release.arrived < 2:
        raise InputError(f"tolerated_loss = {loss:g}: must leave a masked insider one other peer of {plan.peers}")
    needed = _least(within)
    if plan.adaptive and indicator_noise is not None and needed >= 2 * indicator_noise:
        raise InputError(
            f"target_epsilon = {target_epsilon:g} for the {observer}: needs noise_multiplier = {needed:.4g}, but "
            f"indicator_noise = {indicator_noise:g} allows only less than {2 * indicator_noise:g}"
        )
    return replace(plan, noise_multiplier=needed)


def privacy_report(
    noise: NoisePlan,
    iterations: int,
    *,
    delta: float | None = None,
    group_size: int = 5,
    exchange: str = "full",
    parameters: int = PAPER_CNN_PARAMETERS,
    sampling: Sampling | None = None,
) -> dict[str, Any]:
    """What a run of so many iterations at full participation would give away, as `marfl privacy --json` prints it.

    `sampling` makes one record the unit, and is then that of the noise. An ε can be infinite: print it as null in
    strict JSON.
    """
    check_run(noise.peers, iterations)
    check_size(noise.peers, group_size)
    if exchange not in EXCHANGES:
        raise InputError(f"exchange = {exchange}: must be one of {', '.join(EXCHANGES)}")
    if parameters < 1:
        raise InputError(f"parameters = {parameters}: must be at least 1")
    unit, units = "peer" if sampling is None else "record", noise.peers * (sampling.records if sampling else 1)
    delta = default_delta(units) if delta is None else delta
    release = noise.release(least_arrived(noise.peers, noise.tolerated_loss))
    ledger = PrivacyLedger().add(release, iterations)
    told = {
        **{f"epsilon_{observer}": epsilon for observer, epsilon in ledger.epsilons(delta).items()},
        "unit": unit,
        "delta": delta,
        "second_delta": SECOND_DELTA,
        **{f"epsilon_{name}_at_second_delta": epsilon for name, epsilon in ledger.epsilons(SECOND_DELTA).items()},
        **{f"epsilon_{name}_replacing": epsilon for name, epsilon in ledger.epsilons(delta, replacing=True).items()},
        "warnings": delta_warnings(delta, units, unit),
        "adjacency": ADJACENCY if sampling is None else ADJACENCY_OF_RECORDS,
        # of the noise on the sum over what the batches hold together, where each record has its own bound
        "noise_to_clip_ratio": noise.noise_to_clip_ratio(parameters) / (sampling.batch if sampling else 1),
        "assumptions": _assumptions(noise, delta, group_size, exchange, parameters, sampling),
        "colluders": noise.colluders,
    }
    if sampling is not None:
        told |= {"records": sampling.records, "batch": sampling.batch, "sampling_rate": sampling.rate}
    return told | {
        "noise_multiplier": noise.noise_multiplier,
        "update_noise_multiplier": noise.update_multiplier,
        "indicator_noise": noise.indicator_deviation if noise.adaptive else None,
        "peers": noise.peers,
        "iterations": iterations,
    }


def _assumptions(
    noise: NoisePlan, delta: float, group_size: int, exchange: str, parameters: int, sampling: Sampling | None
) -> list[str]:
    shown = "whole" if exchange == "full" else "in parts, of which one may hold the whole norm"
    of_records = [] if sampling is None else [
        f"every record is in its peer's batch with probability {sampling.rate:.4g}, in secret, whatever the others are",
        "no record is held twice, nor by two peers: each copy would count",
    ]  # fmt: skip
    return [
        *of_records,
        f"delta = {delta:.3g}: beside the factor e^epsilon, any event may be this much more probable",
        "the peer took part in every iteration; who takes part, and who is lost, does not depend on data",
        f"at least {least_arrived(noise.peers, noise.tolerated_loss)} of {noise.peers} shares of noise arrive in every "
        "iteration, all drawn independently and by peers that follow the protocol",
        "outsider: sees the global models and clipping bounds of every iteration, nothing else",
        f"insider: is in the peer's group of {group_size} in every iteration, where exchange {exchange} shows it the "
        f"peer's noised update and indicator {shown}",
        "insider_masked: sees only totals, and knows the one share of noise it drew itself; every further peer that "
        f"colludes takes away one more share, and {noise.colluders} are taken to do so",
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
