"""Peer-to-peer federated learning without a server.

The public names are listed in `__all__` and imported when first used, so that `import marfl` and the command line do
not wait for torch before they need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marfl.errors import InputError, MarflError
    from marfl.state import Layout, Snapshot, all_finite, flatten, layout_of, unflatten, vector_hash

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "Layout",
    "MarflError",
    "Snapshot",
    "all_finite",
    "flatten",
    "layout_of",
    "unflatten",
    "vector_hash",
]

_HOMES = {"InputError": "errors", "MarflError": "errors"}  # every other public name lives in `state`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'marfl' has no attribute {name!r}")
    return getattr(import_module(f"marfl.{_HOMES.get(name, 'state')}"), name)
