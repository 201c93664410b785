"""What a peer keeps of an iteration's masks, and the rules of what it may give away. Nothing here talks.

What is signed (see `statements`): a member's card (its public keys and the hash of its seed) for one attempt, and an
elector's pledge to one roster in one attempt. A member masks its value only under cards that their owners have signed
for the attempt in which they were published, and gives its seed, or shares of others' secrets, only to a leader that
shows the pledges of a quorum of the electors that the member itself knows.

**At most one set of inputs of an iteration is ever unmasked**, whoever leads and whatever it says, while at most f of
the n electors lie (f: `ballot.bearable`). An elector that does not lie signs pledges to one roster of an iteration
and lineage, whatever the attempt (`Masking.bind`), and a restarted one signs none. Two rosters that can both be
unmasked would have two quorums. A quorum has more than (n+f)/2 electors, so two of them share more than f, and one of
those does not lie: it has signed pledges to both, which it never does. What a later leader believes, chooses or hides
cannot change that: the rules by which an honest one sees a pledged roster through (`promised`) only save it a vain
attempt. In another lineage other electors decide, and whoever's value may have left in one lineage brings nothing to
the same iteration of another.

**Nobody is singled out.** An elector pledges itself only to a roster in whose sum it is itself, unless it has said
that it brings nothing (`agrees`). So of the electors that bring something all are in the sum but those outside of the
quorum, and the f who lie: fewer than half. And a member counts the contributions of electors that it knows
(`is_sound`): made-up members do not make a sum larger in its eyes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.net.base import PeerId
from marfl.protocol.ballot import Acks, abandoned, bearable, quorum, willing, without
from marfl.protocol.messages import BEHIND, NOT_YET, WITNESS, Ack, Complaint
from marfl.protocol.roster import DecisionId, Elector, Roster, decode_roster
from marfl.protocol.statements import SIGNATURE_BYTES, Verify, statement
from marfl.secagg.crypto import KeyPair, is_public
from marfl.secagg.graph import KEY_BYTES, neighbours, pledges_needed, threshold
from marfl.secagg.session import Session, epoch_of

KIND = ByteKind.MASKS  # what keys, shares, seeds and the signatures of masks are called in the ledger
SUSPECTED = 8  # iterations for which whoever dealt bad shares is complained of
UNSIGNED = "its keys for masks are not signed by it"
SPENT = "its masked value may be in another sum"
BAD_SHARES = "dealt shares that do not give what it published"

Keys: TypeAlias = Mapping[PeerId, bytes]  # the signed card that came with each ack; empty where there is none
Sign: TypeAlias = Callable[[bytes], bytes]  # see `Net.sign`


# --- what is signed ---


def card_statement(decision: DecisionId, attempt: int, card: bytes) -> bytes:
    """What a member signs of its public keys: they are for this attempt and no other."""
    return statement("mask keys", *decision, attempt, card)


def pledge_statement(roster: Roster, attempt: int) -> bytes:
    """What an elector signs that pledges itself to a roster, in this attempt (which may be later than the roster's)."""
    return statement("pledge", *decision_of(roster), attempt, roster.digest)


def decision_of(roster: Roster) -> DecisionId:
    return DecisionId(roster.run, roster.iteration, roster.base, roster.lineage)


def is_signed_card(peer: PeerId, decision: DecisionId, attempt: int, data: bytes, verify: Verify) -> bool:
    """Whether these bytes are a card that this peer has signed for this attempt, and its signature."""
    card, signature = data[:KEY_BYTES], data[KEY_BYTES:]
    if len(signature) != SIGNATURE_BYTES or not is_public(card):
        return False
    return verify(peer, card_statement(decision, attempt, card), signature)


class PledgeProof(NamedTuple):
    """That a quorum of the electors has pledged itself to a roster."""

    places: tuple[int, ...]  # of electors, in the order in which they lead, ascending
    signatures: bytes  # theirs, one after the other


def proof_of(electors: Sequence[Elector], signatures: Mapping[PeerId, bytes], liars: int) -> PledgeProof | None:
    """The pledges that are here as a proof, no more of them than a quorum needs; None while they are no quorum.

    These signatures have been verified one by one.
    """
    if not quorum(electors, signatures, liars):
        return None
    rows = [(place, signatures[elector.id]) for place, elector in enumerate(electors) if elector.id in signatures]
    rows = rows[: pledges_needed(len(electors), liars)]
    return PledgeProof(tuple(place for place, _ in rows), b"".join(signature for _, signature in rows))


def proves(
    proof: PledgeProof, roster: Roster, attempt: int, electors: Sequence[Elector], liars: int, verify: Verify
) -> bool:
    """Whether a quorum of these electors has signed pledges to this roster in this attempt."""
    places, data = proof
    if len(data) != SIGNATURE_BYTES * len(places) or list(places) != sorted(set(places)):
        return False
    if not all(0 <= place < len(electors) for place in places):
        return False
    named = [electors[place].id for place in places]
    if not quorum(electors, named, liars):
        return False
    said = pledge_statement(roster, attempt)
    cuts = range(0, len(data), SIGNATURE_BYTES)
    return all(verify(peer, said, data[at : at + SIGNATURE_BYTES]) for peer, at in zip(named, cuts, strict=True))


# --- whether its exchange took place at all ---


def witnesses_of(
    electors: Sequence[Elector], roster: Roster, signatures: Mapping[PeerId, bytes], liars: int
) -> PledgeProof | None:
    """Pledges of electors in the sum, more of them than can lie; None while there are too few.

    Who is in the sum pledges itself when it holds the masked sum. Without these a leader could bind all others to a
    roster that it never sealed, and no iteration would ever be unmasked.
    """
    there = [(at, one.id) for at, one in enumerate(electors) if one.id in roster.ranks and one.id in signatures]
    some = there[: _fewest_witnesses(electors, roster, liars)]
    if len(some) < _fewest_witnesses(electors, roster, liars):
        return None
    return PledgeProof(tuple(at for at, _ in some), b"".join(signatures[peer] for _, peer in some))


def took_place(
    proof: PledgeProof, roster: Roster, attempt: int, electors: Sequence[Elector], liars: int, verify: Verify
) -> bool:
    """Whether one who does not lie holds the masked sum of a roster, as these pledges of electors in it show."""
    named = [electors[place] for place in proof.places if 0 <= place < len(electors)]
    there = {one.id for one in named} & roster.ranks.keys()
    alone = PledgeProof(tuple(range(len(named))), proof.signatures)  # of these, all have signed
    enough = len(there) >= _fewest_witnesses(electors, roster, liars)
    return enough and proves(alone, roster, attempt, named, 0, verify)


def _fewest_witnesses(electors: Sequence[Elector], roster: Roster, liars: int) -> int:
    bring = sum(elector.id in roster.ranks for elector in electors)
    return min(bearable(len(electors), liars) + 1, bring)


# --- whether a roster is one to be unmasked at all ---


def is_sound(roster: Roster, electors: Sequence[Elector], smallest: int, liars: int) -> bool:
    """Whether a masked roster holds a quorum of the electors that I know, and enough contributions of theirs."""
    named = {voter.id for voter in roster.voters}
    return quorum(electors, named, liars) and known_contributions(roster, electors) >= smallest


def known_contributions(roster: Roster, electors: Sequence[Elector]) -> int:
    """How many updates of a roster are electors': of a newcomer only the leader says that there is one."""
    known = {elector.id for elector in electors}
    return sum(member.weight > 0 and member.id in known for member in roster.members)


def agrees(peer: PeerId, ack: Ack, roster: Roster) -> bool:
    """Whether a peer may pledge itself to a roster: it is in its sum, brings nothing, or knows why it is left out.

    Who still trains may bring something: nobody is to be unmasked before it could.
    """
    if peer in roster.ranks or ack.role == WITNESS:
        return True
    accuses = any(complaint.caught for complaint in ack.blamed)  # then it may have to sit out with the accused
    return ack.join and (accuses or ack.spent or ack.layout != roster.layout or ack.fewest > roster.contributions)


@dataclass(frozen=True)
class Pledged:
    """Which roster may be unmasked, and the attempt in which that was promised."""

    attempt: int
    roster: Roster


class MaskNews(NamedTuple):
    """What a leader must know of a peer's masks before it seals a roster: fields of its ack."""

    spent: bool = False
    epoch: bytes | None = None
    heard: tuple[PeerId, ...] = ()
    pledged: bytes | None = None
    pledged_attempt: int = -1
    sum_here: bool = False
    hopeless: bool = False


@dataclass
class Masking:
    """One iteration's masks, as one peer holds them."""

    offered: dict[int, KeyPair] = field(default_factory=dict)  # by attempt: a vote asked for twice says the same
    session: Session | None = None
    working: Roster | None = None  # the masked roster under way
    total: tuple[Roster, Tensor] | None = None  # a masked sum that is here
    pledge: Pledged | None = None
    bound: dict[bytes, bytes] = field(default_factory=dict)  # by lineage, the one roster that I sign pledges to
    lineage: bytes | None = None  # where my value may have left
    complaints: tuple[Complaint, ...] = ()  # that went with my last vote
    hopeless: set[bytes] = field(default_factory=set)  # rosters that too few can unmask, or pledge themselves to
    # as the leader
    published: tuple[bytes, tuple[bytes, ...]] = (b"", ())  # an epoch, and the cards of everybody in it
    held: dict[PeerId, bytes] = field(default_factory=dict)  # who holds which masked sum
    pledges: dict[PeerId, bytes] = field(default_factory=dict)  # verified signatures
    news: asyncio.Event = field(default_factory=asyncio.Event)  # somebody holds it
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # the secrets are here, or will never be
    secrets: bytes | None = None  # everybody's seed, and the keys of those who are lost

    def offer(self, attempt: int) -> bytes:
        """My card for an attempt: fresh keys for every attempt."""
        return self.offered.setdefault(attempt, KeyPair()).public

    def open(self, roster: Roster, me: PeerId, keys: bytes, verify: Verify) -> bool:
        """Begin a roster's epoch with everybody's cards, or go on with it; False when this is none of mine.

        The cards of those whose keys mine meet, my neighbours, must be signed by them for this attempt. Everybody looks
        at its own neighbours', so every card is looked at by all who use it.
        """
        if self.session is not None and self.session.epoch == roster.masks:
            self.working = roster  # what was given away in this epoch is not forgotten
            return True
        pair, rank = self.offered.get(roster.attempt), roster.ranks[me]
        circle = neighbours(roster.base, roster.ids)[rank]
        cards, signatures = _cut_keys(keys, len(roster.members), len(circle))
        if pair is None or not cards or cards[rank] != pair.public:
            return False
        if epoch_of(roster.run, roster.iteration, roster.ids, cards) != roster.masks:
            return False
        decision = decision_of(roster)
        for other, signature in zip(circle, signatures, strict=True):
            if not is_signed_card(roster.ids[other], decision, roster.attempt, cards[other] + signature, verify):
                return False
        self.session = Session(roster.masks, roster.base, roster.ids, rank, pair, cards)
        self.working, self.total = roster, None
        return True

    def bind(self, roster: Roster, attempt: int, sign: Sign) -> bytes:
        """My signed pledge to a roster; nothing where I have signed one to another roster of this iteration."""
        if self.bound.setdefault(roster.lineage, roster.digest) != roster.digest:
            return b""
        self.pledge = Pledged(attempt, roster)
        return sign(pledge_statement(roster, attempt))

    def cards_of(self, roster: Roster) -> tuple[bytes, ...]:
        """What everybody in this roster's epoch has published; nothing where this peer was never told."""
        if self.session is not None and self.session.epoch == roster.masks:
            return self.session.keys
        return self.published[1] if self.published[0] == roster.masks else ()

    def sum_of(self, roster: Roster) -> Tensor | None:
        """The masked sum over this roster, if it is here."""
        return self.total[1] if self.total and self.total[0].digest == roster.digest else None

    def begin_leading(self, roster: Roster, keys: bytes) -> None:
        """Forget what an attempt before was told; keep the cards of this one (see `keys_for`)."""
        if keys:
            count = len(roster.members)
            self.published = roster.masks, _cut_keys(keys, count, count)[0]
        self.held, self.pledges, self.secrets = {}, {}, None
        self.news.clear()
        self.settled.clear()

    def is_spent(self, lineage: bytes, helped: Roster | None, *, barred: bool) -> bool:
        """Whether my value may be in a sum that this lineage knows nothing of: then it must not be in another."""
        if self.lineage not in (None, lineage) or barred:
            return True  # sent elsewhere, or perhaps before a restart
        return helped is not None and (self.pledge is None or self.pledge.roster.digest != helped.digest)

    def told(self, lineage: bytes, heard: tuple[PeerId, ...], *, spent: bool) -> MaskNews:
        """What my ack says of all this; `heard`: whose values have arrived in the last attempt."""
        session, promise = self.session, self.pledge
        mine = promise if promise and promise.roster.lineage == lineage else None
        return MaskNews(
            spent,
            session.epoch if session and session.spent else None,
            heard if session else (),
            mine.roster.encoded if mine else None,
            mine.attempt if mine else -1,
            mine is not None and self.sum_of(mine.roster) is not None,
            mine is not None and mine.roster.digest in self.hopeless,
        )


def suspected(suspects: Mapping[PeerId, int], electors: Sequence[Elector], iteration: int) -> tuple[Complaint, ...]:
    """What a peer holds against those who dealt bad shares not long ago, where they are still there."""
    known = {elector.id for elector in electors}
    fresh = [peer for peer, when in suspects.items() if iteration - when <= SUSPECTED and peer in known]
    return tuple(Complaint(peer, BAD_SHARES, True) for peer in fresh)


# --- what a leader seals where sums are masked ---


class Promised(NamedTuple):
    """A roster that may have been unmasked already: no other of its iteration ever is."""

    roster: Roster
    holders: tuple[PeerId, ...]  # who has its masked sum; without any, or with too few shares, it is lost

    @property
    def lost(self) -> bool:
        return not self.holders


def promised(
    electors: Sequence[Elector], acks: Acks, liars: int = 0, sealed: Collection[bytes] = ()
) -> Promised | None:
    """The roster that electors have pledged themselves to in the newest attempt; others may hold its sum.

    What only f of them say counts if the roster was sealed here as well (these are the digests): were it otherwise,
    each liar could make up a roster and stop the others with it. A roster that too few are left to pledge themselves
    to is lost, and so is one that more than f call hopeless.
    """
    borne = bearable(len(electors), liars)
    voters = {elector.id: acks[elector.id] for elector in electors if elector.id in acks}
    said: defaultdict[bytes, set[PeerId]] = defaultdict(set)
    for peer, ack in voters.items():
        if ack.pledged is not None:
            said[ack.pledged].add(peer)
    heard = sorted(data for data, by in said.items() if len(by) > borne or decode_roster(data).digest in sealed)
    if not heard:
        return None
    possible = [data for data in heard if quorum(electors, said[data] | _free(voters, decode_roster(data)), liars)]
    newest = max(possible or heard, key=lambda data: max(voters[peer].pledged_attempt for peer in said[data]))
    same = {peer: ack for peer, ack in acks.items() if ack.pledged == newest}
    hopeless = sum(ack.hopeless for ack in same.values()) > borne or not possible
    holders = () if hopeless else tuple(sorted(peer for peer, ack in same.items() if ack.sum_here))
    return Promised(decode_roster(newest), holders)


def _free(voters: Acks, roster: Roster) -> set[PeerId]:
    """Who has not pledged itself yet, and may pledge itself to this roster, as far as its ack tells.

    Who lacks the state may only vote, or may be about to fetch it: it knows itself.
    """
    free = {peer: ack for peer, ack in voters.items() if ack.pledged is None}
    return {peer for peer, ack in free.items() if ack.role == BEHIND or agrees(peer, ack, roster)}


class Needs(NamedTuple):
    """What a masked roster must satisfy, in the eyes of everybody who knows the electors."""

    electors: tuple[Elector, ...]
    smallest: int  # contributions
    liars: int


def masked(session: Session | None, roster: Roster, acks: Acks, keys: Keys, needs: Needs) -> Roster | None:
    """The roster under masks: those of the last attempt where only peers are missing that sent nothing, else fresh.

    Who wants to join must bring signed keys, and a value that is in no other sum. None: not yet, because too many who
    might bring something still train; the others could not unmask anything.
    """
    everybody = roster
    roster = without(roster, [peer for peer in roster.ids if not keys[peer]], UNSIGNED)
    roster = without(roster, [peer for peer in roster.ids if acks[peer].spent], SPENT)
    roster = willing(roster, acks)
    sound = bool(roster.members) and is_sound(roster, needs.electors, needs.smallest, needs.liars)
    if not quorum(needs.electors, _free(acks, roster), needs.liars):
        sound = False
        if any(ack.role == NOT_YET for ack in acks.values()):
            return None
    if not sound:
        return abandoned(everybody)
    if session and _recoverable(roster, session, acks):
        return replace(roster, masks=session.epoch, circle=session.members)
    published = [keys[peer][:KEY_BYTES] for peer in roster.ids]
    return replace(roster, masks=epoch_of(roster.run, roster.iteration, roster.ids, published))


def _recoverable(roster: Roster, session: Session, acks: Acks) -> bool:
    """Whether all members' values are under these masks, and the others sent nothing and can be recovered."""
    circle = session.members
    if not set(roster.ids) <= set(circle) or any(acks[peer].epoch != session.epoch for peer in roster.ids):
        return False
    lost = set(circle) - set(roster.ids)
    if lost & {peer for member in roster.ids for peer in acks[member].heard}:
        return False
    place = {peer: rank for rank, peer in enumerate(circle)}
    here, graph = {place[peer] for peer in roster.ids}, session.graph
    return all(len(here.intersection(graph[place[peer]])) >= threshold(len(graph[place[peer]])) for peer in lost)


# --- cards on their way ---


def keys_for(roster: Roster, keys: Keys) -> bytes:
    """Everybody's cards and then everybody's signatures, where a roster founds an epoch: what a leader keeps."""
    if not roster.masks or roster.circle:
        return b""
    given = [keys[peer] for peer in roster.ids]
    return b"".join(each[:KEY_BYTES] for each in given) + b"".join(each[KEY_BYTES:] for each in given)


def keys_to(peer: PeerId, roster: Roster, keys: bytes) -> bytes:
    """What one member is sent of `keys_for`: everybody's cards, and the signatures of its neighbours."""
    if not keys or peer not in roster.ranks:
        return b""
    circle = neighbours(roster.base, roster.ids)[roster.ranks[peer]]
    start = KEY_BYTES * len(roster.members)
    cuts = [start + SIGNATURE_BYTES * rank for rank in circle]
    return keys[:start] + b"".join(keys[at : at + SIGNATURE_BYTES] for at in cuts)


def _cut_keys(keys: bytes, members: int, signed: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Cards and signatures as a member is sent them; nothing where there is another number."""
    start = KEY_BYTES * members
    if len(keys) != start + SIGNATURE_BYTES * signed:
        return (), ()
    cards = tuple(keys[at : at + KEY_BYTES] for at in range(0, start, KEY_BYTES))
    return cards, tuple(keys[at : at + SIGNATURE_BYTES] for at in range(start, len(keys), SIGNATURE_BYTES))
