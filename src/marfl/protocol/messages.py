"""Every message of the protocol as a type, and the one codec that reads and writes them.

A message is a frozen dataclass. On the wire its header is a msgpack array ``[version, name, {field: value}]``, where
the name is the class's in lower case. `Message.decode` accepts exactly what the fields allow, list items and ranges
included, and turns everything else, whatever the bytes, into a `WireError`. Nothing is ever unpickled. Tensors travel
beside a header, as raw bytes: see `tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, Self, TypeAlias, get_args, get_type_hints

import msgpack

from marfl.errors import WireError
from marfl.net.base import Buffer, Parcel, PeerId

VERSION = 1
MAX_HEADER = 16 * 2**20  # a roster of 100,000 peers fits
MAX_ITEMS = 200_000  # in any one list of a header
MAX_INDEX = 2**53  # of a peer
MOST_NAMES = 100_000  # in a list of peers
LONGEST_REASON = 200  # characters of a complaint
MAX_PAST = 64
LARGEST_DIVISOR = 2**40  # no swarm has more peers; beyond it fp32 would round the divisor anyway

NAMES = {"Ruling": "verdict", "Averaging": "pace", "SignedData": "claim"}  # on the wire, where it differs

MEMBER, WITNESS, NOT_YET, LEFT, BEHIND = "member", "witness", "training", "left", "behind"
READY_ROLES = (MEMBER, WITNESS, NOT_YET, LEFT)  # brings an update, only votes, still trains, says goodbye
ACK_ROLES = (MEMBER, WITNESS, NOT_YET, BEHIND)  # the last one lacks the agreed state

Check: TypeAlias = Callable[[Any], bool]  # whether a value fits a field
Hash: TypeAlias = Annotated[bytes, "hash"]  # 32 bytes


class Complaint(NamedTuple):
    """What one peer holds against another."""

    peer: PeerId
    reason: str
    caught: bool  # it sent what must not be used; otherwise it is only waited for


class Committed(NamedTuple):
    """One committed iteration."""

    iteration: int
    hash: bytes


def _is_hash(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 32


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) and value == value and abs(value) < float("inf")


def _is_list(value: Any, item: Check, most: int = MAX_ITEMS) -> bool:
    return isinstance(value, list | tuple) and len(value) <= most and all(map(item, value))


def _is_complaint(row: Any) -> bool:
    kinds = [type(value) for value in row] if isinstance(row, list | tuple) else []
    return kinds == [str, str, bool] and len(row[1]) <= LONGEST_REASON


def _is_commit(row: Any) -> bool:
    return isinstance(row, list | tuple) and len(row) == 2 and _is_int(row[0]) and isinstance(row[1], bytes)


def _is_scalars(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values())
    return numbers and all(isinstance(name, str) for name in value)


Names: TypeAlias = tuple[PeerId, ...]
Numbers: TypeAlias = tuple[int, ...]

# What each type of a field lets through. None is let through where the type says so.
CHECKS: dict[Any, Check] = {
    int: _is_int,
    float: _is_float,
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    bytes: lambda value: isinstance(value, bytes),
    Hash: _is_hash,
    bytes | None: lambda value: value is None or isinstance(value, bytes),
    Hash | None: lambda value: value is None or _is_hash(value),
    Names: lambda value: _is_list(value, lambda name: isinstance(name, str), MOST_NAMES),
    Numbers: lambda value: _is_list(value, _is_int),
    tuple[Complaint, ...]: lambda value: _is_list(value, _is_complaint, MOST_NAMES),
    tuple[Committed, ...]: lambda value: _is_list(value, _is_commit, MAX_PAST),
    dict[str, float]: _is_scalars,
}
READ: dict[Any, Callable[[Any], Any]] = {  # what has another type in Python than in msgpack
    Names: tuple,
    Numbers: tuple,
    tuple[Complaint, ...]: lambda rows: tuple(Complaint(*row) for row in rows),
    tuple[Committed, ...]: lambda rows: tuple(Committed(*row) for row in rows),
    dict[str, float]: lambda found: {name: float(value) for name, value in found.items()},
}


@dataclass(frozen=True)
class Between:
    """A number between these two, both included."""

    least: float
    most: float

    def __call__(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most)


@dataclass(frozen=True)
class OneOf:
    """One of these words."""

    words: tuple[str, ...]

    def __call__(self, value: Any) -> bool:
        return value in self.words


class FieldRule(NamedTuple):
    """One field of a message: its type, and what else its value must be."""

    kind: Any
    fits: Check | None


_SLOTS: dict[type[Message], dict[str, FieldRule]] = {}  # of every class that was used


def _slots(message: type[Message]) -> dict[str, FieldRule]:
    if message not in _SLOTS:
        kinds = get_type_hints(message, include_extras=True)
        _SLOTS[message] = {each.name: _slot(kinds[each.name]) for each in fields(message)}
    return _SLOTS[message]


def _slot(kind: Any) -> FieldRule:
    rules = [rule for rule in getattr(kind, "__metadata__", ()) if isinstance(rule, Between | OneOf)]
    return FieldRule(get_args(kind)[0], rules[0]) if rules else FieldRule(kind, None)


@dataclass(frozen=True)
class Message:
    """What all messages have: a name on the wire, and a way there and back."""

    @classmethod
    def name(cls) -> str:
        """What the message is called on the wire."""
        return NAMES.get(cls.__name__, cls.__name__.lower())

    @property
    def encoded(self) -> bytes:
        """The header's bytes; a wrong field is a bug of ours and raises at once."""
        values = {name: getattr(self, name) for name in _slots(type(self))}
        self._check(values)
        data: bytes = msgpack.packb([VERSION, self.name(), values], use_bin_type=True)
        return data

    def parcel(self, payload: Buffer = b"") -> Parcel:
        """The message, ready to be sent, with these bytes beside it."""
        return Parcel(self.encoded, payload)

    @classmethod
    def decode(cls, data: Buffer) -> Self:
        """The message in these bytes, which must be one of this class; any other bytes raise `WireError`."""
        values = _fields(cls.name(), data)
        cls._check(values)
        slots = _slots(cls)
        return cls(**{name: READ.get(slots[name].kind, _same)(value) for name, value in values.items()})

    @classmethod
    def _check(cls, values: dict[str, Any]) -> None:
        slots = _slots(cls)
        if values.keys() != slots.keys():
            raise WireError(f"{cls.name()}: fields {sorted(map(str, values))!s:.200}, expected {sorted(slots)}")
        for name, (kind, fits) in slots.items():
            value = values[name]
            if not CHECKS[kind](value) or (fits is not None and not fits(value)):
                raise WireError(f"{cls.name()}.{name}: {value!r:.60} does not fit")


