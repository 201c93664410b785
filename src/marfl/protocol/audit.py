"""Audits after a commit: one peer as an auditor, as an owner that is asked, and as one that hears of liars.

The committed hash names who audits which parts (`signed_slices.auditors`), so nobody can know it before. An auditor
asks the owner for the inputs of the part, and those to whom the owner sent something for its claims; then it adds up
again. What that proves is told to everybody on the channel "fraud". Everybody checks it, and from then on the liar is
left out of the run (`Standing.banned`). Who does not show its inputs is not proven a liar: see `not_shown`.

Inputs are kept until the audits of this peer's parts are answered, at most until the next exchange is over.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgpack
import torch
from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.errors import NetError, WireError
from marfl.net.base import NOT_ENTITLED, Parcel, PeerId
from marfl.plan.schedule import EXCHANGES
from marfl.protocol.attempt import Attempt
from marfl.protocol.ballot import ACCUSES_MANY, NO_COURT, Acks, Court
from marfl.protocol.fraud import Proof, check_fraud, examined
from marfl.protocol.instance import Instance
from marfl.protocol.messages import Audit, Audited, Fraud, Ok, Recall, Recalled
from marfl.protocol.notices import remember_ours
from marfl.protocol.roster import Record, Roster, decode_roster
from marfl.protocol.signed_slices import (
    HASH_BYTES,
    UNANSWERED,
    UNSIGNED,
    AuditBook,
    AuditPart,
    Signed,
    Stage,
    Value,
    Witnessed,
    auditors,
    stage_of,
    value_type,
)
from marfl.protocol.standing import Standing
from marfl.protocol.tensors import raw, vector_from
from marfl.protocol.terms import CHANNEL

NOT_YET, UNKNOWN, SHOWN_ALL, GONE = "not yet", "unknown", "shown", "gone"
LATER = Audited(NOT_YET, b"", b"", b"").parcel()
NO_ANSWER = Audited(UNKNOWN, b"", b"", b"").parcel()
NO_CLAIM = Recalled(UNKNOWN, b"", b"").parcel()
BAD_PROOF = "bad proof"  # of a lie that is none: counted in `Net.refused`
MOST_BANNED = 1024  # peers, whoever they are; beyond that only who takes part: names cost nothing, and bans are kept
MOST_PROOFS = 64  # that are kept, to be told to those who have not heard


@dataclass(frozen=True)
class AuditCounts:
    """What came of one peer's audits."""

    made: int = 0
    unshown: int = 0  # of those: the owner did not show its inputs
    proven: int = 0  # lies that this peer has seen proven, by itself or by others

    def plus(self, other: AuditCounts) -> AuditCounts:
        return AuditCounts(self.made + other.made, self.unshown + other.unshown, self.proven + other.proven)


