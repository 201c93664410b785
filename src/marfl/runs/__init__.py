"""Run directories: what a run leaves on the disk, whoever ran it, and how to read it again.

    config.toml              the resolved settings
    metrics.jsonl            one `Row` for each iteration
    summary.json             what came out (`Summary`); missing while the run is under way or when it was killed
    checkpoint.safetensors   the newest complete state to resume from
    split.json               how many samples of each label each peer holds
    events/                  the rows once more, for TensorBoard
    .lock                    held by the one process that writes

`RunDir` writes, `open_run` reads; neither waits for torch before there is a checkpoint to write or read.
"""

from marfl.runs.config_file import NOT_DECISIVE, PROLONGS, config_hash, flattened, state_hash
from marfl.runs.reader import Run, Split, find_runs, holds_run, open_run
from marfl.runs.rows import BYTE_FIELDS, ROW_FIELDS, SUMMARY_FIELDS, Row, Summary
from marfl.runs.writer import RunDir

__all__ = [
    "BYTE_FIELDS",
    "NOT_DECISIVE",
    "PROLONGS",
    "ROW_FIELDS",
    "SUMMARY_FIELDS",
    "Row",
    "Run",
    "RunDir",
    "Split",
    "Summary",
    "config_hash",
    "find_runs",
    "flattened",
    "holds_run",
    "open_run",
    "state_hash",
]
