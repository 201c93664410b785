"""Partitions: every sample to exactly one peer, in the proportions that were asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.learn.partition import label_table, split
from marfl.settings import Partition

LABELS = np.arange(6000) % 10


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def largest_share(alpha: float) -> float:
    """The mean over peers of the share of a peer's most frequent label."""
    table = label_table([LABELS[rows] for rows in split(Partition(alpha=alpha), LABELS, 20, rng())])
    return float((table.max(axis=1) / table.sum(axis=1)).mean())


@given(
    st.sampled_from(["iid", "dirichlet"]),
    st.floats(0.01, 100),
    st.lists(st.integers(0, 5), min_size=1, max_size=120),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_every_sample_goes_to_one_peer_and_every_peer_gets_the_floor(
    kind: str, alpha: float, labels: list[int], peers: int, floor: int
) -> None:
    partition = Partition(kind, alpha, floor)
    if peers * floor > len(labels):
        with pytest.raises(InputError, match=f"needs {peers * floor} samples"):
            split(partition, np.array(labels), peers, rng())
        return
    shards = split(partition, np.array(labels), peers, rng())
    assert len(shards) == peers
    assert min(len(shard) for shard in shards) >= floor
    assert np.sort(np.concatenate(shards)).tolist() == list(range(len(labels)))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_split_is_a_function_of_its_generator(kind: str) -> None:
    first, again, other = (split(Partition(kind), LABELS, 7, rng(seed)) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


def test_iid_shards_differ_by_one_sample_at_most() -> None:
    assert {len(shard) for shard in split(Partition("iid"), LABELS, 7, rng())} == {857, 858}


def test_a_small_alpha_gives_few_labels_and_a_large_one_tends_to_iid() -> None:
    assert largest_share(0.01) > 0.8
    assert 0.2 < largest_share(1.0) < 0.6
    assert largest_share(1000.0) < 0.13


def test_the_share_of_a_label_has_the_variance_of_the_dirichlet_distribution() -> None:
    peers, alpha = 10, 0.5
    tables = [
        label_table([LABELS[rows] for rows in split(Partition(alpha=alpha), LABELS, peers, rng(seed))], classes=10)
        for seed in range(100)
    ]
    shares = np.stack(tables) / 600
    expected = (1 / peers) * (1 - 1 / peers) / (peers * alpha + 1)
    assert shares.var() == pytest.approx(expected, rel=0.05)


def test_the_floor_is_filled_from_the_largest_shards() -> None:
    before = [len(shard) for shard in split(Partition(alpha=0.05), LABELS, 50, rng())]
    after = [len(shard) for shard in split(Partition(alpha=0.05, min_samples=40), LABELS, 50, rng())]
    gave = [peer for peer in range(50) if after[peer] < before[peer]]
    kept = [peer for peer in range(50) if after[peer] == before[peer]]
    assert gave
    assert kept
    assert all(after[peer] == 40 for peer in range(50) if after[peer] > before[peer])
    assert min(after[peer] for peer in gave) >= max(before[peer] for peer in kept) - 1


def test_ten_thousand_peers_can_be_served() -> None:
    labels = np.arange(60_000) % 10
    shards = split(Partition(alpha=0.1), labels, 10_000, rng())
    assert sum(map(len, shards)) == 60_000
    assert min(map(len, shards)) == 1


def test_the_label_table_counts_labels_per_peer() -> None:
    table = label_table([np.array([0, 0, 2]), np.array([1]), np.array([], dtype=np.int64)], classes=4)
    assert table.tolist() == [[2, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert label_table([np.array([0, 3])]).tolist() == [[1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dirichlett"}, "kind = 'dirichlett': must be one of dirichlet, iid"),
        ({"alpha": 0.0}, "alpha = 0.0: must be a finite number, above 0"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"min_samples": 0}, "min_samples = 0: must be a whole number, at least 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Partition(**settings)  # type: ignore[arg-type]


def test_no_peers_is_an_error() -> None:
    with pytest.raises(InputError, match="peers 0"):
        split(Partition(), LABELS, 0, rng())
