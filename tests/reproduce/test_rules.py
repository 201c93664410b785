"""Verdicts by intervals: what one seed, wide intervals or other settings than the paper's allow one to say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy.stats import t as student

from marfl.reproduce.cases import Calculation, departures, simulated
from marfl.reproduce.claims import OURS, Claim, Judgement, Values, Word, ruled
from marfl.reproduce.numbers import STUDENT, Mean, Shown, Spread, above, ratio, spread, spread_of, times

CNN: dict[str, Any] = {"task": "mnist", "task_options": {"dropout": False}}


def judge(values: Values) -> Judgement:
    return Judgement(Word.CONFIRMED if values["x"] > 2 else Word.REFUTED, "It is {x:x}.", "So it is.")


CLAIM = Claim("c", "Fig. 1", "It is more than twice.", {"x": times("one", "other")}, judge)


def runs(*sent: float) -> list[dict[str, Any]]:
    return [{"seed": seed, "bytes_total": count, "target_accuracy": 0.5} for seed, count in enumerate(sent)]


@pytest.mark.parametrize(
    ("one", "departs", "word", "says"),
    [
        ((30, 31, 32), "", Word.CONFIRMED, "So it is."),
        ((15, 16, 17), "", Word.REFUTED, "So it is."),
        ((15, 16, 17), "MiniLM", Word.NOT_SHOWN, "not the paper's own settings (MiniLM)"),
        ((30, 31, 32), "MiniLM", Word.CONFIRMED, "So it is."),
        ((18, 24, 30), "", Word.NOT_SHOWN, "The intervals leave it open. By the mean alone it would be confirmed"),
        ((15, 16), "", Word.NOT_SHOWN, "The intervals leave it open."),  # two seeds: t is 12.7
        ((15.0, 15.001), "", Word.NOT_SHOWN, "A refutation needs three seeds."),
        ((30,), "", Word.NOT_SHOWN, "One seed tells nothing of the spread."),
        ((15, 15, 15), "", Word.REFUTED, "So it is."),
    ],
)
def test_a_verdict_needs_an_interval_and_a_refutation_the_papers_settings(
    one: tuple[float, ...], departs: str, word: Word, says: str
) -> None:
    evidence = {"one": runs(*one), "other": runs(*(10.0 for _ in one))}
    verdict = CLAIM.verdict(evidence, departs)
    assert verdict.word is word
    assert says in verdict.reason


def test_a_claim_of_our_own_can_be_refuted_on_any_data() -> None:
    claim = Claim("c", OURS, "It is more than twice.", CLAIM.numbers, judge)
    assert claim.verdict({"one": runs(15, 16, 17), "other": runs(10, 10, 10)}, "digits").word is Word.REFUTED


def test_what_follows_from_the_settings_needs_no_second_seed() -> None:
    settled = {name: [{"seed": 0, "bytes_total": sent}] for name, sent in (("one", 30), ("other", 10))}
    assert CLAIM.verdict(settled).word is Word.CONFIRMED
    drawn = {name: [{**found[0], "by_lot": True}] for name, found in settled.items()}
    assert CLAIM.verdict(drawn).word is Word.NOT_SHOWN
    trained = {name: [{"seed": 0, "final_accuracy": 0.5}] for name in ("one", "other")}
    found = spread(above("one", "other"), trained)
    assert found is not None
    assert not found.known


def test_a_number_is_paired_by_seed() -> None:
    evidence = {"one": runs(10, 20, 40), "other": runs(5, 10, 20), "sum": [{"measured": 2.0}]}
    paired = spread(times("one", "other"), evidence)
    assert paired is not None
    assert (paired, paired.half) == (2.0, 0.0)  # though each by itself differs a lot
    found = spread(ratio(Mean("one", "bytes_total"), Mean("sum", "measured")), evidence)
    assert found == pytest.approx(35 / 3)
    assert found is not None
    assert found.half == pytest.approx(student.ppf(0.975, 2) * 7.6376 / math.sqrt(3), rel=1e-3)


def test_the_table_of_student_is_right() -> None:
    assert list(STUDENT) == pytest.approx([student.ppf(0.975, seeds - 1) for seeds in range(2, 11)], abs=1e-3)


def test_a_verdict_that_turns_on_two_numbers_together_is_asked_at_all_corners() -> None:
    def either(values: Values) -> Judgement:
        return Judgement(Word.CONFIRMED if max(values["a"], values["b"]) > 2 else Word.REFUTED, "", "")

    near = {"a": Spread(2.1, 0.2, 3), "b": Spread(2.1, 0.2, 3), "shown": Spread(7.0, math.inf)}
    assert ruled(either, near)[1] == "The intervals leave it open."  # neither alone turns it
    assert ruled(either, near | {"b": Spread(2.3, 0.2, 3)})[1] == ""
    assert ruled(lambda values: either({"a": max(values.values()), "b": 0.0}), near)[1].startswith("One seed")


def test_a_number_is_shown_with_its_interval_in_the_same_unit() -> None:
    assert f"{Shown(Spread(0.613, 0.002, 3)):%}" == "61.3 ± 0.2 %"
    assert f"{Shown(Spread(122.6e9, 3.04e9, 3)):B}" == "122.6 ± 3.0 GB"
    assert f"{Shown(Spread(2.93, 0.4, 3)):x}" == "2.9 ± 0.4×"
    assert f"{Shown(Spread(4.21, 0.0123, 3)):x}" == "4.2 ± 0.01×"  # never ± 0.0
    assert f"{Shown(Spread(7300.0, 360.0, 3)):s}" == "2.0 ± 0.1 h"
    assert f"{Shown(Spread(0.613, math.inf)):%}" == "61.3 %"
    assert spread_of([0.5, 0.5, 0.5], settled=False).ends == (0.5,)


@pytest.mark.parametrize(
    ("settings", "differs"),
    [
        (CNN | {"peers": 125, "batch": 64}, []),
        (CNN | {"peers": 64, "local_batches": 2, "global_batch": 4000}, []),
        (CNN | {"peers": 16, "local_batches": 5, "batch": 100}, []),
        (CNN | {"peers": 64, "batch": 64}, ["4,096 rows in an iteration"]),
        ({"task": "mnist", "peers": 125, "batch": 64}, ["dropout in the network"]),
        ({"task": "20ng", "peers": 125, "batch": 16}, []),
        (
            {"task": "20ng", "peers": 125, "batch": 16, "task_options": {"encoder": "all-MiniLM-L6-v2-fp16"}},
            ["all-MiniLM-L6-v2-fp16 instead of distilbert-base-uncased"],
        ),
        (CNN | {"batch": 64, "peers": 125, "distill.iterations": 8}, ["1 batches in a round of MKD"]),
        (CNN | {"batch": 64, "peers": 125, "optimizer.learning_rate": 0.2}, ["another optimizer"]),
        ({"task": "digits"}, ["digits instead of its data"]),
    ],
)
def test_what_departs_from_the_papers_settings_is_named(settings: dict[str, Any], differs: list[str]) -> None:
    assert list(departures(simulated(settings, (0,)).sources[0])) == differs
    assert list(departures(Calculation("growth"))) == []
