"""What experiments share: how the paper runs, how we run, and how claims on both tasks are told apart."""

from __future__ import annotations

from marfl.reproduce.numbers import Gap, Mean, Ratio

PAPER = {"semantics": "paper"}  # θ and m travel whole, absentees keep stale models, groups by the paper's keys
EXACT = {"semantics": "exact"}  # only updates travel, absentees catch up, exact for any number of peers
RIVALS = ("fedavg", "rdfl", "arfl")
TASKS = ("vision", "text")
DATA = {"vision": "MNIST", "text": "20NG"}  # what the paper calls them
NAMES = {"mar": "MAR-FL", "fedavg": "FedAvg", "rdfl": "RDFL", "arfl": "AR-FL", "ring": "ring all-reduce"}  # in legends
NOTICEABLE = 0.01  # accuracy: less than a point is within what seeds do
SUBSTANTIAL = 0.03


def peers(case: str) -> Mean:
    """How many there are, in all."""
    return Mean(case, "peers")


def accuracy(case: str) -> Mean:
    return Mean(case, "final_accuracy")


def sent(case: str) -> Mean:
    """Bytes of all peers in the whole run."""
    return Mean(case, "bytes_total")


def times(over: str, under: str) -> Ratio:
    """How many times the bytes of the one are those of the other."""
    return Ratio(sent(over), sent(under))


def above(high: str, low: str) -> Gap:
    """How far the accuracy of the one is above that of the other."""
    return Gap(accuracy(high), accuracy(low))
