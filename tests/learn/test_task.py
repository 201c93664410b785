"""Tasks: what a user has to write, and what happens when it is wrong."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn import (
    ClassificationTask,
    Loader,
    Metrics,
    Optimizer,
    Partition,
    Task,
    Worker,
    initial_model,
    load_task,
    local_update,
    shard_of,
)
from marfl.learn.data import labels_of
from marfl.learn.task import EVALUATION_BATCH, evaluate_classifier, row_loss_obstacle

USERS_MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from marfl.learn import ClassificationTask

class Mine(ClassificationTask):
    def __init__(self, width=3): self.width = width
    def model(self): return nn.Linear(self.width, 2)
    def train_set(self): return TensorDataset(torch.eye(self.width).repeat(9, 1), torch.arange(9 * self.width) % 2)
    def test_set(self): return self.train_set()

class Unfinished(ClassificationTask):
    def model(self): return nn.Linear(3, 2)

class NotATask:
    def model(self): return nn.Linear(3, 2)
"""


class Toy(ClassificationTask):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

    def train_set(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(1200.0).view(300, 4), torch.arange(300) % 3)

    def test_set(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        count = 2 * EVALUATION_BATCH + 3
        return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


class Regression:
    """A task that owes nothing to our base class."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def shard(self, peer: int, peers: int, rng: np.random.Generator) -> Dataset[Any]:
        slope = rng.normal()  # common to all peers
        inputs = torch.linspace(peer, peer + 1, 10)[:, None]
        return TensorDataset(inputs, slope * inputs)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Metrics:
        return Metrics(loss=0.0, accuracy=1.0, count=1)


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_tasks.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "users_tasks", raising=False)
    return tmp_path


@pytest.mark.usefixtures("users_folder")
def test_a_users_task_is_found_in_the_current_directory_and_trains() -> None:
    task = load_task("users_tasks:Mine", partition=Partition("iid"), width=5)
    worker = Worker(task, initial_model(task, seed=0))
    loader = Loader(shard_of(task, 0, 4, seed=0), seed=0, peer=0, batch_size=8)
    theta = worker.flat.clone()
    result = local_update(worker, theta, torch.zeros_like(theta), loader.minibatches(0, 0, 2), Optimizer())
    assert result.finite
    assert result.delta.abs().max() > 0
    assert task.evaluate(worker.module).count == 45


@pytest.mark.usefixtures("users_folder")
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("digit", {}, r"task 'digit': unknown. Did you mean digits\? There are 20ng, digits, mnist, synthetic, or mod"),
        ("zzz", {}, "task 'zzz': unknown. There are 20ng, digits, mnist, synthetic, or module:Class"),
        (":Mine", {}, "task ':Mine': unknown"),
        ("no_such_module:Mine", {}, "task no_such_module:Mine: cannot import no_such_module"),
        ("users_tasks:Mien", {}, r"users_tasks has no class 'Mien'. Did you mean Mine\?"),
        ("users_tasks:Unfinished", {}, r"Unfinished must define test_set\(\)"),
        ("users_tasks:NotATask", {}, r"lacks shard, loss, evaluate\(\)"),
        ("users_tasks:Mine", {"depth": 3}, "unexpected keyword argument 'depth'; it takes width"),
        ("digits", {"depth": 3}, "task digits: .*'depth'"),
        ("synthetic", {"classes": 0}, "task synthetic: classes 0: must be at least 1"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_one_clear_line(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_task(spec, **options)
    assert "\n" not in str(caught.value)


def test_partition_settings_reach_the_task() -> None:
    task = load_task("digits", partition=Partition("iid", min_samples=5))
    assert {len(shard_of(task, peer, 100, seed=0)) for peer in range(100)} == {14, 15}  # type: ignore[arg-type]


def test_a_task_that_splits_its_data_itself_refuses_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_split", sys.modules[__name__])
    assert isinstance(load_task("own_split:Regression"), Task)
    with pytest.raises(InputError, match="splits its data itself"):
        load_task("own_split:Regression", partition=Partition())


def test_a_task_without_data_says_what_to_define() -> None:
    class NoData(Toy):
        train_set = ClassificationTask.train_set

    with pytest.raises(InputError, match=r"task NoData: define train_set\(\), or shard\(\)"):
        shard_of(NoData(), 0, 2, seed=0)


def test_shards_agree_between_processes_and_hold_every_sample_once() -> None:
    here, there = Toy(), Toy()
    shards = [labels_of(shard_of(here, peer, 20, seed=1)) for peer in range(20)]
    assert sum(len(shard) for shard in shards) == 300
    inputs = [shard_of(there, peer, 20, seed=1)[row][0] for peer in range(20) for row in range(len(shards[peer]))]
    assert torch.equal(torch.stack(inputs).sort(dim=0).values, torch.arange(1200.0).view(300, 4))
    for peer in reversed(range(20)):
        assert (labels_of(shard_of(there, peer, 20, seed=1)) == shards[peer]).all()
    others = [labels_of(shard_of(here, peer, 20, seed=2)) for peer in range(20)]
    assert any(len(one) != len(other) for one, other in zip(shards, others, strict=True))


def test_what_a_task_draws_in_shard_is_common_to_all_peers() -> None:
    slopes = {float(y / x) for peer in (1, 2) for x, y in [shard_of(Regression(), peer, 3, seed=4)[5]]}
    assert max(slopes) == pytest.approx(min(slopes))
    assert slopes != {0.0}


def test_the_training_set_is_loaded_and_split_once_for_all_peers() -> None:
    class Counting(Toy):
        loads = 0

        def train_set(self) -> Dataset[Any]:
            Counting.loads += 1
            return super().train_set()

    task = Counting()
    shards = [shard_of(task, peer, 50, seed=0) for peer in range(50)]
    assert Counting.loads == 1
    assert len({id(shard.dataset) for shard in shards}) == 1  # type: ignore[attr-defined]


def test_evaluation_in_batches_equals_evaluation_at_once_and_restores_every_mode() -> None:
    task = Toy()
    model = initial_model(task, seed=0)
    model[0].eval()  # type: ignore[index]
    found = task.evaluate(model)
    assert [module.training for module in model.modules()] == [True, False, True]
    model.eval()
    inputs, labels = task.test_set().tensors  # type: ignore[attr-defined]
    logits = model(inputs)
    assert found.count == len(labels)
    assert found.loss == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_an_empty_test_set_is_an_error() -> None:
    with pytest.raises(InputError, match="test set is empty"):
        evaluate_classifier(nn.Linear(4, 3), TensorDataset(torch.ones(0, 4), torch.ones(0)))


def test_the_initial_model_is_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    first = initial_model(Toy(), seed=3)[0].weight  # type: ignore[index]
    torch.manual_seed(2)
    again, other = (initial_model(Toy(), seed=seed)[0].weight for seed in (3, 4))  # type: ignore[index]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sample_losses_have_the_loss_as_their_mean() -> None:
    task, batch = Toy(), (torch.randn(7, 4), torch.arange(7) % 3)
    model = task.model().eval()
    assert task.sample_losses(model, batch).mean().item() == pytest.approx(task.loss(model, batch).item())


def test_a_task_with_its_own_loss_cannot_be_replaced_by_row_losses_unless_it_brings_them() -> None:
    class OwnLoss(Toy):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return 2 * super().loss(model, batch)

    class Both(OwnLoss):
        def sample_losses(self, model: nn.Module, batch: Any) -> Tensor:
            return 2 * super().sample_losses(model, batch)

    assert row_loss_obstacle(Toy()) is None
    assert row_loss_obstacle(Both()) is None
    assert "its own loss()" in (row_loss_obstacle(OwnLoss()) or "")
    assert "no sample_losses()" in (row_loss_obstacle(Regression()) or "")
