"""A peer that goes on where others tell it that its settings are not theirs. Arguments as those of `marfl`."""

from __future__ import annotations

import sys
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    from marfl.peer import daemon
from marfl.cli import main


async def go_on(*_: object) -> None:
    """Whatever the others have."""


if __name__ == "__main__":
    daemon.refuse_other_terms = go_on
    sys.exit(main(sys.argv[1:]))
