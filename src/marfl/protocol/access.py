"""Who may ask what, and when: one table for every channel on which a peer answers. `docs/security.md` shows the same.

The `Gatekeeper` stands before every answer: what the table does not allow is counted in `Net.refused`, never reaches
the answer, and is told no more than that it is refused. A transport lets in only who is admitted; the rest is decided
here, from what this peer knows itself: the record it holds, the iteration under way, and the rosters sealed in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from marfl.net.base import NOT_ENTITLED, Buffer, Parcel, PeerId
from marfl.protocol.attempt import wanted
from marfl.protocol.audit import NO_ANSWER, NO_CLAIM, is_auditor, may_recall
from marfl.protocol.ballot import in_reach
from marfl.protocol.messages import (
    Audit,
    Decided,
    Endorse,
    Finish,
    Fraud,
    Held,
    Masked,
    Message,
    Ok,
    Overtaken,
    Pledge,
    Propose,
    Recall,
    Resend,
    Reveal,
    Revealed,
    Ruling,
    Seal,
    Share,
    Sync,
    Vouch,
)
from marfl.protocol.roster import unbrief
from marfl.protocol.standing import Standing
from marfl.protocol.transfer import under_way

Answer: TypeAlias = Callable[[PeerId, Parcel], Awaitable[Parcel]]  # who asks me, what: my answer
M = TypeVar("M", bound=Message)


class Who(Enum):
    """Whom a channel is for."""

    STRANGER = "stranger"  # anybody who reaches the port
    ADMITTED = "admitted"  # may take part: in a closed run whoever holds a token, in an open one anybody
    ELECTOR = "elector"  # of the iteration under way or just decided
    LEADER = "leader"  # of the attempt that it names
    MEMBER = "member"  # of the roster under way or just decided
    NAMED = "named"  # the one whom the plan names
    AUDITOR = "auditor"  # the member whom the committed hash names for that very part


@dataclass(frozen=True)
class Rule(Generic[M]):
    """One row of the table."""

    who: Who
    gets: str  # what it is for, as the documentation says it
    unless: str = "–"  # who else may ask, or what is kept back all the same
    asks: type[M] | None = None  # the message; None: whoever the transport lets in may ask
    allowed: Callable[[Standing, PeerId, M], bool] = lambda *_: True  # where I stand, who asks me, what

    def lets(self, standing: Standing, sender: PeerId, header: Buffer) -> bool:
        """Whether this may be asked; `WireError` for a question that is none."""
        return self.asks is None or self.allowed(standing, sender, self.asks.decode(header))


# --- the rules ---


def _leads_what_it_names(at: Standing, sender: PeerId, asked: Endorse | Pledge | Reveal) -> bool:
    return at.leads(sender, asked.iteration, asked.attempt)


def _leads_its_roster(at: Standing, sender: PeerId, seal: Seal) -> bool:
    """`WireError` for a roster that cannot be read."""
    instance = at.instance
    if instance is not None and instance.record is None and instance.leader(seal.attempt) == sender:
        return in_reach(instance.ballot, seal.attempt)  # the usual case: a long roster is not read twice
    roster = unbrief(seal.roster, instance.electors if instance else ())
    return at.leads(sender, roster.iteration, seal.attempt)


def _may_propose(at: Standing, sender: PeerId, proposal: Propose) -> bool:
    """Electors in their turn; and anybody who founds a lineage, or is behind: it is told what `sync` would tell it."""
    instance = at.instance
    if proposal.base != at.record.hash:
        return at.record.is_later(proposal.iteration - 1, proposal.base) or at.is_known(sender)
    if proposal.founding:
        return True
    if instance is None or instance.base != at.record.hash:  # it is the first to speak of this iteration
        return at.leads(sender, at.record.iteration + 1, proposal.attempt)
    if instance.electors and instance.lineage == proposal.lineage:
        return instance.leader(proposal.attempt) == sender and in_reach(instance.ballot, proposal.attempt)
    return at.is_elector(sender)


def _knows(at: Standing, sender: PeerId, _: Message) -> bool:
    return at.is_known(sender)


def _votes(at: Standing, sender: PeerId, _: Message) -> bool:
    return at.is_elector(sender)


def _may_sync(at: Standing, sender: PeerId, asked: Sync) -> bool:
    """Anybody may have the agreed state; a result that is not decided yet is for those who decide on it, or hold it."""
    accepted = at.instance.accepted if at.instance else None
    if accepted is None or accepted.hash != asked.want or asked.want == at.state.hash:
        return True
    return at.is_known(sender) or any(voter.id == sender for voter in accepted.roster.party)


def _reports(at: Standing, sender: PeerId, said: Finish | Held) -> bool:
    """A member of the roster that I lead, and whom I asked to keep its result; others where they only ask.

    An elector may report as well where an earlier result is adopted.
    """
    instance = at.instance
    if instance is not None and (instance.iteration, instance.lead.attempt) == (said.iteration, said.attempt):
        led = instance.lead.roster
        if led is not None and (sender in led.ranks or sender in instance.lead.keepers):
            return True
        if isinstance(said, Held) or said.final:
            adopted = led is not None and led.attempt < instance.lead.attempt and isinstance(said, Finish)
            return adopted and instance.rank(sender) is not None
    return at.is_known(sender) or at.took_part(sender, said.iteration)


def _warns(at: Standing, sender: PeerId, head: Overtaken) -> bool:
    """Electors; and whoever is late and tells me of the head that I hold, or of an earlier one."""
    old = at.record.hash == head.hash or at.record.is_later(head.iteration, head.hash)
    return old or at.is_known(sender)


def _is_shown(at: Standing, sender: PeerId, asked: Resend) -> bool:
    """Whom the plan shows that very slice; members of another attempt are told that it is not here."""
    attempt = under_way(at)
    want = wanted(attempt, asked)
    if attempt is None or want is None:
        return at.is_known(sender)
    rank = attempt.roster.ranks.get(sender)
    return rank is not None and attempt.shows(rank, want)


def _proves(at: Standing, sender: PeerId, _: Fraud) -> bool:
    """Whoever may have audited: a proof is believed of anybody, but not everybody may have me check one."""
    return at.is_known(sender) or any(at.took_part(sender, iteration) for iteration in at.history)


def _is_neighbour(at: Standing, sender: PeerId, asked: Share) -> bool:
    masks, digest = at.instance.masks if at.instance else None, asked.digest
    if masks is None or masks.session is None or masks.working is None or masks.working.digest != digest:
        return at.is_known(sender)
    members = masks.session.members
    return sender in members and members.index(sender) in masks.session.neighbours


def _is_in_the_masked_roster(at: Standing, sender: PeerId, asked: Masked) -> bool:
    held = at.instance.masks.total if at.instance else None
    if held is None or held[0].digest != asked.roster:
        return at.is_known(sender)
    return sender in held[0].ranks


TABLE: dict[str, Rule[Any]] = {
    "hello": Rule(Who.STRANGER, "shows its token and is shown mine", "a closed run only; a bad token is told nothing"),
    "layout": Rule(Who.ADMITTED, "the names and shapes of the model's layers, and hashes of frozen ones"),
    "terms": Rule(Who.ADMITTED, "the settings that all peers of the run share"),
    "clock": Rule(Who.ADMITTED, "what time it is here"),
    "about": Rule(Who.ADMITTED, "the run's name, my version, iteration and state, and where I see whoever asks"),
    "ready": Rule(Who.ADMITTED, "says that it is there, trains or leaves", "speaks for itself alone"),
    "sync": Rule(
        Who.ADMITTED, "the agreed state and its record",
        "a few states a minute; what is undecided for electors and the roster's voters", Sync, _may_sync,
    ),
    "propose": Rule(
        Who.ELECTOR, "my vote for its attempt", "admitted, where it founds a lineage or is behind",
        Propose, _may_propose,
    ),
    "seal": Rule(Who.LEADER, "has me begin the roster that it sealed", "–", Seal, _leads_its_roster),
    "endorse": Rule(Who.LEADER, "my vote for a hash", "–", Endorse, _leads_what_it_names),
    "pledge": Rule(Who.LEADER, "my promise to unmask no other roster", "–", Pledge, _leads_what_it_names),
    "reveal": Rule(Who.LEADER, "my seed, and shares of others' secrets", "–", Reveal, _leads_what_it_names),
    "finish": Rule(
        Who.MEMBER, "tells me its hash and hears the verdict",
        "electors, where a result is adopted or kept, or they only ask", Finish, _reports,
    ),
    "held": Rule(Who.MEMBER, "says that it holds the masked sum, and is given the secrets", "–", Held, _reports),
    "masked": Rule(Who.MEMBER, "the masked sum of its own roster", "–", Masked, _is_in_the_masked_roster),
    "decided": Rule(Who.ELECTOR, "tells me what was decided", "members of the roster under way", Decided, _knows),
    "overtaken": Rule(
        Who.ELECTOR, "tells me of a head that wins", "members of the roster under way", Overtaken, _warns
    ),
    "vouch": Rule(Who.ELECTOR, "tells me whom it gave the state: it is waited for", "–", Vouch, _votes),
    "resend": Rule(
        Who.NAMED, "a slice that the plan shows it", "nothing once the iteration is decided", Resend, _is_shown
    ),
    "audit": Rule(
        Who.AUDITOR, "the signed inputs of a part that I own, to add them up again",
        "once; not after the next exchange", Audit, is_auditor,
    ),
    "recall": Rule(
        Who.AUDITOR, "what the owner of that part signed for me: hashes, no values",
        "whom I sent a slice, my own claim of it", Recall, may_recall,
    ),
    "fraud": Rule(Who.ELECTOR, "shows me that somebody lied", "members of the last rosters", Fraud, _proves),
    "share": Rule(Who.NAMED, "the shares that I dealt it, sealed for it", "–", Share, _is_neighbour),
}  # fmt: skip

REFUSALS: dict[str, Parcel] = {  # what a channel's answer looks like where there is none, where it is not `Ok`
    "finish": Ruling("unknown", None, ()).parcel(),
    "reveal": Revealed("refused", ()).parcel(),
    "audit": NO_ANSWER,
    "recall": NO_CLAIM,
}


class Gatekeeper:
    """The table, applied to one peer's answers."""

    def __init__(self, standing: Standing, refusals: dict[str, Callable[[], Parcel]]) -> None:
        self.standing = standing
        self._refusals = refusals  # of channels whose refusal depends on where this peer stands

    async def guarded(self, channel: str, answer: Answer, sender: PeerId, request: Parcel) -> Parcel:
        """The answer to a question, if the table allows it to be asked."""
        liar = sender in self.standing.banned
        if not liar and TABLE[channel].lets(self.standing, sender, request.header):
            return await answer(sender, request)
        self.standing.net.refused.note(NOT_ENTITLED, sender)
        if channel in self._refusals:
            return self._refusals[channel]()
        return REFUSALS.get(channel) or Ok("refused").parcel()


def rows() -> list[str]:
    """The table as the documentation shows it."""
    return [f"| `{channel}` | {rule.who.value} | {rule.gets} | {rule.unless} |" for channel, rule in TABLE.items()]
