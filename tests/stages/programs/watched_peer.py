"""`marfl` under Python's audit hooks: whatever it opens for writing, makes, renames or binds is noted in a file.

    python watched_peer.py NOTES peer …

A line says ``wrote PATH``, ``bound PLACE`` or ``unpickled``. Everything is unpickled through a trap, which notes it.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from typing import Any, NoReturn

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MAKES = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}  # which argument is made


def watch(notes: int) -> None:
    """Note from now on, for as long as this process lives."""

    def note(what: str, which: object) -> None:
        os.write(notes, f"{what} {which}\n".encode())

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & WRITES and not isinstance(arguments[0], int):
            note("wrote", os.path.abspath(os.fsdecode(arguments[0])))
        elif event in MAKES:
            note("wrote", os.path.abspath(os.fsdecode(arguments[MAKES[event]])))
        elif event == "socket.bind":
            note("bound", arguments[1])
        elif event == "pickle.find_class":
            note("unpickled", ".".join(arguments))

    def trap(*_: object, **__: object) -> NoReturn:
        note("unpickled", "")
        raise AssertionError("something was unpickled")

    pickle.loads = pickle.load = pickle._loads = pickle._load = trap  # type: ignore[attr-defined]
    sys.addaudithook(hear)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
        import marfl.peer.daemon  # noqa: F401 - what libraries do while they are imported is not ours
    from marfl.cli import main

    watch(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    sys.exit(main(sys.argv[2:]))
