"""One peer's part in one attempt: slices out, slices in, sums, and a proxy where a sender is gone.

An attempt is all or nothing. A missing slice may be had from another peer that holds the very same bits (a replica of
the partial sum, or whoever received the input); nothing is ever left out or made up.

A slice of up to `Roster.piece` bytes is one message. A longer one is cut, from its own start, in pieces of that size:
they leave in order, and the next one leaves while the receipt of the one before is still on its way.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from marfl.errors import BadPayload, DeadlineExceeded, MarflError, NetError, PeerGone, WireError
from marfl.net.base import Buffer, Net, Parcel, PeerId, Tag
from marfl.plan import schedule
from marfl.plan.grid import Plan
from marfl.plan.sight import may_see
from marfl.protocol.fixed_point import DTYPES, check_range
from marfl.protocol.messages import Ok, Resend
from marfl.protocol.pace import LifeSigns, Pace, called
from marfl.protocol.roster import Roster
from marfl.protocol.signed_slices import AuditBook
from marfl.protocol.slice_codec import PackedCodec, PlainCodec, SliceCodec, added
from marfl.protocol.tensors import (
    LARGEST_FLOAT,
    LARGEST_INPUT,
    check_header,
    claim_parcel,
    claimed_slice_from,
    slice_parcel,
    summable,
)
from marfl.state import new_vector
from marfl.wire.packing import IntegerWire


class Want(NamedTuple):
    """A slice of `rank`'s partial sum after `done` rounds; after the last one, of the mean."""

    done: int
    rank: int
    start: int
    stop: int


# Whether the iteration was decided without this peer's help: so says the leader, or the peer that is named.
Overtaken: TypeAlias = Callable[[PeerId | None], Awaitable[bool]]
DECIDED = "decided"  # the answer of a peer that has dropped its slices: it knows how the iteration ended
WINDOW = 2  # pieces of one slice under way
MODELS = PlainCodec()  # how models travel that groups show each other
BAD_DATA = "bad data"  # a slice that must not be used: counted in `Net.refused`


class Stuck(MarflError):
    """This attempt cannot give a result here: an input cannot be had from anybody."""


class TooSlow(Stuck):
    """The same, though whoever has the input lives and sends: the time of the phase was over first."""


class Piece(NamedTuple):
    """A part of a slice, as it travels in one message."""

    number: int
    values: int
    payload: Buffer


@dataclass
class Outgoing:
    """A slice on its way to one peer."""

    rank: int
    tag: Tag  # of its first piece
    pieces: deque[Piece]  # those that have not left
    untaken: int  # pieces that the peer has not taken yet
    begun: float
    proof: bytes  # what goes with the last piece where slices are signed


