"""The rules of one decision, and nothing else. Pure functions: state and message in, state and answer out; no clock, no
network, no waiting. `marfl.testing.exhaustive` tries every order of events on these very functions.

One iteration is one decision, made by single-decree Paxos (Lamport, "Paxos made simple", 2001):

    elector (Lamport: acceptor)     whoever voted for the last committed roster
    leader (proposer)               the elector whose turn an attempt is; nobody else may propose it
    attempt (ballot number)         rank of its leader modulo the number of electors: no two leaders share one
    proposal and ack (phase 1: prepare and promise)
    seal (phase 2a: accept)         the leader publishes a roster, or an earlier result to adopt
    finish, endorse (phase 2b: accepted)    a vote for a hash, with its data or without
    commit (chosen)                 a quorum of the electors voted for it, and enough peers hold its data

Electors may lie (`liars`). Then quorums are larger, so that any two share an honest elector; votes and acks are signed;
and from the second attempt on every elector checks, by the leader's own rule, the acks that the leader went by.

One thing differs: a leader does not name the value. It seals a roster, and the hash of the new state comes of it; so
members that compute wrongly may vote for different hashes in one attempt. A second kind of rule says whom a leader
leaves out of the next roster, from the complaints that come with the acks (blame).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.messages import BEHIND, MEMBER, NOT_YET, WITNESS, Ack, Propose
from marfl.protocol.roster import VOID, DecisionId, Elector, Member, Record, Roster, decode_roster, ranked

FAR = 2**20  # attempts: nobody lags so far behind; a liar could use up the numbers that a message holds
LIFT = FAR // 64  # attempts that a refusal may be ahead: a liar's few must not lift a leader out of others' reach
COPIES = 3  # of a committed state, at least, where so many peers vote
BAD_ACK = "bad ack"  # counted in `Net.refused`; whoever sent it is as good as silent
MOST_STRANGERS = 256  # that a roster names as missing; there may be any number of them in an open run
LONGEST_NAME, LONGEST_WHY = 256, 512  # characters of a name, and of why somebody is missing
LATE = "its data did not arrive"
SILENT = "did not answer"
TRAINS = "still trains"  # a slow peer that voted, and brings its update later
ACCUSES_MANY = "accuses several peers, each of them alone"
ACCUSES_ALONE = "alone accuses another peer, and either may be wrong"
SAYS = ", says "
AT_ODDS = "members came to different results, and it may be why"
TOO_SMALL = "the sum would hold fewer contributions than its privacy budget allows"

Acks: TypeAlias = Mapping[PeerId, Ack]  # who promised an attempt to its leader, and what it said


# --- quorums and turns ---


def bearable(electors: int, liars: int) -> int:
    """How many liars among so many electors are borne: as many as the run says, but fewer than a third."""
    return max(0, min(liars, (electors - 1) // 3))


def quorum(electors: Sequence[Elector], voters: Collection[PeerId], liars: int = 0) -> bool:
    """Enough electors that any two quorums share a peer; where liars are borne, one that does not lie.

    Without liars: more than half, and exactly half counts when it holds the first elector. With f of them: ⌊(n+f)/2⌋+1.
    """
    if not electors:
        return False
    votes = sum(elector.id in voters for elector in electors)
    borne = bearable(len(electors), liars)
    if borne:
        return 2 * votes > len(electors) + borne
    return 2 * votes + (electors[0].id in voters) > len(electors)


def leader_of(electors: Sequence[Elector], founder: PeerId | None, attempt: int) -> PeerId | None:
    """The only peer that may propose an attempt: so no two rosters share one. A founder has its lineage's first."""
    if founder is not None and attempt == 0:
        return founder
    return electors[attempt % len(electors)].id if electors else None


def next_attempt(electors: Sequence[Elector], founder: PeerId | None, rank: int, highest: int) -> int:
    """The lowest attempt above the highest one heard of that the elector of this rank leads."""
    lowest = highest + 1 if founder is None else max(1, highest + 1)
    return lowest + (rank - lowest) % len(electors)


