"""An elector's part (Paxos: the acceptor): it answers proposals and votes for hashes, by the rules of `ballot`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from marfl.errors import InputError, WireError
from marfl.net.base import NOT_ENTITLED, Parcel, PeerId
from marfl.protocol.ballot import (
    Acceptor,
    Reply,
    Sealed,
    Told,
    Value,
    bearable,
    is_handed_on,
    is_terse,
    justified,
    last_vote,
    may_follow,
    on_endorse,
    on_propose,
    turns_between,
)
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Accepted, Blame, Instance, Turns, passed_by
from marfl.protocol.mask_pledges import MaskNews, card_statement, suspected
from marfl.protocol.messages import BEHIND, MEMBER, NOT_YET, WITNESS, Ack, Endorse, Ok, Propose
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import VOID, Elector, Roster, decode_roster, ranked, unbrief
from marfl.protocol.seniority import arrival, arriving, graded, is_arrival, parted, unpack_arrivals
from marfl.protocol.standing import Standing
from marfl.protocol.statements import (
    Certificate,
    Promise,
    SignedSeal,
    is_lineage_after,
    link_of,
    signers,
    verified_promises,
)
from marfl.protocol.terms import OTHERS
from marfl.protocol.transfer import StateTransfer

NO_BLAME = Blame()
UNFIT = "unfit roster"  # one that a leader sealed and that must not be begun or pledged to: counted in `Net.refused`
OUT_OF_TURN = "proposal out of turn"  # of who ends attempt after attempt: counted in `Net.refused`
FREE_TURNS = 4  # of others that an elector may end before it has to wait
GROUNDLESS = "groundless request"  # of a leader that does not show what it goes by: counted in `Net.refused`


def promise_of(ack: Ack) -> Promise:
    """What an ack says of its elector's votes: what it signs."""
    vote = last_vote(ack)
    pledged = decode_roster(ack.pledged).digest if ack.pledged else b""
    said = (vote.attempt, *vote.value, vote.holds) if vote else (-1, b"", b"", False)
    return Promise(ack.attempt, *said, ack.pledged_attempt if pledged else -1, pledged)


def told(promise: Promise) -> Told | None:
    """The last vote that a promise tells of."""
    if promise.voted_in < 0:
        return None
    return Told(promise.voted_in, Value(promise.roster, promise.hash), promise.holds)


def names_electors_rightly(instance: Instance, roster: Roster) -> bool:
    """Whether a roster leaves the electors as they are: only who founds a lineage names them, and only once."""
    if not roster.electors:
        return True
    named = ranked(instance.run, instance.iteration, roster.electors)
    return instance.founder is not None and instance.electors in ((), named)