class Attempt:
    """The exchange's view of an attempt: ranks instead of names, slices of one vector instead of messages."""

    def __init__(
        self,
        net: Net,
        roster: Roster,
        plan: Plan,
        length: int,
        pace: Pace,
        overtaken: Overtaken | None = None,
        meetings: int = 0,
    ) -> None:
        self.net, self.roster, self.plan = net, roster, plan
        self.rank = roster.ranks[net.me]
        self._part = roster.part
        self.pace, self.phase_timeout = pace, pace.phase
        self.started = net.now() + meetings * pace.phase  # each meeting before the averaging takes a phase
        self.signs = LifeSigns(net, pace)
        self._beside = max(2, roster.group_size) if roster.exchange in schedule.EXCHANGES else plan.peers
        self.gone: set[int] = set()  # ranks that refused a connection
        self.unsent: set[int] = set()  # ranks that have not taken my slice yet
        self.overtaken = overtaken
        self.length = length
        self.codec: SliceCodec = PlainCodec(DTYPES.get(roster.wire, torch.float32))  # of few bits: see `pack`
        self.waiting: set[int] = set()  # ranks whose slice I lack right now
        self.overdue: set[int] = set()  # those of them that let me wait too long
        self._stalled: set[int] = set()  # ranks whose last piece did not come by itself
        self.heard: set[int] = set()  # ranks whose own value, or a part of it, has arrived
        self.tainted: dict[int, str] = {}  # ranks that sent what must not be used
        self.book: AuditBook | None = None  # where sums are audited: what I sign, and what I am sent
        self._proofs: dict[int, bytes] = {}  # by rank: the claim that came with its last piece
        self._held: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}  # (rounds done, rank): [(start, slice)]
        self._packed: dict[int, tuple[Tensor, list[Piece]]] = {}  # what is about to leave: one value may go to many
        self._dropped = False
        self._over = False  # somebody who knows said so
        self._step = "before its first slice"  # where it stands, in words
        self.written: asyncio.Future[None] | None = None  # what must be on the disk before a slice is whole elsewhere

    def deadline(self, phase: float) -> float:
        """The agreed end of a phase: an offset from the roster's receipt, so one late group does not push the next.

        Phases of the averaging count from 0; the meetings before it have negative numbers.
        """
        return self.started + (phase + 1) * self.phase_timeout

    def tag(self, channel: str, round: int, piece: int = 0) -> Tag:
        """A tag of this roster and no other: two views of who takes part never mix."""
        return Tag(channel, self.roster.iteration, self.roster.attempt, round, self._part, piece)

    def pack(self, wire: IntegerWire) -> None:
        """Have values travel as integers of a few bits."""
        self.codec = PackedCodec(wire, self.plan, len(self.roster.circle or self.roster.members))

    @property
    def dtype(self) -> torch.dtype:
        """Of the result in memory."""
        return self.codec.dtype

    def cut(self, count: int, done: int, codec: SliceCodec | None = None) -> list[tuple[int, int]]:
        """Where so many values are cut for their way: [start, stop) of each piece. Nothing has no pieces."""
        each = (codec or self.codec).each(self.roster.piece, done)
        return [(start, min(start + each, count)) for start in range(0, count, each)]

    def done(self, channel: str, round: int) -> int:
        """After how many rounds those sums are that travel in this one, inward ("reduce") or outward."""
        rounds = len(self.plan.rounds)
        if channel == "reduce":
            return round
        return rounds if self.roster.exchange == "grid" else min(round + 1, rounds)

    # --- slices out ---

    @asynccontextmanager
    async def sending(
        self, phase: int, channel: str, round: int, slices: Iterable[tuple[int, Tensor]]
    ) -> AsyncIterator[None]:
        """Send these (rank, slice) pairs while the body runs. A peer that is gone is remembered, not an error."""
        # Everybody starts with another peer (the ranks after its own first), so that no downlink is everybody's first.
        turn = sorted(slices, key=lambda item: (item[0] - self.rank) % self.plan.peers)
        tag, deadline = self.tag(channel, round), self.deadline(phase)
        self._step = f"in phase {phase} ({channel}, round {round})"
        self._packed.clear()
        leaving = [self._outgoing(rank, tag, value) for rank, value in turn if value.numel()]
        self._packed.clear()
        lanes = [self._send(out, deadline) for out in leaving for _ in range(min(WINDOW, out.untaken))]
        tasks = [asyncio.create_task(lane) for lane in lanes]
        try:
            yield
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()

    def _outgoing(self, rank: int, tag: Tag, value: Tensor) -> Outgoing:
        if id(value) not in self._packed:
            self._packed[id(value)] = value, list(self._pieces(tag, value))
        pieces = deque(self._packed[id(value)][1])
        proof = b""
        if self.book is not None:
            if self.book.closed:  # what it would sign now might be another slice than the one that it sends
                raise Stuck("the iteration is decided")
            proof = self.book.prove(tag.channel, tag.round, rank, value)
        return Outgoing(rank, tag, pieces, len(pieces), self.net.now(), proof)

    def _pieces(self, tag: Tag, value: Tensor) -> Iterator[Piece]:
        """A slice as it travels; models that groups show each other are always fp32."""
        codec = self.codec if tag.channel in ("reduce", "gather") else MODELS
        done = self.done(tag.channel, tag.round)
        for number, (start, stop) in enumerate(self.cut(value.numel(), done, codec)):
            yield Piece(number, stop - start, codec.encode(value[start:stop], done))

    async def _send(self, out: Outgoing, deadline: float) -> None:
        """Send pieces of a slice, one after the other, until none is left."""
        to = self.roster.members[out.rank].id
        self.unsent.add(out.rank)
        try:
            while out.pieces:
                piece = out.pieces.popleft()
                tag = out.tag._replace(piece=piece.number)
                given = piece.payload, piece.values, self.roster.digest, self.roster.layout
                last = not out.pieces
                if last and not await self.is_written():
                    return  # the attempt ends by what the disk said
                parcel = claim_parcel(*given, out.proof) if last and out.proof else slice_parcel(*given)
                await self.net.send(to, tag, parcel, kind=tag.kind, deadline=self._taken_by(parcel.size, deadline))
                if tag.channel == "gather":
                    self.net.sent.down += memoryview(piece.payload).nbytes
                out.untaken -= 1
        except PeerGone:
            self.gone.add(out.rank)
            out.pieces.clear()
            self.unsent.discard(out.rank)
        except NetError:
            out.pieces.clear()  # it stays in `unsent`: the receiver asks again, or the attempt fails and says why
        except asyncio.CancelledError:
            if self.net.now() - out.begun < self.phase_timeout / 2:
                self.unsent.discard(out.rank)  # the attempt ended first: this link is not to blame
            raise
        else:
            if not out.untaken:
                self.unsent.discard(out.rank)

    def _taken_by(self, size: int, deadline: float) -> float:
        """When a message must have been taken: where a phase is long, a peer that takes nothing is noticed before."""
        if not self.pace.extra:
            return deadline
        patience = self.pace.usual + self.pace.message(WINDOW * size, self._beside)
        return min(deadline, self.net.now() + patience)

    # --- what must be on the disk first ---

    @property
    def is_safe(self) -> bool:
        """Whether slices may be whole elsewhere: what must be on the disk is there."""
        written = self.written
        return written is None or (written.done() and not written.cancelled() and written.exception() is None)

    async def is_written(self) -> bool:
        """The same, once it is known."""
        if self.written is not None:
            await asyncio.wait({self.written})
        return self.is_safe

    async def once_written(self, result: Coroutine[Any, Any, Tensor]) -> Tensor:
        """A result that may be voted for. What the disk refuses is raised, whatever the exchange waits for."""
        if self.written is None:
            return await result
        work: asyncio.Future[Any] = asyncio.create_task(result)
        both: set[asyncio.Future[Any]] = {work, self.written}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if self.written.done():
                self.written.result()
            found: Tensor = await work
            return found
        finally:
            work.cancel()
            # The next attempt writes again: what this one would say after its end nobody needs to hear.
            self.written.add_done_callback(lambda done: done.cancelled() or done.exception())

    # --- what I hold, for those who miss it ---

    def hold(self, done: int, start: int, value: Tensor, rank: int | None = None) -> None:
        """Keep a slice of `rank`'s partial sum after `done` rounds (mine, unless said)."""
        if self._dropped:
            return
        if self.book is not None and rank is None:
            self.book.note(done, start, value)
        self._held.setdefault((done, self.rank if rank is None else rank), []).append((start, value))

    def find(self, want: Want) -> Tensor | None:
        """The wanted slice, if these very bits are here."""
        done, rank, start, stop = want
        same = rank == self.rank or self.rank in self.plan.replicas(rank, done)
        for owner in (rank, self.rank) if same else (rank,):
            for begin, value in self._held.get((done, owner), ()):
                if begin <= start and stop <= begin + value.numel():
                    return value[start - begin : stop - begin]
        return None

    def drop(self) -> None:
        """Keep nothing of anybody's any more: nobody needs it once the iteration is decided."""
        self._dropped = True
        self._held.clear()

    @cached_property
    def _steps(self) -> list[schedule.Step]:
        over_plan = self.roster.exchange in schedule.EXCHANGES
        if not over_plan:
            return []
        return list(schedule.steps(self.plan, self.roster.exchange, self.length, self.codec.unit))

    def shows(self, rank: int, want: Want) -> bool:
        """Whether the plan lets this member see a slice: see `marfl.plan.sight`. Rivals' exchanges repair nothing."""
        weights = [member.weight for member in self.roster.members]
        wanted = schedule.SliceTransfer(want.rank, rank, want.start, want.stop)
        return bool(self._steps) and may_see(self.plan, self.roster.exchange, self._steps, weights, want.done, wanted)

    def standstill(self) -> str:
        """Where this attempt stands, whom it waits for and for how long nothing of each came, and who took nothing."""
        now, name = self.net.now(), [member.id for member in self.roster.members]
        silent = {name[rank]: now - self.signs.heard(name[rank]) for rank in sorted(self.waiting)}
        waits = [f"{peer} ({_silence(seconds)})" for peer, seconds in silent.items()]
        untaken = [name[rank] for rank in sorted(self.unsent)]
        found = [self._step, f"waiting for {', '.join(waits)}" if waits else ""]
        found.append(f"not all was taken by {', '.join(untaken)}" if untaken else "")
        return ", ".join(filter(None, found))

    # --- slices in ---

    def pieces(self, want: Want) -> list[Want]:
        """A slice as it travels: one message each, cut from the slice's start."""
        cuts = self.cut(want.stop - want.start, want.done)
        return [want._replace(start=want.start + start, stop=want.start + stop) for start, stop in cuts]

    async def gather(
        self, phase: int, round: int, wants: Iterable[Want], room: Tensor, inputs: tuple[int, ...] = ()
    ) -> None:
        """Write slices of peers' partial sums into their places in the whole vector, piece by piece.

        Everybody's first pieces, then everybody's second: so no peer's slice waits here for another's.
        """
        parts = [item for want in wants for item in enumerate(self.pieces(want))]
        for number, part in sorted(parts, key=itemgetter(0)):
            room[part.start : part.stop] = await self._take(phase, self.tag("gather", round, number), part, inputs)

    async def _take(self, phase: int, tag: Tag, want: Want, inputs: tuple[int, ...] = ()) -> Tensor:
        """A piece of a peer's partial sum: from that peer, else from a replica, else summed again from `inputs`."""
        self.waiting.add(want.rank)
        self._step = f"in phase {phase} ({tag.channel}, round {tag.round})"
        since = self._since(phase)
        value = await self._direct(phase, tag, want, since)
        self._stalled.discard(want.rank)
        if value is None:
            self._stalled.add(want.rank)
            self.overdue.add(want.rank)
            value = await self._repair(phase, tag, want, inputs, since)
            self.overdue.discard(want.rank)
        if self.book is not None:
            self._note(self.book, tag, want, value)
        if want.done == 0:
            self.heard.add(want.rank)
        self.waiting.discard(want.rank)
        return value

    def _checked(self, parcel: Parcel, want: Want) -> Tensor:
        roster, count = self.roster, want.stop - want.start
        try:
            expected = {"digest": roster.digest, "layout": roster.layout}
            if self.book is None:
                check_header(parcel.header, **expected, count=count)
                value = self.codec.decode(parcel.payload, count, want.done)
            else:
                value, proof = claimed_slice_from(parcel, **expected, count=count, dtype=self.dtype)
                self._proofs[want.rank] = proof
            self._check(value, want.done)
            return value
        except WireError as error:
            raise self.caught(want.rank, error) from None

    def opened(self, parcel: Parcel, want: Want) -> Tensor:
        """The slice in a message of an exchange that repairs nothing, or `WireError`."""
        roster, count = self.roster, want.stop - want.start
        check_header(parcel.header, digest=roster.digest, layout=roster.layout, count=count)
        value = self.codec.decode(parcel.payload, count, want.done)
        if isinstance(self.codec, PackedCodec):
            self.codec.check(value, want.done)
            return value
        if roster.wire == "fixed":
            check_range(value, len(roster.members))
            return value
        return summable(value, LARGEST_FLOAT)

    def _note(self, book: AuditBook, tag: Tag, want: Want, value: Tensor) -> None:
        """Where slices are signed: check a whole one against its sender's claim, and keep it for an audit."""
        try:
            book.take(tag.channel, tag.round, want.rank, want.stop, value, self._proofs.pop(want.rank, None))
        except WireError as error:
            raise self.caught(want.rank, error) from None

    def caught(self, rank: int, error: WireError) -> Stuck:
        """Note who sent what must not be used; why this attempt gives no result."""
        self.tainted[rank] = str(error)
        self.net.refused.note(BAD_DATA, self.roster.members[rank].id)
        return Stuck(f"{self.roster.members[rank].id} sent {error}")

    async def _direct(self, phase: int, tag: Tag, want: Want, since: float) -> Tensor | None:
        """From the sender itself, for half a phase, less when it is known to be gone.

        As long as it may still meet others it is waited for, but asked now and then: what it sent may be lost.
        """
        value = await self._arrival(phase, tag, want)
        while value is None and self.net.now() < self.started and want.rank not in self.gone:
            if await self._was_overtaken() or self._is_silent(want.rank, since):
                break
            value = await self._resend(want.rank, want, self.started)
            if value is None:
                value = await self._arrival(phase, tag, want)
        return value

    async def _arrival(self, phase: int, tag: Tag, want: Want) -> Tensor | None:
        parcel = await self.arrival(phase, tag, want.rank)
        return None if parcel is None else self._checked(parcel, want)

    async def arrival(self, phase: int, tag: Tag, rank: int) -> Parcel | None:
        """A message as its sender sent it; None when it has not come after half a phase, or its sender is gone.

        While the pieces of a slice keep coming, the next one is given time until the phase ends; so is every message
        where a phase is long, as long as bytes of its sender come.
        """
        source, step = self.roster.members[rank].id, self.pace.usual / 8
        limit = min(self.deadline(phase - 0.5), self.net.now() + self.phase_timeout / 2)
        if tag.piece and rank not in self._stalled:  # its pieces keep coming: to ask for them would hold them up
            limit = max(limit, min(self.deadline(phase), self.net.now() + step))
        if self.pace.extra:
            limit = self.deadline(phase)
        since = self._since(phase)
        while True:
            try:
                parcel = await self.net.recv(source, tag, deadline=min(limit, self.net.now() + step))
            except NetError:
                if rank in self.gone or self.net.now() >= limit or self._is_silent(rank, since, 0.5):
                    return None
            else:
                self.signs.note(source)
                return parcel

    async def owed(self, phase: int, tag: Tag, rank: int) -> Parcel:
        """A message that nobody else has, until the phase ends; at first, while its sender shows that it lives."""
        source, limit, since = self.roster.members[rank].id, self.deadline(phase), self._since(phase)
        while self.pace.extra and phase == 0 and self.net.now() < limit - self.pace.usual:
            with suppress(DeadlineExceeded):
                return await self.net.recv(source, tag, deadline=self.net.now() + self.pace.usual / 8)
            if self._is_silent(rank, since):
                break
        return await self.net.recv(source, tag, deadline=self.net.now() if self._is_silent(rank, since) else limit)

    def _since(self, phase: int) -> float:
        """From when on a peer should show that it lives: at first all begin at once, later they wait for others."""
        now = self.net.now()
        return min(now, self.started) if phase == 0 else now

    def _is_silent(self, rank: int, since: float, share: float = 1.0) -> bool:
        return self.signs.silent(self.roster.members[rank].id, since, share)

    def _flows(self, rank: int, since: float) -> bool:
        """Whether a peer has shown only just now that it lives, where a phase is long: then it is not asked again."""
        return bool(self.pace.extra) and rank not in self.gone and not self._is_silent(rank, since, 0.5)

    async def _repair(self, phase: int, tag: Tag, want: Want, inputs: tuple[int, ...], since: float) -> Tensor:
        """Ask whoever may hold the same bits, again and again until the phase ends or all of them fall silent."""
        limit, source = self.deadline(phase), self.roster.members[want.rank].id
        sources = {want.rank, *self._holders(want), *inputs} - {self.rank}
        while self.net.now() < limit and not all(self._is_silent(rank, since) for rank in sources):
            if not self._flows(want.rank, since):
                value = await self._from_anybody(want, limit)
                if value is None and inputs:
                    value = await self._rebuild(want, inputs, limit)
                if value is not None:
                    return value
                if want.rank in self.gone and self.gone.issuperset(self._holders(want)):
                    break  # nobody is left who could have it
                if await self._was_overtaken():
                    break
            value = await self._pause(tag, want, min(limit, self.net.now() + self.pace.usual / 16))
            if value is not None:
                return value
        if self.net.now() >= limit and self.signs.heard(source) > limit - self.pace.usual / 2:
            raise TooSlow(source)
        raise Stuck(f"no slice of {source} from anybody")

    async def _pause(self, tag: Tag, want: Want, until: float) -> Tensor | None:
        """Wait before anybody is asked again; where a phase is long, what is still on its way may come meanwhile."""
        if self.pace.extra:
            with suppress(NetError):  # not yet, or my own daemon is gone: then time must pass
                return self._checked(await self.net.recv(self.roster.members[want.rank].id, tag, deadline=until), want)
        await self.net.sleep_until(until)
        return None

    async def _was_overtaken(self) -> bool:
        return self._over or (self.overtaken is not None and await self.overtaken(None))

    async def _from_anybody(self, want: Want, limit: float) -> Tensor | None:
        """The slice from its owner or from one who holds the same bits; None when nobody has it now."""
        value = self.find(want)
        others = [rank for rank in self._holders(want) if rank not in self.gone]
        for holder in (want.rank, *others):
            if value is None and not self._over and holder != self.rank:
                value = await self._resend(holder, want, limit)
        return value

    async def _rebuild(self, want: Want, inputs: tuple[int, ...], limit: float) -> Tensor | None:
        """A reduced part whose owner is gone, added up again from the inputs it was made of, where I may see them."""
        parts = [Want(want.done - 1, rank, want.start, want.stop) for rank in inputs]
        if not all(part.rank == self.rank or self.shows(self.rank, part) for part in parts):
            return None
        total: Tensor | None = None
        for part in parts:
            value = await self._from_anybody(part, limit)
            if value is None:
                return None
            total = value.to(self.codec.dtype_of(want.done)) if total is None else total + value
        return None if total is None else self.finished(want.done, total)

    def _holders(self, want: Want) -> tuple[int, ...]:
        """Who, besides its owner, may hold a partial sum."""
        if self.roster.exchange == "grid":
            return ()  # partial sums have no replicas there
        if want.done == 0:  # whoever shares its first group may have received its input
            seat = self.plan.seats(want.rank)[0]
            return tuple(peer for peer in seat.core if peer != want.rank) if seat else ()
        return self.plan.replicas(want.rank, want.done)

    async def _resend(self, holder: int, want: Want, limit: float) -> Tensor | None:
        request = Resend(self.roster.digest, *want).parcel()
        peer = self.roster.members[holder].id
        deadline = min(limit, self.net.now() + self.pace.usual / 4)
        try:
            if self.pace.extra:
                extra = self.pace.message(4 * (want.stop - want.start), self._beside)
                answer = await called(self.net, peer, "resend", request, deadline - self.net.now(), extra)
                self.signs.note(peer)
            else:
                answer = await self.net.call(peer, "resend", request, deadline=deadline)
            status = Ok.decode(answer.header).status
            if status == DECIDED and self.overtaken:  # the leader may be gone, but this peer knows
                self._over = self._over or await self.overtaken(self.roster.members[holder].id)
            if status != "held":
                return None
            value = self.codec.decode(answer.payload, want.stop - want.start, want.done)
            self._check(value, want.done)
            return value
        except PeerGone:
            self.gone.add(holder)
        except NetError:
            return None  # too slow this time: asked again until the phase ends
        except WireError as error:
            self.caught(holder, error)  # another one may have it
        return None

    async def sum_in_order(
        self, phase: int, round: int, sources: Iterable[int], own: Tensor, room: Tensor, start: int
    ) -> Tensor:
        """Add the sources' slices from `start` on, piece after piece, as soon as a piece of all of them is here.

        The sum is written into `room`. After the last round it is the sum over the roster, and what is left there is
        the mean: see `finished`.
        """
        order = tuple(sources)
        for number, part in enumerate(self.pieces(Want(round, self.rank, start, start + own.numel()))):
            here = slice(part.start - start, part.stop - start)
            await self._sum_piece(phase, self.tag("reduce", round, number), order, part, own[here], room[here])
        return room

    async def _sum_piece(
        self, phase: int, tag: Tag, sources: tuple[int, ...], part: Want, own: Tensor, room: Tensor
    ) -> None:
        """Add one piece of all sources in the order given: coordinate order, never order of arrival.

        Sequential adds only: a fused or stacked sum rounds differently, and a slice of it is not the sum of slices.
        """
        total: Tensor | None = None
        for rank in sources:
            if rank == self.rank:
                value = own
            else:
                value = await self._take(phase, tag, part._replace(rank=rank))
                if part.done == 0 and self.roster.exchange != "grid":
                    self.hold(0, part.start, value, rank)  # others may miss this input
            total = value if total is None else added(total, value, room)
        assert total is not None
        room.copy_(self.finished(part.done + 1, total))

    def finished(self, done: int, total: Tensor) -> Tensor:
        """A partial sum as it is held and sent: the last one is divided here, once, by whoever made it.

        Integers stay a sum: everybody divides them by itself, and gets the same bits.
        """
        return self.averaged(total) if done == len(self.plan.rounds) else total

    def averaged(self, total: Tensor) -> Tensor:
        """What becomes of the sum over the roster before it travels on: the mean, but for integers."""
        if isinstance(self.codec, PackedCodec) and not self.roster.masked:
            return self.codec.rounded(total)
        return total / self.roster.weight if self.roster.wire == "fp32" else total

    def empty(self) -> Tensor:
        """Room for the whole vector."""
        return new_vector(self.length, self.dtype)

    def _check(self, value: Tensor, done: int) -> None:
        """`BadPayload` for values that a partial sum after so many rounds cannot have."""
        if isinstance(self.codec, PackedCodec):
            if not self.roster.masked:
                self.codec.check(value, done)
        elif self.roster.wire == "fixed":
            check_range(value, len(self.roster.members))
        elif self.roster.wire == "fp32":
            inputs = 1 if done == 0 else self.plan.peers
            # After the last round it is a mean: the weights may add up to very little.
            summable(value, LARGEST_FLOAT if done == len(self.plan.rounds) else inputs * LARGEST_INPUT)