class Audits:
    """One peer's part in audits."""

    def __init__(self, standing: Standing) -> None:
        self.standing, self.talk = standing, standing.talk
        self.net, self.settings = standing.net, standing.settings
        self.book: AuditBook | None = None  # of the exchange that was committed last
        self.proofs: dict[PeerId, Parcel] = {}  # of whom I know that it lied
        self.lies: dict[bytes, Parcel] = {}  # by roster, of a lie in its exchange
        self._ours: set[PeerId] = set()  # who of those liars took part: anybody can make up others
        self.counts = AuditCounts()  # until they are told
        self.total = AuditCounts()  # those that are
        self._news = asyncio.Event()  # an iteration is settled
        self._last = 0  # that was
        self._asked: set[AuditPart] = set()  # parts of mine that are still to be asked for

    # --- before and after an exchange ---

    def begin(self, attempt: Attempt) -> None:
        """Have the slices of an exchange signed, where sums are audited."""
        roster = attempt.roster
        if self.settings.audit and roster.exchange in EXCHANGES and len(roster.members) > 1:
            signing = self.net.sign, self.net.verify, self.settings.audit
            attempt.book = AuditBook(roster, attempt.rank, attempt.length, *signing)

    def settled(self, instance: Instance) -> None:
        """An iteration is committed: keep what I may be asked for, and audit what its hash has me audit."""
        attempt, record = instance.work.exchange, instance.record
        self.book, self._asked = None, set()
        self._last = instance.iteration
        self._news.set()
        self._news.clear()
        if attempt is None or attempt.book is None or record is None or record.roster is None:
            return
        if attempt.roster.digest != record.roster.digest:
            return
        duties = auditors(record.hash, record.roster, self.settings.audit)
        self.book = attempt.book
        self._asked = {part for part in duties if part.rank == attempt.rank}
        unsigned = self.book.keep_for(duties)
        if unsigned:
            self.talk.aside(self._unsigned(self.book, unsigned))
        for part, auditor in duties.items():
            if auditor == self.net.me:
                self.talk.aside(self._audit(self.book, part))

    # --- an auditor's part ---

    async def _audit(self, book: AuditBook, part: AuditPart) -> None:
        """Ask for a part's inputs and for its claims, and add up again."""
        roster, stage = book.roster, stage_of(book.roster, book.length, part)
        if stage is None:
            return None
        owner = roster.members[part.rank].id
        answer = await self._ask_owner(owner, Audit(roster.digest, *part).parcel())
        self.counts = replace(self.counts, made=self.counts.made + 1)
        if answer is None:
            return self._not_shown(owner)
        try:
            if gone := _gone(roster, answer):
                there = await asyncio.gather(*(self._is_there(peer) for peer in gone))
                return self._not_shown(owner if any(there) else None)
            said, values = _read(book, stage, part, answer)
            seen = await self._claims(book, stage, part)
            proof = examined(owner, said, roster, values, seen, self.net.verify)
        except WireError:
            return self._not_shown(owner)
        if proof is not None:
            await self.accuse(proof)
        return None

    def _not_shown(self, owner: PeerId | None) -> None:
        """A part cannot be added up again; nobody is to blame (None) where whoever has not signed is gone."""
        self.counts = replace(self.counts, unshown=self.counts.unshown + 1)
        if owner is not None:
            self.standing.complain(owner, UNANSWERED)

    async def _is_there(self, peer: PeerId) -> bool:
        """Whether a peer answers at all."""
        return await self.talk.ask(peer, CHANNEL, Parcel(b"")) is not None

    async def _ask_owner(self, owner: PeerId, request: Parcel) -> Parcel | None:
        """The owner's answer; it may not have heard of the commit yet. None when there is none in time."""
        limit = self.net.now() + self.settings.phase_timeout + self.settings.call_timeout
        while self.net.now() < limit:
            try:
                answer = await self.net.call(owner, "audit", request, deadline=limit)
                status = Audited.decode(answer.header).status
            except (NetError, WireError):
                return None
            if status != NOT_YET:
                return answer if status in (SHOWN_ALL, GONE) else None
        return None

    async def _claims(self, book: AuditBook, stage: Stage, part: AuditPart) -> list[Witnessed]:
        """What the owner claimed of its own input and of its output, from those to whom it did."""
        asked = {(rank, stage.level) for rank in stage.peers} | {(rank, stage.done) for rank in stage.holders}
        me = book.roster.ranks[self.net.me]
        mine = [book.witnessed(part.rank, done) for rank, done in sorted(asked) if rank == me]
        others = [
            self._ask_claim(book.roster, rank, Recall(book.roster.digest, part.rank, done))
            for rank, done in sorted(asked) if rank != me
        ]  # fmt: skip
        return [each for each in (*mine, *await asyncio.gather(*others)) if each is not None]

    async def _ask_claim(self, roster: Roster, holder: int, asked: Recall) -> Witnessed | None:
        answer = await self.talk.ask(roster.members[holder].id, "recall", asked.parcel())
        try:
            return _witnessed(Recalled.decode(answer.header)) if answer is not None else None
        except WireError:
            return None  # it holds nothing that proves anything

    # --- an owner's part, and that of whoever was sent something ---

    async def answer_audit(self, sender: PeerId, request: Parcel) -> Parcel:
        """The auditor of a part of mine asks for its inputs; it may have heard of the commit before me."""
        asked, limit = Audit.decode(request.header), self.net.now() + self.settings.call_timeout / 2
        while not self._is_settled(asked.digest) and self.net.now() < limit:
            await self.talk.until(self._news, limit)
        book = self.book
        if book is None or book.roster.digest != asked.digest:
            return NO_ANSWER if self._is_settled(asked.digest) else LATER
        if not is_auditor(self.standing, sender, asked):  # who may ask was not known before
            self.net.refused.note(NOT_ENTITLED, sender)
            return NO_ANSWER
        part = AuditPart(asked.rank, asked.round, asked.passing)
        level = part.round + part.passing
        gone = await self._unsigned(book, [(level, rank) for rank in book.unclaimed(part)])
        if gone:
            return Audited(GONE, b"", msgpack.packb(gone), b"").parcel()
        found = book.answer(part)
        if book is self.book:
            self._asked.discard(part)
            book.keep_only(self._asked)
        if found is None:
            return NO_ANSWER
        hashes, proofs = found.said.parts[-2:]
        assert isinstance(hashes, bytes)
        assert isinstance(proofs, bytes)
        return Audited(SHOWN_ALL, hashes, proofs, found.said.signature).parcel(raw(torch.cat(found.values)))

    async def _unsigned(self, book: AuditBook, keys: Iterable[tuple[int, int]]) -> list[int]:
        """Ask for the claims of slices that I have without: by (rounds done, rank). Who is gone, and cannot be asked.

        Others gave them to me when their senders were late, or I took a claim that I did not verify. Whoever is there
        and has not signed is named in my next vote. That is a peer's word like any other: see `not_shown`.
        """
        gone = []
        for done, rank in keys:
            peer = book.roster.members[rank].id
            answer = await self.talk.ask(peer, "recall", Recall(book.roster.digest, rank, done).parcel())
            try:
                if answer is not None:
                    book.complete(rank, done, Recalled.decode(answer.header).claim)
            except WireError:
                self.net.refused.note(BAD_PROOF, peer)
            if answer is None:
                gone.append(rank)
            elif not book.is_claimed(rank, done):
                self.standing.complain(peer, UNSIGNED)
        return gone

    def _is_settled(self, digest: bytes) -> bool:
        """Whether this iteration is over here, or another has been since."""
        record = committed(self.standing, digest)
        return record is not None and record.iteration <= self._last

    async def answer_recall(self, sender: PeerId, request: Parcel) -> Parcel:
        """What somebody claimed to me, for its auditor; or what I claimed, for whoever was sent the slice itself."""
        asked = Recall.decode(request.header)
        book, attempt = self.book, self.standing.instance.work.exchange if self.standing.instance else None
        if attempt is not None and attempt.book is not None and attempt.roster.digest == asked.digest:
            book = attempt.book
        if book is None or book.roster.digest != asked.digest:
            return NO_CLAIM
        if asked.rank == book.rank:
            dest = book.roster.ranks.get(sender)
            proof = book.sent_to(dest, asked.done) if dest is not None else b""
            return Recalled(SHOWN_ALL if proof else UNKNOWN, proof, b"").parcel()
        found = book.witnessed(asked.rank, asked.done)
        if found is None:
            return NO_CLAIM
        return Recalled(SHOWN_ALL, msgpack.packb(found.signed), found.cells).parcel()

    # --- what becomes of liars ---

    def news(self) -> tuple[tuple[int, ...], AuditCounts]:
        """Iterations in which somebody is proven to have lied, once each; and what this peer has audited."""
        found, self.standing.tainted = tuple(sorted(self.standing.tainted)), set()
        counts, self.counts = self.counts, AuditCounts()
        self.total = self.total.plus(counts)
        return found, counts

    async def show(self, iteration: int, roster: Roster) -> None:
        """Before a run goes back to what was before an iteration: show its members why. Who has not seen refuses."""
        record = self.standing.history.get(iteration)
        proof = self.lies.get(record.roster.digest) if record is not None and record.roster is not None else None
        if proof is not None:
            others = (peer for peer in roster.ids if peer != self.net.me)
            await asyncio.gather(*(self._tell(peer, proof) for peer in others))

    async def accuse(self, proof: Proof) -> None:
        """Leave a liar out, and tell everybody why."""
        if self._believe(proof):
            roster, record = self.standing.last_roster, self.standing.record
            known = {elector.id for elector in record.electors} | set(roster.ids if roster else ())
            parcel = self.proofs[proof.culprit]
            telling = (self._tell(peer, parcel) for peer in sorted(known - {self.net.me, proof.culprit}))
            await asyncio.gather(*telling)

    async def _tell(self, peer: PeerId, parcel: Parcel) -> None:
        await self.talk.ask(peer, "fraud", parcel, ByteKind.REPAIR)

    def warn(self, leader: PeerId, roster: Roster) -> None:
        """A leader that has a liar in its roster has not heard of the proof."""
        for liar in roster.ranks.keys() & self.proofs.keys():
            self.talk.aside(self._tell(leader, self.proofs[liar]))

    async def answer_fraud(self, sender: PeerId, request: Parcel) -> Parcel:
        """Somebody says that it can prove a lie: it must, whoever it is."""
        culprit = Fraud.decode(request.header).culprit
        try:
            proof = Proof.decode(request.payload)
            if culprit in self.proofs and not self._is_new(proof):
                return Ok("ok").parcel()
            known = self._believe(proof) and proof.culprit == culprit
        except WireError:
            self.net.refused.note(BAD_PROOF, sender)
            return Ok("refused").parcel()
        return Ok("ok" if known else "refused").parcel()

    def _is_new(self, proof: Proof) -> bool:
        """Whether a proof is of a lie in a sum that I have not heard of: who has lied before may have lied there, too.

        Else a liar could have itself caught for less, and nobody would go back before its wrong sum.
        """
        return bool(proof.roster) and not self.standing.knows_lie(decode_roster(proof.roster).digest)

    def _is_committed(self, digest: bytes) -> bool:
        return committed(self.standing, digest) is not None

    def _believe(self, proof: Proof) -> bool:
        """Check a proof, and leave the liar out of this run from now on. `WireError` where it proves nothing."""
        if proof.run != self.settings.run:
            raise WireError("a proof of another run")
        if len(self.standing.banned) >= MOST_BANNED and not self.standing.is_known(proof.culprit):
            raise WireError("a proof of somebody who is nobody here, and there were many")
        culprit = check_fraud(proof, self.net.verify)
        self.counts = replace(self.counts, proven=self.counts.proven + (culprit not in self.proofs))
        self._ours |= {culprit} if self.standing.takes_part(culprit) else set()
        parcel = Fraud(culprit).parcel(proof.encoded)
        remember_ours(self.proofs, culprit, parcel, self._ours.__contains__, MOST_PROOFS)
        if proof.roster:
            digest = decode_roster(proof.roster).digest
            self.standing.note_lie(digest, culprit)
            remember_ours(self.lies, digest, parcel, self._is_committed, MOST_PROOFS)
        self.standing.ban(culprit, proof.reason)
        return True


