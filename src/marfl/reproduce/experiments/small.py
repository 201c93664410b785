"""The smaller claims: mixing, a lost peer, the control plane, and butterflies under churn."""

from __future__ import annotations

from marfl.reproduce.cases import Case, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Judgement, Values, Word
from marfl.reproduce.experiments.common import EXACT, TASKS
from marfl.reproduce.numbers import Mean, Ratio
from marfl.reproduce.scales import Crowd, Scale


def _mixing_cases(scale: Scale) -> dict[str, Case]:
    return {
        "law": calculated("mixing_law", peers=8, groups=2, trials=20_000),
        "keys 125 by 5": calculated("variance_left", peers=125, group_size=5, rounds=3),
        "keys 125 by 3": calculated("variance_left", peers=125, group_size=3, rounds=4, dimension=4),
        "keys 100 by 5": calculated("variance_left", peers=100, group_size=5, rounds=3),
        "lost": calculated("lost_peer", peers=125, group_size=5),
    }


def _law(values: Values) -> Judgement:
    near = abs(values["measured"] - values["exact"]) < abs(values["measured"] - values["paper"])
    return Judgement(
        Word.REFINED if near else Word.CONFIRMED,
        "For eight peers in two random groups the mean distortion falls to {measured:g} of what it was in a round; the "
        "printed factor is {paper:g}, the exact one {exact:g}.",
        "The printed equation is not an equality: groups less one over peers less one is. The two agree as N grows.",
    )


def _faster(values: Values) -> Judgement:
    better = [values[f"keys_{place}"] < values[f"random_{place}"] for place in ("grid", "near", "off")]
    ours = (
        "Variance left, keys against random groups: {keys_grid:g} against {random_grid:g} on the perfect grid, "
        "{keys_near:g} against {random_near:g} for groups of three among the same peers, {keys_off:g} against "
        "{random_off:g} for groups of five among a hundred."
    )
    if all(better):
        reason = (
            "It holds for keys as we define them off the grid: peers sorted by key, cut in runs of the group size. The "
            "published code has another schedule there, which the paper does not describe."
        )
        return Judgement(Word.CONFIRMED, ours, reason)
    return Judgement(
        Word.REFINED if any(better) else Word.REFUTED,
        ours,
        "On a perfect grid keys never meet twice and are exact. Off it, cutting the sorted keys in runs brings some "
        "peers together again.",
    )


def _one_group(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED,
        "A peer lost in the first round is missed by the {first:n} others of its group; at the end all {all:n} others "
        "hold another mean. Lost in the last round it is missed by {last:n}.",
        "One group at a time is right for the round in which it happens. But what the group then passes on is another "
        "sum, so everybody's result changes; our exchanges therefore make an attempt all or nothing.",
    )


MIXING = Experiment(
    "mixing",
    "Mixing, and a lost peer (section 2)",
    "Calculations on the plans themselves: no training.",
    _mixing_cases,
    (
        Claim(
            "mixing-law", "Equation 1",
            "With random groups the expected distortion falls by the factor (r−1)/N + r/N² in every round.",
            {name: Mean("law", name) for name in ("measured", "paper", "exact")},
            _law,
        ),
        Claim(
            "keys-mix", "Section 2.3",
            "Deterministic key updates mix faster than random groups.",
            {
                f"{way}_{place}": Mean(case, way)
                for place, case in (("grid", "keys 125 by 5"), ("near", "keys 125 by 3"), ("off", "keys 100 by 5"))
                for way in ("keys", "random")
            },
            _faster,
        ),
        Claim(
            "one-group", "Section 2.2",
            "A peer that drops out affects a single group only.",
            {name: Mean("lost", name) for name in ("first", "last", "all")},
            _one_group,
        ),
    ),
)  # fmt: skip


def _control_cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} control": simulated(
            bench.settings(Crowd(16, 4)) | EXACT | {"engine": "protocol", "iterations": 5, "test_every": 5}, (0,)
        )
        for bench in scale.benches
    }


def _negligible(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if max(values.values()) < 0.01 else Word.REFINED,
        "Control messages are {vision:%} of all bytes on vision and {text:%} on text.",
        "It depends on the model: control costs the same for every model, so it shows where the model is small.",
    )


CONTROL = Experiment(
    "control",
    "The control plane (section 2.2)",
    "The real protocol on a virtual network, every header, roster and vote counted, among sixteen peers.",
    _control_cases,
    (
        Claim(
            "control", "Section 2.2",
            "The control plane's cost is negligible compared to model-exchange traffic.",
            {
                task: Ratio(Mean(f"{task} control", "bytes_by_kind.control"), Mean(f"{task} control", "bytes_total"))
                for task in TASKS
            },
            _negligible,
        ),
    ),
)  # fmt: skip


def _stall_cases(scale: Scale) -> dict[str, Case]:
    settings = scale.text.settings() | EXACT | {"engine": "bitwise", "churn.death": 0.01}
    return {
        f"{name} deaths": simulated(settings | way, scale.text.seeds[:1])
        for name, way in (
            ("butterfly", {"technique": "butterfly"}),
            ("grid", {}),
            ("full", {"exchange": "full"}),
        )
    }


def _stalls(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED if values["butterfly"] > 0 else Word.REFUTED,
        "With deaths during the exchange, {butterfly:%} of a butterfly's bytes are for attempts that come to nothing, "
        "{grid:%} with `grid` and {full:%} with `full`.",
        "A part whose owner dies is missing for everybody, so the butterfly as it stands must wait for ever. Here "
        "whoever is left seals a new roster and repeats the exchange, which serves every technique alike; what a death "
        "costs is the bytes that had been sent.",
    )


def _wasted(case: str) -> Ratio:
    return Ratio(Mean(case, "bytes_by_kind.repair"), Mean(case, "bytes_total"))


STALL = Experiment(
    "stall",
    "Butterfly all-reduce under churn (appendix)",
    "One peer in a hundred dies in every round of the exchange; whoever is left seals a new roster.",
    _stall_cases,
    (
        Claim(
            "butterfly-stalls", "Appendix, FL baselines",
            "Butterfly all-reduce stalls under churn: it needs peers that are totally reliable.",
            {name: _wasted(f"{name} deaths") for name in ("butterfly", "grid", "full")},
            _stalls,
        ),
    ),
)  # fmt: skip
