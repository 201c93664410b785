"""The built-in tasks: digits, mnist and synthetic."""

import gzip
import os
import platform
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from marfl.errors import InputError
from marfl.learn import Loader, Optimizer, Worker, initial_model, load_task, pooled_update, shard_of
from marfl.learn.task import ClassificationTask
from marfl.learn.tasks.digits import Digits
from marfl.learn.tasks.mnist import FILES, Mnist, load, read_idx
from marfl.learn.tasks.synthetic import Synthetic
from marfl.learn.worker import keep_freed_memory
from marfl.state import flatten, unflatten

MNIST_IS_HERE = bool(os.environ.get("MARFL_DATA")) and (Path(os.environ["MARFL_DATA"]) / "mnist" / FILES[0]).is_file()
needs_mnist = pytest.mark.skipif(not MNIST_IS_HERE, reason="SKIPPED: set MARFL_DATA to a folder with mnist/ to test it")


def accuracy_after(task: ClassificationTask, iterations: int, peers: int) -> float:
    """Train with all peers, one batch each, averaging exactly."""
    worker = Worker(task, initial_model(task, seed=0))
    theta = worker.flat.clone()
    momentum = torch.zeros_like(theta)
    loaders = [Loader(shard_of(task, peer, peers, 0), seed=0, peer=peer, batch_size=32) for peer in range(peers)]
    for iteration in range(iterations):
        batches = (loader.minibatch(iteration, iteration) for loader in loaders)
        result = pooled_update(worker, theta, momentum, batches, [1.0] * peers, Optimizer())
        theta, momentum = result.theta, result.momentum
    worker.load(theta)
    return task.evaluate(worker.module).accuracy


def idx(*shape: int, values: bytes | None = None, kind: int = 8) -> bytes:
    body = bytes(int(np.prod(shape))) if values is None else values
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + body


