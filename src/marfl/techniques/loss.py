"""What is sent in vain when peers die during an exchange, counted from its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from marfl.errors import InputError
from marfl.plan.schedule import Phase


class Play(NamedTuple):
    """A schedule played until nobody can go on."""

    sent: int  # values
    finished: int  # peers that got all they wait for


def spread(n: int, deaths: int) -> list[int]:
    """The ranks of the dead, evenly spread: only their number is known."""
    if not 1 <= deaths <= n:
        raise InputError(f"deaths = {deaths}: must be between 1 and the {n} peers")
    return [place * n // deaths for place in range(deaths)]


def play(phases: Iterable[Phase], n: int, dead: Collection[int], died_in: int) -> Play:
    """Let the dead fall silent in a phase; everybody else goes on until an input is missing, and is then stuck."""
    stuck: set[int] = set()
    sent = 0
    for number, messages in enumerate(phases):
        silent = stuck.union(dead) if number >= died_in else frozenset()
        refused = dead if number >= died_in else ()
        for source, dest, start, stop in messages:
            if source in silent:
                stuck.add(dest)
            elif dest not in refused:
                sent += stop - start
    return Play(sent, n - len(stuck.union(dead)))


def ring_messages(n: int, hops: int, deaths: int, died_in: int) -> int:
    """`play` for a ring of whole or chunked vectors, in closed form: the messages sent until it stands still.

    From the fatal hop on, the dead send nothing, nobody sends to them, and one peer more after each of them starves
    with every hop.
    """
    dead = spread(n, deaths)
    gaps = [after - before for before, after in zip(dead, [*dead[1:], n], strict=True)]
    return died_in * n + sum(gap - 2 - hop for gap in gaps for hop in range(min(gap - 2, hops - died_in)))
