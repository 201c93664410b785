"""An elector's part (Paxos: the acceptor): it answers proposals and votes for hashes, by the rules of `ballot`."""

from __future__ import annotations

from marfl.errors import InputError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.ballot import Acceptor, Reply, may_follow, on_endorse, on_propose
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Accepted, Blame, Instance
from marfl.protocol.mask_pledges import MaskNews
from marfl.protocol.messages import BEHIND, MEMBER, NOT_YET, WITNESS, Ack, Endorse, Ok, Propose
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import Roster, unbrief
from marfl.protocol.standing import Standing
from marfl.protocol.terms import OTHERS

NO_BLAME = Blame()


class Voting:
    """One peer's votes. What it has promised is kept in the standing's instance."""

    def __init__(self, standing: Standing, readiness: Readiness) -> None:
        self.standing, self.readiness = standing, readiness
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
            self.net.refused[OTHERS] += 1
            return OTHERS
        if standing.incarnations.vote(sender, proposal.incarnation, proposal.base + proposal.lineage):
            self.net.refused[SECOND] += 1
            return Reply.REFUSED.value
        return ""

    def offered_keys(self, ack: Ack) -> bytes:
        """The public keys that go with my vote, where sums are masked."""
        instance = self.standing.instance
        masked = self.settings.wire == "masked" and ack.status == Reply.ACK.value and ack.join
        return instance.masks.offer(ack.attempt) if masked and instance else b""

    def vote(self, sender: PeerId, proposal: Propose) -> Ack:
        """Ack a proposal, or say why not (see `ballot.on_propose`)."""
        standing = self.standing
        if proposal.base != standing.record.hash:
            if standing.record.beats(proposal.mass, proposal.base):
                return self.ack(Reply.BEHIND.value, record=standing.record.encoded)
            standing.gone_elsewhere(sender)
            return self.ack(Reply.STALE.value)
        instance = standing.enter()
        before = instance.acceptor(barred=standing.barred == instance.iteration)
        follows = proposal.founding and self._may_follow(instance, before, sender, proposal.lineage)
        reply, after = on_propose(before, sender, proposal, follows=follows)
        if after.lineage != instance.lineage:
            instance.found(after.lineage, sender)
        if reply is not Reply.ACK:
            return self.ack(reply.value, instance if proposal.iteration == instance.iteration else None)
        blame = instance.blame()
        instance.promise(proposal.attempt)
        standing.note_ack(instance, proposal.attempt)
        standing.wait_for_leader(instance, self.settings.call_timeout * 2)
        return self.ack(reply.value, instance, blame=blame)

    def _may_follow(
        self, instance: Instance, acceptor: Acceptor[Accepted], sender: PeerId, lineage: bytes
    ) -> bool:
        """Whether to help found a new lineage (see `ballot.may_follow`)."""
        now, patience = self.net.now(), self.settings.minority_timeout / 2
        lonely = now - max(instance.entered, instance.heard) >= patience or bool(self.readiness.survivors(instance))
        alone = not self.standing.record.electors or (lonely and self.settings.on_minority == "fork")
        quiet = now - instance.heard > self.settings.ready_timeout
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
        )

    def _role(self, instance: Instance | None) -> str:
        """What this peer is to an iteration: who trains may still bring something, who is behind cannot go on alone."""
        if self.standing.behind:
            return BEHIND
        if instance is None or not instance.begun:
            return NOT_YET
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
        return Ok("ok" if self.endorse(sender, Endorse.decode(request.header)) else "refused").parcel()

    def endorse(self, sender: PeerId, asked: Endorse) -> bool:
        """Vote for a hash, unless a later attempt was promised, or another hash was voted for in this one."""
        found = self.asked_for(sender, asked.iteration, asked.attempt, asked.roster, asked.hash)
        if found is None:
            return False
        instance, roster = found
        had = instance.accepted if instance.accepted and instance.accepted.hash == asked.hash else None
        # The vote is for this attempt, also when the result was finished in an earlier one.
        state, update = (had.state, had.mean) if had else (None, None)
        self.standing.accept(instance, Accepted(asked.attempt, roster, asked.hash, state, update))
        return True

    def asked_for(
        self, sender: PeerId, iteration: int, attempt: int, data: bytes, digest: bytes | None = None
    ) -> tuple[Instance, Roster] | None:
        """The roster that a leader asks this elector to vote for, or to pledge itself to; None where it must not."""
        instance = self.standing.instance
        barred = self.standing.barred == iteration
        if instance is None or instance.iteration != iteration or barred:
            return None
        roster = unbrief(data, instance.electors)
        allowed = on_endorse(instance.acceptor(barred=barred), sender, roster, attempt, digest)
        return (instance, roster) if allowed and roster.base == self.standing.record.hash else None
