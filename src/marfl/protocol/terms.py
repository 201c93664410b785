"""The terms of a run: every setting that all its peers must share, as plain values by name, and one digest of them all.

Peers show each other the digest in heads, notices, proposals and acks; whoever has another one is neither voted for nor
counted, and its head is not followed, so no commit ever mixes peers with other settings. Whoever meets a digest that it
does not know asks for the terms behind it, once, to name the first setting that differs. A library peer has fewer
settings than a daemon: between the two only those count that both have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from marfl.errors import NetError, WireError
from marfl.net.base import Buffer, Parcel, PeerId
from marfl.protocol.speaker import Speaker

CHANNEL = "terms"
OTHERS = "other settings"  # a vote or a proposal that is not heeded: in `Net.refused`
KIND = "kind"  # of peer: whose terms have which names
MAX_BYTES = 2**16
MOST = 256  # digests of others that are remembered
ASKED = 16  # at a time
SHOWN = 60  # characters of a value in a line
NAME = re.compile(r"[a-z0-9_.]{1,60}")  # of a setting: others' go into rosters and logs


class Difference(NamedTuple):
    """The first setting in which two peers differ."""

    name: str
    mine: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.mine)} here and {_shown(self.theirs)} there"


def canonical(terms: Mapping[str, Any]) -> bytes:
    """One text for one set of terms, whoever writes it."""
    return json.dumps(terms, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()


def parsed(data: Buffer) -> dict[str, Any]:
    """The terms in these bytes, or `WireError`."""
    if len(data) > MAX_BYTES:
        raise WireError(f"terms of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        found = json.loads(bytes(data))
        if not isinstance(found, dict) or canonical(found) != bytes(data) or not all(map(NAME.fullmatch, found)):
            raise WireError("not the terms of a run")
    except (ValueError, RecursionError):
        raise WireError("not the terms of a run") from None
    return found


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    """The first of my settings, or else of theirs, that is not the same on both sides; None where all are."""
    alike = mine.get(KIND) == theirs.get(KIND)
    for name in dict.fromkeys([*mine, *sorted(theirs)]):
        both = name in mine and name in theirs
        if (both or alike) and name != KIND and mine.get(name) != theirs.get(name):
            return Difference(name, mine.get(name), theirs.get(name))
    return None


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value):.{SHOWN}}"


class Terms:
    """One peer's own terms, and what it knows of others'."""

    def __init__(self, mine: Mapping[str, Any]) -> None:
        self.encoded = canonical(mine)
        self.mine = parsed(self.encoded)  # as others will see them: a tuple is a list
        self.mine = {name: self.mine[name] for name in mine}  # the first difference is the first in this order
        self.digest = digest_of(self.encoded)
        self._others: dict[bytes, Difference | None] = {}
        self._asked: set[bytes] = set()

    def agree(self, digest: bytes) -> bool:
        """Whether a peer with this digest has the same settings, as far as this one knows."""
        return digest == self.digest or self._others.get(digest, ...) is None

    def knows(self, digest: bytes) -> bool:
        return digest == self.digest or digest in self._others

    def learn(self, digest: bytes, data: Buffer) -> None:
        """Remember the terms behind a digest, or `WireError` when these are not they."""
        if digest_of(data) != digest:
            raise WireError("terms of another digest")
        self._others[digest] = difference(self.mine, parsed(data))
        if len(self._others) > MOST:  # anybody may say anything in an open run
            del self._others[next(iter(self._others))]

    def difference(self, digest: bytes) -> Difference | None:
        return self._others.get(digest)

    def why(self, digest: bytes) -> str:
        """What to say of a peer with this digest, in everybody's words: a roster is read by all."""
        found = self._others.get(digest)
        if found is None:
            return "has other settings"
        return f"has other settings: {found.name} is {_shown(found.theirs)}, not {_shown(found.mine)}"

    def met(self, talk: Speaker, peer: PeerId, digest: bytes) -> bool:
        """Whether this peer shows my settings; a digest that is new here is asked for, to be known next time."""
        if not self.knows(digest):
            talk.aside(self.ask(talk, peer, digest))
        return self.agree(digest)

    async def ask(self, talk: Speaker, peer: PeerId, digest: bytes) -> None:
        """Have the terms of a digest that is not known from whoever shows it; silence is no answer."""
        if self.knows(digest) or digest in self._asked or len(self._asked) >= ASKED:
            return
        self._asked.add(digest)
        try:
            answer = await talk.ask(peer, CHANNEL, Parcel(b""))
            if answer is not None:
                self.learn(digest, answer.header)
        except (NetError, WireError):
            return  # it has other settings, and does not say which
        finally:
            self._asked.discard(digest)

    async def answer(self, _: PeerId, __: Parcel) -> Parcel:
        """My terms, for whoever asks."""
        return Parcel(self.encoded)