def not_shown(acks: Acks, court: Court = NO_COURT) -> dict[PeerId, str]:
    """Who sits out the next roster because of audits: it showed no inputs, or did not sign what it sent.

    Only who is there. Where one peer alone says so of another, either of the two may be to blame: both sit out, as with
    bad data. Whoever says so of several, each time alone, sits out instead of them. An owner that names somebody who
    did not sign cannot show its inputs: that is not held against it as well.
    """
    said = [(accuser, peer, why) for accuser, ack in acks.items() for peer, why, _ in ack.blamed if peer in acks]
    excused = {accuser for accuser, peer, why in said if why == UNSIGNED and peer != accuser}
    accused: defaultdict[PeerId, dict[PeerId, str]] = defaultdict(dict)
    for accuser, peer, why in said:
        if peer != accuser and (why == UNSIGNED or (why == UNANSWERED and peer not in excused)):
            accused[peer][accuser] = why
    guilty = {peer: next(iter(by.values())) for peer, by in accused.items() if court.believes(by)}
    alone = [(accuser, peer) for peer, by in accused.items() if peer not in guilty for accuser in by]
    counts = Counter(accuser for accuser, _ in alone)
    guilty |= {accuser: ACCUSES_MANY for accuser, count in counts.items() if count > 1}
    for accuser, peer in alone:
        if accuser not in guilty and peer not in guilty:
            guilty |= court.out(accuser, peer, accused[peer][accuser])
    return guilty


