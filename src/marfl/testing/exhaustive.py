"""Every order of events of one decision, on the very rules that peers run: ``python -m marfl.testing.exhaustive``.

`marfl.protocol.ballot` says what an elector may promise and vote for, what a leader must adopt and what is decided.
Here electors and leaders do nothing but follow it, and a search tries all that may happen to them in up to three
attempts: whose ack a leader hears and whose is lost, who finishes, who endorses without the data, in any order and
however late. A crash is a peer to which nothing happens any more, a lost message one that nobody ever uses: both are
among the orders tried. What must never happen is that two hashes are committed.

What the search leaves out changes nothing: peers that are alike are not told apart; a commit counts as soon as a
leader could have seen it; the first attempt is sealed at the start, since an ack to it binds nobody; and in the last
one everybody votes who can, since no vote in it keeps anybody from another.

Large searches are *sorted*: all that happens in an attempt comes before anything of the next one. That leaves nothing
out either. Who has acked or voted in an attempt does nothing in an earlier one any more, so each peer's own events are
in that order anyway; and nothing in an attempt depends on a later one. Then an attempt that is over can be forgotten,
but for what was committed, everybody's last vote, and the rosters that votes are for; and an ack that its leader does
not use is as good as none. Whether electors keep to that order is asked of the rules first (`_check_sortable`).

Where electors lie (`Bounds.liars`) the search is another one: see `marfl.testing.liars`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import NamedTuple, TypeVar

from marfl.errors import BrokenPromise
from marfl.protocol import ballot
from marfl.protocol.ballot import Ballot, Tally, Value, Way, quorum
from marfl.protocol.roster import Elector
from marfl.testing.liars import Lies, try_all

T = TypeVar("T")

NO = -1  # no promise, no hash
UNHEARD = (NO,)  # where an ack might be: there is none, or it is not needed any more
WRONG = 10  # added to an attempt's number: another hash than the rest of its roster computes
OUT, MEMBER, FIRST = 0, 1, 2  # a peer's place in a roster; the first one decides where two halves tie


@dataclass(frozen=True)
class Bounds:
    """What is tried. Attempt `a` makes the hash `a`."""

    electors: int
    attempts: int = 3
    bring: int = 1  # electors that bring data; the others can only endorse
    tie: bool = True  # whether the elector that decides a tie brings data
    guests: int = 0  # members without a vote: they came after the last commit
    wrong: bool = False  # whether a member may compute a wrong hash
    fetch: bool = False  # whether an elector may fetch the data before it endorses a hash
    sorted: bool = False  # whether attempts come one after the other
    liars: int = 0  # electors that lie: then what brings data is all the same, since rosters may be of liars alone
    twins: bool = False  # whether two rosters of one attempt, which a liar sealed, have one hash
    full: bool = False  # whether everybody who votes holds the data, where some lie

    def __str__(self) -> str:
        if self.liars:
            first = ", also the one that decides ties" if self.tie else ""
            twins = ", two rosters of one hash" if self.twins else ""
            data = "" if self.full else ", votes without data"
            return f"{self.electors} electors, {self.liars} lie{first}{twins}{data}, {self.attempts} attempts"
        ties = f", {'also' if self.tie else 'not'} the one that decides ties" if self.electors % 2 == 0 else ""
        guests = f", {self.guests} newcomers" if self.guests else ""
        wrong = ", wrong hashes" if self.wrong else ""
        fetch = ", endorsers that fetch" if self.fetch else ""
        who = f"{self.electors} electors, {self.bring} with data{ties}{guests}{wrong}{fetch}"
        return f"{who}, {self.attempts} attempts{', sorted' if self.sorted else ''}"


class SaidVote(NamedTuple):
    """A peer's vote, as its ack tells it."""

    attempt: int
    number: int  # of the hash
    holds: bool

    @property
    def hash(self) -> bytes:
        return _hash(self.number)

    @property
    def value(self) -> Value:
        return Value(b"", self.hash)


class Person(NamedTuple):
    """One peer: what binds it, and what it has said in each attempt."""

    elector: bool
    brings: bool
    promised: int
    vote: SaidVote | tuple[()]  # its last
    places: tuple[int, ...]  # in the roster that each attempt sealed
    acked: tuple[SaidVote | tuple[()] | tuple[int], ...]  # what its acks told of its last vote, or UNHEARD
    finished: tuple[int, ...]
    endorsed: tuple[int, ...]


