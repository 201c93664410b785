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
    assert shown["reasons"].keys() == {"epsilon_insider_masked"}
    assert shown["reasons"]["epsilon_insider_masked"].startswith("infinite: ")
    assert "∞" in run(capsys, "--noise-multiplier", "1", *lonely)[1]


def test_a_person_gets_a_line_for_every_observer(capsys):
    code, out, _ = run(capsys, "--noise-multiplier", "1", *PAPERS)
    assert code == 0
    for words in ("outsider          28.3", "insider           2,032", "insider_masked    28", "zero-out"):
        assert words in out


WRONG = "Invalid value for"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--noise-multiplier and --target-epsilon: give exactly one of them"),
        (("--noise-multiplier", "1", "--target-epsilon", "8"), "--noise-multiplier and --target-epsilon: give exactly"),
        (("--noise-multiplier", "0"), f"{WRONG} '--noise-multiplier': must be a finite number, above 0, not '0'"),
        (("--noise-multiplier", "nan"), f"{WRONG} '--noise-multiplier': must be a finite number, above 0, not 'nan'"),
        (("--noise-multiplier", "2", "--indicator-noise", "1"), "indicator_noise = 1: must be a number above noise"),
        (("--noise-multiplier", "1", "--delta", "0"), f"{WRONG} '--delta': must be a number, above 0, below 1, not"),
        (("--noise-multiplier", "1", "--delta", "1"), f"{WRONG} '--delta': must be a number, above 0, below 1, not"),
        (("--noise-multiplier", "1", "--tolerated-loss", "1"), f"{WRONG} '--tolerated-loss': must be a number, at"),
        (("--noise-multiplier", "1", "--exchange", "post"), "Invalid value for '--exchange': must be one of"),
        (("--target-epsilon", "1", "--indicator-noise", "1"), "target_epsilon = 1 for the insider: needs noise_multi"),
        (("--target-epsilon", "0"), "target_epsilon = 0: must be a number above 0"),
        (("--target-epsilon", "8", "--target-observer", "me"), "Invalid value for '--target-observer': must be one of"),
    ],
)
def test_wrong_questions_are_refused_in_one_line(capsys, arguments, said):
    code, out, err = run(capsys, *PAPERS, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"marfl: {said}")
    assert err.count("\n") == 1