# --- what an elector may do (phases 1b and 2b) ---


class Value(NamedTuple):
    """What a decision decides."""

    roster: bytes  # its digest
    hash: bytes  # of the state that came of it


class Vote(Protocol):
    """A vote for a result (Lamport: an accepted proposal)."""

    @property
    def attempt(self) -> int:
        """The attempt in which it was cast, which may be later than the one that made the result."""

    @property
    def hash(self) -> bytes: ...

    @property
    def value(self) -> Value:
        """What is voted for: a roster, and the hash that came of it."""

    @property
    def holds(self) -> bool:
        """Whether the voter has the data, not only the hash."""


V = TypeVar("V", bound=Vote)


@dataclass(frozen=True)
class Ballot(Generic[V]):
    """What an elector has bound itself to in one iteration."""

    promised: int = -1  # the highest attempt acked: it never votes in an earlier one
    accepted: V | None = None  # its last vote


def may_promise(ballot: Ballot[V], attempt: int) -> bool:
    """Whether to ack a proposal (phase 1b): unless a later attempt was promised."""
    return attempt >= ballot.promised


def promise(ballot: Ballot[V], attempt: int) -> Ballot[V]:
    """The elector after its ack. Its last vote stays, and is told with the ack."""
    return Ballot(max(ballot.promised, attempt), ballot.accepted)


def may_vote(ballot: Ballot[V], attempt: int, value: Value) -> bool:
    """Whether to vote for a result of this attempt (phase 2b): unless a later attempt was promised.

    An attempt gets one vote of an elector: who has endorsed one result in it does not finish with another one.
    """
    last = ballot.accepted
    once = last is None or last.attempt != attempt or last.value == value
    return once and attempt >= ballot.promised


def voted(ballot: Ballot[V], vote: V) -> Ballot[V]:
    """The elector after this vote."""
    return Ballot(max(ballot.promised, vote.attempt), vote)


@dataclass(frozen=True)
class Acceptor(Generic[V]):
    """All that an elector's answers in one decision depend on."""

    iteration: int
    base: bytes  # hash of the state that this iteration starts from
    lineage: bytes
    electors: tuple[Elector, ...]  # in the order in which they lead
    founder: PeerId | None  # whom it follows into a new lineage
    ballot: Ballot[V]
    barred: bool  # it may have voted in this decision before a restart: it never votes in it again
    under_way: int | None  # the attempt whose exchange goes on here


class Reply(Enum):
    """How an elector answers a proposal, as its ack's status says it."""

    ACK = "ack"  # it has promised
    REFUSED = "refused"  # not this leader's turn, or a later attempt was promised
    LEFT = "left"  # it follows another lineage
    BARRED = "barred"
    STALE = "stale"  # the leader is ahead of it
    BEHIND = "behind"  # the leader is behind it
    UNKNOWN = "unknown"  # the leader is no elector here


def heeds(acceptor: Acceptor[V], sender: PeerId, attempt: int) -> bool:
    """Whether the sender leads this attempt, and no later one was promised: what all requests of a leader need."""
    turn = leader_of(acceptor.electors, acceptor.founder, attempt) == sender
    return turn and in_reach(acceptor.ballot, attempt) and may_promise(acceptor.ballot, attempt)


def in_reach(ballot: Ballot[V], attempt: int) -> bool:
    """Whether an attempt can have been come to by now: no honest peer speaks of one that is farther."""
    return 0 <= attempt <= ballot.promised + FAR


