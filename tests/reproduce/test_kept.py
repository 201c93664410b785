"""Runs that the repository keeps: another machine makes the page from them and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marfl.errors import InputError
from marfl.report.series import series_of
from marfl.reproduce import runner
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import calculated, key_of, simulated
from marfl.reproduce.kept import COLUMNS, KeptRuns

SETTINGS: dict[str, Any] = {"peers": 6, "group_size": 2, "iterations": 7, "test_every": 3, "engine": "fast", "batch": 8}
CASES = (
    simulated(SETTINGS, (0, 1), links="wifi"),
    simulated(SETTINGS, (0,), technique="arfl", churn__participation=0.5, churn__dropout=0.3),
    calculated("growth", small=2, large=4),
)
SOURCES = [source for case in CASES for source in case.sources]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    archive = Archive(tmp_path_factory.mktemp("here"))
    for bundle in runner.bundles(archive, SOURCES):
        runner.compute(archive, bundle, lambda seconds: None)
    return archive


@pytest.fixture
def there(here: Archive, tmp_path: Path) -> Archive:
    """Another machine, which has the file alone."""
    kept = KeptRuns(tmp_path / "runs.jsonl")
    kept.write(here.lines(SOURCES))
    return Archive(tmp_path / "empty", kept)


def test_another_machine_has_the_same_summaries_rows_and_lines(here: Archive, there: Archive) -> None:
    assert runner.bundles(there, SOURCES) == []  # nothing is run again
    for source in SOURCES:
        assert dict(there.summary(source) or {}) == dict(here.summary(source) or {})
    for case in CASES[:2]:
        for config in case.sources:
            mine, theirs = here.run(config), there.run(config)
            assert theirs.finished
            for row, other in zip(mine.rows, theirs.rows, strict=True):
                for name in (*COLUMNS, "iteration", "bytes_total"):
                    same = other[name] == row[name] if row[name] is None else other[name] == pytest.approx(row[name])
                    assert same, name
        ((one,), (two,)) = (series_of([archive.run(config) for config in case.sources]) for archive in (here, there))
        assert one.label == two.label


def test_what_is_kept_is_kept_on_and_what_is_new_is_added(here: Archive, there: Archive, tmp_path: Path) -> None:
    more = simulated(SETTINGS, (2,)).sources[0]
    (bundle,) = runner.bundles(there, [*SOURCES, more])
    runner.compute(there, bundle, lambda seconds: None)
    further = KeptRuns(tmp_path / "further.jsonl")
    further.write(there.lines([*SOURCES, more]))
    assert further.lines.keys() == {key_of(source) for source in [*SOURCES, more]}
    assert all(further.lines[key] == line for key, line in there.kept.lines.items())  # type: ignore[union-attr]


def test_a_replay_of_a_run_that_was_only_kept_trains_it_again(there: Archive) -> None:
    other = simulated(SETTINGS, (0,), technique="fedavg", links="wifi").sources[0]
    (bundle,) = runner.bundles(there, [other])
    runner.compute(there, bundle, lambda seconds: None)
    assert there.is_here(other)
    assert there.is_here(bundle.first)


def test_a_line_that_was_changed_by_hand_is_refused(there: Archive) -> None:
    kept = there.kept
    assert kept is not None
    kept.path.write_text(kept.path.read_text().replace('"peers":6', '"peers":7', 1))
    with pytest.raises(InputError, match="line 1: was changed after it was made"):
        there.summary(SOURCES[0])
