"""Peer-to-peer federated learning without a server.

The public names are listed in `__all__` and imported when first used, so that `import marfl` and the command line do
not wait for torch before they need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marfl.errors import InputError, MarflError
    from marfl.peer.api import Aggregated, AsyncPeer, Peer
    from marfl.state import Layout, Snapshot, all_finite, flatten, layout_of, unflatten, vector_hash

__version__ = "0.1.0"

__all__ = [
    "Aggregated",
    "AsyncPeer",
    "InputError",
    "Layout",
    "MarflError",
    "Peer",
    "Snapshot",
    "all_finite",
    "flatten",
    "layout_of",
    "unflatten",
    "vector_hash",
]

_HOMES = {
    "marfl.errors": ("InputError", "MarflError"),
    "marfl.peer": ("Aggregated", "AsyncPeer", "Peer"),
    "marfl.state": ("Layout", "Snapshot", "all_finite", "flatten", "layout_of", "unflatten", "vector_hash"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'marfl' has no attribute {name!r}")
