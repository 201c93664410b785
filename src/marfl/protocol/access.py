"""Who may ask what, and when: one table for every channel on which a peer answers. `docs/security.md` shows the same.

`guarded` stands before every answer: what the table does not allow is counted in `Net.refused`, never reaches the
answer, and is told no more than that it is refused. A transport lets in only who is admitted; the rest is decided here,
from what this peer knows itself: the record it holds, the iteration under way, and the rosters sealed in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from marfl.net.base import NOT_ENTITLED, Parcel, PeerId, Tag, Verdict
from marfl.protocol.attempt import wanted
from marfl.protocol.roster import ranked, unbrief
from marfl.protocol.sync import nothing_to_give
from marfl.protocol.voting import unknown_leader
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.attempt import Attempt
    from marfl.protocol.participant import Participant

Answer: TypeAlias = Callable[["Participant", PeerId, Parcel], Awaitable[Parcel]]  # who asks me, what: my answer
Allowed: TypeAlias = Callable[["Participant", PeerId, dict[str, Any]], bool]  # who asks me, with these fields


class Who(Enum):
    """Whom a channel is for."""

    STRANGER = "stranger"  # anybody who reaches the port
    ADMITTED = "admitted"  # may take part: in a closed run whoever holds a token, in an open one anybody
    ELECTOR = "elector"  # of the iteration under way or just decided
    LEADER = "leader"  # of the attempt that it names
    MEMBER = "member"  # of the roster under way or just decided
    NAMED = "named"  # the one whom the plan names


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    who: Who
    gets: str  # what it is for, as the documentation says it
    unless: str = "–"  # who else may ask, or what is kept back all the same
    allowed: Allowed | None = None  # None: whoever the transport lets in


# --- what this peer knows of another ---


def is_elector(me: Participant, peer: PeerId) -> bool:
    """Whether a peer votes in the iteration under way, or voted in the one just decided, or founds a lineage."""
    instance, roster = me.instance, me.record.roster
    if instance is not None and (instance.founder == peer or instance.rank(peer) is not None):
        return True
    before = me.history.get(me.record.iteration - 1)
    lists = me.record.electors, roster.electors if roster else (), before.electors if before else ()
    return any(elector.id == peer for electors in lists for elector in electors)


def is_known(me: Participant, peer: PeerId) -> bool:
    """Whether a peer is an elector, or a member of a roster that was sealed here in this iteration."""
    instance = me.instance
    sealed = instance.sealed.values() if instance is not None else ()
    return any(peer in roster.ranks for roster in sealed) or is_elector(me, peer)


def leads(me: Participant, sender: PeerId, iteration: int, attempt: int) -> bool:
    """Whether this attempt was ever the sender's to lead; of what was long ago, nobody can tell."""
    instance = me.instance
    if instance is not None and instance.iteration == iteration and instance.leader(attempt) == sender:
        return True
    before = me.record if me.record.iteration == iteration - 1 else me.history.get(iteration - 1)
    if before is None:
        return iteration <= me.record.iteration
    electors = ranked(me.settings.run, iteration, before.electors)
    return bool(electors) and electors[attempt % len(electors)].id == sender


# --- the rules ---


