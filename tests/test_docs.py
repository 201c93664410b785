"""The documentation: what follows from the code is fresh, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import SCALES
from marfl.reproduce.digest import BEGIN, END, learned_html, learned_page, lessons, readme_table
from marfl.reproduce.experiments import EXPERIMENTS
from marfl.reproduce.publish import findings_of, kept_in
from stages.reproduction_page import check_tables, check_verdicts

ROOT = Path(__file__).parent.parent


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_references_are_what_the_code_says() -> None:
    assert reference().stale() == [], "run make docs"


def test_a_changed_reference_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = reference()
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    assert "docs/cli.md" in module.stale()
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert module.main() == 0
    assert module.stale() == []
    (tmp_path / "docs/config.md").write_text("other")
    assert module.stale() == ["docs/config.md"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/reproduction/index.html").is_file()


def test_every_test_that_a_page_names_is_there() -> None:
    """A reader who looks for what plays an attack must find it."""
    named = {
        (page.name, *found)
        for page in (ROOT / "docs").glob("*.md")
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 50
    for page, file, test in sorted(named):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{page}: {file}::{test}"


def committed() -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
    """The page of verdicts, what it says for a program, and the summaries of the runs that are kept, by key."""
    results: dict[str, Any] = json.loads((ROOT / "docs/reproduction/results.json").read_text())
    lines = kept_in(ROOT / "docs").lines
    return (ROOT / "docs/reproduction.md").read_text(), results, {key: line["summary"] for key, line in lines.items()}


def test_every_number_of_the_committed_page_is_in_the_committed_summaries() -> None:
    page, results, summaries = committed()
    assert check_verdicts(page, results, summaries.__getitem__)
    assert check_tables(page, results, summaries.__getitem__)


def test_a_wrong_number_on_the_page_is_noticed() -> None:
    page, results, summaries = committed()
    key = next(key for key in summaries if f"| `{key}` |" in page)
    wrong = summaries | {key: {**summaries[key], "final_accuracy": summaries[key]["final_accuracy"] + 0.1}}
    with pytest.raises(AssertionError):
        check_tables(page, results, wrong.__getitem__)


def test_the_readme_and_what_we_learned_follow_from_the_runs_that_are_kept(tmp_path: Path) -> None:
    scale = SCALES[committed()[1]["scale"]]
    findings = findings_of(Archive(tmp_path, kept_in(ROOT / "docs")), scale, list(EXPERIMENTS.values()), {})
    readme = (ROOT / "README.md").read_text()
    again = f"marfl reproduce all --scale {scale.name} --minutes 0 --docs docs"
    assert f"{BEGIN}\n{readme_table(findings)}\n{END}" in readme, again
    captions = {path.stem: "" for path in (ROOT / "docs/reproduction").glob("*.svg")}
    told = lessons(findings, captions)
    assert (ROOT / "docs/learned.md").read_text() == learned_page(told), again
    assert (ROOT / "docs/learned.html").read_text() == learned_html(told, scale), again
