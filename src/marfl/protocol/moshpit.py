"""Averaging as the paper coordinates it: groups by keys in the DHT, no roster, no votes, no commit.

MAR-FL (Mulitze et al. 2025, arXiv 2512.05234, "Group formation and synchronization"), on Moshpit All-Reduce (Ryabinin
et al. 2021, arXiv 2103.03239). In every round a peer (i) announces itself under its group key and collects who else is
there, (ii) cross-checks through the DHT that all of them list the same group, (iii) exchanges whole vectors with them,
and (iv) makes its next key from its place in the group.

What is promised is the paper's, and less than `participant` does: on a perfect grid where nobody fails all peers end on
the mean over everybody, with the bits of the simulator. Whoever fails leaves peers with different averages; nobody
decides which of them counts, nothing is sent again, and a group goes on without whom it does not hear.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from marfl.errors import NetError, WireError
from marfl.net.base import Net, PeerId, Tag
from marfl.plan.keys import Key, first_key, key_meetings, next_key
from marfl.protocol.exchange import sum_in_turn
from marfl.protocol.messages import Averaging, Present
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.speaker import Speaker
from marfl.protocol.tensors import tensor_from, tensor_parcel


@dataclass(frozen=True)
class Grouping:
    """What all peers of a run know of its groups: N, M, how many rounds, and d."""

    peers: int
    group_size: int
    rounds: int
    dimension: int


@dataclass
class Averaged:
    """What became of a peer's vector in one iteration."""

    value: Tensor
    groups: list[tuple[PeerId, ...]] = field(default_factory=list)  # whose vectors were averaged here, by round
    missing: dict[str, str] = field(default_factory=dict)  # peers that should have been, by id or index, and why not

    @property
    def present(self) -> tuple[PeerId, ...]:
        """Everybody met, in no order that means anything."""
        return tuple(sorted({peer for group in self.groups for peer in group}))


