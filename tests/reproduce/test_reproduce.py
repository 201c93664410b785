"""`marfl reproduce`: every claim judged by runs, every number from a summary, nothing computed twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from marfl.cli import main
from marfl.errors import BrokenPromise
from marfl.report.series import LINE_STYLES, LOOKS, OURS, look_of
from marfl.reproduce import runner
from marfl.reproduce.archive import Archive, alone
from marfl.reproduce.cases import SCALES, calculated, key_of, simulated
from marfl.reproduce.claims import Judgement, Word
from marfl.reproduce.digest import BEGIN, END
from marfl.reproduce.experiments import EXPERIMENTS
from marfl.reproduce.publish import told_apart


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cheapest experiment, by one process."""
    folder = tmp_path_factory.mktemp("mixed")
    assert main(["reproduce", "mixing", "--out", str(folder), "--workers", "1"]) == 0
    return folder


@pytest.fixture
def mixing(mixed: Path, tmp_path: Path) -> Path:
    """The same, to be tampered with."""
    return Path(shutil.copytree(mixed, tmp_path / "out"))


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "reproduction/results.json").read_text())
    return found


@pytest.mark.parametrize("file", ["summary.json", "seal.json"])
def test_a_run_that_was_edited_by_hand_is_refused_and_the_page_stays(
    mixing: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    page = (mixing / "reproduction.md").read_bytes()
    edited = next((mixing / "runs").glob("mixing-law-*")) / file
    edited.write_text(re.sub(r"0\.1|[0-9a-f]{12}", "0.2", edited.read_text(), count=1))
    capsys.readouterr()
    assert main(["reproduce", "mixing", "--out", str(mixing)]) == 2
    assert "was changed after it was made" in capsys.readouterr().err
    assert (mixing / "reproduction.md").read_bytes() == page


def test_a_run_that_was_cut_short_does_not_count_and_is_computed_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    case = simulated({"peers": 4, "group_size": 2, "iterations": 3, "engine": "fast"}, (0,))
    (source,) = case.sources
    (bundle,) = runner.bundles(archive, [source])
    runner.compute(archive, bundle, lambda seconds: None)
    whole = archive.summary(source)
    (archive.path(source) / "seal.json").unlink()  # as a kill before the end leaves it
    assert archive.summary(source) is None
    (again,) = runner.bundles(archive, [source])
    runner.compute(archive, again, lambda seconds: None)
    found = archive.summary(source)
    assert whole is not None
    assert found is not None
    assert found["model_hash"] == whole["model_hash"]


def test_a_run_under_another_default_is_refused(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    (source,) = simulated({"peers": 4, "group_size": 2, "iterations": 2, "engine": "fast"}, (0,)).sources
    (bundle,) = runner.bundles(archive, [source])
    runner.compute(archive, bundle, lambda seconds: None)
    config = archive.path(source) / "config.toml"
    config.write_text(config.read_text().replace("decay = 0.9", "decay = 0.8"))
    archive.seal(source)
    with pytest.raises(Exception, match=r"was run with another optimizer\.decay"):
        archive.summary(source)


def test_worker_processes_compute_what_one_process_computes(mixed: Path, tmp_path: Path) -> None:
    assert main(["reproduce", "mixing", "--out", str(tmp_path), "--workers", "2"]) == 0
    assert results(tmp_path) == results(mixed)


def endless(archive: Archive) -> list[runner.Bundle]:
    """Two trainings that take hours."""
    settings = {"peers": 4, "group_size": 2, "iterations": 1_000_000, "engine": "fast"}
    return runner.bundles(archive, simulated(settings, (0, 1)).sources)


def test_a_worker_process_that_dies_is_one_line_and_takes_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly(*arguments: Any) -> Any:
        next(each for each in multiprocessing.active_children() if each not in before).kill()
        return waited(*arguments)

    before, waited = multiprocessing.active_children(), runner.wait
    monkeypatch.setattr(runner, "wait", deadly)
    with pytest.raises(BrokenPromise, match="a worker process died; with little memory use fewer --workers"):
        list(runner.run_all(Archive(tmp_path), endless(Archive(tmp_path)), 2))
    assert multiprocessing.active_children() == before


def test_when_time_is_up_worker_processes_end_at_once(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    news = list(runner.run_all(Archive(tmp_path), endless(Archive(tmp_path)), 2, time.monotonic() + 1))
    assert not any(isinstance(each, runner.Ended) for each in news)
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize("workers", ["1", "2"])
def test_without_time_the_page_says_what_was_not_run(tmp_path: Path, workers: str) -> None:
    assert main(["reproduce", "mixing", "--minutes", "0", "--out", str(tmp_path), "--workers", workers]) == 0
    claims = results(tmp_path)["claims"]
    assert {claim["verdict"] for claim in claims} == {"not run"}
    assert "Not run: law." in (tmp_path / "reproduction.md").read_text()


def test_asking_for_one_experiment_takes_no_other_from_the_page(mixing: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    for name in ("mixing", "control"):
        arguments = ["reproduce", name, "--out", str(mixing), "--docs", str(docs), "--workers", "1"]
        assert main(arguments) == 0
    page = (docs / "reproduction.md").read_text()
    judged = {claim["name"] for claim in json.loads((docs / "reproduction/results.json").read_text())["claims"]}
    assert judged == {"mixing-law", "keys-mix", "one-group", "control"}
    assert "privacy (nothing)" in page
    assert "mixing (nothing)" not in page


def test_one_claim_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "mixing-law", "--out", str(tmp_path), "--workers", "1"]) == 0
    assert capsys.readouterr().out.startswith("refined        mixing-law  ")
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "runs").iterdir()] == ["mixing-law"]
    words = {claim["name"]: claim["verdict"] for claim in results(tmp_path)["claims"]}
    assert words == {"mixing-law": "refined", "keys-mix": "not run", "one-group": "not run"}


