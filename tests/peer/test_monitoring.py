"""What monitors read: numbers in Prometheus' format, and logs as lines or as JSON."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from marfl.errors import InputError
from marfl.peer.logs import log_to
from marfl.peer.prometheus import metrics_text
from marfl.runs.rows import ROW_FIELDS, parse_peer_row

STATUS: dict[str, Any] = {
    "run": 'demo "x"\\\n', "peer": "12D3", "index": 2, "state": "training", "iteration": 7, "accuracy": None,
    "peers_seen": 3, "sent": {"payload": 100, "control": 10, "dht": 3}, "received": {"payload": 90},
    "refused": {"not entitled": 2},
}  # fmt: skip


def newest() -> Any:
    row = {name: None if "or null" in kind else 0 for name, kind in ROW_FIELDS.items()}
    own = {"status": "committed", "present": ["a", "b"], "missing": {"c": "left"}, "sent": {}, "received": {}}
    return parse_peer_row(row | own | {"iteration": 7, "wall_seconds": 1.5, "checks": []})


def test_prometheus_own_parser_reads_the_numbers():
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed: not tested")
    families = {family.name: family for family in parser.text_string_to_metric_families(
        metrics_text(STATUS, 3, newest()).decode())}  # fmt: skip
    assert families["marfl_iteration"].samples[0].value == 7
    assert families["marfl_iteration"].samples[0].labels == {"run": 'demo "x"\\\n', "peer": "12D3", "index": "2"}
    sent = {sample.labels["kind"]: sample.value for sample in families["marfl_sent"].samples}
    assert sent == {"payload": 100, "control": 10, "dht": 3}
    assert families["marfl_sent"].type == "counter"
    assert families["marfl_peers_known"].samples[0].value == 4
    assert families["marfl_averaged_peers"].samples[0].value == 2
    assert families["marfl_missing_peers"].samples[0].value == 1
    assert "marfl_accuracy" not in families, "it was not tested yet"


def test_a_peer_without_an_iteration_has_numbers_too():
    text = metrics_text(STATUS | {"accuracy": 0.5}, 1, None).decode()
    assert "marfl_accuracy{" in text
    assert "marfl_averaged_peers" not in text
    assert all(line.startswith("# ") or re.fullmatch(r"marfl_\w+\{.*\} [\d.e+]+", line) for line in text.splitlines())


@pytest.mark.parametrize("kind", ["text", "json"])
def test_logs_have_a_date_and_a_level_as_lines_or_as_json(tmp_path: Path, kind: str, capsys):
    end = log_to(tmp_path / "log", kind, {"run": "demo", "index": 1})
    logging.getLogger("marfl.peer").info("iteration %d: done", 3)
    logging.getLogger("marfl.net").warning("it is late")
    end()
    logging.getLogger("marfl.peer").info("after the end")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    if kind == "text":
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    iteration 3: done", lines[0])
        assert lines[1].endswith("WARNING it is late")
        return
    first, second = map(json.loads, lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info", "logger": "marfl.peer", "run": "demo", "index": 1, "message": "iteration 3: done",
    }  # fmt: skip
    assert second["level"] == "warning"


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written"):
        log_to(tmp_path / "no" / "log", "text", {})