def on_propose(acceptor: Acceptor[V], sender: PeerId, proposal: Propose, *, follows: bool) -> tuple[Reply, Acceptor[V]]:
    """The answer to a proposal from the same state (phase 1b), and the elector after it.

    `follows`: it may help to found the proposal's lineage (see `may_follow`). One ack per attempt, to whoever leads it.
    """
    if proposal.iteration != acceptor.iteration:
        return Reply.REFUSED, acceptor
    if proposal.founding:
        if not follows:
            return Reply.REFUSED, acceptor
        if acceptor.lineage != proposal.lineage:
            acceptor = founded(acceptor, proposal.lineage, sender)
    elif acceptor.barred:
        return Reply.BARRED, acceptor
    if acceptor.lineage != proposal.lineage:
        return Reply.LEFT, acceptor
    # A late proposal has no grounds to end an attempt that its leader knew nothing of.
    working = acceptor.under_way
    late = working is not None and proposal.attempt > working > proposal.seen
    if late or not heeds(acceptor, sender, proposal.attempt):
        return Reply.REFUSED, acceptor
    return Reply.ACK, replace(acceptor, ballot=promise(acceptor.ballot, proposal.attempt))


def founded(acceptor: Acceptor[V], lineage: bytes, founder: PeerId) -> Acceptor[V]:
    """The elector once it follows a founder: it never votes in the old lineage again, and is bound to nothing yet."""
    return replace(acceptor, lineage=lineage, founder=founder, electors=(), ballot=Ballot(), under_way=None)


def may_follow(acceptor: Acceptor[V], sender: PeerId, lineage: bytes, *, alone: bool, quiet: bool) -> bool:
    """Whether to help found a new lineage. Paxos has no such thing: there the electors are never replaced.

    `alone`: there are no electors yet, or no majority of them was heard of for long and this peer may go on without.
    `quiet`: the founder that it follows has not shown for long that others follow it. Of two founders who begin at
    once, the one with the lower name wins.
    """
    if acceptor.lineage == lineage:
        return acceptor.founder == sender
    if acceptor.founder is None:
        return alone
    undecided = not acceptor.electors and acceptor.ballot.promised <= 0
    return quiet or (undecided and sender < acceptor.founder)


def turns_between(electors: Sequence[Elector], promised: int, attempt: int, liars: int) -> int:
    """How many others have their time before whoever has led in vain leads this attempt; no more than are needed.

    If it is a liar itself, one of so many others is none.
    """
    return min((attempt - promised - 1) % max(1, len(electors)), bearable(len(electors), liars))


def on_endorse(
    acceptor: Acceptor[V], sender: PeerId, roster: Roster, attempt: int, digest: bytes | None = None
) -> bool:
    """Whether to vote for a hash, or to pledge oneself to a roster (no hash), on its leader's request (phase 2b).

    An ack that tells of a vote for a roster of another decision, or of a later attempt, would count for nobody.
    """
    here = acceptor.iteration, acceptor.lineage, acceptor.base
    fits = (roster.iteration, roster.lineage, roster.base) == here and roster.attempt <= attempt and not acceptor.barred
    once = digest is None or may_vote(acceptor.ballot, attempt, Value(roster.digest, digest))
    return fits and once and heeds(acceptor, sender, attempt)


def on_seal(acceptor: Acceptor[V], me: PeerId, sender: PeerId, roster: Roster, seal: Sealed) -> bool:
    """Whether this peer has a part in a sealed attempt: a member of its roster, or a voter that adopts a result.

    Whoever acked the roster may be asked to hold its result (see `kept`), a newcomer without a vote in it, too.
    """
    voter = any(voter.id == me for voter in (*acceptor.electors, *roster.witnesses))
    mine = me in roster.ranks or (seal.adopt is not None and voter)
    return mine and roster.attempt <= seal.attempt and heeds(acceptor, sender, seal.attempt)


class Sealed(NamedTuple):
    """What a leader has to say of an attempt beside its roster."""

    attempt: int
    adopt: bytes | None = None  # the hash of an earlier attempt's result that everybody votes for again
    holders: tuple[PeerId, ...] = ()  # who has the data of that result
    keys: bytes = b""  # everybody's public keys, where sums are masked
    promises: bytes = b""  # signed acks that justify it, from the second attempt on
    votes: bytes = b""  # signed votes of members for what is to be held by others
    arrivals: bytes = b""  # newcomers' own words that they take part (see `seniority`)
    signature: bytes = b""  # its leader's


