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


def test_every_number_of_the_committed_page_is_in_the_committed_summaries() -> None:
    results: dict[str, Any] = json.loads((ROOT / "docs/reproduction/results.json").read_text())
    page = (ROOT / "docs/reproduction.md").read_text()

    def summary_of(key: str) -> dict[str, Any]:
        found: dict[str, Any] = results["runs"][key]["summary"]
        return found

    assert check_verdicts(page, results, summary_of)
    assert check_tables(page, results, summary_of)


def test_every_result_of_the_readme_is_in_a_verdict_of_the_page() -> None:
    chapter = (ROOT / "README.md").read_text().split("## What the paper claims")[1].split("## ")[0]
    table = [line.split("|") for line in chapter.splitlines() if line.startswith("| ")][1:]
    cells = [cell for row in table for cell in row[3:5]]
    shown = [number for cell in cells for number in re.findall(r"\d[\d.]*(?: %|×| points)?", cell)]
    measured = re.findall(r"^- (?:We measured|Verdict): .*$", (ROOT / "docs/reproduction.md").read_text(), re.MULTILINE)
    assert len(shown) > 20
    assert [number for number in shown if number not in "\n".join(measured)] == []
    page = (ROOT / "docs/reproduction.md").read_text()
    counts = re.search(r"\*\*(\d+) claims: (\d+) confirmed, (\d+) refuted, (\d+) refined", page)
    assert counts is not None
    said = "Of {} claims {} are confirmed, {} refuted and {} refined".format(*counts.groups())
    assert said in " ".join(chapter.split())


def test_a_wrong_number_on_the_page_is_noticed() -> None:
    results: dict[str, Any] = json.loads((ROOT / "docs/reproduction/results.json").read_text())
    page = (ROOT / "docs/reproduction.md").read_text()
    run = next(run for key, run in results["runs"].items() if f"| `{key}` |" in page)
    run["summary"]["final_accuracy"] += 0.1
    with pytest.raises(AssertionError):
        check_tables(page, results, lambda key: results["runs"][key]["summary"])