def _same(value: Any) -> Any:
    return value


def _fields(name: str, data: Buffer) -> dict[str, Any]:
    """The fields of a header that must have this name, unchecked."""
    if len(data) > MAX_HEADER:
        raise WireError(f"a header of {len(data)} bytes; at most {MAX_HEADER} are read")
    try:
        message = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_str_len=MAX_HEADER, max_bin_len=MAX_HEADER,
            max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0,
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack header: {type(error).__name__}") from None
    if not isinstance(message, list) or len(message) != 3:
        raise WireError("a header must be [version, name, fields]")
    version, got, found = message
    if version != VERSION or isinstance(version, bool):
        raise WireError(f"wire version {version!r:.20}; this peer speaks {VERSION}")
    if got != name:
        raise WireError(f"a {got!r:.30} message where {name!r} was expected")
    if not isinstance(found, dict):
        raise WireError("a header's fields must be a map")
    return found


# --- before an iteration ---


@dataclass(frozen=True)
class Ready(Message):
    """A peer is there for the next iteration, still trains for it, or says goodbye. Told to a leader and to the DHT."""

    iteration: int
    base: Hash  # the state that it starts from
    index: int
    weight: float
    layout: Hash
    role: Annotated[str, OneOf(READY_ROLES)]
    incarnation: int  # which process of its key speaks
    terms: Hash  # its settings
    seconds: Annotated[float, Between(0, math.inf)] = 0.0  # that it still trains for, where it says so


@dataclass(frozen=True)
class Noted(Message):
    """The answer to a `Ready`: whether it came in time, and for how many seconds the others had waited for it."""

    status: str
    waited: float


@dataclass(frozen=True)
class Head(Message):
    """Which commit a peer knows of, for whoever is behind or joins. In the DHT."""

    iteration: int
    hash: Hash
    lineage: Hash
    terms: Hash


@dataclass(frozen=True)
class Vouch(Message):
    """A peer was given this state: it means to take part."""

    peer: PeerId
    base: Hash


@dataclass(frozen=True)
class Overtaken(Message):
    """There is a head that wins over yours."""

    hash: Hash
    iteration: int
    peer: PeerId = ""  # who can prove it, where that is not the sender


