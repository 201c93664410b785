"""Every order of events of one decision in which some electors lie, on the very rules that the honest ones run.

It is the part of `marfl.testing.exhaustive` for `Bounds.liars`. Liars say what they like: they ack every attempt with
any last vote, true or invented, or with none; they vote for everything in every attempt; and they lead every attempt.
What an honest leader does is among what a lying one may do: it shows each elector any quorum of the acks that it was
given, honest ones as they were said, and seals what that elector then lets pass (`ballot.justified`). So two rosters
in one attempt, a roster and an adoption, other things shown to others, late and never: all of that is tried. Votes and
acks are signed: nobody speaks for an honest elector.

An attempt makes two values, which are two rosters. They have two hashes, or one (`twins`): a lying leader can seal two
rosters of which the same state comes. One more value is of no attempt: liars say that they voted for it.

Nothing is left out by this: the first attempt needs no acks. An ack to the last attempt is the end of what an elector
does in earlier ones, so it is given by whoever has done all that it will do, and what it votes for then binds it in
nothing else. Honest electors that are alike are not told apart, but for the first one where that is honest: it decides
ties under a rule that knows of no liars. Attempts are not sorted: that a liar keeps no promise is the point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product
from typing import NamedTuple, TypeAlias

from marfl.protocol import ballot
from marfl.protocol.ballot import Ballot, Tally, Value
from marfl.protocol.roster import Elector

NO = -1  # no promise
MADE_UP = 255  # a value that no roster makes
ROSTERS = 2  # that an attempt may seal


class Said(NamedTuple):
    """A vote, as an ack tells it."""

    attempt: int
    number: int  # of the value
    holds: bool
    twins: bool = False

    @property
    def hash(self) -> bytes:
        number = self.number // ROSTERS if self.twins and self.number != MADE_UP else self.number
        return bytes([number]) * 32

    @property
    def value(self) -> Value:
        return Value(bytes([self.number]) * 32, self.hash)


Told: TypeAlias = tuple[Said | None] | None  # what an ack tells of a last vote; None: there is no ack


class Honest(NamedTuple):
    """An elector that does not lie: what binds it, and what it has said in each attempt but the last."""

    promised: int
    vote: Said | None
    acked: tuple[Told, ...]
    cast: tuple[tuple[int, ...], ...]  # by attempt: the values that it voted for; more than one breaks the rules


@dataclass(frozen=True)
class Lies:
    """What is tried."""

    electors: int
    liars: int
    attempts: int
    twins: bool = False  # whether the two rosters of an attempt have one hash
    first: bool = False  # whether a liar is the first elector
    holding: bool = True  # whether it is told apart who holds the data of what it votes for

    @property
    def honest(self) -> tuple[int, ...]:
        """The places of those who do not lie."""
        start = self.liars if self.first else 0
        return tuple(range(start, start + self.electors - self.liars))

    @property
    def lying(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.electors)) - set(self.honest)))

    @property
    def values(self) -> tuple[int, ...]:
        return (*range(ROSTERS * self.attempts), MADE_UP)


State: TypeAlias = tuple[Honest, ...]
Before: TypeAlias = dict[State, tuple[State | None, str]]


class Tried(NamedTuple):
    """How a search ended."""

    states: int
    commits: int  # states with a commit
    trace: tuple[str, ...]  # what happened until two values were committed, or one that no roster makes


def try_all(lies: Lies) -> Tried:
    """Try everything; stop where two values are committed, or an honest elector votes for what no roster makes."""
    for rule in (_allowed, _allowed_by, _commits, _votes):
        rule.cache_clear()  # the rules may have changed: mutants do that
    nothing = Honest(NO, None, (None,) * (lies.attempts - 1), ((),) * (lies.attempts - 1))
    start = (nothing,) * len(lies.honest)
    before: Before = {start: (None, "nobody has voted")}
    waiting, commits = deque([start]), 0
    while waiting:
        state = waiting.popleft()
        done = _committed(lies, state)
        commits += bool(done)
        if wrong := _wrong(lies, state, done):
            return Tried(len(before), commits, (*_trace(before, state), wrong))
        for what, after in _events(lies, state):
            if after not in before:
                before[after] = (state, what)
                waiting.append(after)
    return Tried(len(before), commits, ())


def _wrong(lies: Lies, state: State, done: set[int]) -> str:
    """What must never be."""
    if len(done) > 1:
        return f"committed: {sorted(done)}"
    if any(MADE_UP in votes for person in state for votes in person.cast):
        return "an honest elector has voted for what no roster makes"
    if done:  # in the last attempt everybody votes who can, and nothing comes of it but a commit
        last = lies.attempts - 1
        for number in _allowed(lies, last, tuple((person.vote,) for person in state)) - done:
            voters = frozenset(at for at, one in zip(lies.honest, state, strict=True) if _can(lies, one, last, number))
            if _commits(lies, number, voters):
                return f"attempt {last}: its leader may seal {number}, and all vote for it; committed: {sorted(done)}"
    return ""


def _can(lies: Lies, person: Honest, attempt: int, number: int) -> bool:
    return bool(_votes(lies, person.promised, person.vote, attempt, number))


def _committed(lies: Lies, state: State) -> set[int]:
    """What could be certified of the attempts before the last one: honest votes in one attempt, and the liars'."""
    found = set()
    for attempt in range(lies.attempts - 1):
        for number in {number for person in state for number in person.cast[attempt]}:
            voters = (at for at, person in zip(lies.honest, state, strict=True) if number in person.cast[attempt])
            if _commits(lies, number, frozenset(voters)):
                found.add(number)
    return found