def committed(standing: Standing, digest: bytes) -> Record | None:
    """The record of a roster that I know to be committed."""
    known = (standing.record, *standing.history.values())
    return next((each for each in known if each.roster is not None and each.roster.digest == digest), None)


def is_auditor(standing: Standing, sender: PeerId, asked: Audit) -> bool:
    """Whether the committed hash names this peer for this very part. Before I know of the commit any member may ask."""
    record, roster = committed(standing, asked.digest), _roster_of(standing, asked.digest)
    if roster is None or roster.ranks.get(standing.net.me) != asked.rank:
        return False
    if record is None:
        return standing.settings.audit > 0 and sender in roster.ranks
    named = auditors(record.hash, roster, standing.settings.audit)
    return named.get(AuditPart(asked.rank, asked.round, asked.passing)) == sender


def may_recall(standing: Standing, sender: PeerId, asked: Recall) -> bool:
    """Whoever audits a part of that member; and a member that asks for what I sent itself."""
    record, roster = committed(standing, asked.digest), _roster_of(standing, asked.digest)
    if roster is None or sender not in roster.ranks:
        return False
    if roster.ranks.get(standing.net.me) == asked.rank:
        return True
    named = auditors(record.hash, roster, standing.settings.audit) if record else {}
    return any(part.rank == asked.rank and who == sender for part, who in named.items())