class Moshpit:
    """One peer that averages by group keys."""

    def __init__(self, net: Net, settings: Settings, index: int, layout: bytes, grouping: Grouping) -> None:
        self.net, self.settings, self.talk = net, settings, Speaker(net, settings)
        self.index, self.layout, self.grouping = index, layout, grouping
        self.exchanging = False
        self._meetings = key_meetings(grouping.peers, grouping.group_size, grouping.rounds, grouping.dimension)

    async def average(self, iteration: int, value: Tensor) -> Averaged:
        """My vector averaged with my groups', round after round. Never fails: whoever is missing is in the result."""
        await self.talk.announce("pace", Averaging(iteration).encoded)
        begun, patience = self.net.now(), self.settings
        mine, result = Present(self.index, self.layout), Averaged(value)
        key = first_key(self.index, self.grouping.group_size, self.grouping.dimension)
        for round in range(self.grouping.rounds):
            # agreed offsets from the start: one late group does not take the patience of the next
            earlier = round * (patience.ready_timeout + patience.call_timeout + patience.phase_timeout)
            group = await self._form(iteration, round, key, mine, begun + earlier + patience.ready_timeout)
            result.missing.update(self._absent(round, key, group))
            mine = await self._swap(iteration, round, key, group, result)
            key = next_key(key, list(group).index(self.net.me))
        result.value = result.value / mine.divisor
        self.net.forget(iteration)
        return result

    async def pace(self) -> int:
        """The newest iteration that another peer says it averages in; 0 when nobody says so."""
        found = [0]
        for peer, data in (await self.talk.look_up("pace")).items():
            if peer == self.net.me:
                continue
            try:
                found.append(Averaging.decode(data).iteration)
            except WireError:
                continue  # somebody's nonsense says nothing
        return max(found)

    # --- (i) and (ii): the group ---

    async def _form(self, iteration: int, round: int, key: Key, mine: Present, limit: float) -> dict[PeerId, Present]:
        """The group of a key, myself included, in the order of the indices: those who list the same peers as I do."""
        place = f"key/{iteration}/{round}/{'.'.join(map(str, key))}"
        found = await self._collect(place, mine, len(self._meetings[round].get(key, ())), limit)
        decided = replace(mine, view=_view(found))
        agree = await self._cross_check(place, decided, found, self.net.now() + self.settings.call_timeout)
        return {peer: said for peer, said in found.items() if peer in agree}

    async def _collect(self, place: str, mine: Present, expected: int, limit: float) -> dict[PeerId, Present]:
        """Who is under the key: everybody who would be, if nobody failed, or whoever is there when time is over."""
        found: dict[PeerId, Present] = {}
        while True:
            if self.net.me not in found:  # also when the DHT did not listen
                await self.talk.announce(place, mine.encoded)
            found = self._read(await self.talk.look_up(place))
            # once anybody has decided, waiting longer can only make my list another one
            over = self.net.now() >= limit or any(said.view for said in found.values())
            if len(found.keys() | {self.net.me}) >= expected or over:
                everybody = found | {self.net.me: mine}
                return dict(sorted(everybody.items(), key=lambda item: (item[1].index, item[0])))
            await self.net.sleep_until(min(limit, self.net.now() + self.settings.poll))

    async def _cross_check(
        self, place: str, mine: Present, group: Mapping[PeerId, Present], limit: float
    ) -> set[PeerId]:
        """Publish my list, and wait for the others'; those whose list is mine. A list is never changed."""
        said: dict[PeerId, Present] = {}
        while True:
            if said.get(self.net.me) != mine:
                await self.talk.announce(place, mine.encoded)
            said = self._read(await self.talk.look_up(place))
            views = {peer: said[peer].view if peer in said else None for peer in group} | {self.net.me: mine.view}
            if None not in views.values() or self.net.now() >= limit:
                return {peer for peer, view in views.items() if view == mine.view}
            await self.net.sleep_until(min(limit, self.net.now() + self.settings.poll))

    def _read(self, records: Mapping[PeerId, bytes]) -> dict[PeerId, Present]:
        """What peers of my model say; other bytes, and other models, are as good as nobody."""
        found = {}
        for peer, data in records.items():
            try:
                said = Present.decode(data)
            except WireError:
                continue
            if said.layout == self.layout and said.index < self.grouping.peers:
                found[peer] = said
        return found

    def _absent(self, round: int, key: Key, group: Mapping[PeerId, Present]) -> dict[str, str]:
        here = {said.index for said in group.values()}
        lost = [index for index in self._meetings[round].get(key, ()) if index not in here]
        return {str(index): f"was not in the group of its key in round {round + 1}" for index in lost}

    # --- (iii): the exchange ---

    async def _swap(
        self, iteration: int, round: int, key: Key, group: Mapping[PeerId, Present], result: Averaged
    ) -> Present:
        """Whole vectors to and from everybody in the group; afterwards I hold the sum of those that came."""
        tag, digest = Tag("reduce", iteration, 0, round), _digest(self.settings.run, iteration, round, key, group)
        limit = self.net.now() + self.settings.phase_timeout
        others = [peer for peer in group if peer != self.net.me]
        self.exchanging = True
        try:
            came = await asyncio.gather(
                *(self._receive(peer, tag, digest, result, limit) for peer in others),
                *(self._send(peer, tag, digest, result, limit) for peer in others),
            )
        finally:
            self.exchanging = False
        values = {peer: vector for peer, vector in zip(others, came, strict=False) if vector is not None}
        values[self.net.me] = result.value
        members = [peer for peer in group if peer in values]
        result.groups.append(tuple(members))
        result.value, divisor = combined([values[peer] for peer in members], [group[p].divisor for p in members])
        return Present(self.index, self.layout, divisor)

    async def _send(self, peer: PeerId, tag: Tag, digest: bytes, result: Averaged, limit: float) -> None:
        try:
            await self.net.send(peer, tag, tensor_parcel(result.value, digest, self.layout), deadline=limit)
        except NetError as error:
            result.missing.setdefault(peer, f"did not take a vector in round {tag.round + 1} ({error})")

    async def _receive(self, peer: PeerId, tag: Tag, digest: bytes, result: Averaged, limit: float) -> Tensor | None:
        """A member's vector; None when it does not come, or must not be used."""
        try:
            parcel = await self.net.recv(peer, tag, deadline=limit)
            return tensor_from(parcel, digest=digest, layout=self.layout, count=result.value.numel())
        except (NetError, WireError) as error:
            result.missing[peer] = f"gave no vector in round {tag.round + 1} ({error})"
            return None


def combined(values: Sequence[Tensor], divisors: Sequence[int]) -> tuple[Tensor, int]:
    """The mean of the means values/divisors, as a sum and its divisor.

    Where all divisors are the same, nothing is divided yet: so a perfect grid ends on the bits of the plan's sum.
    """
    if len(set(divisors)) > 1:
        values, divisors = [value / by for value, by in zip(values, divisors, strict=True)], [1]
    return sum_in_turn(values), divisors[0] * len(values)


def _view(group: Mapping[PeerId, Present]) -> bytes:
    return hashlib.sha256("\n".join(group).encode()).digest()


def _digest(run: str, iteration: int, round: int, key: Key, group: Mapping[PeerId, Present]) -> bytes:
    """What every data message carries, so that two groups never mix."""
    return hashlib.sha256(f"{run}\n{iteration}\n{round}\n{key}\n".encode() + _view(group)).digest()
