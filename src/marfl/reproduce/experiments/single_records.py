"""Hiding one record instead of a whole peer: the same noise, another unit, among 16 peers under masks."""

from __future__ import annotations

from typing import Any

from marfl.reproduce.cases import DATA, EXACT, TASKS, Bench, Case, Crowd, Scale, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import NOTICEABLE, SUBSTANTIAL, Mean, Number, accuracy, ratio

HOSPITALS = Crowd(16, 4)
DELTA = 1e-5
RECORDS = {"mnist": 3750, "20ng": 700, "digits": 85, "synthetic": 250}  # about what one of 16 peers has
BATCH = {"vision": 64, "text": 16}
NOISE = {"little": 1.0, "much": 4.0}  # σ
STEP = {"vision": 3.0, "text": 2.0}  # η: a clipped gradient is short
PLAIN_STEP = {"vision": 0.1, "text": 2.0}  # where nothing is clipped


def _settings(bench: Bench) -> dict[str, Any]:
    """One batch for an iteration, of as many rows for everybody: records are sampled at one public rate."""
    given = bench.settings(HOSPITALS, iterations=bench.private)
    usual = {name: value for name, value in given.items() if name not in ("global_batch", "local_batches")}
    return usual | EXACT | {"batch": bench.batch or BATCH[bench.name]}


def _private(bench: Bench, noise: str) -> dict[str, Any]:
    return {
        **_settings(bench), "engine": "bitwise", "privacy.noise_multiplier": NOISE[noise],
        "privacy.delta": DELTA, "privacy.masks": True,
    }  # fmt: skip


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in reversed(scale.benches):
        of_records = {
            "privacy.unit": "record", "privacy.records": RECORDS[bench.task["task"]],
            "optimizer.learning_rate": STEP[bench.name],
        }  # fmt: skip
        found[f"{bench.name} nothing hidden"] = simulated(
            _settings(bench) | {"optimizer.learning_rate": PLAIN_STEP[bench.name]}, bench.seeds
        )
        for noise in NOISE:
            hidden = _private(bench, noise) | of_records
            found[f"{bench.name} records hidden, {noise} noise"] = simulated(hidden, bench.seeds)
        found[f"{bench.name} peers hidden, little noise"] = simulated(_private(bench, "little"), bench.seeds)
    return found


def _bearable(values: Values) -> Judgement:
    hides = values["epsilon_record"] < values["epsilon_peer"]
    learns = values["record"] > values["peer"] + SUBSTANTIAL
    return Judgement(
        Word.CONFIRMED if hides and learns else Word.REFUTED,
        "With σ = {sigma:g} a masked insider's ε is {epsilon_record:g} for a record and {epsilon_peer:g} for a peer, "
        "{times:x} as much; {record:%} are right where records are hidden, {peer:%} where peers are, {none:%} where "
        "nothing is.",
        "What one record can change is clipped by itself, and whether it was in the batch is a secret: the same noise "
        "hides it better, and is spread over all records of all batches.",
    )


def _price(values: Values) -> Judgement:
    lower = values["epsilon_much"] < values["epsilon_little"]
    worse = values["much"] < values["little"] - NOTICEABLE
    return Judgement(
        Word.CONFIRMED if lower and worse else Word.REFUTED,
        "{little:%} at ε = {epsilon_little:g} (σ = {sigma_little:g}), {much:%} at ε = {epsilon_much:g} "
        "(σ = {sigma_much:g}); {none:%} without privacy.",
        "The noise on the mean has the norm σ·√P over all records of all batches, P being the parameters.",
    )


def _hidden(task: str, unit: str, noise: str, what: str = "epsilon_insider_masked") -> Mean:
    return Mean(f"{task} {unit}s hidden, {noise} noise", f"privacy.{what}")


def _units(task: str) -> dict[str, Number]:
    record, peer = (_hidden(task, unit, "little") for unit in ("record", "peer"))
    return {
        "none": accuracy(f"{task} nothing hidden"),
        "record": accuracy(f"{task} records hidden, little noise"),
        "peer": accuracy(f"{task} peers hidden, little noise"),
        "epsilon_record": record, "epsilon_peer": peer, "times": ratio(peer, record),
        "sigma": _hidden(task, "record", "little", "noise_multiplier"),
    }  # fmt: skip


def _noises(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {"none": accuracy(f"{task} nothing hidden")}
    for noise in NOISE:
        found |= {
            noise: accuracy(f"{task} records hidden, {noise} noise"),
            f"epsilon_{noise}": _hidden(task, "record", noise),
            f"sigma_{noise}": _hidden(task, "record", noise, "noise_multiplier"),
        }
    return found


def _lines(task: str) -> dict[str, str]:
    kinds = ("nothing hidden", *(f"records hidden, {noise} noise" for noise in NOISE), "peers hidden, little noise")
    return {f"{task} {kind}": kind for kind in kinds}


def _claims(task: str) -> tuple[Claim, ...]:
    return (
        Claim(
            f"records-{task}", "ours",
            f"Noise under which 16 peers cannot hide a peer, and learn little, hides every record, and they learn "
            f"({DATA[task]}).",
            _units(task), _bearable,
        ),
        Claim(
            f"records-price-{task}", "ours",
            f"A smaller ε of a record costs accuracy ({DATA[task]}).",
            _noises(task), _price,
        ),
    )  # fmt: skip


RECORDS_HIDDEN = Experiment(
    "records",
    "One record as the unit of privacy",
    "16 peers under masks, a secret sample of records in every batch, gradients clipped one by one; beside it the same "
    "noise with a whole peer as the unit, and the same run without privacy.",
    _cases,
    tuple(claim for task in TASKS for claim in _claims(task)),
    tuple(
        Figure(f"records-{task}", "accuracy-iterations", "accuracy where records are hidden", _lines(task))
        for task in TASKS
    ),
)  # fmt: skip