def test_the_readme_is_renewed_between_its_marks_and_one_without_is_left_alone(tmp_path: Path) -> None:
    readme, docs = tmp_path / "README.md", tmp_path / "docs"
    arguments = ["reproduce", "mixing", "--out", str(tmp_path / "out"), "--docs", str(docs), "--minutes", "0"]
    for before in ("no marks", f"above\n{BEGIN}\nold\n{END}\nbelow\n"):
        readme.write_text(before)
        assert main(arguments) == 0
        now = readme.read_text()
        assert (now == before) == (BEGIN not in before)
    assert now.startswith(f"above\n{BEGIN}\nOf ")
    assert now.endswith(f"{END}\nbelow\n")
    assert "old" not in now
    readme.write_text(f"{BEGIN}\nno end")
    assert main(arguments) == 2
    assert readme.read_text() == f"{BEGIN}\nno end"


def test_a_second_process_on_the_same_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reproduce", "mixing", "--out", str(tmp_path / "out"), "--minutes", "0"]
    with alone(tmp_path / "out"):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert "another process (pid" in said
        assert said.count("\n") == 1
        assert not (tmp_path / "out/index.html").exists()
    assert main(arguments) == 0


def test_ctrl_c_leaves_a_page_of_what_is_finished_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(archive: Archive, bundle: runner.Bundle, report: runner.OnProgress) -> None:
        if "lost" in archive.path(bundle.first).name:
            raise KeyboardInterrupt
        whole(archive, bundle, report)

    whole = runner.compute
    monkeypatch.setattr(runner, "compute", interrupted)
    arguments = ["reproduce", "mixing", "--out", str(tmp_path), "--workers", "1"]
    assert main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    words = {claim["name"]: claim["verdict"] for claim in results(tmp_path)["claims"]}
    assert words == {"mixing-law": "refined", "keys-mix": "confirmed", "one-group": "not run"}
    monkeypatch.setattr(runner, "compute", whole)
    assert main(arguments) == 0
    assert "not run" not in {claim["verdict"] for claim in results(tmp_path)["claims"]}