# --- what a leader must do with acks (phase 2a) ---


class Way(Enum):
    """What a leader may do once a quorum has acked its attempt."""

    FREE = "seal a new roster"  # nothing can have been committed
    ADOPT = "have everybody vote for an earlier result again"
    WAIT = "do nothing"  # something may be committed, and nobody here can tell what, or has its data


class Choice(NamedTuple):
    """What the leader of an attempt must do."""

    way: Way
    value: Value | None = None  # of the result to adopt
    holders: tuple[PeerId, ...] = ()  # who has its data, among those who acked

    @property
    def hash(self) -> bytes | None:
        return self.value.hash if self.value else None


class Told(NamedTuple):
    """A vote as an ack tells it."""

    attempt: int
    value: Value
    holds: bool

    @property
    def hash(self) -> bytes:
        return self.value.hash


def last_vote(ack: Ack) -> Told | None:
    """The last vote of whoever gave this ack."""
    if ack.accepted_hash is None or ack.accepted is None:
        return None
    return Told(ack.accepted_attempt, Value(decode_roster(ack.accepted).digest, ack.accepted_hash), ack.holds)


def choose(
    electors: Sequence[Elector], acks: Mapping[PeerId, Vote | None], liars: int = 0, *, held: bool = False
) -> Choice:
    """What a leader must do, from the last votes of those who acked (phase 2a). The acks hold a quorum of the electors.

    Only electors vote. Others who finished a result (newcomers) may give its data, if an elector voted for it; `held`:
    somebody has it, whoever that is.

    If a result was committed in some attempt, every vote of a later attempt is for the same result: this rule keeps
    that up. So a result may be committed only if those whose last vote is for it, in whichever attempt, all who are
    silent, and as many of the others as may lie, are a quorum together. Without liars only what was voted for in the
    newest attempt heard of can be committed; a liar could say that it voted in a newer one.

    A result that may be committed is adopted once more peers than can lie stand behind it: one of them knows that it is
    the sum. Until then, and where two may be committed, the leader waits for more acks.
    """
    named = {elector.id for elector in electors}
    borne = bearable(len(electors), liars)
    votes = {peer: vote for peer, vote in acks.items() if vote is not None and peer in named}
    if not votes:
        return Choice(Way.FREE)
    newest = max(vote.attempt for vote in votes.values())
    values = sorted({vote.value for vote in votes.values() if borne or vote.attempt == newest})
    backers = {value: {peer for peer, vote in votes.items() if vote.value == value} for value in values}
    silent = named - acks.keys()
    possible = [value for value in values if _may_be_committed(electors, backers[value], silent, acks, liars)]
    if len(possible) > 1:
        return Choice(Way.WAIT)
    likely = possible[0] if possible else max(values, key=lambda value: len(backers[value]))
    holders = tuple(sorted(peer for peer, vote in acks.items() if vote and vote.value == likely and vote.holds))
    if (holders or held) and len(backers[likely]) > borne:
        return Choice(Way.ADOPT, likely, holders)
    return Choice(Way.WAIT if possible else Way.FREE)


def _may_be_committed(
    electors: Sequence[Elector],
    backers: Collection[PeerId],
    silent: Collection[PeerId],
    acks: Collection[PeerId],
    liars: int,
) -> bool:
    """Whether a quorum may have voted for what these stand behind, though some of the others say otherwise."""
    others = [elector.id for elector in electors if elector.id in acks and elector.id not in backers]
    return quorum(electors, {*backers, *silent, *others[: bearable(len(electors), liars)]}, liars)


def justified(electors: Sequence[Elector], acks: Mapping[PeerId, Vote | None], adopt: Value | None, liars: int) -> bool:
    """Whether these acks of an attempt allow its leader to seal a new roster, or to have this result adopted.

    Every elector asks this before it votes in a later attempt than the first: a leader may lie. Who has the data of
    what is adopted is the leader's to know: it may be a newcomer, whose ack is not among these, and without data nobody
    votes for it.
    """
    if not quorum(electors, acks, liars):
        return False
    choice = choose(electors, acks, liars, held=adopt is not None)
    return choice.way is (Way.FREE if adopt is None else Way.ADOPT) and choice.value == adopt