def textbook_cnn() -> nn.Sequential:
    """The paper's network as the paper describes it."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def test_digits_has_a_fixed_test_set_that_shares_nothing_with_the_training_set() -> None:
    train, test = Digits().train_set(), Digits().test_set()
    assert (len(train), len(test)) == (1437, 360)  # type: ignore[arg-type]
    assert torch.equal(test[:][0], Digits().test_set()[:][0])
    everything = torch.cat((train[:][0], test[:][0]))
    assert abs(everything.mean().item()) < 1e-3
    assert everything.std().item() == pytest.approx(1, abs=1e-3)
    labels = torch.cat((train[:][1], test[:][1]))
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # scikit-learn's own table


def test_digits_is_learnt_by_twenty_peers_in_a_hundred_iterations() -> None:
    assert len(flatten(Digits().model())) == 30_154
    assert accuracy_after(Digits(), iterations=100, peers=20) > 0.8


def test_the_papers_network_has_1199882_parameters() -> None:
    assert len(flatten(Mnist().model())) == 1_199_882


def test_our_network_computes_what_the_papers_does_gradients_too() -> None:
    ours, textbook = initial_model(Mnist(), seed=0).eval(), textbook_cnn()
    unflatten(flatten(ours), textbook)
    images = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    logits, expected = ours(images), textbook(images)
    assert torch.allclose(logits, expected, atol=1e-5)
    for output in (logits, expected):
        output.square().sum().backward()
    for mine, theirs in zip(ours.parameters(), textbook.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@needs_mnist
def test_mnist_is_normalised_and_complete() -> None:
    task = load_task("mnist")
    assert isinstance(task, Mnist)
    images, labels = task.train_set()[:]
    assert images.shape == (60_000, 1, 28, 28)
    assert abs(images.mean().item()) < 1e-3
    assert images.std().item() == pytest.approx(1, abs=1e-3)
    assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert task.test_set()[:][1].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@needs_mnist
@pytest.mark.slow
def test_mnist_is_learnt() -> None:
    class FewTests(Mnist):
        def test_set(self) -> torch.utils.data.Dataset:  # type: ignore[type-arg]
            return torch.utils.data.Subset(super().test_set(), range(1000))

    assert accuracy_after(FewTests(), iterations=20, peers=8) > 0.6


def test_missing_mnist_says_both_ways_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MARFL_DATA", raising=False)
    with pytest.raises(InputError, match=r"MARFL_DATA is not set; either set .* or download .*https://") as caught:
        Mnist().train_set()
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("MARFL_DATA", str(tmp_path))
    with pytest.raises(InputError, match=f"no {FILES[0]} is in {tmp_path}/mnist; either set MARFL_DATA"):
        Mnist().train_set()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", "cannot be unpacked"),
        (gzip.compress(idx(4, 28, 28))[:-12], "cannot be unpacked"),
        (gzip.compress(idx(4, 28, 28))[:20] + b"\xff" * 30, "cannot be unpacked"),
        (gzip.compress(b"\0\0"), "not an IDX file"),
        (gzip.compress(idx(4, 28, 28)[:10]), "not an IDX file"),
        (gzip.compress(idx(4, 28, 28, kind=13)), "not an IDX file of unsigned bytes"),
        (gzip.compress(idx(4, 28, 28)[:-1]), r"holds 3135 values, its header says \(4, 28, 28\)"),
        (gzip.compress(idx(4, 28, 28) + b"x"), "holds 3137 values"),
        (gzip.compress(idx(5, 28, 28)), r"has shape \(5, 28, 28\), MNIST has \(4, 28, 28\)"),
    ],
    ids=["text", "cut off", "spoilt", "short", "half a header", "other kind", "one less", "one more", "five images"],
)
def test_a_damaged_mnist_file_is_one_clear_line(
    content: bytes, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MARFL_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name in FILES:
        (tmp_path / "mnist" / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load("train", 4)
    assert "\n" not in str(caught.value)
    assert FILES[0] in str(caught.value)


def test_small_mnist_files_are_read_and_their_labels_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MARFL_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for name in FILES:
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(idx(3, values=b"\1\2\3")))
    (tmp_path / "mnist" / FILES[0]).write_bytes(gzip.compress(idx(3, 28, 28, values=bytes([255]) * 2352)))
    images, labels = load("train", 3)[:]
    assert labels.tolist() == [1, 2, 3]
    assert images.unique().tolist() == pytest.approx([(1 - 0.1307) / 0.3081])
    (tmp_path / "mnist" / FILES[1]).write_bytes(gzip.compress(idx(3, values=b"\1\2\x0b")))
    with pytest.raises(InputError, match="label 11 is not a digit"):
        load("train", 3)


def test_idx_values_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(2, 3, values=bytes(range(6)))))
    assert read_idx(tmp_path / "x.gz").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_synthetic_is_by_default_the_papers_20ng_head() -> None:
    assert len(flatten(Synthetic().model())) == 56_828


def test_synthetic_has_the_sizes_that_were_asked_for() -> None:
    task = load_task("synthetic", features=6, hidden=[5, 4], classes=3, samples=50, test_samples=20, dropout=0.1)
    assert isinstance(task, Synthetic)
    assert len(flatten(task.model())) == 6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3
    assert [tuple(part.shape) for part in task.train_set()[:]] == [(50, 6), (50,)]
    assert len(load_task("synthetic", hidden=[]).model()) == 1  # type: ignore[arg-type]


def test_synthetic_data_is_a_function_of_its_options() -> None:
    first, again, other = (Synthetic(features=5, samples=30, data_seed=seed).train_set()[:] for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_synthetic_can_be_learnt() -> None:
    task = Synthetic(features=20, hidden=(32,), classes=5, samples=4000, test_samples=500, dropout=0.1)
    assert accuracy_after(task, iterations=150, peers=10) > 0.75


def test_freed_memory_can_be_kept_exactly_where_there_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
