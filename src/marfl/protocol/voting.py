"""An elector's part in an iteration: its votes, for a roster that is to be sealed and for the hash that came of it.

The promises of Paxos (see `roster`) are kept here: one vote per attempt, none for an attempt below a promised one, and
none for a result whose attempt has been overtaken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marfl.net.base import Parcel, PeerId
from marfl.protocol.instance import Accepted, Instance
from marfl.protocol.masks import Masking, spent
from marfl.protocol.readiness import survivors
from marfl.protocol.roster import Roster, ranked
from marfl.protocol.roster_code import unbrief
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

FORGED = "forged roster"  # from a peer that has none to make: counted in `Net.refused`


async def answer_propose(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """A leader asks for my vote."""
    ack = vote(me, sender, unpack("propose", request.header))
    return Parcel(pack("ack", **ack), offered_keys(me, ack))


def offered_keys(me: Participant, ack: dict[str, Any]) -> bytes:
    """The public keys that go with my vote, where sums are masked."""
    masked = me.settings.wire == "masked" and ack["status"] == "ack" and ack["join"]
    return me.instance.masks.offer(ack["attempt"]) if masked and me.instance else b""


def vote(me: Participant, sender: PeerId, proposal: dict[str, Any]) -> dict[str, Any]:
    """Ack a proposal, or say why not. One vote per attempt, by whoever leads it, from the same state as mine."""
    attempt = proposal["attempt"]
    if proposal["base"] != me.record.hash:
        if me.record.beats(proposal["mass"], proposal["base"]):
            return _ack(me, "behind", record=me.record.encoded)
        me.gone_elsewhere(sender)
        return _ack(me, "stale")
    instance = me.enter()
    if proposal["iteration"] != instance.iteration:
        return _ack(me, "refused")
    if proposal["founding"]:
        if not _may_follow(me, instance, sender, proposal["lineage"]):
            return _ack(me, "refused", instance)
        if instance.lineage != proposal["lineage"]:
            instance.found(proposal["lineage"], sender)
    elif me.barred == instance.iteration:
        return _ack(me, "barred", instance)
    if instance.lineage != proposal["lineage"]:
        return _ack(me, "left", instance)
    # A late proposal has no grounds to end an attempt that its leader knew nothing of.
    late = instance.busy and attempt > instance.working > proposal["seen"]
    if late or instance.leader(attempt) != sender or attempt < instance.promised:
        return _ack(me, "refused", instance)
    blame = instance.blame()
    instance.promise(attempt)
    me.wait_for_leader(instance, me.settings.call_timeout * 2)
    return _ack(me, "ack", instance, blame=blame)


def _ack(
    me: Participant,
    status: str,
    instance: Instance | None = None,
    *,
    blame: dict[str, Any] | None = None,
    record: bytes | None = None,
) -> dict[str, Any]:
    mine = instance.mine if instance else None
    accepted = instance.accepted if instance else None
    return {
        "status": status, "attempt": instance.promised if instance else -1, "record": record,
        "join": mine is not None and not me.behind, "index": me.index, "layout": me.layout,
        "wire": me.settings.wire,
        "weight": float(mine.weight) if mine else 0.0,
        "fewest": mine.fewest if mine else 0,
        **(blame or {"blamed": [], "waits": False, "unsent": []}),
        "accepted": accepted.roster.encoded if accepted else None,
        "accepted_hash": accepted.hash if accepted else None,
        "accepted_attempt": accepted.attempt if accepted else -1,
        "holds": accepted is not None and accepted.state is not None,
        **_of_masks(me, instance),
    }  # fmt: skip


def _of_masks(me: Participant, instance: Instance | None) -> dict[str, Any]:
    """What a leader must know before it seals a masked roster."""
    masks = instance.masks if instance else Masking()
    session, promise = masks.session, masks.pledge
    mine = promise if promise and instance and promise.roster.lineage == instance.lineage else None
    attempt = instance.attempt if instance else None
    return {
        "spent": instance is not None and spent(me, instance),
        "epoch": session.epoch if session and session.spent else None,
        "heard": [attempt.roster.members[rank].id for rank in sorted(attempt.heard)] if attempt and session else [],
        "pledged": mine.roster.encoded if mine else None,
        "pledged_attempt": mine.attempt if mine else -1,
        "sum_here": mine is not None and masks.sum_of(mine.roster) is not None,
        "hopeless": mine is not None and mine.roster.digest in masks.hopeless,
    }


def _may_follow(me: Participant, instance: Instance, sender: PeerId, lineage: bytes) -> bool:
    """Whether to help found a new lineage: at the beginning, after hearing of no majority for long, or without one."""
    if instance.lineage == lineage:
        return instance.founder == sender
    now, patience = me.net.now(), me.settings.minority_timeout / 2
    lonely = now - max(instance.entered, instance.heard) >= patience or bool(survivors(me, instance))
    if me.record.electors and instance.founder is None and not (lonely and me.settings.on_minority == "fork"):
        return False
    if instance.founder is None:
        return True
    older = now - instance.heard > me.settings.ready_timeout
    return older or (not instance.electors and instance.promised <= 0 and sender < instance.founder)


async def answer_endorse(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """An elector without the data votes for a hash that a majority of the roster holds."""
    fields = unpack("endorse", request.header)
    if endorse(me, sender, fields):
        return Parcel(pack("ok", status="ok"))
    return refusal(me, sender, fields["iteration"], fields["attempt"])


def refusal(me: Participant, sender: PeerId, iteration: int, attempt: int) -> Parcel:
    """The answer to whoever asks for something with a roster that is not followed: late, or not its to make."""
    if not _may_lead(me, sender, iteration, attempt):
        me.net.refused[FORGED] += 1
    return Parcel(pack("ok", status="refused"))


def _may_lead(me: Participant, sender: PeerId, iteration: int, attempt: int) -> bool:
    """Whether this attempt was ever the sender's to lead; of what was long ago, nobody can tell."""
    instance = me.instance
    if instance is not None and instance.iteration == iteration and instance.leader(attempt) == sender:
        return True
    before = me.record if me.record.iteration == iteration - 1 else me.history.get(iteration - 1)
    if before is None:
        return iteration <= me.record.iteration
    electors = ranked(me.settings.run, iteration, before.electors)
    return bool(electors) and electors[attempt % len(electors)].id == sender


def asked_for(me: Participant, sender: PeerId, fields: dict[str, Any]) -> tuple[Instance, Roster] | None:
    """The roster that a leader asks this elector to vote for; None where no vote can be given, or a later one was."""
    instance, attempt = me.instance, fields["attempt"]
    if instance is None or instance.iteration != fields["iteration"] or me.barred == instance.iteration:
        return None
    roster = unbrief(fields["roster"], instance.electors)
    if instance.leader(attempt) != sender or attempt < instance.promised or roster.lineage != instance.lineage:
        return None
    return (instance, roster) if roster.base == me.record.hash else None


def endorse(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Vote for a hash, unless a later attempt was promised."""
    asked, attempt = asked_for(me, sender, fields), fields["attempt"]
    if asked is None:
        return False
    instance, roster = asked
    had = instance.accepted if instance.accepted and instance.accepted.hash == fields["hash"] else None
    # The vote is for this attempt, also when the result was finished in an earlier one.
    state, update = (had.state, had.mean) if had else (None, None)
    me.accept(instance, Accepted(attempt, roster, fields["hash"], state, update))
    instance.promised = max(instance.promised, attempt)
    return True