def is_handed_on(electors: Sequence[Elector], roster: Roster, liars: int) -> bool:
    """Whether a quorum of the electors is among those who decide after this roster, as in any that their acks make.

    Else a lying leader could seal a roster of itself alone, and decide alone from then on.
    """
    return quorum(electors, {voter.id for voter in roster.voters}, liars)


def is_terse(before: Record, electors: Iterable[Elector], roster: Roster) -> bool:
    """Whether a roster says no more than an honest leader has to say: everybody keeps it, and shows it to others.

    All in it that no other rule looks at: who is missing and why, and who was there when masks were made.
    """
    people = (*electors, *before.electors, *(before.roster.party if before.roster else ()), *roster.party)
    others = {*(peer for peer, _ in roster.omitted), *roster.circle} - {one.id for one in people}
    few = len(others) <= MOST_STRANGERS and len({*roster.circle}) == len(roster.circle)
    short = all(len(peer) <= LONGEST_NAME for peer in others)
    short = short and all(len(why) <= LONGEST_WHY for _, why in roster.omitted)
    once = len({peer for peer, _ in roster.omitted}) == len(roster.omitted)
    return few and short and once and (roster.masked or not roster.circle)


# --- what is decided ---


class Tally(NamedTuple):
    """What the leader of an attempt has heard of its results."""

    finished: Mapping[PeerId, bytes | None]  # by member: the hash of the state it holds; None: it could not finish
    endorsed: Mapping[PeerId, bytes]  # by elector: the hash that it voted for without being asked for the data


def held(electors: Sequence[Elector], members: Sequence[Elector], tally: Tally, *, again: bool) -> bytes | None:
    """The hash whose data a majority of the roster holds.

    `again`: the result is of an earlier attempt, whose roster may be lost; then a majority of the electors will do.
    """
    for digest in sorted({got for got in tally.finished.values() if got is not None}):
        holders = _voters(tally.finished, digest)
        if quorum(members, holders) or (again and quorum(electors, holders)):
            return digest
    return None


def decided(
    electors: Sequence[Elector], members: Sequence[Elector], tally: Tally, *, again: bool, liars: int = 0
) -> bytes | None:
    """The hash that is committed: its data is held (see `held`), and a quorum of the electors voted for it."""
    digest = held(electors, members, tally, again=again)
    if digest is None:
        return None
    voters = _voters(tally.finished, digest) | _voters(tally.endorsed, digest)
    return digest if quorum(electors, voters, liars) else None


def kept(voters: Sequence[Elector], holders: Collection[PeerId]) -> bool:
    """Whether enough peers hold the data of a result before it is committed: `COPIES`, or a majority of its voters.

    The voters decide the next iteration. In a small swarm any majority of them that lives then has the state; in a
    large one a commit costs no more than `COPIES` copies, however few peers bring an update.
    """
    return len(holders) >= COPIES or quorum(voters, holders)


def _voters(said: Mapping[PeerId, bytes | None] | Mapping[PeerId, bytes], digest: bytes) -> set[PeerId]:
    return {peer for peer, got in said.items() if got == digest}


# --- which acks count ---


def check_ack(ack: Ack, attempt: int, decision: DecisionId, heaviest: float, *, alike: bool = False) -> None:
    """`WireError` for an ack that no honest peer gives to a proposal of this attempt at a decision.

    Its numbers go into the roster: nobody could follow one made of numbers out of bounds.
    """
    _need(ack.weight <= heaviest, f"weight (max_weight is {heaviest:g})")
    _need(not alike or ack.weight in (0, 1), "weight (all updates count alike)")
    _need(ack.attempt <= attempt + LIFT, "attempt")  # its leader goes on above it, where others still follow
    _need(not ack.join or ack.role == MEMBER, "role")
    if ack.status == Reply.ACK.value:
        _need(ack.attempt == attempt, "attempt")
        _need((ack.accepted is None) == (ack.accepted_hash is None), "vote")
        for roster, when in ((ack.accepted, ack.accepted_attempt), (ack.pledged, ack.pledged_attempt)):
            _need(roster is None or _is_earlier(decode_roster(roster), when, attempt, decision), "vote")


