"""What is left of peers' updates as tensors and plain values, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from marfl.wire.error_feedback import ErrorFeedback, OnItsWay, Residual

NAME = "left."  # before the names of its tensors


def save_feedback(memories: Iterable[ErrorFeedback]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors by name, and a row for each peer; what several share is kept once."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def named(value: Tensor) -> str:
        if id(value) not in names:
            names[id(value)] = f"{NAME}{len(names)}"
            tensors[names[id(value)]] = value
        return names[id(value)]

    rows = [
        {
            "lost": memory.lost,
            "kept": [[at, record.hex(), lineage.hex(), named(value)] for at, record, lineage, value in memory.kept],
            "on_its_way": [[roster.hex(), at, named(value)] for roster, at, value in memory.on_its_way],
        }
        for memory in memories
    ]
    return tensors, rows


def load_feedback(row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ErrorFeedback:
    """One peer's, as `save_feedback` kept it; earlier versions kept float64."""
    kept = [
        Residual(at, bytes.fromhex(record), bytes.fromhex(lineage), tensors[name].to(torch.float32))
        for at, record, lineage, name in row["kept"]
    ]
    sent = [
        OnItsWay(bytes.fromhex(roster), at, tensors[name].to(torch.float32)) for roster, at, name in row["on_its_way"]
    ]
    return ErrorFeedback(kept, row["lost"], sent)
