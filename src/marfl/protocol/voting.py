"""An elector's part in an iteration: its votes, for a roster that is to be sealed and for the hash that came of it.

The promises of Paxos (see `roster`) are kept here: one vote per attempt, none for an attempt below a promised one, and
none for a result whose attempt has been overtaken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from marfl.errors import InputError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.ballot import may_promise, may_vote
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Accepted, Instance
from marfl.protocol.masks import Masking, spent
from marfl.protocol.readiness import survivors
from marfl.protocol.roster import Roster, unbrief
from marfl.protocol.terms import OTHERS, met
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant


async def answer_propose(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """A leader asks for my vote."""
    proposal = unpack("propose", request.header)
    try:
        why = _objection(me, sender, proposal)
        ack = _ack(me, why) if why else vote(me, sender, proposal)
    except InputError:  # it cannot be written down: none is cast, and the iteration that I run ends with the error
        return Parcel(b"")
    return Parcel(pack("ack", **ack), offered_keys(me, ack))


def _objection(me: Participant, sender: PeerId, proposal: dict[str, Any]) -> str:
    """Why this leader gets no vote, whatever it proposes: other settings, or another process has its key."""
    if not met(me, sender, proposal["terms"]):
        me.net.refused[OTHERS] += 1
        return OTHERS
    if me.incarnations.vote(sender, proposal["incarnation"], proposal["base"] + proposal["lineage"]):
        me.net.refused[SECOND] += 1
        return "refused"
    return ""


def unknown_leader(me: Participant) -> Parcel:
    """What somebody is told who is no elector here: no vote, and no refusal that an honest leader gives way to."""
    return Parcel(pack("ack", **_ack(me, "unknown")))


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
    if late or instance.leader(attempt) != sender or not may_promise(instance.ballot, attempt):
        return _ack(me, "refused", instance)
    blame = instance.blame()
    instance.promise(attempt)
    me.note_ack(instance, attempt)
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
        "join": mine is not None and not me.behind, "role": _role(me, instance), "index": me.index,
        "layout": me.layout, "wire": me.settings.wire, "incarnation": me.incarnation, "terms": me.terms.digest,
        "weight": float(mine.weight) if mine else 0.0,
        "fewest": mine.fewest if mine else 0,
        **(blame or {"blamed": [], "waits": False, "unsent": []}),
        "accepted": accepted.roster.encoded if accepted else None,
        "accepted_hash": accepted.hash if accepted else None,
        "accepted_attempt": accepted.attempt if accepted else -1,
        "holds": accepted is not None and accepted.holds,
        **_of_masks(me, instance),
    }  # fmt: skip


def _role(me: Participant, instance: Instance | None) -> str:
    """What this peer is to an iteration: who trains may still bring something, who is behind cannot go on by itself."""
    if me.behind:
        return "behind"
    if instance is None or not instance.begun:
        return "training"
    return "member" if instance.mine is not None else "witness"


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
    return Parcel(pack("ok", status="refused"))


def asked_for(me: Participant, sender: PeerId, fields: dict[str, Any]) -> tuple[Instance, Roster] | None:
    """The roster that a leader asks this elector to vote for; None where no vote can be given, or a later one was."""
    instance, attempt = me.instance, fields["attempt"]
    if instance is None or instance.iteration != fields["iteration"] or me.barred == instance.iteration:
        return None
    roster = unbrief(fields["roster"], instance.electors)
    if instance.leader(attempt) != sender or not may_promise(instance.ballot, attempt):
        return None
    follows = roster.lineage == instance.lineage and roster.base == me.record.hash
    return (instance, roster) if follows else None


def endorse(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Vote for a hash, unless a later attempt was promised, or another hash was voted for in this one."""
    asked, attempt = asked_for(me, sender, fields), fields["attempt"]
    if asked is None or not may_vote(asked[0].ballot, attempt, fields["hash"]):
        return False
    instance, roster = asked
    had = instance.accepted if instance.accepted and instance.accepted.hash == fields["hash"] else None
    # The vote is for this attempt, also when the result was finished in an earlier one.
    state, update = (had.state, had.mean) if had else (None, None)
    me.accept(instance, Accepted(attempt, roster, fields["hash"], state, update))
    return True
