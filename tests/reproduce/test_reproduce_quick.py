"""`marfl reproduce all`, whole: a page on which every claim has a verdict, and every number a run.

The runs are those of scale quick with fewer iterations and peers yet: nothing here depends on what is learnt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marfl.cli import main
from marfl.reproduce.cases import SCALES, Crowd
from marfl.reproduce.digest import LESSONS, NOT_YET
from marfl.reproduce.experiments import EXPERIMENTS
from stages.reproduction_page import SummaryOf, check_tables, check_verdicts

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Few iterations of everything, among few peers."""
    scale = SCALES["quick"]
    few = {"crowd": Crowd(8, 2), "noise": (0.1, 0.3, 0.7), "distilled": (1, 2)}
    brief = {"iterations": 2, "distill_iterations": 5, "target": 0.01}
    vision, text = (replace(bench, **few, **brief) for bench in scale.benches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "quick", replace(scale, vision=vision, text=text))
        yield


@pytest.fixture(scope="module")
def quick(short: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every experiment."""
    folder = tmp_path_factory.mktemp("quick")
    reproduce("all", folder)
    return folder


def reproduce(experiment: str, folder: Path) -> None:
    assert main(["reproduce", experiment, "--scale", "quick", "--out", str(folder), "--workers", "1"]) == 0


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "reproduction/results.json").read_text())
    return found


def on_disk(folder: Path) -> SummaryOf:
    """Summaries by key, straight from the run directories."""
    return lambda key: json.loads((next((folder / "runs").glob(f"*-{key}")) / "summary.json").read_text())


def test_every_claim_has_a_verdict_and_every_figure_is_drawn(quick: Path) -> None:
    verdicts = {claim["name"]: claim["verdict"] for claim in results(quick)["claims"]}
    assert list(verdicts) == [claim.name for each in EXPERIMENTS.values() for claim in each.claims]
    assert set(verdicts.values()) <= {"confirmed", "refined", "not shown here"}  # stand-ins refute nothing
    assert "not shown here" in verdicts.values()  # one seed
    drawn = {path.name for path in (quick / "reproduction").iterdir()}
    names = [figure.name for each in EXPERIMENTS.values() for figure in each.figures]
    assert {f"{name}.{kind}" for name in names for kind in ("svg", "png")} <= drawn
    page = (quick / "reproduction.md").read_text()
    assert all(f"(reproduction/{name}.svg)" in page for name in names)
    learned = (quick / "learned.md").read_text()
    assert all(f"(reproduction/{lesson.figure}.svg)" in learned for lesson in LESSONS)
    assert NOT_YET not in learned


def test_every_number_of_every_verdict_comes_from_the_summaries_of_its_runs(quick: Path) -> None:
    page = (quick / "reproduction.md").read_text()
    assert check_verdicts(page, results(quick), on_disk(quick)) == sum(len(e.claims) for e in EXPERIMENTS.values())


def test_every_row_of_a_table_is_what_the_run_directories_say(quick: Path) -> None:
    assert check_tables((quick / "reproduction.md").read_text(), results(quick), on_disk(quick)) > 100


@pytest.mark.usefixtures("short")
def test_one_deleted_run_is_all_that_is_computed_again(tmp_path: Path) -> None:
    reproduce("any-number", tmp_path)
    page = (tmp_path / "reproduction.md").read_text()
    victim = sorted((tmp_path / "runs").glob("synthetic-mar-100-*"))[0]
    shutil.rmtree(victim)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/seal.json")}
    assert before
    reproduce("any-number", tmp_path)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/seal.json")}
    assert after.keys() - before.keys() == {victim / "seal.json"}
    assert all(after[path] == when for path, when in before.items())
    assert (tmp_path / "reproduction.md").read_text() == page


@pytest.mark.skipif(CHROMIUM is None, reason="SKIPPED: install chromium to see whether the page opens in it")
def test_the_page_opens_in_chromium_without_errors_and_shows_every_figure(quick: Path, tmp_path: Path) -> None:
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}",
    ]
    command = [str(CHROMIUM), *flags, "--dump-dom", (quick / "index.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('src="data:image/svg+xml;base64,') == sum(len(e.figures) for e in EXPERIMENTS.values())