def _leads_what_it_names(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    return leads(me, sender, fields["iteration"], fields["attempt"])


def _leads_its_roster(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """`WireError` for a roster that cannot be read."""
    instance = me.instance
    if instance is not None and instance.record is None and instance.leader(fields["attempt"]) == sender:
        return True  # the usual case: a long roster is not read twice
    roster = unbrief(fields["roster"], instance.electors if instance else ())
    return leads(me, sender, roster.iteration, fields["attempt"])


def _may_propose(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Electors in their turn; and anybody who founds a lineage, or is behind: it is told what `sync` would tell it."""
    if fields["base"] != me.record.hash:
        return me.record.beats(fields["mass"], fields["base"]) or is_known(me, sender)
    if fields["founding"]:
        return True
    instance = me.instance
    if instance is None or instance.base != me.record.hash:  # it is the first to speak of this iteration
        return leads(me, sender, me.record.iteration + 1, fields["attempt"])
    if instance.electors and instance.lineage == fields["lineage"]:
        return instance.leader(fields["attempt"]) == sender
    return is_elector(me, sender)


def _knows(me: Participant, sender: PeerId, _: dict[str, Any]) -> bool:
    return is_known(me, sender)


def _votes(me: Participant, sender: PeerId, _: dict[str, Any]) -> bool:
    return is_elector(me, sender)


def _may_sync(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Anybody may have the agreed state; a result that is not decided yet is for those who decide on it."""
    accepted = me.instance.accepted if me.instance else None
    undecided = accepted is not None and accepted.hash == fields["want"] != me.state.hash
    return not undecided or is_known(me, sender)


def _reports(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """A member of the roster that I lead, and whom I asked to keep its result; others where they only ask.

    An elector may report as well where an earlier result is adopted.
    """
    instance = me.instance
    if instance is not None and (instance.iteration, instance.leading) == (fields["iteration"], fields["attempt"]):
        if instance.led is not None and (sender in instance.led.ranks or sender in instance.keepers):
            return True
        if fields.get("final", True):
            adopted = instance.led is not None and instance.led.attempt < instance.leading and "final" in fields
            return adopted and instance.rank(sender) is not None
    return is_known(me, sender) or _took_part(me, sender, fields["iteration"])


def _took_part(me: Participant, peer: PeerId, iteration: int) -> bool:
    """Whether a peer voted in an iteration that I remember, or could have."""
    found = me.history.get(iteration), me.history.get(iteration - 1)
    return any(elector.id == peer for record in found if record is not None for elector in record.electors)


def _warns(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Electors; and whoever is late and tells me of the head that I hold, or of a lighter one."""
    old = me.record.hash == fields["hash"] or me.record.beats(fields["mass"], fields["hash"])
    return old or is_known(me, sender)


def _is_shown(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Whom the plan shows that very slice; members of another attempt are told that it is not here."""
    attempt = under_way(me)
    want = wanted(attempt, fields)
    if attempt is None or want is None:
        return is_known(me, sender)
    rank = attempt.roster.ranks.get(sender)
    return rank is not None and attempt.shows(rank, want)


def _is_neighbour(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    masks = me.instance.masks if me.instance else None
    if masks is None or masks.session is None or masks.working is None or masks.working.digest != fields["digest"]:
        return is_known(me, sender)
    members = masks.session.members
    return sender in members and members.index(sender) in masks.session.neighbours


def _is_in_the_masked_roster(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    held = me.instance.masks.total if me.instance else None
    if held is None or held[0].digest != fields["roster"]:
        return is_known(me, sender)
    return sender in held[0].ranks


def judged(me: Participant, sender: PeerId, tag: Tag) -> Verdict:
    """What becomes of a message with data: it is for the iteration under way alone, from members of its roster.

    Before that roster is known here the electors are believed. Whoever is new waits until it comes.
    """
    if tag.iteration > me.record.iteration + 1:
        return Verdict.REFUSE
    if tag.iteration <= me.record.iteration:
        late = is_known(me, sender) or _took_part(me, sender, tag.iteration)
        return Verdict.DROP if late else Verdict.REFUSE
    instance = me.instance
    if instance is not None and instance.base == me.record.hash:
        for roster in instance.sealed.values():
            if roster.part == tag.part:
                return Verdict.TAKE if sender in roster.ranks else Verdict.REFUSE
    return Verdict.TAKE if is_elector(me, sender) else Verdict.LATER


def under_way(me: Participant) -> Attempt | None:
    """The attempt whose slices this peer still gives to those who miss them: none once the iteration is decided."""
    instance = me.instance
    return instance.attempt if instance is not None and instance.record is None else None


TABLE: dict[str, Rule] = {
    "hello": Rule(Who.STRANGER, "shows its token and is shown mine", "a closed run only; a bad token is told nothing"),
    "layout": Rule(Who.ADMITTED, "the names and shapes of the model's layers"),
    "terms": Rule(Who.ADMITTED, "the settings that all peers of the run share"),
    "clock": Rule(Who.ADMITTED, "what time it is here"),
    "ready": Rule(Who.ADMITTED, "says that it is there, trains or leaves", "speaks for itself alone"),
    "sync": Rule(
        Who.ADMITTED, "the agreed state and its record",
        "a few states a minute; what is undecided for electors and members", _may_sync,
    ),
    "propose": Rule(
        Who.ELECTOR, "my vote for its attempt", "admitted, where it founds a lineage or is behind", _may_propose
    ),
    "seal": Rule(Who.LEADER, "has me begin the roster that it sealed", allowed=_leads_its_roster),
    "endorse": Rule(Who.LEADER, "my vote for a hash", allowed=_leads_what_it_names),
    "pledge": Rule(Who.LEADER, "my promise to unmask no other roster", allowed=_leads_what_it_names),
    "reveal": Rule(Who.LEADER, "my seed, and shares of others' secrets", allowed=_leads_what_it_names),
    "finish": Rule(
        Who.MEMBER, "tells me its hash and hears the verdict", "electors, where a result is adopted or they only ask",
        _reports,
    ),
    "held": Rule(Who.MEMBER, "says that it holds the masked sum, and is given the secrets", allowed=_reports),
    "masked": Rule(Who.MEMBER, "the masked sum of its own roster", allowed=_is_in_the_masked_roster),
    "decided": Rule(Who.ELECTOR, "tells me what was decided", "members of the roster under way", _knows),
    "heavier": Rule(Who.ELECTOR, "tells me of a head that wins", "members of the roster under way", _warns),
    "vouch": Rule(Who.ELECTOR, "tells me whom it gave the state: it is waited for", allowed=_votes),
    "resend": Rule(Who.NAMED, "a slice that the plan shows it", "nothing once the iteration is decided", _is_shown),
    "share": Rule(Who.NAMED, "the shares that I dealt it, sealed for it", allowed=_is_neighbour),
}  # fmt: skip


async def guarded(me: Participant, channel: str, answer: Answer, sender: PeerId, request: Parcel) -> Parcel:
    """The answer to a question, if the table allows it to be asked."""
    allowed = TABLE[channel].allowed
    if allowed is None or allowed(me, sender, unpack(channel, request.header)):
        return await answer(me, sender, request)
    me.net.refused[NOT_ENTITLED] += 1
    return _refusal(me, channel)


def _refusal(me: Participant, channel: str) -> Parcel:
    """What a channel's answer looks like where there is none."""
    if channel == "propose":
        return unknown_leader(me)
    if channel == "finish":
        return Parcel(pack("verdict", status="unknown", record=None, holders=[]))
    if channel == "reveal":
        return Parcel(pack("revealed", status="refused", owners=[]))
    return nothing_to_give(me) if channel == "sync" else Parcel(pack("ok", status="refused"))


def rows() -> list[str]:
    """The table as the documentation shows it."""
    return [f"| `{channel}` | {rule.who.value} | {rule.gets} | {rule.unless} |" for channel, rule in TABLE.items()]