def _roster_of(standing: Standing, digest: bytes) -> Roster | None:
    """The roster with this digest: committed, or sealed in the iteration under way."""
    record, instance = committed(standing, digest), standing.instance
    return record.roster if record else (instance.sealed.get(digest) if instance else None)


def _read(book: AuditBook, stage: Stage, part: AuditPart, answer: Parcel) -> tuple[Signed, Sequence[Tensor]]:
    """An owner's word and the values behind it; `WireError` for an answer that is none."""
    told = Audited.decode(answer.header)
    at = [rank for rank, *_ in stage.sources].index(part.rank)
    own = told.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
    parts: tuple[Value, ...] = (
        book.roster.digest, book.length, part.round, int(part.passing), *stage.own, own, told.hashes, told.proofs
    )  # fmt: skip
    sizes = [stop - start for _, start, stop in stage.sources]
    joined = vector_from(answer.payload, sum(sizes), value_type(book.roster))
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return Signed("inputs", parts, told.signature), [joined[a:b] for a, b in pairwise(ends)]


def _gone(roster: Roster, answer: Parcel) -> list[PeerId]:
    """Whose claims an owner cannot show because they are gone, as it says; `WireError` for an answer that is none."""
    told = Audited.decode(answer.header)
    if told.status != GONE:
        return []
    try:
        ranks = msgpack.unpackb(told.proofs, raw=False, max_ext_len=0)
        return [roster.members[rank].id for rank in ranks if type(rank) is int and 0 <= rank < len(roster.members)]
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a list of ranks: {type(error).__name__}") from None


def _witnessed(told: Recalled) -> Witnessed:
    """A claim that was recalled, or `WireError`. Whose it is will be checked."""
    try:
        kind, parts, signature = msgpack.unpackb(told.claim, raw=False, max_ext_len=0)
        signed = Signed(kind, tuple(parts), signature)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a claim: {type(error).__name__}") from None
    if type(signed.kind) is not str or type(signed.signature) is not bytes:
        raise WireError("not a claim")
    return Witnessed(signed, told.cells)
