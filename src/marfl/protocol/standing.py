"""Where one peer stands: the agreed state that it holds, the decision under way, and what it knows of the others.

All parts of a participant share one `Standing`. It changes in few ways: a decision is entered, a vote is cast, a
decision is taken over, a newer state is installed. A `Diary` hears of each, and may refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from marfl.errors import InputError, WireError
from marfl.net.base import PeerId, Tag, Verdict
from marfl.plan.grid import plan
from marfl.protocol.ballot import Ballot, bearable, in_reach, voted
from marfl.protocol.chain import Anchor
from marfl.protocol.commits import Commits, Evidence, electors_of
from marfl.protocol.former_states import WINDOW, may_go_back, went_back, where_to
from marfl.protocol.fraud import contradicts
from marfl.protocol.incarnations import Incarnations
from marfl.protocol.instance import Accepted, Binding, Instance, Led
from marfl.protocol.messages import Complaint, Head
from marfl.protocol.notices import Notices, remember, remember_ours
from marfl.protocol.pace import Pace
from marfl.protocol.pedigree import Pedigree, parted_at
from marfl.protocol.roster import VOID, Elector, Record, Roster, given_up, ranked
from marfl.protocol.signed_slices import Signed
from marfl.protocol.speaker import Speaker
from marfl.protocol.statements import (
    LONGEST_GROUNDS,
    Cast,
    Certificate,
    SignedPromise,
    SignedSeal,
    link_of,
    unpack_promises,
)
from marfl.protocol.terms import Terms
from marfl.state import Snapshot
from marfl.wire.error_feedback import CommittedSum, RecordChain
from marfl.wire.packing import IntegerWire
from marfl.wire.quantiser import SCALES, exponents_in, wire_at

Advance: TypeAlias = Callable[[Snapshot, Tensor, Roster], Snapshot]  # the agreed state, the mean update: the next state
T = TypeVar("T")
Contradicted: TypeAlias = Callable[[PeerId, Signed, Signed], None]
OTHER_RESULT = "vote for another result"  # than what was decided of the same roster: counted in `Net.refused`
EMPTY = "empty word"  # of a head that is not where it is said to be: counted in `Net.refused`
UNPROVEN = "unproven record"  # a record that nothing certifies: counted in `Net.refused`
MOST_ACKED = 64  # states
REMEMBERED = 8  # iterations
MOST_HEADS = 16  # that are looked at
MOST_MUTE = 1024  # peers
MOST_LIES = 64  # iterations with one
MOST_SEALS = 64  # attempts of a decision whose seals are remembered
PROMISE_BYTES = 256  # that one elector's promise takes at most, where a leader shows it
MOST_PROMISED = 4  # attempts of a decision whose promises are remembered


def _keep_nearest(by_attempt: dict[int, T], promised: int, most: int) -> None:
    """Forget what was said of the attempts that are farthest from mine: by speaking of those nobody hides a lie."""
    while len(by_attempt) > most:
        del by_attempt[max(by_attempt, key=lambda attempt: (abs(attempt - promised), attempt))]


class Caught(NamedTuple):
    """A verified state, the record it belongs to, and the mean update that led to it when that was sent."""

    record: Record
    state: Snapshot
    mean: Tensor | None
    commits: dict[int, bytes]  # what was committed before it, as far as its donor says
    evidence: Evidence | None = None  # how it follows what this peer was sure of


class Diary:
    """What a peer does beside the rules when it votes: a real one writes its votes down. This one does nothing."""

    incarnation = 0  # which process of its key this is
    revoked = ""  # why this peer must not vote any more
    keeps = False  # whether votes are written down at all

    def knows(self, iteration: int) -> bool:
        """Whether votes were written down up to this iteration, or later."""
        return True

    def revoke(self, record: Record, *, cast_here: bool) -> None:
        """Others have a vote of mine for this record that is not written down, or that this process has not cast."""

    def entering(self, standing: Standing) -> None:
        """Before the first vote of an iteration; sets `Standing.barred` where one was cast in an earlier life."""

    def voted(self, standing: Standing, result: Accepted) -> None:
        """A vote was cast."""

    def decided(self, standing: Standing, instance: Instance, before: Record) -> None:
        """A decision was taken over."""

    def installed(self, standing: Standing, before: Record) -> None:
        """A newer state was installed."""

    def helped(self, roster: Roster) -> None:
        """This peer helps to take the masks off a roster's sum."""

    def caught(self, liar: PeerId, why: str) -> None:
        """Somebody is proven to have lied."""

    def complained(self, peer: PeerId, why: str) -> None:
        """This peer holds something against another."""

    def liars(self) -> dict[PeerId, str]:
        """Who was proven to have lied in an earlier life of this peer, and how."""
        return {}


