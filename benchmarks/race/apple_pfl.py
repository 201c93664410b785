"""Apple's pfl: FedAvg in its SimulatedBackend, one step each. `torchrun --nproc-per-node 2` spreads it over processes.

    python apple_pfl.py cnn|small ITERATIONS        # in an environment with pfl[pytorch] and dp-accounting below 0.6
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import LEARNING_RATE, Stopwatch, Workload, arguments, loss_of


class Trainable(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return loss_of(self.inner, inputs, labels.long())  # pfl makes floats of everything

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor, **_: Any) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(inputs, labels).item() * len(labels), len(labels))}


class Laps(TrainingProcessCallback):
    """Says when a central iteration is over; of several processes the first speaks."""

    def __init__(self) -> None:
        self.watch: Stopwatch | None = None

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.watch = Stopwatch()
        return Metrics()

    def after_central_iteration(self, metrics: Metrics, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        if os.environ.get("RANK", "0") == "0" and self.watch:
            self.watch.lap()
        return False, Metrics()


def users_of(workload: Workload) -> FederatedDataset:
    """Every user's next batch, each time it is drawn."""
    inputs, labels = workload.data()
    drawn = dict.fromkeys(range(workload.peers), 0)

    def batch_of(user: int) -> Dataset:
        rows = workload.rows(user, drawn[user], len(labels))
        drawn[user] += 1
        return Dataset(raw_data=[inputs[rows], labels[rows]], user_id=str(user))

    return FederatedDataset(batch_of, get_user_sampler("minimize_reuse", list(range(workload.peers))))


def main() -> None:
    workload, iterations = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    module = Trainable(workload.model())
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, central)
    users = users_of(workload)
    backend = SimulatedBackend(training_data=users, val_data=users)
    settings = NNAlgorithmParams(
        central_num_iterations=iterations, evaluation_frequency=10 * iterations, train_cohort_size=workload.peers,
        val_cohort_size=0,
    )  # fmt: skip
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=workload.batch, local_num_steps=None
    )
    FederatedAveraging().run(
        settings, backend, model, local, NNEvalHyperParams(local_batch_size=workload.batch), callbacks=[Laps()],
        send_metrics_to_platform=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
