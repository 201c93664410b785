"""From a run's `[privacy]` settings to its mechanism; settings without a guarantee are refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from marfl.config import Config
from marfl.dp.accounting import Observer, PrivacyLedger, check_delta
from marfl.dp.budget import check_run, check_sound, default_delta
from marfl.dp.calibration import NoisePlan, least_arrived
from marfl.dp.mechanism import Adaptation, check_bound
from marfl.dp.paper import PaperRule
from marfl.dp.record_level import Sampling, check_record_bound
from marfl.errors import InputError
from marfl.from_config import technique_of


@dataclass(frozen=True)
class Sound:
    """The public constants of sound mode: every peer of a run has the same."""

    noise: NoisePlan
    adaptation: Adaptation
    bound: float  # C of the first iteration


def check_privacy(config: Config) -> None:
    """`InputError` naming the setting, its value and the reason, when a run's privacy settings cannot hold."""
    given = config.privacy
    if given.unit == "record" and given.mode != "sound":
        raise InputError("privacy.unit = record: needs privacy.noise_multiplier, and privacy.mode = sound")
    if given.mode == "off":
        if given.target_epsilon is not None:
            raise InputError(
                f"privacy.target_epsilon = {given.target_epsilon:g}: needs privacy.noise_multiplier; "
                "marfl privacy --target-epsilon finds one"
            )
        return
    if given.noise_multiplier is None:
        raise InputError(f"privacy.mode = {given.mode}: needs privacy.noise_multiplier, the noise in units of the clip")
    check_run(config.peers, config.iterations)
    check_delta(delta_of(config))
    if given.mode == "paper":
        _check_paper(config)
        return
    _check_sound(config)
    if given.target_epsilon is not None:
        _check_budget(config, given.target_epsilon)


def _check_sound(config: Config) -> None:
    if config.semantics != "exact":
        raise InputError(
            f"semantics = {config.semantics} with privacy.mode = sound: must be exact, because the paper's sends "
            "models and momenta that are neither clipped nor noised"
        )
    chosen = technique_of(config)
    if not chosen.exact:
        raise InputError(
            f"technique = {config.technique} with privacy: must have an exact average (mar, fedavg, arfl, rdfl, ring, "
            "butterfly), because a model that misses some shares of the noise is protected by the others alone"
        )
    distills = config.distill.iterations and not config.distill.match_local_steps
    check_sound(
        exact_plan=config.plan == "exact",
        teacher=config.distill.teacher if distills else None,
        momentum=config.momentum or "derive",
    )
    if config.privacy.unit == "record":
        _check_records(config)
    sound_of(config)


def _check_records(config: Config) -> None:
    """Refuse what does not go with one record as the unit, and say why."""
    sampling_of(config)
    check_record_bound(first_bound(config))
    for name, value, needed, why in (
        ("local_batches", config.local_batches, 1, "a second step would start from a model that no noise hides"),
        ("momentum", config.momentum, "derive", "the agreed step follows from the sum of clipped gradients"),
        ("distill.iterations", config.distill.iterations, 0, "distillation learns from all records of a batch at once"),
        ("privacy.clip_step", config.privacy.clip_step, 0, "the bound of a record's gradient is fixed"),
    ):
        if value != needed:
            raise InputError(f"{name} = {value}: must be {needed} with privacy.unit = record, because {why}")


def _check_budget(config: Config, target: float) -> None:
    noise, observer = noise_of(config, shares_of(config)), Observer(config.privacy.target_observer or "insider")
    least = noise.release(least_arrived(noise.peers, noise.tolerated_loss))
    one = PrivacyLedger().add(least).epsilon(observer, delta_of(config))
    if one > target:
        raise InputError(
            f"privacy.target_epsilon = {target:g} for the {observer}: must be at least {one:.4g}, which one iteration "
            "takes; or add noise"
        )


def _check_paper(config: Config) -> None:
    if config.semantics != "paper":
        raise InputError("privacy.mode = paper: needs semantics = paper; exact semantics has privacy.mode = sound")
    if config.technique not in ("mar", "fedavg"):
        raise InputError(f"technique = {config.technique} with privacy.mode = paper: must be mar or fedavg")
    if config.momentum != "send":
        raise InputError(f"momentum = {config.momentum} with privacy.mode = paper: must be send, as in Algorithm 4")
    if config.privacy.target_epsilon is not None:
        raise InputError(
            f"privacy.target_epsilon = {config.privacy.target_epsilon:g} with privacy.mode = paper: must not be set, "
            "because that mode satisfies no epsilon"
        )
    noise_of(config, shares_of(config))


def shares_of(config: Config) -> int:
    """n: how many shares the noise is cut into. Public and fixed before the run, so that no peer has to ask.

    By default the peers that the churn settings let an update arrive from; losses on the way are for
    `tolerated_loss`. An iteration with fewer or more peers is accounted for as it was.
    """
    given, churn = config.privacy, config.churn
    if given.shares is not None:
        return given.shares
    part = churn.participation * (churn.update_participation or 1.0) * (churn.aggregate_participation or 1.0)
    return max(1, round(config.peers * part))


def noise_of(config: Config, shares: int) -> NoisePlan:
    """The noise of an iteration, cut into so many shares."""
    given = config.privacy
    assert given.noise_multiplier is not None  # check_privacy has seen to it
    return NoisePlan(
        given.noise_multiplier, shares, given.indicator_noise, given.tolerated_loss,
        adaptive=adaptation_of(config).step > 0, published=given.mode == "paper", colluders=given.colluders,
        sampling=sampling.rate if (sampling := sampling_of(config)) else 1.0,
    )  # fmt: skip


def indicator_noise_of(config: Config, shares: int) -> float:
    """σ_b: as set, or as it follows."""
    given = config.privacy
    assert given.noise_multiplier is not None  # check_privacy has seen to it
    plan = NoisePlan(given.noise_multiplier, shares, given.indicator_noise, published=given.mode == "paper")
    return plan.indicator_deviation


def sound_of(config: Config) -> Sound:
    """The mechanism of a run in sound mode."""
    bound = first_bound(config)
    check_bound(bound)
    return Sound(noise_of(config, shares_of(config)), adaptation_of(config), bound)


def first_bound(config: Config) -> float:
    """C of the first iteration."""
    assert config.privacy.clip is not None  # a resolved config has it
    return config.privacy.clip


def adaptation_of(config: Config) -> Adaptation:
    assert config.privacy.clip_step is not None  # a resolved config has it
    return Adaptation(config.privacy.target_quantile, config.privacy.clip_step)


def sampling_of(config: Config) -> Sampling | None:
    """How records come into a batch; None where the unit is a peer."""
    if config.privacy.unit == "peer":
        return None
    if config.privacy.records is None:
        raise InputError(
            "privacy.unit = record: needs privacy.records, a public number of records that a peer is taken to have; "
            "batch / records is the rate at which all peers sample theirs"
        )
    return Sampling(config.batch, config.privacy.records)


def paper_rule(config: Config) -> PaperRule:
    """Algorithm 4's constants: β and η_u are the paper's, γ and η_C the run's."""
    return PaperRule(adaptation=adaptation_of(config))


def units_of(config: Config) -> int:
    """How many are protected, as far as is public: peers, or records."""
    return config.peers * (config.privacy.records or 1 if config.privacy.unit == "record" else 1)


def delta_of(config: Config) -> float:
    """δ: as set, else the number of protected units to the −1.1."""
    return default_delta(units_of(config)) if config.privacy.delta is None else config.privacy.delta