def _trace(before: Before, state: State) -> tuple[str, ...]:
    lines: list[str] = []
    here: State | None = state
    while here is not None:
        here, what = before[here]
        lines.append(what)
    return tuple(reversed(lines))


# --- what may happen ---


def _events(lies: Lies, state: State) -> Iterator[tuple[str, State]]:
    fixed = 0 if lies.first else 1
    for attempt in range(lies.attempts - 1):
        allowed = _allowed(lies, attempt, tuple(person.acked[attempt] for person in state))
        for at, person in enumerate(state):
            if at > fixed and person == state[at - 1]:
                continue  # what may happen to one of two twins may happen to the other
            for what, after in (*_acks(person, attempt), *_new_votes(lies, person, attempt, allowed)):
                rest = [*state[:at], after, *state[at + 1 :]]
                yield f"attempt {attempt}: elector {what}", (*rest[:fixed], *sorted(rest[fixed:], key=repr))


def _acks(person: Honest, attempt: int) -> Iterator[tuple[str, Honest]]:
    """An honest elector acks a proposal, and tells its last vote; nobody needs acks to the first attempt."""
    mine = Ballot(person.promised, person.vote)
    if attempt == 0 or person.acked[attempt] is not None or not ballot.may_promise(mine, attempt):
        return
    acked = (*person.acked[:attempt], (person.vote,), *person.acked[attempt + 1 :])
    after = person._replace(promised=ballot.promise(mine, attempt).promised, acked=acked)
    yield f"{_name(person)} acks", after


def _new_votes(lies: Lies, person: Honest, attempt: int, allowed: frozenset[int]) -> Iterator[tuple[str, Honest]]:
    """An honest elector votes for what it was shown to be justified, or for its last vote's value once more."""
    for number in allowed | ({person.vote.number} if person.vote else set()):
        if number in person.cast[attempt]:
            continue
        for promised, vote in _votes(lies, person.promised, person.vote, attempt, number):
            cast = tuple(sorted((*person.cast[attempt], number)))
            everything = (*person.cast[:attempt], cast, *person.cast[attempt + 1 :])
            after = person._replace(promised=promised, vote=vote, cast=everything)
            yield f"{_name(person)} votes for {number}{'' if vote.holds else ' without holding it'}", after


def _name(person: Honest) -> str:
    last = f"voted for {person.vote.number} in attempt {person.vote.attempt}" if person.vote else "no vote"
    return f"({last}, promised {person.promised})"


# --- the rules, asked once for each case ---


def _electors(lies: Lies) -> list[Elector]:
    return [Elector(str(at), at) for at in range(lies.electors)]


@cache
def _votes(lies: Lies, promised: int, last: Said | None, attempt: int, number: int) -> tuple[tuple[int, Said], ...]:
    """What binds an elector after it voted for a value, with its data or without; nothing where it does not."""
    mine, found = Ballot(promised, last), []
    for holds in (True, False) if lies.holding else (True,):
        vote = Said(attempt, number, holds, lies.twins)
        if ballot.may_vote(mine, attempt, vote.value):
            after = ballot.voted(mine, vote)
            assert after.accepted is not None
            found.append((after.promised, after.accepted))
    return tuple(found)


@cache
def _commits(lies: Lies, number: int, honest: frozenset[int]) -> bool:
    """Whether a value is decided by these honest electors and all liars. Its roster may have been of a liar alone."""
    vote = Said(0, number, True, lies.twins)
    electors = _electors(lies)
    teller = electors[lies.lying[0]]
    tally = Tally({teller.id: vote.hash}, {str(at): vote.hash for at in (*honest, *lies.lying)})
    return ballot.decided(electors, [teller], tally, again=False, liars=lies.liars) is not None


@cache
def _allowed(lies: Lies, attempt: int, told: tuple[Told, ...]) -> frozenset[int]:
    """The values that a lying leader can have honest electors vote for, with any of the acks that it was given."""
    if attempt == 0:
        return frozenset(range(ROSTERS))
    shown = product(*((None,) if one is None else (None, one) for one in told))
    fixed = 0 if lies.first else 1
    some = {(*acks[:fixed], *sorted(acks[fixed:], key=repr)) for acks in shown}
    return frozenset().union(*(_allowed_by(lies, attempt, acks) for acks in some))


@cache
def _allowed_by(lies: Lies, attempt: int, honest: Sequence[Told]) -> frozenset[int]:
    """The values that these honest acks justify, with whatever the liars say."""
    electors, found = _electors(lies), set()
    told = {str(at): one[0] for at, one in zip(lies.honest, honest, strict=True) if one is not None}
    for invented in combinations_with_replacement(_inventions(lies, attempt), len(lies.lying)):
        acks = told | {str(at): one[0] for at, one in zip(lies.lying, invented, strict=True) if one is not None}
        if ballot.justified(electors, acks, None, lies.liars):
            found |= set(range(ROSTERS * attempt, ROSTERS * (attempt + 1)))
        for number in lies.values:
            if number == MADE_UP or number < ROSTERS * attempt:
                adopt = Said(0, number, True, lies.twins).value
                found |= {number} if ballot.justified(electors, acks, adopt, lies.liars) else set()
    return frozenset(found)


def _inventions(lies: Lies, attempt: int) -> list[Told]:
    """What a liar may say in an ack: nothing, that it has not voted, or any vote, as old or as new as can be."""
    votes = product((0, attempt), lies.values, (True, False) if lies.holding else (True,))
    return [None, (None,), *((Said(when, number, holds, lies.twins),) for when, number, holds in votes)]
