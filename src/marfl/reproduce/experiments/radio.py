"""What radio users save: updates as integers of a few bits, beside fp32, FedAvg and MAR-FL as published."""

from __future__ import annotations

from typing import Any

from marfl.reproduce.cases import DATA, EXACT, PAPER, TASKS, Bench, Case, Scale, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import Mean, Number, above, accuracy, ratio

PROFILES = ("wifi", "lte", "nb-iot")
WIRES = ("fp32", "int8", "int4")
ALLOWED = {"int8": 0.002, "int4": 0.004}  # accuracy that a wire may cost
_WAYS = {
    "fedavg": EXACT | {"technique": "fedavg"},
    "published": PAPER,
    **{wire: EXACT | {"wire": wire} for wire in WIRES},
}
_LINES = {"published": "MAR-FL", "fedavg": "FedAvg", "fp32": "ours, fp32", "int8": "ours, int8", "int4": "ours, int4"}


def _settings(bench: Bench) -> dict[str, Any]:
    return bench.settings(bench.sizes[-1]) | EXACT


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        for wire in WIRES:
            found[f"{bench.name} {wire}"] = simulated(_settings(bench), bench.seeds, wire=wire)
        for wire in WIRES:
            found[f"{bench.name} half {wire}"] = simulated(
                _settings(bench), bench.seeds, wire=wire, churn__participation=0.5
            )
        for profile in PROFILES:
            for way, settings in _WAYS.items():
                found[f"{bench.name} {way} {profile}"] = simulated(
                    _settings(bench) | settings, bench.seeds, links=profile, target_accuracy=bench.early or bench.target
                )
    return found


# --- what it costs ---


def _gaps(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for crowd in ("", "half "):
        found[f"{crowd}fp32".replace(" ", "_")] = accuracy(f"{task} {crowd}fp32")
        for wire in ALLOWED:
            found[f"{crowd}{wire}".replace(" ", "_")] = above(f"{task} {crowd}fp32", f"{task} {crowd}{wire}")
    return found


def _is_within(values: Values) -> Judgement:
    kept = all(values[crowd + wire] <= most for wire, most in ALLOWED.items() for crowd in ("", "half_"))
    return Judgement(
        Word.CONFIRMED if kept else Word.REFUTED,
        "Of {fp32:%} in floats, eight bits lose {int8:pt2} and four bits {int4:pt2}; with half of the peers in every "
        "iteration, of {half_fp32:%}, {half_int8:pt2} and {half_int4:pt2}.",
        "What rounding leaves out of an iteration is kept and sent in the next ones. Less than nothing is lost where "
        "integers happened to end higher.",
    )


# --- what it saves ---


def _savings(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {"target": Mean(f"{task} int4 wifi", "target_accuracy")}
    for way in ("fedavg", "published"):
        for wire in ALLOWED:
            found[f"{way}_{wire}"] = ratio(_bytes(f"{task} {way} wifi"), _bytes(f"{task} {wire} wifi"))
    for profile in PROFILES:
        name, quickest = profile.replace("-", "_"), _seconds(f"{task} int4 {profile}")
        found[f"int4_{name}"] = quickest
        for way in ("fedavg", "published", "fp32", "int8"):
            found[f"{way}_{name}"] = ratio(_seconds(f"{task} {way} {profile}"), quickest)
    return found


def _bytes(case: str) -> Mean:
    return Mean(case, "bytes_to_target")


def _seconds(case: str) -> Mean:
    return Mean(case, "seconds_to_target")


def _saves(values: Values) -> Judgement:
    def over_all(way: str, spec: str) -> str:
        return ", ".join(f"{{{way}_{profile.replace('-', '_')}:{spec}}}" for profile in PROFILES)

    kept = values["fedavg_int8"] >= 3.4 and values["fedavg_int4"] >= 6
    return Judgement(
        Word.CONFIRMED if kept else Word.REFINED,
        "To {target:%} FedAvg in floats sends {fedavg_int8:x} the bytes of eight bits and {fedavg_int4:x} of four, "
        "MAR-FL as published {published_int8:x} and {published_int4:x}. Over Wi-Fi, LTE and NB-IoT four bits take "
        f"{over_all('int4', 's')}; eight bits {over_all('int8', 'x')} that, our exchange in floats "
        f"{over_all('fp32', 'x')}, FedAvg {over_all('fedavg', 'x')}, MAR-FL as published {over_all('published', 'x')}.",
        "The first iteration travels in whole words to find the scales, and where a wire needs an iteration more it "
        "pays for that as well.",
    )


RADIO = Experiment(
    "radio",
    "What radio users save (ours)",
    "Updates as integers of eight and of four bits with error feedback, among the largest crowd, beside the same in "
    "fp32: the accuracy at the end of the schedule, with all peers and with half of them in every iteration; and bytes "
    "and virtual time to a target accuracy over three kinds of links, beside FedAvg and MAR-FL as published. A wire is "
    "trained once; what differs between links is computed apart.",
    _cases,
    (
        *(
            Claim(
                f"bits-accuracy-{task}", "ours",
                "At the end of the schedule eight bits are within 0.2 points of fp32 and four bits within 0.4, also "
                f"with half of the peers ({data}).",
                _gaps(task), _is_within,
            )
            for task, data in DATA.items()
        ),
        *(
            Claim(
                f"bits-radio-{task}", "ours",
                "To the same accuracy, integers of eight and four bits send at least 3.4 and 6 times fewer bytes than "
                f"FedAvg in fp32 ({data}).",
                _savings(task), _saves,
            )
            for task, data in DATA.items()
        ),
    ),
    tuple(
        Figure(
            f"radio-{profile}-{task}", "accuracy-time", f"accuracy over virtual time, links {profile}",
            {f"{task} {way} {profile}": label for way, label in _LINES.items()},
        )
        for task in TASKS
        for profile in PROFILES
    ),
)  # fmt: skip
