"""More work between two averages: an outer step with momentum (DiLoCo, arXiv 2311.08105), and training on meanwhile."""

from __future__ import annotations

from typing import Any

from marfl.reproduce.cases import DATA, EXACT, TASKS, Case, Crowd, Scale, simulated
from marfl.reproduce.claims import OURS, Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import Mean, Number, ratio, to_target

CROWD = Crowd(25, 5)
_STEPS = {"local_batches": 4}  # H
_LOUD, _CALM = ({"learning_rate": 1.0, "momentum": 0.8}, {"learning_rate": 0.7, "momentum": 0.0})  # overlap bears calm
_OUTER = {"strategy": "diloco"} | _STEPS
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": _STEPS,
    "diloco": _OUTER | {"strategy_options": _LOUD},
    "calm": _OUTER | {"strategy_options": _CALM},
    "calm overlapped": _OUTER | {"strategy_options": _CALM, "overlap": True},
}
_LINES = {  # as the legends call them
    "plain": "one local step",
    "steps": "four local steps",
    "diloco": "DiLoCo, four local steps",
    "calm": "outer step without momentum",
    "calm overlapped": "the same, overlapped",
}


def _cases(scale: Scale) -> dict[str, Case]:
    """Tested after every iteration: those of DiLoCo are few and long."""
    return {
        f"{bench.name} {way}": simulated(
            bench.settings(CROWD, iterations=2 * bench.iterations) | EXACT | settings, bench.seeds,
            links="lte", test_every=1, target_accuracy=bench.early or bench.target,
        )
        for bench in reversed(scale.benches)
        for way, settings in _WAYS.items()
    }  # fmt: skip


# --- an outer step with momentum ---


def _prices(task: str) -> dict[str, Number]:
    plain = f"{task} plain"
    found: dict[str, Number] = {"target": Mean(plain, "target_accuracy"), "plain_bytes": to_target(plain, "bytes")}
    for way in ("steps", "diloco"):
        case = f"{task} {way}"
        found[f"{way}_bytes"] = ratio(to_target(plain, "bytes"), to_target(case, "bytes"))
        for what in ("steps", "seconds"):
            found[f"{way}_{what}"] = ratio(to_target(case, what), to_target(plain, what))
    found["outer"] = ratio(to_target(f"{task} steps", "bytes"), to_target(f"{task} diloco", "bytes"))
    return found


def _four_times(values: Values) -> Judgement:
    ours = (
        "To {target:%} one step between two averages takes {plain_bytes:B}. DiLoCo takes {diloco_bytes:x} fewer bytes, "
        "{diloco_steps:x} the gradient steps and {diloco_seconds:x} the time over LTE; as many local steps alone, "
        "{steps_bytes:x} fewer bytes, {steps_steps:x} the steps and {steps_seconds:x} the time."
    )
    if values["diloco_bytes"] < 4:
        return Judgement(Word.REFUTED, ours, "It does not save by that factor.")
    if values["outer"] <= 1:
        return Judgement(Word.REFINED, ours, "The local steps alone save as much: the outer momentum adds nothing.")
    return Judgement(Word.CONFIRMED, ours, "Local steps alone take {outer:x} its bytes.")


# --- training on meanwhile ---


def _lateness(task: str) -> dict[str, Number]:
    usual, overlapped = f"{task} calm", f"{task} calm overlapped"
    return {
        "target": Mean(usual, "target_accuracy"),
        "usual": to_target(usual, "seconds"),
        **{what: ratio(to_target(overlapped, what), to_target(usual, what)) for what in ("seconds", "bytes")},
    }


def _sooner(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["seconds"] < 1 else Word.REFUTED,
        "Without overlap {target:%} takes {usual:s} over LTE; with it {seconds:x} that, and {bytes:x} the bytes.",
        "An average that is applied one iteration later costs more iterations; it pays where waiting for it took "
        "longer than they do.",
    )


OUTER_STEPS = Experiment(
    "outer-steps",
    "Outer steps and overlap (ours)",
    f"{CROWD.peers} peers, exact semantics, until the target accuracy is reached, over LTE: one local step between two "
    "averages; four of the same size; four with an outer step of 1.0 and momentum 0.8 (DiLoCo); and four with an outer "
    "step of 0.7 and no momentum, as it is and overlapped. A second of computing is ten batches.",
    _cases,
    (
        *(
            Claim(
                f"diloco-{task}", OURS,
                "Four local steps between averages and an outer momentum (DiLoCo) reach the same accuracy with at "
                f"least 4× fewer bytes than one local step ({data}).",
                _prices(task), _four_times,
            )
            for task, data in DATA.items()
        ),
        *(
            Claim(
                f"overlap-{task}", OURS,
                f"Training on while the last update is averaged reaches the same accuracy sooner over LTE ({data}).",
                _lateness(task), _sooner,
            )
            for task, data in DATA.items()
        ),
    ),
    tuple(
        Figure(
            f"outer-steps-{task}", "accuracy-bytes", "local steps, outer steps and overlap",
            {f"{task} {way}": label for way, label in _LINES.items()},
        )
        for task in TASKS
    ),
)  # fmt: skip