def _is_earlier(roster: Roster, when: int, attempt: int, decision: DecisionId) -> bool:
    of = DecisionId(roster.run, roster.iteration, roster.base, roster.lineage)
    return of == decision and roster.attempt <= when <= attempt


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"an ack with a bad {what}")


# --- blame: who is left out of the next roster; nobody is for what one peer alone says of it ---


class Court(NamedTuple):
    """By what a leader judges those who accuse each other, beside their words."""

    electors: Collection[PeerId] = ()  # of others anybody may have many; where none are known all count
    liars: int = 0  # of them that may lie
    omitted: Mapping[PeerId, str] = {}  # whom the last roster left out, and why; with masks, the last ones
    few: bool = False  # without two of them nothing could be summed
    coin: bytes = b""  # nobody chooses it

    def believes(self, accusers: Collection[PeerId]) -> bool:
        """Whether so many accuse one that more than one of them does not lie, or is no newcomer."""
        heard = sum(peer in self.electors for peer in accusers) if self.electors else len(accusers)
        return heard > max(1, self.liars)

    def out(self, accuser: PeerId, peer: PeerId, why: str) -> dict[PeerId, str]:
        """Who sits out where one peer's word is against another's: both; again and again only one, by the coin.

        Else one peer would keep another out of every roster: by what it says, or by what it sends to that one alone.
        """
        both = {peer: f"{why}{SAYS}{accuser}", accuser: ACCUSES_ALONE}
        before = self.few or self.omitted.get(accuser) == ACCUSES_ALONE or SAYS in self.omitted.get(peer, "")
        one = min(both, key=lambda each: hashlib.sha256(self.coin + each.encode()).digest())
        return {one: both[one]} if before else both


NO_COURT = Court()


def culprits(acks: Acks, *, patient: bool, court: Court = NO_COURT) -> dict[PeerId, str]:
    """Who must be left out of the next roster, and why: peers that sent bad data, and the roots of the waiting.

    A peer that is waited for is excused while it waits for somebody itself, or cannot be rid of what it has for
    somebody who is silent or has a bad link; unless its own link is bad. So is one of whom a single peer complains,
    unless it says so itself. If that leaves nobody, nobody is blamed while there is patience; after that whoever the
    most peers wait for; of several, whoever is waited for by the most of whom nobody complains.
    """
    guilty = _caught(acks, court)
    waits = _complaints(acks, caught=False)
    slow = _bad_links(acks, waits, patient=patient)
    able = {p: ack for p, ack in acks.items() if not ack.waits and ack.accepted_hash is None}
    free = {p for p, ack in able.items() if not _held_up(ack, acks.keys() - slow)}
    roots = {p for p, by in waits.items() if p in slow or (p in free and _is_supported(acks[p], by))}
    if not roots and not guilty and waits and not patient:
        worst = max(waits, key=lambda peer: (len(waits[peer]), len(waits[peer].keys() - waits.keys()), peer))
        roots = {worst} if len(waits[worst]) > 1 else {worst, *waits[worst]}
    return dict.fromkeys(roots, LATE) | guilty


def _complaints(acks: Acks, *, caught: bool) -> dict[PeerId, dict[PeerId, str]]:
    """By accused: who complains of it, and of what. Nobody complains of itself."""
    found: defaultdict[PeerId, dict[PeerId, str]] = defaultdict(dict)
    for accuser, ack in acks.items():
        for peer, reason, is_caught in ack.blamed:
            if is_caught is caught and peer != accuser:
                found[peer][accuser] = reason
    return dict(found)


