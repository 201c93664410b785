"""Peer-to-peer federated learning without a server.

    Peer, AsyncPeer       average with others from a training loop of yours; `aggregate` returns an `Aggregated`
    RecordData            the data of a peer that hides single records, and the loss of one
    simulate, load        run an experiment on this machine; load a `Config` from a preset, a file and overrides
    Row, SimulationSummary    what `simulate` reports of each iteration, and returns at the end
    Task, ClassificationTask, Metrics              what to learn, for simulations and `marfl peer`
    Optimizer, Partition, Churn, Sessions, Distill, Privacy   the settings that stand together, by subject
    MarflError and below  everything that is raised on purpose (see `marfl.errors`)

The public names are listed in `__all__` and imported when first used, so that `import marfl` and the command line do
not wait for torch before they need it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marfl.config import Config, load
    from marfl.errors import (
        BadPayload,
        BrokenPromise,
        DeadlineExceeded,
        InputError,
        MarflError,
        NetError,
        PeerGone,
        SyncError,
        Unreachable,
        WireError,
    )
    from marfl.learn.strategies import DiLoCo, FedAdam, FedProx, FedYogi, Scaffold
    from marfl.learn.strategy import Strategy, StrategyStep
    from marfl.learn.task import ClassificationTask, Metrics, Task
    from marfl.peer.api import Aggregated, AsyncPeer, Peer
    from marfl.peer.record_privacy import RecordData
    from marfl.plan.cost import Messages
    from marfl.runs.rows import Row, SimulationSummary
    from marfl.settings import Churn, Distill, Optimizer, Partition, Privacy, Sessions
    from marfl.sim.simulation import simulate
    from marfl.state import Layout, Snapshot, all_finite, flatten, layout_of, unflatten, vector_hash
    from marfl.techniques.technique import GlobalSum, MixContext, Mixed, NoGlobalAverage

__version__ = "0.1.0"

# Without it MKL rounds a row of a matrix by its place among the others (seen on AMD): a record's gradient would tell of
# its company. MKL reads it at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

__all__ = [
    "Aggregated",
    "AsyncPeer",
    "BadPayload",
    "BrokenPromise",
    "Churn",
    "ClassificationTask",
    "Config",
    "DeadlineExceeded",
    "DiLoCo",
    "Distill",
    "FedAdam",
    "FedProx",
    "FedYogi",
    "GlobalSum",
    "InputError",
    "Layout",
    "MarflError",
    "Messages",
    "Metrics",
    "MixContext",
    "Mixed",
    "NetError",
    "NoGlobalAverage",
    "Optimizer",
    "Partition",
    "Peer",
    "PeerGone",
    "Privacy",
    "RecordData",
    "Row",
    "Scaffold",
    "Sessions",
    "SimulationSummary",
    "Snapshot",
    "Strategy",
    "StrategyStep",
    "SyncError",
    "Task",
    "Unreachable",
    "WireError",
    "all_finite",
    "flatten",
    "layout_of",
    "load",
    "simulate",
    "unflatten",
    "vector_hash",
]

_HOMES = {
    "marfl.config": ("Config", "load"),
    "marfl.errors": (
        "BadPayload", "BrokenPromise", "DeadlineExceeded", "InputError", "MarflError", "NetError", "PeerGone",
        "SyncError", "Unreachable", "WireError",
    ),
    "marfl.learn.strategies": ("DiLoCo", "FedAdam", "FedProx", "FedYogi", "Scaffold"),
    "marfl.learn.strategy": ("Strategy", "StrategyStep"),
    "marfl.learn.task": ("ClassificationTask", "Metrics", "Task"),
    "marfl.peer.api": ("Aggregated", "AsyncPeer", "Peer"),
    "marfl.peer.record_privacy": ("RecordData",),
    "marfl.plan.cost": ("Messages",),
    "marfl.runs.rows": ("Row", "SimulationSummary"),
    "marfl.settings": ("Churn", "Distill", "Optimizer", "Partition", "Privacy", "Sessions"),
    "marfl.sim.simulation": ("simulate",),
    "marfl.techniques.technique": ("GlobalSum", "MixContext", "Mixed", "NoGlobalAverage"),
    "marfl.state": ("Layout", "Snapshot", "all_finite", "flatten", "layout_of", "unflatten", "vector_hash"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'marfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
