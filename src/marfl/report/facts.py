"""What a table says about a run: from its summary, or from its rows as far as it got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marfl.errors import InputError
from marfl.runs import BYTE_FIELDS, Run


@dataclass(frozen=True)
class Facts:
    """One run in figures; None where it does not say."""

    run: str
    technique: str
    semantics: str | None
    exchange: str | None
    plan: str | None
    task: str | None
    peers: int | None
    seed: int | None
    iterations: int  # done
    final_accuracy: float | None
    best_accuracy: float | None
    bytes_total: int
    models_per_peer_iteration: float | None  # bytes sent, in model sizes S
    disagreement: float | None
    model_hash: str | None
    virtual_seconds: float | None
    wall_seconds: float | None
    engine: str | None
    engine_reason: str | None  # which way it took, and why
    findings: dict[str, int]  # what the rows' checks found, the most frequent first: in how many iterations
    state: str  # finished, or unfinished and why
    bytes_by_kind: dict[str, int]

    @property
    def bytes_per_iteration(self) -> float:
        """Bytes of all peers in one iteration, on average."""
        return self.bytes_total / max(1, self.iterations)


def facts_of(run: Run, name: str) -> Facts:
    """Gather the facts of a run, to be called `name`; one that names no technique is refused."""
    summary: Mapping[str, Any] = run.summary or {}
    technique = _text(run, "technique")
    if technique is None:
        raise InputError(f"{run.path / 'config.toml'}: names no technique; restore it or repeat the run")
    accuracies = [row["test_accuracy"] for row in run.rows if row["test_accuracy"] is not None]
    last = run.rows[-1] if run.rows else {}
    grouped = technique == "mar"  # a group's exchange and plan mean nothing to the others
    return Facts(
        run=name,
        technique=technique,
        semantics=_text(run, "semantics"),
        exchange=_text(run, "exchange") if grouped else None,
        plan=_text(run, "plan") if grouped else None,
        task=_text(run, "task"),
        peers=_whole(run, "peers"),
        seed=_whole(run, "seed"),
        iterations=len(run.rows),
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        bytes_total=last.get("bytes_total", 0),
        models_per_peer_iteration=_models(summary),
        disagreement=last.get("disagreement"),
        model_hash=last.get("model_hash"),
        virtual_seconds=_total(run, "virtual_seconds"),
        wall_seconds=summary.get("wall_seconds", _total(run, "wall_seconds")),
        engine=summary.get("engine"),
        engine_reason=summary.get("engine_reason"),
        findings=_findings(run),
        state=_state(run),
        bytes_by_kind={name.removeprefix("bytes_"): sum(row.get(name, 0) for row in run.rows) for name in BYTE_FIELDS},
    )


def _findings(run: Run) -> dict[str, int]:
    counts = Counter(str(finding) for row in run.rows for finding in row.get("checks") or ())
    return dict(counts.most_common())


def _text(run: Run, name: str) -> str | None:
    value = run.config.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{run.path / 'config.toml'}: {name} is {value!r}, not text; restore it or repeat the run")
    return value


def _whole(run: Run, name: str) -> int | None:
    value = run.config.get(name)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise InputError(f"{run.path / 'config.toml'}: {name} is {value!r}, not a count; restore it or repeat the run")
    return value


def _models(summary: Any) -> float | None:
    sent, size = summary.get("bytes_per_peer_iteration"), summary.get("model_bytes")
    return sent / size if sent is not None and size else None


def _total(run: Run, field: str) -> float | None:
    """The sum over the rows that say, or None when none does."""
    values = [row[field] for row in run.rows if row[field] is not None]
    return sum(values) if values else None


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    reason = run.summary.stopped_because if run.summary else None
    return f"unfinished: {reason}" if reason else "unfinished"
