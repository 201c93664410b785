"""A peer's numbers for Prometheus, in its text format. They are those of the status page, and need no library here.

The format is version 0.0.4 of the exposition format; the tests read it with prometheus-client's own parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marfl.runs.rows import PeerRow

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "marfl_"
Sample = tuple[Mapping[str, str], float | None]  # labels, value


def metrics_text(status: Mapping[str, Any], here: int, newest: PeerRow | None) -> bytes:
    """All that is counted, with a line of help for each."""
    who = {"run": str(status["run"]), "peer": str(status["peer"]), "index": str(status["index"])}
    sent, received = dict(status["sent"]), dict(status["received"])
    lines = [
        *_family("info", "gauge", "Who this is, and what it does.", [({**who, "state": str(status["state"])}, 1.0)]),
        *_family("iteration", "gauge", "The last iteration that is over here.", [(who, status["iteration"])]),
        *_family("accuracy", "gauge", "Test accuracy when last tested, 0 to 1.", [(who, status["accuracy"])]),
        *_family("peers_here", "gauge", "Peers that say that they are here, this one included.", [(who, here)]),
        *_family("peers_known", "gauge", "Peers ever seen, this one included.", [(who, status["peers_seen"] + 1)]),
        *_family("sent_total", "counter", "Sent, by kind: bytes, messages and DHT operations.", _kinds(who, sent)),
        *_family("received_total", "counter", "Received, by kind.", _kinds(who, received)),
        *_family("refused_total", "counter", "What was not let in, by reason.", _kinds(who, status["refused"])),
    ]
    if newest is not None:
        lines += [
            *_family("averaged_peers", "gauge", "Peers in the newest average.", [(who, len(newest.present))]),
            *_family("missing_peers", "gauge", "Known peers that were not in it.", [(who, len(newest.missing))]),
            *_family("iteration_seconds", "gauge", "How long it took, with training.", [(who, newest.wall_seconds)]),
        ]
    return "".join(f"{line}\n" for line in lines).encode()


def _kinds(who: Mapping[str, str], counts: Mapping[str, Any]) -> list[Sample]:
    return [({**who, "kind": str(kind)}, float(count)) for kind, count in counts.items()]


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> list[str]:
    """One metric; nothing where it has no value yet."""
    lines = [f"{PREFIX}{name}{_labels(labels)} {float(value)!r}" for labels, value in samples if value is not None]
    head = [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
    return [*head, *lines] if lines else []


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
