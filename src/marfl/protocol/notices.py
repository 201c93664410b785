"""What the others have told this peer before an iteration: who is there, trains, leaves, or is on its way.

Everything here is somebody's word, kept by the name of who gave it, and no more of it than fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

from marfl.net.base import PeerId
from marfl.protocol.instance import Instance
from marfl.protocol.messages import LEFT, Committed, Ready

K = TypeVar("K")
T = TypeVar("T")
ReadyPeers: TypeAlias = dict[PeerId, Ready]  # who announced itself for this iteration, from the same state as mine
MOST_HOPES = 8  # so often a newcomer's word is waited for before it takes part
MAX_NOTICES = 65_536
MOST_VOUCHERS = 4096  # electors whose word for newcomers is kept
MOST_VOUCHED = 256  # newcomers that one of them vouches for: its word pushes out nobody's but its own


class Notices:
    """The last word of everybody who told me that it is ready."""

    def __init__(self) -> None:
        self._last: ReadyPeers = {}  # the oldest first
        self._vouched: dict[PeerId, dict[PeerId, bytes]] = {}  # by elector: whom it gave which state, oldest first
        self._ahead: dict[PeerId, tuple[int, Committed]] = {}  # who said that it is ahead, when I was where
        self._expected: dict[PeerId, tuple[float, int]] = {}  # newcomers: since when, and for which time
        self._due: dict[PeerId, tuple[bytes, float]] = {}  # who said when it is done, the oldest first
        self._goodbyes: dict[PeerId, tuple[bytes, bytes]] = {}  # who left after which record, and its signature
        self._tardy: dict[PeerId, None] = {}  # who was waited for in vain, and has taken part in nothing since
        self.news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, peer: PeerId, said: Ready, now: float) -> None:
        remember(self._last, peer, said)
        self._due.pop(peer, None)
        if said.seconds:
            remember(self._due, peer, (said.base, now + said.seconds))
        self.news.set()

    def due(self, peer: PeerId, base: bytes) -> float | None:
        """When somebody that trains from this state will be done, if it said so."""
        said, when = self._due.get(peer, (b"", 0.0))
        return when if said == base else None

    def keep_goodbye(self, peer: PeerId, link: bytes, signature: bytes) -> None:
        remember(self._goodbyes, peer, (link, signature))

    def goodbyes(self, link: bytes) -> dict[PeerId, bytes]:
        """Who has signed that it leaves after this record."""
        return {peer: signature for peer, (after, signature) in self._goodbyes.items() if after == link}

    @property
    def left(self) -> set[PeerId]:
        """Whose last word was a goodbye."""
        return {peer for peer, said in self._last.items() if said.role == LEFT}

    def about(self, instance: Instance) -> ReadyPeers:
        """Who is ready to go on from the same state, and who has left by now."""
        last = self._last.items()
        return {peer: said for peer, said in last if said.base == instance.base or gone(said, instance)}

    def vouch(self, peer: PeerId, base: bytes, by: PeerId) -> None:
        """Somebody was given this state, says an elector: it means to take part."""
        known = self._vouched.get(by, {})
        remember(known, peer, base, MOST_VOUCHED)
        remember(self._vouched, by, known, MOST_VOUCHERS)
        self.news.set()

    def claim(self, peer: PeerId, said: Ready, mine: int) -> None:
        """Somebody is ready for a later iteration than the one after mine: it may be ahead, or say so only."""
        remember(self._ahead, peer, (mine, Committed(said.iteration - 1, said.base)))

    def claims(self, mine: int) -> dict[PeerId, Committed]:
        """Who said that it is ahead before I got as far as this iteration, and with which commit; told once."""
        due = {peer: head for peer, (heard, head) in self._ahead.items() if heard < mine}
        self._ahead = {peer: claim for peer, claim in self._ahead.items() if peer not in due}
        return due

    def waited_in_vain(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            remember(self._tardy, peer, None)

    def is_vouched_for(self, peer: PeerId, base: bytes) -> bool:
        return peer not in self._tardy and bool(self.vouchers(peer, base))

    def vouchers(self, peer: PeerId, base: bytes) -> set[PeerId]:
        """Who says that it gave somebody this state."""
        return {by for by, known in self._vouched.items() if known.get(peer) == base}

    def expect(self, peer: PeerId, now: float) -> None:
        """A newcomer is on its way: its next word is waited for shortly, but not again and again for nothing.

        Only of one that has spoken to me itself: at others' word there could be any number of them.
        """
        _, times = self._expected.get(peer, (now, 0))
        if times < MOST_HOPES and any(peer in known for known in self._vouched.values()):
            remember(self._expected, peer, (now, times + 1))
            self.news.set()

    def coming(self, base: bytes) -> dict[PeerId, float]:
        """Which newcomers have not yet said that they go on from this state, and since when they are expected."""
        spoke = {peer for peer, said in self._last.items() if said.base == base}
        return {peer: since for peer, (since, _) in self._expected.items() if peer not in spoke}

    def seen(self, iteration: int, peers: Iterable[PeerId]) -> None:
        """These took part in an iteration: who had left before it is back."""
        for peer in peers:
            self._tardy.pop(peer, None)
            self._expected.pop(peer, None)
            said = self._last.get(peer)
            if said is not None and said.role == LEFT and said.iteration < iteration:
                del self._last[peer]


def remember(last: dict[K, T], name: K, word: T, most: int = MAX_NOTICES) -> None:
    """Keep somebody's last word, and not more than so many people's: anybody may say something in an open run."""
    last.pop(name, None)
    last[name] = word
    if len(last) > most:
        del last[next(iter(last))]


def remember_ours(last: dict[K, T], name: K, word: T, is_ours: Callable[[K], bool], most: int) -> None:
    """The same, where what is ours goes last: of the rest anybody can make up as much as it likes."""
    last.pop(name, None)
    last[name] = word
    if len(last) > most:
        del last[next((each for each in last if not is_ours(each)), next(iter(last)))]


def gone(said: Ready, instance: Instance) -> bool:
    """Whether this was a goodbye; one for a later iteration comes from somebody who knows more than I do."""
    return said.role == LEFT and said.iteration <= instance.iteration