# --- the decision ---


@dataclass(frozen=True)
class Propose(Message):
    """A leader asks for a vote (Paxos: prepare, phase 1a)."""

    iteration: int
    attempt: int  # the ballot number
    seen: int  # the highest attempt the leader knew of: it takes that one for failed
    lineage: Hash
    base: Hash
    founding: bool
    incarnation: int  # whoever leads votes for its own roster
    terms: Hash
    settled: bool = False  # the leader knows that the record before is certified


@dataclass(frozen=True)
class Ack(Message):
    """The answer to a proposal (Paxos: promise, phase 1b), with all that a leader must know to seal a roster."""

    status: str  # "ack", or why not: "refused", "left", "barred", "stale", "behind", "unknown", "other settings"
    attempt: int  # the highest one promised
    record: bytes | None  # a newer commit, for a leader that is behind
    join: bool  # brings a contribution
    role: Annotated[str, OneOf(ACK_ROLES)]
    index: Annotated[int, Between(0, MAX_INDEX)]
    layout: Hash
    wire: str  # how values travel
    incarnation: int
    terms: Hash
    weight: Annotated[float, Between(0, math.inf)]
    fewest: Annotated[int, Between(0, MAX_INDEX)]  # contributions of a sum that it would be in
    blamed: tuple[Complaint, ...]
    waits: bool  # for others' data
    unsent: Names  # who has not taken its data yet
    accepted: bytes | None  # the roster whose result this peer voted for, if any
    accepted_hash: Hash | None
    accepted_attempt: int
    holds: bool  # has that result's data, not only its hash
    spent: bool  # its masked value may be in a sum that this lineage knows nothing of
    epoch: Hash | None  # whose masks its value is under
    heard: Names  # whose values it has received in the last attempt
    pledged: bytes | None  # the roster that it has promised to unmask, and no other
    pledged_attempt: int
    sum_here: bool  # holds its masked sum
    hopeless: bool  # too few can unmask it
    signature: bytes = b""  # of the promise, where later electors may have to see it (see `statements.promise`)
    certificate: bytes = b""  # of the newer commit, where this peer has it
    age: Annotated[int, Between(0, MAX_INDEX)] = 0  # iterations since the state that its update was learned from
    slow: bool = False  # it keeps the others waiting, and knows it: nobody does while it trains
    sealed: bytes = b""  # the last seal of this iteration that it was given, with what its leader went by


@dataclass(frozen=True)
class Seal(Message):
    """A leader publishes a roster (Paxos: accept, phase 2a), or has an earlier result adopted."""

    roster: bytes
    attempt: int
    adopt: Hash | None
    holders: Names
    promises: bytes = b""  # the signed acks that the leader goes by, from the second attempt on
    votes: bytes = b""  # signed votes of members, where others are to hold what came of this very attempt
    signature: bytes = b""  # of the leader, where it may lie: see `statements.SignedSeal`


@dataclass(frozen=True)
class Finish(Message):
    """A member tells its leader the hash that it voted for (Paxos: accepted, phase 2b); None: it has no result."""

    iteration: int
    attempt: int
    hash: Hash | None
    final: bool  # False: it only asks for news
    signature: bytes = b""  # of the vote


@dataclass(frozen=True)
class Ruling(Message):
    """The answer to `Finish`: "commit" with the record, "pending", "retry" or "unknown". On the wire: verdict."""

    status: str
    record: bytes | None
    holders: Names
    certificate: bytes = b""  # for whoever has not voted for this very result


@dataclass(frozen=True)
class Endorse(Message):
    """A leader asks an elector without the data to vote for a hash that a majority of the roster holds."""

    iteration: int
    attempt: int
    roster: bytes
    hash: Hash
    votes: bytes = b""  # signed votes of members of the roster: some of them does not lie
    promises: bytes = b""  # as in `Seal`
    signature: bytes = b""  # as in `Seal`


@dataclass(frozen=True)
class Decided(Message):
    """What was decided (Paxos: the learners' message)."""

    iteration: int
    record: bytes
    holders: Names
    certificate: bytes = b""


@dataclass(frozen=True)
class Ok(Message):
    """An answer that is a status and nothing else."""

    status: str


# --- states and slices ---


@dataclass(frozen=True)
class Sync(Message):
    """Asks for the newest agreed state, or for one of this hash."""

    have: Hash
    want: Hash | None
    links: tuple[Committed, ...] = ()  # records (their links) that the asker is sure of: a proof begins with one
    light: bool = False  # the record and its proof are enough


