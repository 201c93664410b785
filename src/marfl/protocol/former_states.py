"""States before the newest one: how long they are kept, and when a run goes back to one.

Two things can turn out about a commit afterwards. An audit may prove that a sum in it is wrong: with `on_fraud =
"rollback"` the next iteration sums nothing, and the state after it is the one from before the lie. Its roster says so
(`Roster.restores`), so a quorum signs it like any other, and nobody votes for it who has not checked the proof itself.
And where certificates are long a peer goes on at its leader's word: if another result is certified in the end it needs
the state before to take part in that decision.

States are kept in memory: `WINDOW` of them where a run may go back, one while a commit is not settled. After a restart
they are gone, and whoever lacks one fetches what comes of going back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from marfl.protocol.ballot import abandoned
from marfl.protocol.roster import BACK, Record, Roster
from marfl.state import Snapshot

WINDOW = 3  # a lie is proven before the next exchange is over; the proof may need one more to get around


def in_the_model(records: Mapping[int, Record], newest: int) -> list[int]:
    """The iterations whose sums are in the newest state, the newest first, as far as these records go back."""
    found, at = [], newest
    while at > 0 and at in records:
        roster = records[at].roster
        back = roster.restores if roster is not None else None
        if back is None:
            found.append(at)
        at = at - 1 if back is None else min(back, at - 1)
    return found


def may_go_back(to: int, lies: Collection[int], records: Mapping[int, Record], newest: int) -> bool:
    """Whether a run may go back to the state after an iteration: the next one has a proven lie that is in the model."""
    return newest - to <= WINDOW and to + 1 in lies and to + 1 in in_the_model(records, newest)


def where_to(lies: Collection[int], records: Mapping[int, Record], newest: int) -> int | None:
    """The iteration after whose state a run should go on: before the first lie that is in the model; None: nowhere."""
    due = [at - 1 for at in in_the_model(records, newest) if may_go_back(at - 1, lies, records, newest)]
    return min(due, default=None)


def taking_back(roster: Roster, to: int) -> Roster:
    """The same peers go back to the state after an iteration, and sum nothing."""
    return replace(abandoned(roster), exchange=f"{BACK}{to}")


def went_back(former: Snapshot, now: Snapshot, roster: Roster) -> Snapshot:
    """The state after going back: what the former one holds, momentum and scalars included, under the next number.

    Two lineages may part in it, as in an iteration that goes by (see `instance.passed_by`).
    """
    name = {"lineage": float(int.from_bytes(roster.lineage[-6:]))} if roster.electors else {}
    return Snapshot(now.version + 1, former.vectors, dict(former.scalars) | name)