class Sealing(NamedTuple):
    """What the leader of an attempt did."""

    adopt: int  # the hash to vote for again; NO: a new roster
    roster: int  # the attempt whose roster it is


class Situation(NamedTuple):
    """All that decides what may happen next."""

    seals: tuple[Sealing | None, ...]
    numbers: tuple[int, ...]  # of the people, see `_number`; where there may be ties, who decides them comes first
    over: int = 0  # how many attempts are over, where they are sorted
    committed: tuple[int, ...] = ()  # hashes, in those attempts

    @property
    def people(self) -> tuple[Person, ...]:
        return tuple(_PEOPLE[number] for number in self.numbers)


class Event(NamedTuple):
    """What happened to somebody in an attempt."""

    attempt: int
    what: str
    hash: int = NO
    who: Person | None = None

    def __str__(self) -> str:
        who = f"{_name(self.who)} " if self.who else ""
        return f"attempt {self.attempt}: {who}{self.what}{'' if self.hash == NO else f' {self.hash}'}"


_PEOPLE: list[Person] = []  # a state names people by their number here: there are few of them, and millions of states
_NUMBERS: dict[Person, int] = {}


def _number(person: Person) -> int:
    number = _NUMBERS.get(person)
    if number is None:
        number = _NUMBERS[person] = len(_PEOPLE)
        _PEOPLE.append(person)
    return number


@dataclass(frozen=True)
class Found:
    """How a search ended."""

    bounds: Bounds
    states: int
    commits: int  # states with a commit: a search without any would show nothing
    trace: tuple[str, ...] = ()  # what happened until two hashes were committed; empty if that cannot happen


def forget() -> None:
    """Keep no answer of the ballot's rules: they may have changed, as mutants do that."""
    for rule in (_promised, _voted, _choice, _held, _decided):
        rule.cache_clear()


def search(bounds: Bounds) -> Found:
    """Try everything; stop at the first state in which two hashes are committed."""
    if bounds.liars:
        kinds = bounds.electors, bounds.liars, bounds.attempts
        return Found(bounds, *try_all(Lies(*kinds, twins=bounds.twins, first=bounds.tie, holding=not bounds.full)))
    forget()
    if bounds.sorted:
        _check_sortable(bounds.attempts)
    before: dict[Situation, tuple[Situation | None, Event]] = {state: (None, what) for what, state in _starts(bounds)}
    waiting, commits = deque(before), 0
    while waiting:
        state = waiting.popleft()
        done = _commits(state)
        commits += bool(done)
        if len(done) > 1:
            return Found(bounds, len(before), commits, _trace(before, state))
        for what, after in _events(bounds, state):
            if after not in before:
                before[after] = (state, what)
                waiting.append(after)
    return Found(bounds, len(before), commits)


def _check_sortable(attempts: int) -> None:
    """`BrokenPromise` unless a promise keeps from earlier attempts, and from nothing else."""
    for promised, last, number, attempt in product(range(NO, attempts), *[range(NO, attempts)] * 2, range(attempts)):
        if last > promised or (last == NO) != (number == NO):
            continue  # a vote is a promise, too
        vote: SaidVote | tuple[()] = SaidVote(last, number, True) if last != NO else ()
        new = SaidVote(attempt, attempt, True)
        after = _promised(promised, vote, attempt), _voted(promised, vote, new)
        if promised > attempt and after != (None, None):
            raise BrokenPromise(f"who has promised attempt {promised} still acts in {attempt}: they cannot be sorted")
        if promised <= attempt and after != (attempt, _voted(last, vote, new)):
            raise BrokenPromise(f"what happens in attempt {attempt} depends on a promise of {promised}: keep that")


def _starts(bounds: Bounds) -> Iterator[tuple[Event, Situation]]:
    """Whoever brings data may be in the first roster, or may not."""
    blank = _blank(bounds)
    bring = [at for at, person in enumerate(blank.people) if person.brings]
    for count in range(1, len(bring) + 1):
        for members in combinations(bring, count):
            for places in _places(bounds.electors, list(members)):
                yield Event(0, f"its leader seals a roster of {count}"), _sealed(blank, 0, Sealing(NO, 0), places)