def _caught(acks: Acks, court: Court) -> dict[PeerId, str]:
    """Who sent what must not be used. Where one peer alone says so, either of the two may be to blame: both sit out.

    Who says so of several, each time alone, is the one that they have in common.
    """
    accused = _complaints(acks, caught=True)
    guilty = {peer: next(iter(by.values())) for peer, by in accused.items() if court.believes(by)}
    alone = [(accuser, peer) for peer, by in accused.items() if peer not in guilty for accuser in by]
    counts = Counter(accuser for accuser, _ in alone)
    guilty |= {accuser: ACCUSES_MANY for accuser, count in counts.items() if count > 1 and accuser not in guilty}
    for accuser, peer in alone:
        if accuser not in guilty and peer not in guilty:
            guilty |= court.out(accuser, peer, accused[peer][accuser])
    return guilty


def at_odds(electors: Sequence[Elector], acks: Acks, attempt: int, liars: int) -> dict[PeerId, str]:
    """Whom to leave out where members of one roster came to so many results that none of them can be adopted.

    Somebody shows each of them something else, and nobody can tell who: so other ones sit out each time, a quarter of
    all. The first time may be a mistake. No votes of liars alone look like that.
    """
    borne, names = bearable(len(electors), liars), {elector.id for elector in electors}
    votes = [vote for peer, ack in acks.items() if peer in names and (vote := last_vote(ack)) is not None]
    newest = max((vote.attempt for vote in votes), default=0)
    rosters = Counter(vote.value.roster for vote in votes if vote.attempt == newest)
    if not borne or newest < 1:
        return {}
    of = max(sorted(rosters), key=lambda digest: rosters[digest])
    results = Counter(vote.hash for vote in votes if vote.attempt == newest and vote.value.roster == of)
    if results.total() - max(results.values()) <= borne:
        return {}
    return dict.fromkeys(some_of(acks, of + attempt.to_bytes(8)), AT_ODDS)