def test_what_cannot_be_run_is_on_the_page_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARFL_DATA", raising=False)
    case = simulated({"task": "mnist", "peers": 4, "group_size": 2, "iterations": 1, "engine": "fast"}, (0,))
    (event,) = runner.run_all(Archive(tmp_path), runner.bundles(Archive(tmp_path), case.sources), 1)
    assert isinstance(event, runner.Ended)
    assert "MARFL_DATA is not set" in (event.problem or "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["comunication"], "did you mean communication?"),
        (["all", "--scale", "huge"], "must be one of quick, laptop, paper"),
        (["all", "--workers", "-1"], "must be a whole number, at least 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_list_names_every_experiment_with_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "list", "--scale", "laptop", "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(EXPERIMENTS)
    assert all(row["runs"] > row["finished"] == 0 for row in rows)
    assert main(["reproduce", "list"]) == 0
    assert "CPU minutes left" in capsys.readouterr().out


@pytest.mark.parametrize("scale", SCALES)
def test_every_claim_and_figure_names_cases_that_exist(scale: str) -> None:
    for experiment in EXPERIMENTS.values():
        cases = experiment.cases(SCALES[scale])
        for claim in experiment.claims:
            assert set(claim.needs()) <= cases.keys()
        for figure in experiment.figures:
            assert set(figure.cases) <= cases.keys()


def test_a_number_that_no_run_gave_cannot_be_written_into_a_verdict() -> None:
    with pytest.raises(ValueError, match="comes from no run"):
        Judgement(Word.CONFIRMED, "It is 10.3× less.", "So it is.")


def test_a_key_names_what_decides_and_nothing_else() -> None:
    settings: dict[str, Any] = {"peers": 8, "iterations": 3}
    one, two = (simulated(settings, (0,), **more).sources[0] for more in ({"workers": 1}, {"workers": 2}))
    other = simulated(settings, (1,)).sources[0]
    assert key_of(one) == key_of(two) != key_of(other)
    assert key_of(calculated("growth", small=2, large=4).sources[0]) != key_of(
        calculated("growth", small=2, large=8).sources[0]
    )


def test_lines_of_one_look_differ_in_colour_and_those_of_two_in_dashes() -> None:
    """Five runs of one technique can be told apart; where techniques stand side by side, each keeps its colour."""
    alike = told_apart([OURS] * 5)
    assert alike[0] == (OURS, (0, None))
    assert len({look.colour for look, _ in alike}) == len({look.marker for look, _ in alike}) == 5
    assert len({dashes for _, dashes in alike}) == 5
    both = told_apart([look_of("mar"), OURS, look_of("mar")])
    assert [look.colour for look, _ in both] == [LOOKS["mar"].colour, OURS.colour, LOOKS["mar"].colour]
    assert [dashes for _, dashes in both] == [LINE_STYLES[0], LINE_STYLES[0], LINE_STYLES[1]]


DIRECTOR = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from marfl.reproduce import runner

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, runner._start_worker, (context.Array("d", 1, lock=False),))
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600).result()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system cannot wait for processes of others")
def test_workers_end_with_the_process_that_directs_them(tmp_path: Path) -> None:
    """A killed `marfl reproduce` leaves nobody behind that computes for nobody, in directories that others want."""
    (tmp_path / "director.py").write_text(DIRECTOR)
    with subprocess.Popen([sys.executable, tmp_path / "director.py"], stdout=subprocess.PIPE, text=True) as director:
        assert director.stdout is not None
        worker = os.pidfd_open(int(director.stdout.readline()))
        director.kill()
    ended, _, _ = select.select([worker], [], [], 30)
    os.close(worker)
    assert ended