def _blank(bounds: Bounds) -> Situation:
    many = bounds.attempts
    blank = ((OUT,) * many, (UNHEARD,) * many, (NO,) * many, (NO,) * many)
    data = [bounds.tie, *(True for _ in range(bounds.bring - bounds.tie))]
    data += [False] * (bounds.electors - len(data))
    people = [Person(True, brings, NO, (), *blank) for brings in data]
    people += [Person(False, True, NO, (), *blank) for _ in range(bounds.guests)]
    return _state((None,) * many, people)


def _state(
    seals: tuple[Sealing | None, ...], people: Sequence[Person], over: int = 0, committed: tuple[int, ...] = ()
) -> Situation:
    """The state with its people in a fixed order: those who are alike may change places, and nothing else changes."""
    fixed = 1 - sum(person.elector for person in people) % 2
    numbers = [_number(person) for person in people]
    return Situation(seals, (*numbers[:fixed], *sorted(numbers[fixed:])), over, committed)


def _trace(before: dict[Situation, tuple[Situation | None, Event]], state: Situation) -> tuple[str, ...]:
    lines: list[str] = []
    here: Situation | None = state
    while here is not None:
        here, what = before[here]
        lines.append(str(what))
    return (*reversed(lines), *(f"committed: {number}" for number in sorted(_commits(state))))


# --- what may happen ---


def _events(bounds: Bounds, state: Situation) -> Iterator[tuple[Event, Situation]]:
    for attempt, seal in enumerate(state.seals):
        if attempt < state.over or (bounds.sorted and attempt > state.over and state.seals[state.over] is None):
            continue
        if seal is None:
            yield from _acks(_forgotten(state, attempt) if bounds.sorted else state, attempt)
            yield from _seals(state, attempt)
        elif attempt < bounds.attempts - 1:
            yield from _finishes(bounds, state, attempt, seal)
            yield from _endorsements(bounds, state, attempt, seal)


def _forgotten(state: Situation, attempt: int) -> Situation:
    """The state once this is the attempt under way: of earlier ones only what still counts is left."""
    if attempt == state.over:
        return state
    nothing = (NO,) * len(state.seals)
    rosters = {person.vote.number % WRONG for person in state.people if isinstance(person.vote, SaidVote)}
    people = [
        person._replace(
            promised=person.vote.attempt if isinstance(person.vote, SaidVote) else NO,
            places=tuple(place if at in rosters else OUT for at, place in enumerate(person.places)),
            finished=nothing,
            endorsed=nothing,
        )
        for person in state.people
    ]
    return _state((None,) * len(state.seals), people, attempt, tuple(sorted(_commits(state))))


def _acks(state: Situation, attempt: int) -> Iterator[tuple[Event, Situation]]:
    """Somebody acks a proposal."""
    for at, person in _unlike(state):
        promised = _promised(person.promised, person.vote, attempt)
        if person.acked[attempt] is UNHEARD and promised is not None:
            acked = _put(person.acked, attempt, person.vote)
            after = person._replace(promised=promised, acked=acked)
            yield Event(attempt, "acks", who=person), _with(state, at, after)


