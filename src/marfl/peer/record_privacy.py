"""Single records of a library peer: which of them are in a batch, and their clipped gradients, are marfl's business.

A loader of the user's own is not a Poisson sample, and a loss over a batch mixes records. So the user hands over a data
set and the loss of one record, and `aggregate` does the rest: it samples in secret, clips, adds noise, averages and
makes the agreed step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from marfl.dp.noise import system_words
from marfl.dp.private_agreement import RecordAgreement, Secret
from marfl.errors import InputError
from marfl.learn.data import Batch, Loader
from marfl.learn.record_gradients import RecordGradients
from marfl.learn.task import Metrics
from marfl.learn.worker import Worker
from marfl.settings import Optimizer


@dataclass(frozen=True)
class RecordData:
    """The data of a peer that hides single records, and how the swarm steps on them; all but the data is shared."""

    dataset: Dataset[Any]  # any map-style data set; its rows are the records, and each follows from its own alone
    loss: Callable[[nn.Module, Batch], Tensor]  # of one record, which comes as a batch of one row
    batch: Annotated[int, Field(ge=1)] = 64  # batch / privacy["records"] is the rate at which a record is sampled
    learning_rate: float = Optimizer.learning_rate  # η
    decay: float = Optimizer.decay  # μ, of the agreed momentum

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer(self.learning_rate, self.decay)

    def settings(self) -> dict[str, Any]:
        """As a run's settings."""
        names = {"batch": self.batch, "optimizer.learning_rate": self.learning_rate, "optimizer.decay": self.decay}
        return names | {"momentum": "derive"}


def check_records(privacy: Mapping[str, Any] | None, records: object) -> None:
    """Refuse records without the privacy that is for them, and the other way round."""
    if records is not None and not isinstance(records, RecordData):
        raise InputError(f"Peer: records must be marfl.RecordData(dataset, loss), not {type(records).__name__}")
    if ((privacy or {}).get("unit") == "record") != (records is not None):
        raise InputError(
            'Peer: privacy["unit"] = "record" and records go together: records=marfl.RecordData(dataset, loss of one)'
        )


class RecordSums:
    """What one peer sends: sums over secret samples of its records, under noise."""

    def __init__(self, model: nn.Module, records: RecordData) -> None:
        module = copy.deepcopy(model)  # the user's stays as it is: gradients are taken at the agreed state
        self._gradients = RecordGradients(Worker(_OneRecord(module, records), module), _first(records))
        self._loader = Loader(records.dataset, seed=0, peer=0, batch_size=records.batch)

    @property
    def way(self) -> str:
        """How gradients are computed."""
        return self._gradients.way

    def draw(self, agreement: RecordAgreement, theta: Tensor, bound: float) -> Tensor:
        """A fresh vector: draw it once per iteration."""
        words = system_words()
        return agreement.of_records(self._gradients, self._loader, theta, bound, Secret(words, words))


def _first(records: RecordData) -> Batch:
    return Loader(records.dataset, seed=0, peer=0, batch_size=1).records(np.arange(1))


class _OneRecord:
    """A task of one loss."""

    def __init__(self, module: nn.Module, records: RecordData) -> None:
        self._module, self._records = module, records

    def model(self) -> nn.Module:
        return self._module

    def shard(self, peer: int, peers: int, rng: np.random.Generator) -> Dataset[Any]:
        return self._records.dataset

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._records.loss(model, batch)

    def sample_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._records.loss(model, batch).reshape(1)  # one record at a time: anything else is no such loss

    def evaluate(self, model: nn.Module) -> Metrics:
        raise InputError("Peer: the user evaluates the model")
