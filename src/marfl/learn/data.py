"""Data sets: where they lie, how rows are taken from them and joined. Any map-style torch `Dataset` will do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from marfl.errors import InputError

Batch: TypeAlias = Any  # what the task's loss understands: tensors with the rows first, in a tuple, list or mapping


def data_folder(name: str, *, files: Sequence[str], source: str) -> Path:
    """`$MARFL_DATA/name`, checked to hold `files`; if not, an `InputError` that says how to get them from `source`."""
    root = os.environ.get("MARFL_DATA")
    folder = Path(root or "DATA") / name
    missing = [file for file in files if not root or not (folder / file).is_file()]
    if missing:
        problem = f"no {missing[0]} is in {folder}" if root else "MARFL_DATA is not set"
        raise InputError(
            f"task {name}: {problem}; either set MARFL_DATA to the folder that holds {name}/, "
            f"or download {', '.join(files)} from {source} into {folder} and set MARFL_DATA={folder.parent}"
        )
    return folder


def size_of(dataset: Dataset[Any]) -> int:
    """The number of rows; an `InputError` for a data set that has none to tell (an iterable one)."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise InputError(f"data set {type(dataset).__name__}: must have a length and be indexed by row") from None


def gather(dataset: Dataset[Any], rows: Tensor) -> Batch:
    """The rows of a data set as one batch: one indexing operation for tensors in memory, collated one by one else."""
    if isinstance(dataset, Subset):
        return gather(dataset.dataset, torch.as_tensor(dataset.indices)[rows])
    if isinstance(dataset, TensorDataset):
        return take(dataset.tensors, rows)
    return default_collate([dataset[row] for row in rows.tolist()])


def take(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch, in the order asked for."""
    return _by_tensor(lambda tensors: tensors[0].index_select(0, rows), [batch])


def join(batches: Sequence[Batch]) -> Batch:
    """Batches of one kind as one batch, in their order."""
    return _by_tensor(torch.cat, batches)


def _by_tensor(function: Callable[[list[Tensor]], Tensor], batches: Sequence[Batch]) -> Batch:
    """Apply a function to the tensors that have the same place in each batch."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(list(batches))
    if isinstance(first, Mapping):
        return {name: _by_tensor(function, [batch[name] for batch in batches]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_by_tensor(function, parts) for parts in zip(*batches, strict=True))
    raise InputError(f"a batch holds {type(first).__name__}: it must be tensors in a tuple, list or mapping")


def labels_of(dataset: Dataset[Any]) -> np.ndarray:
    """The label of every row: the second tensor, the attribute `targets`, or the second item of each row."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) < 2:
            raise InputError("the training set has no labels: its rows must be (input, label)")
        return dataset.tensors[1].numpy()
    if hasattr(dataset, "targets"):
        return np.asarray(dataset.targets)
    return np.asarray([int(dataset[row][1]) for row in range(size_of(dataset))])
