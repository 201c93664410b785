"""Does a verdict page say what summaries say? Worked out anew from the formulas in words, for pages of any scale."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from scipy.stats import t as student

from marfl.reproduce.numbers import Shown, Spread

SPECS = ("%", "B", "x", "pt", "pt2", "s", "n", "g")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]\d+)?")
Results = dict[str, Any]
SummaryOf = Callable[[str], dict[str, Any]]  # by the run's key


def check_verdicts(page: str, results: Results, summary_of: SummaryOf) -> int:
    """Every number of every verdict, with its interval; returns how many verdicts have any."""
    judged = 0
    for claim in results["claims"]:
        chapter = page.split(f'<a id="{claim["name"]}"></a>')[1].split("\n> ", 2)[1]
        assert f"- We measured: {claim['ours']}\n- Verdict: **{claim['verdict']}**. {claim['reason']}\n" in chapter
        if claim["verdict"] == "not run":
            continue
        numbers = {name: recomputed(claim, formula, summary_of) for name, formula in claim["formulas"].items()}
        assert claim["numbers"] == pytest.approx(numbers)
        halves = {name: numbers[name].half for name in claim["halves"]}
        assert claim["halves"] == pytest.approx(halves, rel=1e-3)
        allowed = shown(list(numbers.values())) | set(NUMBER.findall(claim["departs"]))
        for text in (claim["ours"], claim["reason"]):
            assert set(NUMBER.findall(text)) <= allowed, text
        judged += 1
    return judged


def recomputed(claim: dict[str, Any], formula: str, summary_of: SummaryOf) -> Spread:
    """A formula in words, worked out from summaries seed by seed: its mean, and half of its 95 % interval."""
    named = [keys for case, keys in claim["runs"].items() if re.search(rf" of {re.escape(case)}(?=\)|$)", formula)]
    count = max(map(len, named))
    values = [of_seed(claim, formula, summary_of, seed) for seed in range(count)]
    half = student.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0
    return Spread(statistics.fmean(values), float(half), count)


def of_seed(claim: dict[str, Any], formula: str, summary_of: SummaryOf, seed: int) -> float:
    terms = "|".join(sorted(map(re.escape, claim["runs"]), key=len, reverse=True))

    def term(found: re.Match[str]) -> str:
        keys = claim["runs"][found[2]]
        return repr(field(summary_of(keys[seed if len(keys) > 1 else 0]), found[1]))

    spelled = re.sub(rf"([\w.]+) of ({terms})(?=\)|$)", term, formula).replace("−", "-")
    assert re.fullmatch(r"[\d.e+\-/() ]+", spelled), spelled
    return float(eval(spelled))  # digits and signs alone: the line above has seen to it


def field(summary: dict[str, Any], path: str) -> float:
    value: Any = summary
    for part in path.split("."):
        value = value[part]
    return float(value)


def shown(values: list[Spread]) -> set[str]:
    """Every way the page may write these numbers, with their intervals."""
    return {token for value in values for spec in SPECS for token in NUMBER.findall(format(Shown(value), spec))}


def check_tables(page: str, results: Results, summary_of: SummaryOf) -> int:
    """Every row that tells of simulated runs; returns how many there are."""
    seeds_of = {(name, keys[0]): keys for cases in results["cases"].values() for name, keys in cases.items()}
    rows = re.findall(r"^\| ([^|]+) \| `([0-9a-f]{12})` \| (.*) \|$", page, re.MULTILINE)
    for name, key, rest in rows:
        found = [summary_of(each) for each in seeds_of[name, key]]
        seeds, peers, iterations, accuracy, sent, models, *_ = rest.split(" | ")
        assert int(seeds) == len(found)
        assert int(peers) == found[0]["peers"]
        accuracies = [summary["final_accuracy"] for summary in found]
        spread = f" ({Shown(min(accuracies)):%} … {Shown(max(accuracies)):%})" if len(found) > 1 else ""
        mean = {name: statistics.fmean(field(summary, name) for summary in found) for name in MEANS}
        assert accuracy == f"{Shown(mean['final_accuracy']):%}{spread}", name
        assert first_number(iterations) == first_number(f"{Shown(mean['iterations']):n}")
        assert first_number(sent) == first_number(f"{Shown(mean['bytes_total']):B}")
        assert models == f"{mean['bytes_per_peer_iteration'] / found[0]['model_bytes']:.3f}"
        assert all(summary["finished"] for summary in found)
    return len(rows)


def first_number(cell: str) -> str:
    return NUMBER.findall(cell)[0]


MEANS = ("final_accuracy", "iterations", "bytes_total", "bytes_per_peer_iteration")