def _seals(state: Situation, attempt: int) -> Iterator[tuple[Event, Situation]]:
    """The leader has heard a majority, and whoever else it has heard by then."""
    people = state.people
    heard = [at for at, person in enumerate(people) if person.acked[attempt] is not UNHEARD]
    electors = tuple(Elector(str(at), at) for at, person in enumerate(people) if person.elector)
    for count in range(len(electors) // 2, len(heard) + 1):
        for acks in combinations(heard, count):
            if not quorum(electors, {str(at) for at in acks}):
                continue
            told = tuple(person.acked[attempt] if at in acks else UNHEARD for at, person in enumerate(people))
            way, number = _choice(tuple(person.elector for person in people), told)
            if way is Way.ADOPT:
                again = Sealing(number, number % WRONG)
                event = Event(attempt, f"its leader, who heard {count}, adopts", number)
                yield event, _sealed(state, attempt, again, ())
            elif way is Way.FREE and (members := [at for at in acks if people[at].brings]):
                for places in _places(len(electors), members):
                    event = Event(attempt, f"its leader, who heard {count}, seals a roster of {len(members)}")
                    yield event, _sealed(state, attempt, Sealing(NO, attempt), places)


def _places(electors: int, members: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Who is where in a roster: who comes first in one of an even number is decided elsewhere, so anybody may."""
    odd = len(members) % 2
    leads = members[:1] if odd or (members[0] == 0 and electors % 2 == 0) else members
    for lead in leads:
        yield tuple((at, FIRST if at == lead and not odd else MEMBER) for at in members)


def _sealed(state: Situation, attempt: int, seal: Sealing, places: Iterable[tuple[int, int]]) -> Situation:
    """Later acks to this attempt are of no use any more."""
    where = dict(places)
    people = [
        person._replace(
            acked=_put(person.acked, attempt, UNHEARD), places=_put(person.places, attempt, where.get(at, OUT))
        )
        for at, person in enumerate(state.people)
    ]
    return _state(_put(state.seals, attempt, seal), people, state.over, state.committed)


def _finishes(bounds: Bounds, state: Situation, attempt: int, seal: Sealing) -> Iterator[tuple[Event, Situation]]:
    """A member computes the result, or somebody fetches what is adopted; either is a vote, and the leader hears it."""
    for at, person in _unlike(state):
        if person.finished[attempt] != NO or (seal.adopt == NO and person.places[attempt] == OUT):
            continue
        right = attempt if seal.adopt == NO else seal.adopt
        for number in (right, right + WRONG) if bounds.wrong and seal.adopt == NO else (right,):
            bound = _voted(person.promised, person.vote, SaidVote(attempt, number, True))
            if bound is not None:
                after = person._replace(
                    promised=bound[0], vote=bound[1], finished=_put(person.finished, attempt, number)
                )
                yield Event(attempt, "finishes with", number, person), _with(state, at, after)


def _endorsements(bounds: Bounds, state: Situation, attempt: int, seal: Sealing) -> Iterator[tuple[Event, Situation]]:
    """An elector votes for what a majority of the roster holds, with its data where it has fetched that first."""
    number = _held(*_tally(state, attempt, seal))
    for at, person in _unlike(state) if number is not None else ():
        assert number is not None
        if not person.elector or person.endorsed[attempt] != NO or person.finished[attempt] == number:
            continue
        held = bool(person.vote) and person.vote[1:] == (number, True)
        for holds in (held, True) if bounds.fetch and not held else (held,):
            bound = _voted(person.promised, person.vote, SaidVote(attempt, number, holds))
            if bound is None:
                continue
            after = person._replace(promised=bound[0], vote=bound[1], endorsed=_put(person.endorsed, attempt, number))
            what = "fetches and endorses" if holds and not held else "endorses"
            yield Event(attempt, what, number, person), _with(state, at, after)


def _commits(state: Situation) -> set[int]:
    """What the leaders of all attempts could have seen to be decided."""
    last = len(state.seals) - 1
    found = {_decided(*_tally(state, at, seal)) for at, seal in enumerate(state.seals[:last]) if seal is not None}
    if (seal := state.seals[last]) is not None:
        found.add(_decided(*_tally(_unanimous(state, last, seal), last, seal)))
    return {number for number in found if number is not None} | set(state.committed)


def _unanimous(state: Situation, attempt: int, seal: Sealing) -> Situation:
    """Everybody who can has voted in the last attempt."""
    number = attempt if seal.adopt == NO else seal.adopt
    return _state(state.seals, [p._replace(finished=_put(p.finished, attempt, number)) for p in state.people])


def _tally(state: Situation, attempt: int, seal: Sealing) -> tuple[tuple[tuple[bool, int, int, int], ...], bool]:
    rows = tuple((p.elector, p.places[seal.roster], p.finished[attempt], p.endorsed[attempt]) for p in state.people)
    return rows, attempt > seal.roster


def _unlike(state: Situation) -> Iterator[tuple[int, Person]]:
    """Peers that are not alike: what may happen to one of two twins may happen to the other."""
    people, before = state.people, -1
    fixed = 1 - sum(person.elector for person in people) % 2
    for at, number in enumerate(state.numbers):
        if at <= fixed or number != before:
            yield at, people[at]
        before = number


def _with(state: Situation, at: int, person: Person) -> Situation:
    return _state(state.seals, _put(state.people, at, person), state.over, state.committed)


def _put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _name(person: Person) -> str:
    kind = "an elector" if person.elector else "a newcomer"
    vote = person.vote
    last = f"voted for {vote[1]} in attempt {vote[0]}{'' if vote[2] else ' without holding it'}" if vote else "no vote"
    return f"{kind} {'with data' if person.brings else 'without data'} ({last})"


def _hash(number: int) -> bytes:
    return bytes([number]) * 32


# --- the rules, asked once for each case ---


@cache
def _promised(promised: int, vote: SaidVote | tuple[()], attempt: int) -> int | None:
    """What a peer has promised after it acked; None when it does not."""
    mine = Ballot(promised, vote or None)
    return ballot.promise(mine, attempt).promised if ballot.may_promise(mine, attempt) else None


@cache
def _voted(promised: int, last: SaidVote | tuple[()], vote: SaidVote) -> tuple[int, SaidVote] | None:
    """What binds a peer after it voted; None when it does not."""
    mine = Ballot(promised, last or None)
    if not ballot.may_vote(mine, vote.attempt, vote.value):
        return None
    after = ballot.voted(mine, vote)
    assert after.accepted is not None
    return after.promised, after.accepted


@cache
def _choice(electors: tuple[bool, ...], told: tuple[SaidVote | tuple[()] | tuple[int], ...]) -> tuple[Way, int]:
    """What a leader does with these acks."""
    people = [Elector(str(at), at) for at, elector in enumerate(electors) if elector]
    acks = {str(at): vote if isinstance(vote, SaidVote) else None for at, vote in enumerate(told) if vote != UNHEARD}
    choice = ballot.choose(people, acks)
    return choice.way, choice.hash[0] if choice.hash is not None else NO


@cache
def _held(rows: tuple[tuple[bool, int, int, int], ...], again: bool) -> int | None:
    digest = ballot.held(*_heard(rows), again=again)
    return digest[0] if digest is not None else None


@cache
def _decided(rows: tuple[tuple[bool, int, int, int], ...], again: bool) -> int | None:
    digest = ballot.decided(*_heard(rows), again=again)
    return digest[0] if digest is not None else None


def _heard(rows: tuple[tuple[bool, int, int, int], ...]) -> tuple[list[Elector], list[Elector], Tally]:
    """Electors, members (the first one first), and what they said."""
    electors = [Elector(str(at), at) for at, (elector, *_) in enumerate(rows) if elector]
    members = sorted((-place, at) for at, (_, place, *_) in enumerate(rows) if place != OUT)
    finished = {str(at): _hash(number) for at, (_, _, number, _) in enumerate(rows) if number != NO}
    endorsed = {str(at): _hash(number) for at, (*_, number) in enumerate(rows) if number != NO}
    return electors, [Elector(str(at), at) for _, at in members], Tally(finished, endorsed)


# --- the searches ---

QUICK = (
    *(Bounds(3, bring=bring, wrong=wrong) for bring in (2, 3) for wrong in (False, True)),
    Bounds(3, bring=1, guests=1),
    *(Bounds(4, bring=2, tie=tie) for tie in (True, False)),
    Bounds(3, bring=2, wrong=True, fetch=True),
    Bounds(4, bring=1, fetch=True),
    Bounds(4, liars=1),
    *(Bounds(4, liars=1, tie=tie, twins=True, full=True) for tie in (True, False)),
    Bounds(5, liars=1, full=True),
    Bounds(7, liars=2, attempts=2, full=True),
)
LONG = (
    Bounds(3, bring=2, attempts=4),
    Bounds(3, bring=2, guests=1),
    Bounds(4, bring=2, wrong=True),
    Bounds(4, bring=2, fetch=True),
    Bounds(4, bring=3),
    Bounds(4, bring=4),
    *(Bounds(5, bring=bring, sorted=True) for bring in (2, 3, 5)),
    Bounds(5, bring=2, wrong=True, sorted=True),
    Bounds(5, bring=2, fetch=True, sorted=True),
    Bounds(5, bring=2, guests=1, sorted=True),
    Bounds(5, bring=3, attempts=4, sorted=True),
    *(Bounds(6, bring=2, tie=tie, sorted=True) for tie in (True, False)),
    *(Bounds(7, bring=bring, sorted=True) for bring in (2, 3)),
    Bounds(4, liars=1, tie=False),
    Bounds(4, liars=1, attempts=4, full=True),
    Bounds(5, liars=1),
    Bounds(7, liars=2, attempts=2),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tries every order of events of one decision.")
    parser.add_argument("--long", action="store_true", help="also what takes minutes: up to 7 electors")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(argv)
    cases = QUICK + (LONG if options.long else ())
    broken = 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for found in pool.imap(search, cases):
            print(f"{found.bounds}: {found.states} states, {found.commits} of them with a commit", flush=True)
            broken += bool(found.trace)
            for line in found.trace:
                print(f"    {line}")
    print(f"{broken} of {len(cases)} searches found two commits of one iteration")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
