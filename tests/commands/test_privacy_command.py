"""`marfl privacy`: the oracle values for a program, a table for a person, one line for bad input."""

from __future__ import annotations

import json

import pytest

from marfl import cli

PAPERS = ("--peers", "125", "--iterations", "30")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["privacy", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_json_holds_the_oracle_values_and_says_what_they_mean(capsys):
    code, out, err = run(capsys, "--noise-multiplier", "1", *PAPERS, "--json")
    shown = json.loads(out)
    assert (code, err) == (0, "")
    assert shown["epsilon_outsider"] == pytest.approx(28.3, rel=2e-3)
    assert shown["epsilon_insider"] == pytest.approx(2032, rel=2e-3)
    assert 28.3 < shown["epsilon_insider_masked"] < 29
    assert shown["delta"] == pytest.approx(125**-1.1)
    assert shown["noise_to_clip_ratio"] == pytest.approx(1.00322 * 1_199_882**0.5 / 125, rel=1e-4)  # z√P/n
    assert shown["adjacency"].startswith("zero-out")
    assert len(shown["assumptions"]) > 5


def test_a_budget_gives_the_noise_that_keeps_it(capsys):
    budget = ("--target-epsilon", "8", "--target-observer", "outsider")
    found = json.loads(run(capsys, *budget, *PAPERS, "--json")[1])
    assert found["epsilon_outsider"] == pytest.approx(8, rel=1e-3)
    assert found["epsilon_outsider"] <= 8
    again = json.loads(run(capsys, "--noise-multiplier", str(found["noise_multiplier"]), *PAPERS, "--json")[1])
    assert again == found


def test_an_infinite_epsilon_is_null_with_a_reason_beside_it(capsys):
    lonely = ("--peers", "2", "--iterations", "1", "--tolerated-loss", "0.5", "--indicator-noise", "1")
    shown = json.loads(run(capsys, "--noise-multiplier", "1", *lonely, "--json")[1])
    assert shown["epsilon_insider_masked"] is None
    kinds = ("", "_at_second_delta", "_replacing")
    assert shown["reasons"].keys() == {f"epsilon_insider_masked{kind}" for kind in kinds}
    assert shown["reasons"]["epsilon_insider_masked"].startswith("infinite: ")
    assert "∞" in run(capsys, "--noise-multiplier", "1", *lonely)[1]


def test_a_person_gets_a_line_for_every_observer(capsys):
    code, out, _ = run(capsys, "--noise-multiplier", "1", *PAPERS)
    assert code == 0
    for words in ("outsider          28.3", "insider           2,032", "insider_masked    28", "zero-out"):
        assert words in out


HOSPITALS = ("--unit", "record", "--records", "5000", "--batch", "64", "--peers", "16", "--iterations", "100")


def test_one_record_as_the_unit_and_what_colluders_take_away(capsys):
    shown, robbed = (
        json.loads(run(capsys, *HOSPITALS, "--noise-multiplier", "1", "--delta", "1e-6", *more, "--json")[1])
        for more in ((), ("--colluders", "7"))
    )
    assert shown["epsilon_outsider"] == pytest.approx(1.192, abs=2e-3)
    assert shown["epsilon_outsider_at_second_delta"] < shown["epsilon_outsider"] < shown["epsilon_outsider_replacing"]
    assert (shown["unit"], shown["sampling_rate"], shown["warnings"]) == ("record", 0.0128, [])
    assert shown["adjacency"].startswith("one record added or removed")
    assert shown["epsilon_outsider"] < robbed["epsilon_outsider"] < robbed["epsilon_insider"]
    assert shown["epsilon_insider"] == robbed["epsilon_insider"]


def test_the_noise_for_a_budget_of_records_keeps_it_also_with_colluders(capsys):
    budget = ("--target-epsilon", "2", "--target-observer", "insider_masked", "--delta", "1e-6", "--colluders", "5")
    found = json.loads(run(capsys, *HOSPITALS, *budget, "--json")[1])
    assert 1.99 < found["epsilon_insider_masked"] <= 2


def test_a_delta_that_says_little_is_warned_of(capsys):
    told = run(capsys, *PAPERS, "--noise-multiplier", "1", "--delta", "0.02")[1]
    assert "warning: delta = 0.02 is above 0.01" in told
    told = run(capsys, *HOSPITALS, "--noise-multiplier", "1", "--delta", "1e-4")[1]
    assert "warning: delta = 0.0001 is above 1 in 80,000: to give away one record whole" in " ".join(told.split())


WRONG = "Invalid value for"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--noise-multiplier and --target-epsilon: give exactly one of them"),
        (("--noise-multiplier", "1", "--target-epsilon", "8"), "--noise-multiplier and --target-epsilon: give exactly"),
        (("--noise-multiplier", "0"), f"{WRONG} '--noise-multiplier': must be a finite number, above 0, not '0'"),
        (("--noise-multiplier", "nan"), f"{WRONG} '--noise-multiplier': must be a finite number, above 0, not 'nan'"),
        (("--noise-multiplier", "2", "--indicator-noise", "1"), "indicator_noise = 1: must be a number above noise"),
        (("--noise-multiplier", "1", "--delta", "0"), f"{WRONG} '--delta': must be a number, above 0, below 0.5"),
        (("--noise-multiplier", "1", "--delta", "0.5"), f"{WRONG} '--delta': must be a number, above 0, below"),
        (("--noise-multiplier", "1", "--tolerated-loss", "1"), f"{WRONG} '--tolerated-loss': must be a number, at"),
        (("--noise-multiplier", "1", "--exchange", "post"), "Invalid value for '--exchange': must be one of"),
        (("--target-epsilon", "1", "--indicator-noise", "1"), "target_epsilon = 1 for the insider: needs noise_multi"),
        (("--noise-multiplier", "1", "--unit", "record"), "--unit record and --records: go together; batch / records"),
        (("--noise-multiplier", "1", "--records", "9"), "--unit record and --records: go together; batch / records"),
        (("--noise-multiplier", "1", "--colluders", "125"), "colluders = 125: must be at least 0 and below the 125"),
        (("--target-epsilon", "0"), "target_epsilon = 0: must be a number above 0"),
        (("--target-epsilon", "8", "--target-observer", "me"), "Invalid value for '--target-observer': must be one of"),
    ],
)
def test_wrong_questions_are_refused_in_one_line(capsys, arguments, said):
    code, out, err = run(capsys, *PAPERS, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"marfl: {said}")
    assert err.count("\n") == 1