def some_of(acks: Acks, coin: bytes) -> list[PeerId]:
    """A quarter of those who take part, by a coin: one who spoils a sum is among them sooner or later."""
    bring = [peer for peer, ack in acks.items() if ack.join]
    bring.sort(key=lambda peer: hashlib.sha256(coin + peer.encode()).digest())
    return bring[: -(-len(bring) // 4)]


def _is_supported(ack: Ack, accusers: Collection[PeerId]) -> bool:
    """Whether a complaint counts: several have it, or the accused itself has not got rid of what it owes."""
    return len(accusers) > 1 or any(accuser in ack.unsent for accuser in accusers)


def _held_up(ack: Ack, reached: Collection[PeerId]) -> bool:
    """Whether this peer still has something for somebody who is not reached: what it sends after that is late."""
    return any(to not in reached for to in ack.unsent)


def _bad_links(acks: Acks, waits: dict[PeerId, dict[PeerId, str]], *, patient: bool) -> set[PeerId]:
    """The fewest peers that explain all the messages that could not be sent between peers that live.

    Of two ends that explain as much: the one that several wait for, unless it waits for the other; else the sender. One
    message alone is nobody's fault while there is patience, if its sender waits for the other end (it has its word only
    that the other is to blame, and is held up itself), or if somebody who is silent now is waited for anyway.
    """
    silent = waits.keys() - acks.keys()
    stuck = {(sender, to) for sender, ack in acks.items() for to in ack.unsent if to in acks}
    found: set[PeerId] = set()
    while stuck:
        ends = Counter(end for pair in stuck for end in pair)
        senders = {sender for sender, _ in stuck}
        both_ways = stuck | {(to, sender) for sender, to in stuck}
        excused = {one for one, other in both_ways if one in waits.get(other, ())}
        missed = {peer for peer in ends if len(waits.get(peer, ())) > 1} - excused
        worst = max(ends, key=lambda peer: (ends[peer], peer in missed, peer in senders, peer))
        if not patient or ends[worst] > 1 or worst in missed or not (worst in excused or silent):
            found.add(worst)
        stuck = {pair for pair in stuck if worst not in pair}
    return found


# --- what roster a leader seals ---


class Against(NamedTuple):
    """What a leader knows of peers that may be missing in its roster."""

    known: Iterable[PeerId]  # who must be named, present or not
    reasons: Mapping[PeerId, str]  # who must be left out, and why (see `culprits`)
    left: Collection[PeerId] = ()  # who has said goodbye


def new_roster(blank: Roster, acks: Acks, against: Against, *, founding: bool) -> Roster | None:
    """Exactly those who acked and bring something, without those who spoiled the last attempt; None: not yet.

    `blank` says all about the roster but who is in it. Where nobody brings anything, and nobody still trains, the
    iteration goes by: then it is of those who only vote, and nothing is summed.
    """
    joining = {p: ack for p, ack in acks.items() if ack.join and _speaks(blank, ack) and p not in against.reasons}
    if not any(ack.weight > 0 for ack in joining.values()):
        if any(ack.role == NOT_YET and peer not in against.reasons for peer, ack in acks.items()):
            return None  # it may still bring something
        joining = {p: replace(ack, weight=0.0) for p, ack in acks.items() if ack.role in (MEMBER, WITNESS)}
        blank = replace(blank, exchange=VOID)
    if not joining:
        return None  # nobody here holds the state
    there, voters = (
        ranked(blank.run, blank.iteration, tuple(Elector(peer, ack.index) for peer, ack in some.items()))
        for some in (joining, acks)
    )
    missing = [peer for peer in dict.fromkeys(against.known) if peer not in joining]
    return replace(
        blank,
        members=tuple(Member(elector.id, elector.index, joining[elector.id].weight) for elector in there),
        witnesses=tuple(elector for elector in voters if elector.id not in joining),
        electors=voters if founding else (),
        omitted=tuple((peer, against.reasons.get(peer, _why(blank, peer, acks, against.left))) for peer in missing),
        wire=blank.wire if blank.exchange != VOID else "fp32",
        ages=tuple((elector.id, age) for elector in there if (age := joining[elector.id].age)),
    )


def _speaks(blank: Roster, ack: Ack) -> bool:
    """Whether this peer's values can be added to the others'."""
    return ack.layout == blank.layout and ack.wire == blank.wire


def _why(blank: Roster, peer: PeerId, acks: Acks, left: Collection[PeerId]) -> str:
    if peer not in acks:
        return "said goodbye" if peer in left else SILENT
    if acks[peer].slow and acks[peer].role in (NOT_YET, BEHIND):
        return TRAINS
    if acks[peer].layout != blank.layout:
        return "brings another model layout"
    return "brings no update" if _speaks(blank, acks[peer]) else "sends values in another way (wire)"


def without(roster: Roster, left: Collection[PeerId], why: str) -> Roster:
    """The roster without these members, who only vote."""
    if not left:
        return roster
    staying = tuple(member for member in roster.members if member.id not in left)
    gone = [member for member in roster.members if member.id in left]
    voters = (*roster.witnesses, *(Elector(member.id, member.index) for member in gone))
    omitted = (*roster.omitted, *((member.id, why) for member in gone))
    return replace(roster, members=staying, witnesses=ranked(roster.run, roster.iteration, voters), omitted=omitted)


def willing(roster: Roster, acks: Acks) -> Roster:
    """The largest part of a roster whose sum is large enough for everybody in it (`Contribution.fewest`).

    Whoever wants more contributions than there are is left out; that may leave too few for others, and so on.
    """
    while unwilling := {m.id for m in roster.members if m.weight and acks[m.id].fewest > roster.contributions}:
        roster = without(roster, unwilling, TOO_SMALL)
    return roster


def abandoned(roster: Roster) -> Roster:
    """The same peers let the iteration go by: nothing is summed, nothing revealed, the model stays as it is."""
    members = tuple(Member(member.id, member.index, 0.0) for member in roster.members)
    return replace(roster, exchange=VOID, members=members, wire="fp32", masks=b"", circle=())
