"""Which commits a peer knows to be certified, and how it shows that to others. Pure: nothing here talks.

A record is certified by a quorum of signed votes of the electors of the record before (`statements.Certificate`). Its
leader makes the certificate and hands it to the next leaders. Whoever has voted for the very result that is decided
need not see it: the leader's word that it has the certificate is enough to go on. But until more peers than can lie say
that they know the record to be certified, it is not *settled* here: this peer does not vote on top of it, and stays an
elector of the decision before, with the votes that it has cast there (`Standing.former`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.ballot import bearable, quorum
from marfl.protocol.roster import Elector, Record, decode_record, ranked
from marfl.protocol.statements import Certificate, Verify, cast, link_of, signers

MOST_STEPS = 64  # of a proof
RECENT = 16  # certificates that are kept


class Certified(NamedTuple):
    """A record, the one before it, and the quorum of votes that committed it."""

    before: Record
    record: Record
    certificate: Certificate


def electors_of(before: Record, record: Record) -> tuple[Elector, ...]:
    """Who decided a record, in the order in which they led: a roster that founds a lineage names them itself."""
    roster = record.roster
    assert roster is not None
    founders = roster.electors if roster.lineage != before.lineage else ()
    return ranked(roster.run, roster.iteration, founders or before.electors)


def signed_by(step: Certified, run: str, liars: int, verify: Verify) -> set[PeerId]:
    """Who signed a record that follows another one; `WireError` unless they are a quorum of those who decide it."""
    before, record, roster = step.before, step.record, step.record.roster
    if roster is None or roster.run != run or record != before.after(roster, record.hash):
        raise WireError("a record that does not follow the one before")
    if (roster.base, roster.iteration) != (before.hash, before.iteration + 1):
        raise WireError("a record that does not follow the one before")
    if roster.lineage != before.lineage and not roster.electors:
        raise WireError("a record of another lineage that does not found it")
    electors = electors_of(before, record)
    voted = cast(roster, step.certificate.attempt, link_of(before), record.hash)
    who = signers(step.certificate, voted, electors, verify)
    if not quorum(electors, who, liars):
        raise WireError("a certificate without a quorum")
    return set(who)


def reaches(anchor: Record, step: Certified, who: Collection[PeerId], liars: int) -> bool:
    """Whether a record that these signed is certain to somebody who is sure of an earlier one, the anchor.

    It follows the anchor; or more of the anchor's electors signed it than can lie. One of those is honest, and votes
    only on top of what is certified: so the record before is, and the quorum makes it the next one.
    """
    if link_of(step.before) == link_of(anchor):
        return True
    known = {elector.id for elector in anchor.electors}
    later = step.record.iteration > anchor.iteration + 1 and step.record.since <= anchor.iteration
    return later and len(known & set(who)) > bearable(len(known), liars)


class Commits:
    """One peer's knowledge of certificates."""

    def __init__(self, run: str, liars: int, verify: Verify) -> None:
        self.run, self.liars, self.verify = run, liars, verify
        self.settled = True  # whether the newest record is surely committed
        self.vouchers: set[PeerId] = set()  # who said that it knows so
        self._steps: list[Certified] = []  # those that were seen, the oldest first

    # --- what is certain ---

    def borne(self, electors: Sequence[Elector]) -> int:
        """How many of these may lie."""
        return bearable(len(electors), self.liars)

    def enter(self, steps: Iterable[Certified], vouchers: Iterable[PeerId], liars: int) -> None:
        """There is a newer record: with its certificate, or on the word of these, of whom so many may lie."""
        self.settled, self.vouchers = False, set()
        for step in steps:
            self.prove(step)
        self.vouch(vouchers, liars)

    def prove(self, step: Certified) -> None:
        """The newest record's certificate was seen and holds."""
        steps = [*self._steps, step]
        self._steps = [each for at, each in enumerate(steps) if at >= len(steps) - RECENT or _founds(each)]
        self.settled = True

    def vouch(self, peers: Iterable[PeerId], liars: int) -> None:
        """These say that they know the newest record to be certified."""
        self.vouchers.update(peers)
        self.settled = self.settled or liars == 0 or len(self.vouchers) > liars

    def step_to(self, record: Record) -> Certified | None:
        """How a record is certified, if that is known here."""
        link = link_of(record)
        return next((step for step in reversed(self._steps) if link_of(step.record) == link), None)

    # --- proofs ---

    def proof(self, links: Collection[bytes], head: Record) -> bytes:
        """That the head is certified, for somebody who is sure of these records; b"" where it cannot be shown.

        Its own certificate will mostly do. Where lineages were founded since, the proof has their foundings.
        """
        last = self.step_to(head)
        if last is None or link_of(head) in links:
            return b""
        steps = [step for step in self._steps if _founds(step) and step is not last]
        past = {link_of(step.record): step.record.iteration for step in self._steps}
        since = max((past[link] for link in links if link in past), default=0)
        return packed([*(step for step in steps if since < step.record.iteration < head.iteration), last])

    def checked(self, anchors: Sequence[Record], record: Record, proof: bytes) -> tuple[Certified, ...]:
        """The steps that prove a record to a peer that is sure of these others; `WireError` if they do not.

        Whoever knows nothing but a beginning without electors has nothing to check by: it believes whom it joins.
        """
        if link_of(record) in {link_of(anchor) for anchor in anchors}:
            return ()
        steps = unpacked(proof)
        if not steps or link_of(steps[-1].record) != link_of(record):
            raise WireError("a record without a proof")
        sure = list(anchors)
        for step in steps:
            who = signed_by(step, self.run, self.liars, self.verify)
            innocent = not any(anchor.electors for anchor in sure)
            if not innocent and not any(reaches(anchor, step, who, self.liars) for anchor in sure):
                raise WireError("a record that is proven from others than are known here")
            sure.append(step.record)
        return steps


def _founds(step: Certified) -> bool:
    """Whether a record founds a lineage: these are kept for good."""
    return step.record.since == step.record.iteration


def packed(steps: Iterable[Certified]) -> bytes:
    rows = [(step.before.encoded, step.record.encoded, step.certificate.encoded) for step in steps]
    data: bytes = msgpack.packb(rows)
    return data


def unpacked(data: bytes) -> tuple[Certified, ...]:
    """The steps in these bytes, or `WireError`; nothing is verified yet."""
    if not data:
        return ()
    try:
        rows = msgpack.unpackb(data, raw=False, max_array_len=MOST_STEPS, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a proof: {type(error).__name__}") from None
    if not isinstance(rows, list) or any(
        not isinstance(row, list) or [type(each) for each in row] != [bytes] * 3 for row in rows
    ):
        raise WireError("not a proof: bad fields")
    return tuple(Certified(decode_record(one), decode_record(two), Certificate.decode(said)) for one, two, said in rows)