def _silence(seconds: float) -> str:
    return f"silent for {seconds:.1f} s" if math.isfinite(seconds) else "never heard of"


async def resend(attempt: Attempt | None, request: Parcel) -> Parcel:
    """Serve a slice to a peer that misses it, if this attempt is mine and the bits are here.

    Whether that peer may see it was asked before: see `access`.
    """
    want = wanted(attempt, Resend.decode(request.header))
    if attempt is None or want is None:
        return Ok("unknown").parcel()
    value = attempt.find(want) if attempt.is_safe else None
    return Ok("not yet").parcel() if value is None else Ok("held").parcel(attempt.codec.encode(value, want.done))


def wanted(attempt: Attempt | None, asked: Resend) -> Want | None:
    """Which slice of this attempt is asked for; None if it is another's, `BadPayload` if there is no such slice."""
    if attempt is None or asked.digest != attempt.roster.digest:
        return None
    want = Want(asked.done, asked.rank, asked.start, asked.stop)
    ranks, rounds = attempt.plan.peers, len(attempt.plan.rounds)
    if not (0 <= want.start < want.stop <= attempt.length and 0 <= want.rank < ranks and 0 <= want.done <= rounds):
        raise BadPayload("a resend request out of range")
    unit = attempt.codec.unit
    if want.start % unit or (want.stop % unit and want.stop != attempt.length):
        raise BadPayload("a resend request that cuts a block")
    return want
