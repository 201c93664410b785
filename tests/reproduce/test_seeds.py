"""Which runs come first, how many seeds a claim is judged by, and a calculation beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marfl.reproduce import runner
from marfl.reproduce.archive import Archive
from marfl.reproduce.calculations import thinned_groups
from marfl.reproduce.cases import SCALES, simulated
from marfl.reproduce.claims import Claim, Experiment, Findings, Judgement, Word
from marfl.reproduce.numbers import above
from marfl.reproduce.publish import findings_of, results

CONFIRMED = Judgement(Word.CONFIRMED, "It is {gap:pt} above.", "So it is.")


def test_a_case_counts_from_its_first_seed_on_and_a_claim_compares_as_many_seeds_of_each(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    settings: dict[str, Any] = {"peers": 4, "group_size": 2, "iterations": 2, "engine": "fast"}
    cases = {name: simulated(settings, (0, 1, 2), batch=batch) for name, batch in (("one", 8), ("other", 16))}
    claim = Claim("c", "ours", "One is above the other.", {"gap": above("one", "other")}, lambda values: CONFIRMED)
    experiment = Experiment("e", "title", "about", lambda scale: cases, (claim,))

    def found() -> Findings:
        return findings_of(archive, SCALES["quick"], [experiment], {})[0]

    for sources, seeds, used in (
        (cases["one"].sources[1:2], {}, {}),  # the second before the first
        (cases["one"].sources[:1], {"one": 2}, {"one": 2}),
        (cases["other"].sources[:1], {"one": 2, "other": 1}, {"one": 1, "other": 1}),
    ):
        for bundle in runner.bundles(archive, sources):
            runner.compute(archive, bundle, lambda seconds: None)
        assert {name: len(done) for name, done in found().evidence.items()} == seeds
        assert {name: len(done) for name, done in found().used(claim).items()} == used
    assert found().sparse == ["one", "other"]
    assert found().verdicts[0][1].word is Word.CONFIRMED
    listed = results(SCALES["quick"], [found()])
    assert {name: len(keys) for name, keys in listed["claims"][0]["runs"].items()} == {"one": 1, "other": 1}
    assert {name: len(keys) for name, keys in listed["cases"]["e"].items()} == {"one": 2, "other": 1}


def test_first_what_is_soon_done_seed_by_seed_then_what_takes_long_case_by_case() -> None:
    settings: dict[str, Any] = {"peers": 4, "group_size": 2, "engine": "fast"}
    lasting, first, second, longer, short = (
        simulated(settings, (0, 1), iterations=count) for count in (10**6, 20_000, 40_000, 2 * 10**6, 10)
    )
    other = simulated(settings, (0, 1), iterations=20)
    assert list(runner.in_order([lasting, first, second, longer, short, other])) == [
        short.sources[0], other.sources[0], short.sources[1], other.sources[1],
        *first.sources, *second.sources, *lasting.sources, *longer.sources,
    ]  # fmt: skip


def test_groups_with_holes_send_less_and_mix_worse_than_full_ones() -> None:
    everybody = thinned_groups(27, 3, participation=1.0, dropout=0.0)
    assert everybody == {"filled": 26 / 6, "holes": 26 / 6, "variance_filled": 0.0, "variance_holes": 0.0}
    thinned = thinned_groups(125, 5, participation=0.5, dropout=0.2)
    assert thinned["holes"] > thinned["filled"] > 3
    assert thinned["variance_holes"] > thinned["variance_filled"] > 0