class Standing:
    """The state of one participant. Its parts read it; what binds the peer changes by the methods below alone."""

    def __init__(
        self, talk: Speaker, index: int, layout: bytes, state: Snapshot, record: Record, advance: Advance
    ) -> None:
        if state.hash != record.hash:
            raise InputError("the state does not belong to the record: their hashes differ")
        self.talk, self.net, self.settings = talk, talk.net, talk.settings
        self.index, self.layout = index, layout
        self.state, self.record, self.advance = state, record, advance
        self.instance: Instance | None = None
        self.former: Instance | None = None  # the decision before, while its record is not settled: its votes stand
        self.aside: dict[bytes, Binding] = {}  # by link of the record before: what binds me in decisions I have left
        self.told_by: PeerId | None = None  # the leader at whose word I went on to the newest record
        self.led: Led | None = None  # the last decision that I led to: somebody's second vote may come late
        self.before = record  # the record before the newest
        self.moved: float | None = None  # when the newest came to be so here; None: nobody has asked yet
        self.contradicted: Contradicted = lambda *_: None  # hears of two words of one peer that cannot both be honest
        self.doubt = b""  # the record that names me as a voter, though I know of no vote: I sit out what follows it
        self.vote: tuple[bytes, Cast] | None = None  # (link of a record, my vote for it), if I had one
        known = self.settings.run, self.settings.liars, self.net.verify
        self.proofs = Commits(*known, record, self.settings.expected)
        self.barred = -1  # after a restart: the iteration it may have voted in before, and never votes in again
        self.last_mean: tuple[bytes, Tensor | None] | None = None  # (from which state, the update to mine)
        self.past: dict[int, Snapshot] = {}  # states of iterations before the newest: see `former_states`
        self.lies: dict[int, PeerId] = {}  # iterations with a sum that is proven wrong, and who lied
        self.tainted: set[int] = set()  # those of them that nobody was told of yet
        self._alleged: dict[bytes, PeerId] = {}  # by roster that is not known to be committed: who lied in it
        self.last_roster: Roster | None = None  # of the last exchange that began here
        self.history: dict[int, Record] = {}
        self._mute: dict[PeerId, tuple[float, float]] = {}  # who let me wait for its head: asked again when, after
        self.donors: dict[PeerId, None] = {}  # who has shown that it is ahead, newest last
        self.discarded = 0
        self.helped: dict[int, Roster] = {}  # by iteration, the one that this peer has helped to unmask
        self.in_vain = -1  # the last iteration that went by though I held its masked sum
        self.suspects: dict[PeerId, int] = {}  # who dealt bad shares of its secrets, and in which iteration
        self.fetched = False  # my state came from others: they may have gone on meanwhile
        self.follows = False  # I came too late for the iteration under way, and wait for what comes of it
        self.carries = False  # what this peer learns too late it brings to a later iteration: nobody need wait for it
        self.late = False  # the others waited for me longer than it pays, or went on without me
        self.company = 0  # peers that are there at the run's beginning, where that was looked up; 0: those expected
        self.notices = Notices()
        self.incarnation = 0  # which process of its key this is, and the others'
        self.incarnations = Incarnations()
        self.acked: dict[bytes, set[tuple[bytes, int]]] = {}  # by state: lineages and attempts that this process acked
        self.offered: dict[bytes, None] = {}  # states that an update was offered from: it may be in a roster
        self.terms = Terms(self.settings.terms)
        self.banned: dict[PeerId, str] = {}  # who is proven to have lied, and how: it takes part in nothing any more
        self._complaints: dict[PeerId, tuple[str, int | None]] = {}  # of audits, and the iteration they were told in
        self.diary = Diary()
        self.net.refused.known = self.is_known
        self.judge_anew()

    def keep(self, diary: Diary) -> None:
        """Have this diary hear of every vote from now on."""
        self.diary, self.incarnation = diary, diary.incarnation
        self.banned |= diary.liars()

    @property
    def behind(self) -> bool:
        """Whether this peer knows of a commit whose state it does not hold."""
        return self.state.hash != self.record.hash

    @property
    def chain(self) -> RecordChain:
        """The newest records, for whoever keeps something that belongs to one.

        After a restart or a catch-up only the newest is known, and by its roster the one that it follows.
        """
        commits, roster = self.commits, self.record.roster
        before = {self.record.iteration - 1: roster.base} if roster is not None else {}
        return RecordChain(self.record.lineage, before | commits)

    @property
    def decisions(self) -> list[CommittedSum]:
        """The last commits that are known here with their rosters, oldest first."""
        known = {**self.history, self.record.iteration: self.record}
        rosters = [(record, record.roster) for _, record in sorted(known.items()) if record.roster is not None]
        return [
            CommittedSum(
                record.iteration, None if roster.exchange == VOID else roster.digest, record.hash, record.lineage
            )
            for record, roster in rosters
        ]

    def wire_now(self, wire: IntegerWire) -> IntegerWire:
        """How integers of a few bits travel from the state that this peer holds."""
        return wire_at(wire, exponents_in(self.state.vectors[SCALES].numpy()))

    @property
    def slow(self) -> bool:
        """Whether the others should go on while this peer trains."""
        return self.carries and self.late

    @property
    def is_barred(self) -> bool:
        """Whether this peer may have voted on what follows its record before a restart."""
        return self.barred == self.record.iteration + 1

    @property
    def commits(self) -> dict[int, bytes]:
        """The last iterations that were committed here, and what came of them."""
        return {at: record.hash for at, record in self.history.items()} | {self.record.iteration: self.record.hash}

    @property
    def electors(self) -> tuple[Elector, ...]:
        """Of the next iteration, in the order in which they lead."""
        instance = self.instance
        if instance is not None and self.is_current(instance):
            return instance.electors
        return ranked(self.settings.run, self.record.iteration + 1, self.record.electors)

    # --- how it changes ---

    def enter(self) -> Instance:
        """The decision that follows the last one known; votes cast before entering are kept."""
        self.diary.entering(self)
        if self.doubt == link_of(self.record):
            self.barred = self.record.iteration + 1
        if self.instance is None or not self.is_current(self.instance):
            if self.instance:
                self._set_aside(self.instance)
            self.net.forget(self.record.iteration)
            self.instance = self._taken_up()
        elif self.instance.stale:  # it could not sync: try again with the votes it has
            self.instance.stale = False
            self.instance.over.clear()
        self.instance.barred = self.is_barred
        if self.is_barred:  # in an earlier life this peer may have offered what it learned from the same state
            remember(self.offered, self.record.hash, None, MOST_ACKED)
        return self.instance

    def is_current(self, instance: Instance) -> bool:
        """Whether a decision follows my newest record: not another one that led to the same state."""
        return instance.base == self.record.hash and link_of(instance.before) == link_of(self.record)

    def _set_aside(self, instance: Instance) -> None:
        """Keep what binds me in a decision that is open: I may come back to it, and must not have forgotten my word."""
        instance.stop()
        instance.keep_nothing()
        if instance.record is None and instance.promised >= 0:
            remember(self.aside, link_of(instance.before), instance.word(), REMEMBERED)

    def _taken_up(self) -> Instance:
        """The decision that follows my newest record; where I had left it, bound as I was."""
        instance = Instance.after(self.settings.run, self.record, self.net.now())
        if (word := self.aside.pop(link_of(self.record), None)) is not None:
            instance.take_up(word)
        return instance

    def accept(self, instance: Instance, result: Accepted) -> None:
        """Vote for a result. After this, no earlier attempt's result is ever voted for."""
        instance.ballot = voted(instance.ballot, result)
        instance.cast.add((result.attempt, result.value))
        self.diary.voted(self, result)

    def note_ack(self, instance: Instance, attempt: int) -> None:
        """Remember that this very process gave its word for an attempt."""
        self.acked.setdefault(instance.base, set()).add((instance.lineage, attempt))
        if len(self.acked) > MOST_ACKED:
            del self.acked[next(iter(self.acked))]
        if instance.mine is not None:
            remember(self.offered, instance.base, None, MOST_ACKED)

    def decide(
        self,
        instance: Instance,
        record: Record,
        holders: tuple[PeerId, ...],
        certificate: Certificate | None = None,
        vouchers: Iterable[PeerId] = (),
    ) -> None:
        """This iteration is committed: move on to its state if I hold it, else remember who does.

        Its certificate was checked, or these vouch for it (see `commits`).
        """
        roster, before = record.roster, self.record
        if instance.over.is_set() or roster is None or roster.base != instance.base:
            return
        mine = instance.accepted
        self._look_for_me(instance, record, certificate)
        self._name_others(instance.led, instance.lead.finishes, record)
        self._note_commit(instance, record, certificate, vouchers)
        self._keep_state(before)
        if mine is not None and mine.hash == record.hash and mine.state is not None:
            self.last_mean = (self.state.hash, mine.mean)
            self.state = mine.state
        if record.lineage != self.record.lineage:
            self.discarded = 0
        self.record, self.fetched, self.moved = record, False, self.net.now()
        oldest = record.iteration - REMEMBERED
        self.history = {at: known for at, known in self.history.items() if at > oldest} | {record.iteration: record}
        self.helped = {at: known for at, known in self.helped.items() if at > oldest}
        self._match_lies()
        self.notices.seen(record.iteration, (*roster.ids, *(witness.id for witness in roster.witnesses)))
        self.in_vain = record.iteration if instance.masks.total and roster.exchange == VOID else self.in_vain
        instance.record, instance.holders = record, holders
        instance.keep_nothing()
        self.judge_anew()
        instance.end()
        self.diary.decided(self, instance, before)

    def note_seal(self, instance: Instance, seal: SignedSeal) -> bool:
        """Whether a seal is its leader's; of two in one attempt everybody hears."""
        leader, known = instance.leader(seal.attempt), instance.seals.get(seal.attempt)
        said = Signed("seal", seal.parts(instance.signed_id), seal.signature)
        if leader is None or not self.net.verify(leader, said.statement, seal.signature):
            return False
        if known is not None and known.parts(instance.signed_id) != said.parts:
            self.contradicted(leader, Signed("seal", known.parts(instance.signed_id), known.signature), said)
            self._compare_grounds(instance, seal)
        few = len(seal.promises) <= max(LONGEST_GROUNDS, PROMISE_BYTES * len(instance.electors))
        instance.seals.setdefault(seal.attempt, seal if few else seal.brief)
        _keep_nearest(instance.seals, instance.promised, MOST_SEALS)
        return True

    def _compare_grounds(self, instance: Instance, seal: SignedSeal) -> None:
        """A leader has gone by two sets of promises: who gave it two of one attempt lies as well."""
        known = instance.seals[seal.attempt].promises
        for shown in (known, seal.promises):
            try:
                rows = unpack_promises(shown, seal.attempt)
            except WireError:
                continue  # only the digest is known, or it is nothing
            for row in rows:
                if 0 <= row.place < len(instance.electors):
                    self.note_promise(instance, instance.electors[row.place].id, row)

    def note_promise(self, instance: Instance, peer: PeerId, said: SignedPromise, *, checked: bool = False) -> None:
        """What an elector promised for an attempt; of another promise of the same one everybody hears.

        `checked`: the signature was verified. Only what differs is verified here.
        """
        known = instance.promises.setdefault(said.promise.attempt, {})
        _keep_nearest(instance.promises, instance.promised, MOST_PROMISED)
        earlier = known.get(peer)
        if earlier is not None and earlier.promise == said.promise:
            return
        parts = (*instance.signed_id, *said.promise)
        word = Signed("promise", parts, said.signature)
        if not checked and not self.net.verify(peer, word.statement, word.signature):
            return
        if earlier is not None:
            self.contradicted(peer, Signed("promise", (*instance.signed_id, *earlier.promise), earlier.signature), word)
        known.setdefault(peer, said)

    def note_vote(self, led: Led, peer: PeerId, digest: bytes, signature: bytes) -> None:
        """A member's vote for a hash, whose signature holds. Of another one in the attempt everybody hears."""
        for (voter, other), earlier in led.votes.items():
            if voter == peer and other != digest:
                one, two = (
                    Signed("vote", tuple(led.vote(each)), sign)
                    for each, sign in ((other, earlier), (digest, signature))
                )
                self.contradicted(peer, one, two)

    def _name_others(self, led: Led | None, finishes: dict[PeerId, bytes | None], record: Record) -> None:
        """Name whoever voted for another result of a roster that I led than what was decided."""
        if led is not None and record.roster is not None and led.roster.digest == record.roster.digest:
            self.led = led
            for peer in (peer for peer, got in finishes.items() if got not in (None, record.hash)):
                self.net.refused.note(OTHER_RESULT, peer)

    def _look_for_me(self, instance: Instance, record: Record, certificate: Certificate | None) -> None:
        """Whether somebody votes in my name: where electors may lie, my own signature says so, and nothing else.

        Who is only named knows of no vote either: it sits out the next iteration, in which its other self may vote.
        """
        roster = record.roster
        assert roster is not None
        if not self.diary.keeps or self.barred == record.iteration:
            return
        rank, value = instance.rank(self.net.me), (roster.digest, record.hash)
        signed = certificate is not None and any(place == rank for place, _ in certificate.signatures)
        foreign = signed and certificate is not None and (certificate.attempt, value) not in instance.cast
        counted = any(elector.id == self.net.me for elector in roster.voters)
        strange = counted and (record.lineage, roster.attempt) not in self.acked.get(roster.base, ())
        if foreign or (strange and not self.proofs.borne(instance.electors)):
            self.diary.revoke(record, cast_here=False)
        elif strange:
            self.doubt = link_of(record)

    def look_back(self, record: Record, signed: int, deciders: int) -> None:
        """The same of a record that I was given, or had: my log must know of my votes. `InputError` where I must stop.

        `signed`: the newest iteration in which I am shown a vote with my signature; `deciders`: how many decided it.
        """
        named = record.roster is not None and any(elector.id == self.net.me for elector in record.electors)
        lost = named and not self.diary.knows(record.iteration)
        if not self.diary.knows(signed) or (lost and not bearable(deciders, self.settings.liars)):
            self.diary.revoke(record, cast_here=True)
            raise InputError(self.diary.revoked)
        if lost:
            self.doubt = link_of(record)

    def _note_commit(
        self, instance: Instance, record: Record, certificate: Certificate | None, vouchers: Iterable[PeerId]
    ) -> None:
        mine, roster = instance.accepted, record.roster
        assert roster is not None
        if mine is not None and mine.value == (roster.digest, record.hash):
            self.vote = link_of(record), instance.vote(roster, mine.attempt, record.hash)
        if certificate is not None:
            self._look_for_hidden_votes(instance, record, certificate)
        leaders = {instance.leader(roster.attempt), instance.leader(instance.promised)}
        tellers = leaders.intersection(vouchers) - {self.net.me} if certificate is None else ()
        self.told_by = next(iter(tellers), None)
        self.proofs.enter(record, certificate, vouchers, self.proofs.borne(instance.electors))
        self.before = self.record
        self._keep_former(instance)

    def _look_for_hidden_votes(self, instance: Instance, record: Record, certificate: Certificate) -> None:
        """Whether somebody who signed this record told a later leader that it had not: of that everybody hears."""
        assert record.roster is not None
        if record.roster.lineage != instance.lineage:
            return  # what was promised here is of another lineage, whose electors may be others
        said = instance.vote(record.roster, certificate.attempt, record.hash)
        electors = dict(enumerate(instance.electors))
        votes = {electors[place].id: signature for place, signature in certificate.signatures if place in electors}
        later = [rows for attempt, rows in instance.promises.items() if attempt > certificate.attempt]
        for peer, row in (item for rows in later for item in rows.items() if item[0] in votes):
            vote = Signed("vote", tuple(said), votes[peer])
            promise = Signed("promise", (*instance.signed_id, *row.promise), row.signature)
            if contradicts(vote, promise):
                self.contradicted(peer, vote, promise)

    def _keep_former(self, instance: Instance | None) -> None:
        """While a record is not settled its electors keep their votes; after that nobody needs them."""
        self.former = instance if not self.proofs.settled else None
        if self.proofs.settled and not self._window:
            self.past.clear()
        if instance is not None:
            instance.needed = not self.proofs.settled
            if not instance.needed and instance.over.is_set():
                instance.release()

    @property
    def kept(self) -> bytes:
        """What is known of commits, for the disk."""
        return self.proofs.packed(self.before)

    def restore(self, kept: bytes) -> None:
        """Go on with what was kept of commits; `WireError` for what is damaged."""
        self.before = self.proofs.restore(kept, self.record) or self.before

    def believe(self, peers: Iterable[PeerId]) -> None:
        """These electors know the newest record to be certified."""
        if not self.proofs.settled:
            known = [peer for peer in peers if self.is_elector(peer) and peer != self.net.me]
            electors = self.former.electors if self.former else electors_of(self.before, self.record)
            liars = self.proofs.borne(electors)
            self.proofs.vouch(known, liars)
            self._keep_former(self.former)

    def prove(self, certificate: Certificate) -> None:
        """The newest record's certificate is here, and holds."""
        if self.proofs.certificate(self.record) is None:
            self.proofs.prove(self.before, self.record, certificate)
            self._keep_former(self.former)

    @property
    def anchors(self) -> list[Anchor]:
        """What is surely committed, the newest first: proofs for me begin with one of them."""
        past = [self.history[at] for at in sorted(self.history, reverse=True) if at < self.record.iteration]
        return self.proofs.anchors([*([self.record] if self.proofs.settled else ()), self.before, *past])

    def install(self, caught: Caught) -> None:
        """Replace my state by a verified one; what was committed here and is not there is given up, and counted."""
        record, before = caught.record, self.record
        votes = caught.evidence.votes_of(self.net.me) if caught.evidence else (0, len(record.electors))
        self.look_back(record, *votes)
        lost = given_up(self.commits, caught.commits)
        if record.lineage != self.record.lineage:
            theirs = caught.evidence.end.pedigree if caught.evidence else Pedigree((), record.iteration)
            since = parted_at(self.proofs.chronicle.head.pedigree, theirs) or 1
            lost = max(lost, self.record.iteration - since + 1)
        self.discarded = lost or self.discarded
        if link_of(record) != link_of(self.record):
            if caught.commits.get(before.iteration, before.hash) != before.hash:
                self._name_teller()
            self.before = record  # which one came before it is not known here
            self.proofs.jump(caught.evidence, record)
            self.former = None
        self.last_mean = (self.state.hash, caught.mean) if caught.mean is not None else None
        self.state, self.record, self.fetched, self.moved = caught.state, record, True, self.net.now()
        common = caught.evidence.begin.iteration if caught.evidence else record.iteration - 1
        past = {at: known for at, known in self.history.items() if at <= min(common, record.iteration - 1)}
        same = {at: known for at, known in past.items() if caught.commits.get(at, known.hash) == known.hash}
        self.past = {at: state for at, state in self.past.items() if at in same}
        self.history = same | {record.iteration: record}
        self._match_lies()
        self.judge_anew()
        self.diary.installed(self, before)

    # --- going back ---

    def _keep_state(self, record: Record) -> None:
        """Keep the state after this record, which another one follows, as long as a run may go back to it."""
        window = max(self._window, not self.proofs.settled)
        if window and self.state.hash == record.hash:
            self.past[record.iteration] = self.state
        self.past = {at: state for at, state in self.past.items() if at > record.iteration - window}

    @property
    def _window(self) -> int:
        return WINDOW if self.settings.on_fraud == "rollback" and self.settings.audit else 0

    def step_back(self) -> bool:
        """Give up a record that nobody can show to be certified: the decision before goes on, with my votes in it.

        Whether that could be done. What this peer has promised and voted since then was on top of nothing.
        """
        former, state, instance = self.former, self.past.get(self.before.iteration), self.instance
        if self.proofs.settled or former is None or state is None or state.hash != self.before.hash:
            return False
        self._name_teller()
        self.history.pop(self.record.iteration, None)
        self.proofs.step_back()
        self.discarded = 1
        self.state, self.record, self.former = state, self.before, None
        self.last_mean = self.vote = None
        self.moved = self.net.now()
        former.reopen(self.net.now())
        self.instance = former
        if instance is not None and instance is not former:
            instance.stale = True
            self._set_aside(instance)
            instance.end()
        self.judge_anew()
        self.diary.installed(self, self.record)
        return True

    def _name_teller(self) -> None:
        """Name the leader at whose word I went on to a record that is given up: who decides can show the votes."""
        if self.told_by is not None and not self.proofs.settled:
            self.net.refused.note(UNPROVEN, self.told_by)
        self.told_by = None

    @property
    def _known(self) -> dict[int, Record]:
        return self.history | {self.record.iteration: self.record}

    @property
    def where_to(self) -> int | None:
        """The iteration to whose state the run should go back, as far as this peer knows."""
        if self.settings.on_fraud != "rollback":
            return None
        return where_to(self.lies, self._known, self.record.iteration)

    def may_take_back(self, roster: Roster) -> bool:
        """Whether a roster goes back to the state before a lie that this peer has seen proven."""
        to, newest = roster.restores, self.record.iteration
        allowed = to is not None and self.settings.on_fraud == "rollback"
        return allowed and to is not None and may_go_back(to, self.lies, self._known, newest)

    def taken_back(self, roster: Roster) -> Snapshot | None:
        """The state after a roster that goes back; None where what it goes back to is not here."""
        former = self.past.get(roster.restores) if roster.restores is not None else None
        return went_back(former, self.state, roster) if former is not None else None

    def note_lie(self, digest: bytes, liar: PeerId) -> None:
        """Somebody is proven to have lied in the exchange of a roster. It taints an iteration if that was committed.

        Anybody can lie in a roster that it makes up itself: no run goes back for that.
        """
        remember_ours(self._alleged, digest, liar, lambda each: self.takes_part(self._alleged[each]), MOST_LIES)
        self._match_lies()

    def knows_lie(self, digest: bytes) -> bool:
        """Whether somebody is known to have lied in the exchange of this roster, be it committed or not."""
        known = (record.roster for at, record in self._known.items() if at in self.lies)
        return digest in self._alleged or any(roster is not None and roster.digest == digest for roster in known)

    def takes_part(self, peer: PeerId) -> bool:
        """Whether a peer takes part, or did so not long ago."""
        return self.is_known(peer) or any(self.took_part(peer, iteration) for iteration in self.history)

    def _match_lies(self) -> None:
        for at, record in self._known.items():
            liar = self._alleged.pop(record.roster.digest, None) if record.roster is not None else None
            if liar is not None:
                self.lies[at] = liar
                self.tainted.add(at)
        while len(self.lies) > MOST_LIES:
            del self.lies[min(self.lies)]

    def gone_elsewhere(self, donor: PeerId | None) -> None:
        """Others hold a state that wins over mine: end the iteration and sync."""
        if donor is not None:
            self.donors.pop(donor, None)
            self.donors[donor] = None
        if self.instance is not None and not self.instance.over.is_set():
            self.instance.stale = True
            self.instance.end()

    def ban(self, liar: PeerId, why: str) -> None:
        """Leave somebody out of this run from now on: it is proven to have lied."""
        if liar not in self.banned:
            self.banned[liar] = why
            self.diary.caught(liar, why)
            self.notices.news.set()  # nobody waits for it

    def complain(self, peer: PeerId, why: str) -> None:
        """Hold something against a peer in the votes of one iteration, the next in which this peer votes."""
        self.diary.complained(peer, why)
        if self._complaints.get(peer, ("", 0))[1] is not None:  # the first reason stays until it is told
            self._complaints[peer] = why, None

    def complaints(self, iteration: int) -> tuple[Complaint, ...]:
        """What is held against others in this iteration."""
        due = {peer: why for peer, (why, told) in self._complaints.items() if told in (None, iteration)}
        self._complaints = {peer: (why, iteration) for peer, why in due.items()}
        return tuple(Complaint(peer, why, False) for peer, why in due.items())

    def may_help(self, roster: Roster) -> bool:
        """Whether to help unmask this roster: the first of its iteration that I am asked for, and no other."""
        allowed = self.helped.setdefault(roster.iteration, roster).digest == roster.digest
        if allowed:
            self.diary.helped(roster)
        return allowed

    def pace(self, roster: Roster) -> Pace:
        """How long the phases of this roster may take; nobody need travel light where nothing is summed."""
        if not roster.is_sum:
            return Pace(self.settings.phase_timeout)
        layout = plan(len(roster.members), roster.group_size)
        return self.settings.pace(roster.exchange, roster.iteration, layout, self.values)

    @property
    def values(self) -> int:
        """Of the agreed state, all of its vectors: no update has more."""
        return sum(vector.numel() for vector in self.state.vectors.values())

    def wait_for_leader(self, instance: Instance, seconds: float) -> None:
        """Let the present leader work for so long; then it is the next elector's turn, in rank order."""
        rank = instance.rank(self.net.me)
        size = max(1, len(instance.electors))
        turn = size if rank is None else (rank - instance.promised - 1) % size
        instance.until = self.net.now() + seconds
        instance.patience = instance.until + turn * self.settings.takeover

    # --- heads ---

    async def heads(self, *, every: bool = False) -> list[tuple[PeerId, Head]]:
        """Heads that may win over mine, announced by peers with my settings.

        Those of electors that I remember come first; then of my lineage, the farthest first. Each is its peer's word,
        until it is proven. `every`: also those that are not worth a look.
        """
        found = []
        for peer, value in (await self.talk.look_up("head")).items():
            try:
                head = Head.decode(value)
            except WireError:
                continue  # not a record of ours: it announces nothing
            if peer == self.net.me or peer in self.banned or not self.terms.met(self.talk, peer, head.terms):
                continue
            if every or (self.may_win(peer, head) and not self._is_mute(peer)):
                found.append((peer, head))
        mine, known = self.record.lineage, {elector.id for at in self.history.values() for elector in at.electors}
        found.sort(key=lambda at: (at[1].lineage != mine, -at[1].iteration, at[1].hash, at[0]))
        found.sort(key=lambda at: at[0] not in known and not self.is_elector(at[0]))  # or strangers would hide them
        return found[:MOST_HEADS]

    def note_mute(self, peer: PeerId, asked: float) -> None:
        """Somebody was asked for its head, and has let me wait for nothing: it is asked again later and later.

        Anybody can announce one, and each would hold up every iteration. Electors are asked at once all the same. Who
        is no elector may be honest, and the only one that can tell me how the others went on.
        """
        now, settings = self.net.now(), self.settings
        if now - asked >= settings.call_timeout and not self.is_elector(peer):
            _, before = self._mute.get(peer, (0.0, settings.call_timeout / 2))
            pause = min(2 * before, settings.minority_timeout / 2)
            remember(self._mute, peer, (now + pause, pause), MOST_MUTE)

    def note_answer(self, peer: PeerId) -> None:
        """Somebody has shown where it is."""
        self._mute.pop(peer, None)

    def _is_mute(self, peer: PeerId) -> bool:
        return peer in self._mute and self.net.now() < self._mute[peer][0]

    def may_win(self, peer: PeerId, head: Head) -> bool:
        """Whether a head is worth a look: it is later in my lineage, or of another one that has not lost yet."""
        mine = self.record
        if head.hash == mine.hash:
            return self.behind
        if head.lineage == mine.lineage:
            return head.iteration >= mine.iteration
        return (peer, head.lineage) not in self.proofs.losers and head.hash not in self.commits.values()

    async def announce_head(self, record: Record | None = None) -> None:
        """Say where I am (or which commit I know of): whoever is behind, or joins, starts from it.

        Where the DHT does not listen it is told again, aside.
        """
        at = record or self.record
        head = Head(at.iteration, at.hash, at.lineage, self.terms.digest).encoded
        if not await self.talk.announce("head", head):
            self.talk.aside(self.talk.repeat("head", head))

    # --- what this peer knows of another ---

    def is_elector(self, peer: PeerId) -> bool:
        """Whether a peer votes in the iteration under way, or voted in the one just decided, or founds a lineage."""
        instance, roster = self.instance, self.record.roster
        if instance is not None and (instance.founder == peer or instance.rank(peer) is not None):
            return True
        before = self.history.get(self.record.iteration - 1)
        lists = self.record.electors, roster.electors if roster else (), before.electors if before else ()
        return any(elector.id == peer for electors in lists for elector in electors)

    def is_known(self, peer: PeerId) -> bool:
        """Whether a peer is an elector, or a member of a roster that was sealed here in this iteration."""
        sealed = self.instance.sealed.values() if self.instance is not None else ()
        return any(peer in roster.ranks for roster in sealed) or self.is_elector(peer)

    def took_part(self, peer: PeerId, iteration: int) -> bool:
        """Whether a peer voted in an iteration that I remember, or could have."""
        found = self.history.get(iteration), self.history.get(iteration - 1)
        rosters = [record.roster for record in found if record is not None and record.roster is not None]
        return any(one.id == peer for roster in rosters for one in roster.party)

    def leads(self, sender: PeerId, iteration: int, attempt: int) -> bool:
        """Whether this attempt was ever the sender's to lead; of what was long ago, nobody can tell."""
        instance = self.instance
        if instance is not None and instance.iteration == iteration and instance.leader(attempt) == sender:
            return in_reach(instance.ballot, attempt)
        before = self.record if self.record.iteration == iteration - 1 else self.history.get(iteration - 1)
        if before is None:
            return iteration <= self.record.iteration
        electors = ranked(self.settings.run, iteration, before.electors)
        return bool(electors) and electors[attempt % len(electors)].id == sender and in_reach(Ballot(), attempt)

    def judge_anew(self) -> None:
        """Messages that wait may be somebody's now: the roster is here, or another iteration."""
        self.net.admit(self.judged)

    def judged(self, sender: PeerId, tag: Tag) -> Verdict:
        """What becomes of a message with data: it is for the iteration under way alone, from members of its roster.

        Before that roster is known here the electors are believed. Whoever is new waits until it comes.
        """
        if tag.iteration > self.record.iteration + 1:
            return Verdict.REFUSE
        if tag.iteration <= self.record.iteration:
            late = self.is_known(sender) or self.took_part(sender, tag.iteration)
            return Verdict.DROP if late else Verdict.REFUSE
        instance = self.instance
        if instance is not None and self.is_current(instance):
            for roster in instance.sealed.values():
                if roster.part == tag.part:
                    return Verdict.TAKE if sender in roster.ranks else Verdict.REFUSE
        return Verdict.TAKE if self.is_elector(sender) else Verdict.LATER