@dataclass(frozen=True)
class State(Message):
    """A state, or the mean update that leads to it; its vectors follow the header."""

    mode: str  # "full", "delta", "light", or "none" where there is nothing to give
    names: tuple[str, ...]
    lengths: Numbers
    record: bytes | None
    past: tuple[Committed, ...]  # the last commits: whoever is given the state sees what it gives up
    version: int
    scalars: dict[str, float]
    proof: bytes = b""  # that the record is certified (see `commits`)
    settled: bool = False  # the donor knows that it is
    vote: bytes = b""  # the donor's own signed vote for it


@dataclass(frozen=True)
class Data(Message):
    """One slice of a vector, which follows the header."""

    digest: Hash  # of the roster
    layout: Hash
    count: int


@dataclass(frozen=True)
class SignedData(Message):
    """The last piece of a slice that its sender signs: `Data`, and what travels of the claim. On the wire: claim."""

    digest: Hash
    layout: Hash
    count: int
    proof: bytes


@dataclass(frozen=True)
class Resend(Message):
    """Asks for a slice of `rank`'s partial sum after `done` rounds."""

    digest: Hash
    done: int
    rank: int
    start: int
    stop: int


# --- audits ---


@dataclass(frozen=True)
class Audit(Message):
    """An auditor asks an owner for the inputs of a part (see `signed_slices.Part`)."""

    digest: Hash  # of the committed roster
    rank: int
    round: int
    passing: bool


@dataclass(frozen=True)
class Audited(Message):
    """The answer: which inputs the owner used, signed; their values follow. All empty unless the status is "shown"."""

    status: str
    hashes: bytes
    proofs: bytes
    signature: bytes


@dataclass(frozen=True)
class Recall(Message):
    """Asks for what `rank` claimed of its partial sum after `done` rounds."""

    digest: Hash
    rank: int
    done: int


@dataclass(frozen=True)
class Recalled(Message):
    """The answer: the claim as it was signed, and the hashes of its cells; both empty where there is none."""

    status: str
    claim: bytes
    cells: bytes


@dataclass(frozen=True)
class Fraud(Message):
    """Somebody is proven to have lied: the proof follows."""

    culprit: PeerId


# --- masked sums ---


@dataclass(frozen=True)
class Share(Message):
    """The sealed shares that follow are for this roster; or asks for them."""

    digest: Hash


@dataclass(frozen=True)
class Masked(Message):
    """Asks for the masked sum of a roster."""

    roster: Hash


@dataclass(frozen=True)
class Held(Message):
    """A member holds the masked sum; the answer brings the secrets that take the masks off."""

    iteration: int
    attempt: int
    sum: Hash


@dataclass(frozen=True)
class Pledge(Message):
    """A leader asks an elector to promise that no other roster of this iteration is unmasked with its help."""

    iteration: int
    attempt: int
    roster: bytes
    sealed: bytes = b""  # that the leader has sealed this roster, where it may lie (see `statements.SignedSeal`)
    votes: Numbers = ()  # places of electors in the sum that have pledged themselves; the payload has their signatures


@dataclass(frozen=True)
class Reveal(Message):
    """A leader that has a majority's pledges asks for a seed, and for shares of others' secrets."""

    iteration: int
    attempt: int
    roster: Hash
    votes: Numbers  # places of the electors that have pledged themselves
    seeds_of: Numbers  # ranks whose seeds are missing
    keys_of: Numbers  # ranks that are not in the sum


@dataclass(frozen=True)
class Revealed(Message):
    """The answer to `Reveal`: the seed follows the header, then the shares of these owners' secrets."""

    status: str
    owners: Numbers


# --- where the paper's peers coordinate themselves ---


@dataclass(frozen=True)
class Averaging(Message):
    """Which iteration a peer averages in. On the wire: pace."""

    iteration: int


@dataclass(frozen=True)
class Present(Message):
    """What a peer says of itself under its group key."""

    index: Annotated[int, Between(0, MAX_INDEX)]
    layout: Hash
    divisor: Annotated[int, Between(1, LARGEST_DIVISOR)] = 1  # its value is the sum of so many models
    view: Hash | None = None  # a digest of its group, once it has decided who that is


def status_of(answer: Parcel) -> str:
    """The status in an answer that has nothing else; "" for an answer that is none."""
    try:
        return Ok.decode(answer.header).status
    except WireError:
        return ""