class Voting:
    """One peer's votes. What it has promised is kept in the standing's instance."""

    def __init__(self, standing: Standing, readiness: Readiness, transfer: StateTransfer) -> None:
        self.standing, self.readiness, self.transfer = standing, readiness, transfer
        self.net, self.settings = standing.net, standing.settings

    # --- phase 1: proposals ---

    async def answer_propose(self, sender: PeerId, request: Parcel) -> Parcel:
        """A leader asks for my vote."""
        proposal = Propose.decode(request.header)
        try:
            why = self._objection(sender, proposal)
            ack = self.ack(why) if why else self.vote(sender, proposal)
        except InputError:  # it cannot be written down: none is cast, and the iteration that I run ends with the error
            return Parcel(b"")
        return ack.parcel(self.offered_keys(ack))

    def unknown_leader(self) -> Parcel:
        """What somebody is told who is no elector here: no vote, and no refusal that an honest leader gives way to."""
        return self.ack(Reply.UNKNOWN.value).parcel()

    def _objection(self, sender: PeerId, proposal: Propose) -> str:
        """Why this leader gets no vote, whatever it proposes: other settings, or another process has its key."""
        standing = self.standing
        if not standing.terms.met(standing.talk, sender, proposal.terms):
            self.net.refused.note(OTHERS, sender)
            return OTHERS
        if standing.incarnations.vote(sender, proposal.incarnation, proposal.base + proposal.lineage):
            self.net.refused.note(SECOND, sender)
            return Reply.REFUSED.value
        return ""

    def offered_keys(self, ack: Ack) -> bytes:
        """The public keys that go with my vote, and my signature of them, where sums are masked."""
        instance = self.standing.instance
        masked = self.settings.masked and ack.status == Reply.ACK.value and ack.join
        if not masked or instance is None:
            return b""
        card = instance.masks.offer(ack.attempt)
        return card + self.net.sign(card_statement(instance.decision, ack.attempt, card))

    def vote(self, sender: PeerId, proposal: Propose) -> Ack:
        """Ack a proposal, or say why not (see `ballot.on_propose`)."""
        standing = self.standing
        if proposal.base != standing.record.hash:
            return self._vote_elsewhere(sender, proposal)
        if proposal.settled:
            standing.believe([sender])
        instance = standing.enter()
        if self._is_out_of_turn(instance, sender, proposal):
            return self.ack(Reply.REFUSED.value, instance)
        before = instance.acceptor(barred=standing.barred == instance.iteration)
        follows = proposal.founding and is_lineage_after(link_of(standing.record), proposal.lineage)
        follows = follows and proposal.lineage not in instance.left  # what it promised there would be forgotten
        follows = follows and self._may_follow(instance, before, sender, proposal.lineage)
        reply, after = on_propose(before, sender, proposal, follows=follows)
        if after.lineage != instance.lineage:
            instance.found(after.lineage, sender)
        if reply is not Reply.ACK:
            if proposal.founding and standing.record.electors and not standing.is_elector(sender):
                self.net.refused.note(NOT_ENTITLED, sender)
            return self.ack(reply.value, instance if proposal.iteration == instance.iteration else None)
        blame = instance.blame()
        suspects = suspected(standing.suspects, instance.electors, instance.iteration)
        instance.masks.complaints = (*blame.complaints, *suspects)
        self._note_turn(instance, sender, proposal.attempt)
        instance.promise(proposal.attempt)
        standing.note_ack(instance, proposal.attempt)
        standing.wait_for_leader(instance, self.settings.call_timeout * 2)
        blame = blame._replace(complaints=instance.masks.complaints)
        return self.signed(instance, self.ack(reply.value, instance, blame=blame))

    def _is_out_of_turn(self, instance: Instance, sender: PeerId, proposal: Propose) -> bool:
        """Whether somebody asks for a promise before others have had their time, though it must not any more.

        It has ended others' attempts before, or has led for long and has sealed nothing that I could take part in. Else
        one elector could keep all others from leading for ever. An honest leader asks again and again as well, while
        others train. Who ends attempt after attempt without a pause is named.
        """
        had, borne = instance.turns.get(sender, Turns()), self.standing.proofs.borne(instance.electors)
        another = proposal.lineage == instance.lineage and proposal.attempt > instance.promised >= 0
        if not borne or not another or sender == self.net.me:
            return False
        now, settings = self.net.now(), self.settings
        again = instance.leader(instance.promised) == sender
        if now <= had.first + settings.iteration_timeout if again else had.ended < FREE_TURNS:
            return False
        turns = turns_between(instance.electors, instance.promised, proposal.attempt, settings.liars)
        if now >= instance.until + turns * settings.takeover - min(settings.takeover, settings.call_timeout) / 2:
            return False
        if not again and now - had.last < settings.takeover / 2:
            self.net.refused.note(OUT_OF_TURN, sender)
        instance.turns[sender] = had._replace(last=now)
        return True

    def _note_turn(self, instance: Instance, sender: PeerId, attempt: int) -> None:
        """Somebody is promised this attempt."""
        if attempt <= instance.promised:
            return
        had, now = instance.turns.get(sender, Turns()), self.net.now()
        ends = instance.promised >= 0 and instance.leader(instance.promised) != sender and now < instance.until
        brings = instance.mine is not None and instance.mine.weight > 0
        instance.turns[sender] = Turns(had.ended + ends, min(had.first, now) if brings else had.first, now)

    def _vote_elsewhere(self, sender: PeerId, proposal: Propose) -> Ack:
        """The answer to a proposal from another state than mine.

        Where my own is not settled, the decision before may still go on, and my votes in it count. A leader that seems
        to be ahead is asked to prove it.
        """
        standing, former = self.standing, self.standing.former
        if former is not None and former.base == proposal.base and not proposal.founding:
            reply, _ = on_propose(former.acceptor(barred=former.barred), sender, proposal, follows=False)
            if reply is not Reply.ACK:
                return self.ack(reply.value, former if proposal.iteration == former.iteration else None)
            former.promise(proposal.attempt)
            return self.signed(former, replace(self.ack(reply.value, former), role=WITNESS, join=False, weight=0.0))
        if not standing.proofs.settled:  # whether it is ahead it does not know itself
            self.transfer.settle_aside()
            return self.ack(Reply.STALE.value)
        if standing.record.is_later(proposal.iteration - 1, proposal.base):
            proof = standing.proofs.certificate(standing.record)
            told = self.ack(Reply.BEHIND.value, record=standing.record.encoded)
            return replace(told, certificate=proof.encoded if proof else b"")
        standing.talk.aside(self.transfer.look_after(sender, sender, proposal.base))
        return self.ack(Reply.STALE.value)

    def signed(self, instance: Instance, ack: Ack) -> Ack:
        """The ack with my signature, where other electors may have to see what I promised, or that I take part."""
        if instance.rank(self.net.me) is None:
            said = arrival(instance.signed_id, ack.attempt, self.standing.index)
            return replace(ack, signature=self.net.sign(said) + self.net.token)
        if ack.attempt == 0 or not self.standing.proofs.borne(instance.electors):
            return ack
        if ack.attempt not in instance.given:  # asked twice, it says the same twice: two words would be a lie
            last = max((at for at in instance.seals if at < ack.attempt), default=None)
            sealed = instance.seals[last].encoded if last is not None else b""
            signature = self.net.sign(promise_of(ack).statement(instance.signed_id))
            instance.given[ack.attempt] = replace(ack, signature=signature, sealed=sealed)
        return instance.given[ack.attempt]

    def _may_follow(self, instance: Instance, acceptor: Acceptor[Accepted], sender: PeerId, lineage: bytes) -> bool:
        """Whether to help found a new lineage (see `ballot.may_follow`)."""
        now, patience = self.net.now(), self.settings.minority_timeout / 2
        lonely = now - instance.in_company >= patience or bool(self.readiness.survivors(instance))
        lonely = lonely and instance.begun and self.standing.is_elector(sender)  # while I train nobody need lead me
        alone = not self.standing.record.electors or (lonely and self.settings.on_minority == "fork")
        quiet = now - max(instance.heard, instance.last_sign) > self.settings.ready_timeout
        return may_follow(acceptor, sender, lineage, alone=alone, quiet=quiet)

    def ack(
        self, status: str, instance: Instance | None = None, *, blame: Blame = NO_BLAME, record: bytes | None = None
    ) -> Ack:
        """My answer to a proposal, with all that its leader must know of me."""
        standing = self.standing
        mine = instance.mine if instance else None
        accepted = instance.accepted if instance else None
        news = self._of_masks(instance) if instance else MaskNews()
        return Ack(
            status=status,
            attempt=instance.promised if instance else -1,
            record=record,
            join=mine is not None and not standing.behind,
            role=self._role(instance),
            index=standing.index,
            layout=standing.layout,
            wire=self.settings.wire,
            incarnation=standing.incarnation,
            terms=standing.terms.digest,
            weight=float(mine.weight) if mine else 0.0,
            fewest=mine.fewest if mine else 0,
            blamed=(*blame.complaints, *(standing.complaints(instance.iteration) if instance else ())),
            waits=blame.waits,
            unsent=blame.unsent,
            accepted=accepted.roster.encoded if accepted else None,
            accepted_hash=accepted.hash if accepted else None,
            accepted_attempt=accepted.attempt if accepted else -1,
            holds=accepted is not None and accepted.holds,
            spent=news.spent,
            epoch=news.epoch,
            heard=news.heard,
            pledged=news.pledged,
            pledged_attempt=news.pledged_attempt,
            sum_here=news.sum_here,
            hopeless=news.hopeless,
            age=mine.age if mine else 0,
            slow=standing.slow,
        )

    def _role(self, instance: Instance | None) -> str:
        """What this peer is to an iteration: who trains may still bring something, who is behind cannot go on alone.

        Who waits for what comes of it brings nothing: it would wait for the leader, and the leader for it.
        """
        if self.standing.behind:
            return BEHIND
        if instance is None or not instance.begun:
            return WITNESS if self.standing.follows else NOT_YET
        return MEMBER if instance.mine is not None else WITNESS

    def _of_masks(self, instance: Instance) -> MaskNews:
        standing, exchange = self.standing, instance.work.exchange
        barred, helped = standing.barred == instance.iteration, standing.helped.get(instance.iteration)
        heard = tuple(exchange.roster.members[rank].id for rank in sorted(exchange.heard)) if exchange else ()
        spent = instance.masks.is_spent(instance.lineage, helped, barred=barred)
        return instance.masks.told(instance.lineage, heard, spent=spent)

    # --- phase 2: votes for a hash, on a leader's request ---

    async def answer_endorse(self, sender: PeerId, request: Parcel) -> Parcel:
        """An elector without the data votes for a hash that a majority of the roster holds."""
        asked = Endorse.decode(request.header)
        if not self.standing.proofs.settled and asked.iteration == self.standing.record.iteration + 1:
            await self.transfer.settle()
        signature = self.endorse(sender, asked)
        return Ok("ok" if signature else "refused").parcel(signature)

    def endorse(self, sender: PeerId, asked: Endorse) -> bytes:
        """Vote for a hash and sign it, unless a later attempt was promised, or another result voted for in this one.

        Where peers may lie the leader shows that enough members have this result, and what its attempt goes by.
        """
        found = self.asked_for(sender, asked.iteration, asked.attempt, asked.roster, asked.hash)
        if found is None:
            return b""
        instance, roster = found
        promises, arrivals = parted(asked.promises)
        seal = Sealed(
            asked.attempt, asked.hash, promises=promises, votes=asked.votes, arrivals=arrivals,
            signature=asked.signature,
        )  # fmt: skip
        fresh = instance is self.standing.instance
        if sender != self.net.me and not (
            (not fresh or self.standing.proofs.settled)
            and self.is_signed(instance, roster, seal)
            and self.is_grounded(instance, roster, seal)
        ):
            self.net.refused.note(GROUNDLESS, sender)
            return b""
        had = instance.accepted if instance.accepted and instance.accepted.hash == asked.hash else None
        # The vote is for this attempt, also when the result was finished in an earlier one.
        state, update = (had.state, had.mean) if had else (None, None)
        self.standing.accept(instance, Accepted(asked.attempt, roster, asked.hash, state, update))
        return self.net.sign(instance.vote(roster, asked.attempt, asked.hash).statement)

    def is_signed(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Whether a leader that may lie has signed what it seals: a second seal of the attempt proves that it does."""
        if not self.standing.proofs.borne(instance.electors or roster.electors):
            return True
        return self.standing.note_seal(instance, SignedSeal(seal.attempt, roster.digest, seal.promises, seal.signature))

    def is_grounded(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Whether an attempt may be voted in, and a result that is to be adopted or endorsed came of its roster.

        Who has computed it knows so; others are shown more members' votes for it than there can be liars, or, where it
        is of an earlier attempt, the acks by which it must be adopted.
        """
        electors = instance.electors or ranked(roster.run, roster.iteration, roster.electors)
        borne, mine = self.standing.proofs.borne(electors), instance.accepted
        again = roster.attempt < seal.attempt
        value = Value(roster.digest, seal.adopt) if seal.adopt is not None else None
        if value is not None and mine is not None and mine.value == value:
            return True
        if not self._is_well_staffed(instance, roster, seal):
            return False
        if not borne:
            return True
        if not roster.electors and not is_handed_on(instance.electors, roster, self.settings.liars):
            return False
        known = {elector.id for elector in electors}
        if seal.adopt is not None and not again and not self._is_plausible(instance, roster, seal.adopt, known):
            return False
        if not self._may_begin(instance, seal.attempt, value if again else None, seal.promises):
            return False
        if seal.adopt is None or again:
            return True
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        try:
            said = instance.vote(roster, seal.attempt, seal.adopt)
            shown = signers(Certificate.decode(seal.votes), said, members, self.net.verify)
        except WireError:
            return False
        bring = known & roster.ranks.keys()  # of newcomers anybody can have many
        return len(known.intersection(shown)) > min(borne, len(bring) - 1) and bool(shown)

    def _is_well_staffed(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Whether nobody votes after this roster at its leader's word alone (see `seniority`).

        What more electors stand behind than can lie, one of them has seen to be so.
        """
        if roster.digest in instance.sealed:
            return True
        deciders = roster.electors or instance.electors
        staffed = graded(instance.before, deciders, roster, self.settings.seniority, self.settings.liars)
        if (roster.juniors, roster.stays) != (staffed.juniors, staffed.stays):
            return False
        wanted = arriving(instance.electors, roster)
        if not wanted or (seal.adopt is not None and roster.attempt < seal.attempt):
            return True
        try:
            shown = unpack_arrivals(seal.arrivals, wanted)
        except WireError:
            return False
        decision, check = instance.signed_id, (self.net.verify, self.net.entitled)
        if not all(is_arrival(shown[one.id], one, roster.attempt, decision, *check) for one in wanted):
            return False
        instance.arrivals |= {(peer, roster.attempt): each for peer, each in shown.items()}
        return True

    def _is_plausible(self, instance: Instance, roster: Roster, digest: bytes, electors: Collection[PeerId]) -> bool:
        """Whether a result that I did not compute may have come of its roster, for all that I know myself.

        What comes of an iteration that goes by I know. Who brings an update does not stand back for so few electors
        that all of them may lie: their leader may have left the others out to be alone with newcomers of its own.
        """
        if roster.exchange == VOID:
            return self.standing.behind or passed_by(self.standing.state, roster).hash == digest
        if roster.restores is not None:
            former = self.standing.taken_back(roster)
            return self.standing.may_take_back(roster) and (former is None or former.hash == digest)
        mine, bring = instance.mine, roster.ranks.keys() & electors
        return len(bring) > bearable(len(electors), self.settings.liars) or mine is None or not mine.weight

    def _may_begin(self, instance: Instance, attempt: int, adopt: Value | None, promises: bytes) -> bool:
        """Whether an attempt may be voted in: after the first, its leader must show the acks that justify it."""
        if attempt == 0 or not self.standing.proofs.borne(instance.electors):
            return True
        if (attempt, adopt) in instance.justified:
            return True
        try:
            said = verified_promises(promises, attempt, instance.signed_id, instance.electors, self.net.verify)
        except WireError:
            return False
        for peer, row in said.items():
            self.standing.note_promise(instance, peer, row, checked=True)
        votes = {peer: told(row.promise) for peer, row in said.items()}
        if not justified(instance.electors, votes, adopt, self.settings.liars):
            return False
        instance.justified.add((attempt, adopt))
        return True

    def asked_for(
        self, sender: PeerId, iteration: int, attempt: int, data: bytes, digest: bytes | None = None
    ) -> tuple[Instance, Roster] | None:
        """The roster that a leader asks this elector to vote for, or to pledge itself to; None where it must not."""
        former = self.standing.former
        instance = former if former is not None and former.iteration == iteration else self.standing.instance
        if instance is None or instance.iteration != iteration or instance.barred:
            return None
        roster = unbrief(data, instance.electors)
        if roster.run != instance.run or not names_electors_rightly(instance, roster):
            return None
        if not is_terse(instance.before, instance.electors, roster):
            self.net.refused.note(UNFIT, sender)
            return None
        allowed = on_endorse(instance.acceptor(barred=instance.barred), sender, roster, attempt, digest)
        return (instance, roster) if allowed and roster.base in (self.standing.record.hash, instance.base) else None
