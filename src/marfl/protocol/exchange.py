"""The three exchanges over one plan: what each peer sends, receives and adds. All end on the same bits.

`full` is the paper's (whole vectors to the whole group), `chunked` reduce-scatters and all-gathers inside each group,
`grid` reduce-scatters down all the rounds and gathers back up: 2(n-1) vectors in all, FedAvg's price without a server.
`marfl.plan.schedule` lists the same slices; a test holds the two together to the byte. `replay_mean` computes in one
place, without a network, what all of them must give: the simulator's default engine aggregates with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from marfl.errors import BadPayload, InputError
from marfl.net.base import PeerId
from marfl.plan.grid import Plan, Seat, plan, split
from marfl.protocol.attempt import Attempt, Stuck, Want
from marfl.protocol.fixed_point import DTYPES, decode_mean, encode, fits, sum_of_integers
from marfl.protocol.meetings import Prepare
from marfl.protocol.roster import Roster
from marfl.protocol.slice_codec import PackedCodec
from marfl.state import new_vector
from marfl.wire.packing import NoiseRoom, is_small

# Δ, its weight, and the roster that it is for: integers of w·Δ, or None for what they cannot carry.
Quantise: TypeAlias = Callable[[Tensor, float, Roster], Tensor | None]
Exchange: TypeAlias = Callable[[Attempt, Tensor], Awaitable[Tensor]]  # my w·Δ in, the mean over the roster out


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to an iteration: its update, and how much it counts (0: it only helps to aggregate)."""

    base: bytes  # hash of the agreed state that the update starts from
    delta: Tensor  # 1-D fp32, or integers where they travel
    weight: float = 1.0
    fewest: int = 0  # it is only ever in a sum of at least so many contributions (see `ballot.willing`)
    prepare: Prepare | None = None  # makes the update to bring once the roster is sealed, from what its groups show
    quantise: Quantise | None = None  # makes integers for a roster, where few bits travel
    write_down: Callable[[], None] | None = None  # what is left of them: no slice is whole elsewhere before it returns
    age: int = 0  # iterations that it is late by: it was learned from a state before the base


def weighted(mine: Contribution) -> Tensor:
    """w·Δ, rounded once, by its owner. A weight of zero brings exact zeros, whatever Δ is."""
    if mine.weight == 1.0:
        return mine.delta
    return mine.delta * mine.weight if mine.weight else mine.delta.new_zeros(mine.delta.shape)


async def mean(attempt: Attempt, value: Tensor, room: NoiseRoom | None = None) -> Tensor:
    """The weighted mean over exactly the attempt's roster, had by its exchange; of small integers, their sum."""
    roster = attempt.roster
    if roster.wire != "fp32" and not is_small(roster.wire):
        if not fits(value):
            raise Stuck("an update that wire = fixed cannot carry")
        total = await combined(attempt, encode(value).to(attempt.dtype))  # which wraps
        return decoded(roster, total, room=room)
    return await combined(attempt, value)


async def combined(attempt: Attempt, value: Tensor) -> Tensor:
    """What the exchange gives: the mean, or the sum where integers travel."""
    if attempt.plan.peers == 1:
        return attempt.finished(len(attempt.plan.rounds), value)
    return await EXCHANGES[attempt.roster.exchange](attempt, value)


def decoded(
    roster: Roster, total: Tensor, codec: PackedCodec | None = None, room: NoiseRoom | None = None
) -> Tensor:
    """The mean from a sum of integers; a sum out of range is no result, and its culprit cannot be named.

    Of small integers, which have a codec, the sum as everybody gets it.
    """
    try:
        if codec is not None:
            codec.check(total, len(codec.plan.rounds))
            return codec.rounded(total.to(torch.int32))
        return decode_mean(total, len(roster.members), roster.weight, room)
    except BadPayload as error:
        raise Stuck(f"the exchange gave {error}") from None


async def full(attempt: Attempt, value: Tensor) -> Tensor:
    """Whole vectors to every core member of the group, round after round."""
    rank = attempt.rank
    attempt.hold(0, 0, value)
    seats = attempt.plan.seats(rank)
    for round, seat in enumerate(seats):
        if seat is None:
            break
        async with attempt.sending(round, "reduce", round, [(p, value) for p in seat.core if p != rank]):
            if rank == seat.spare:
                continue
            value = await attempt.sum_in_order(round, round, _sources(seat), value, attempt.empty(), 0)
        attempt.hold(round + 1, 0, value)
    return await _hand_to_spare(attempt, len(seats), value)


async def chunked(attempt: Attempt, value: Tensor) -> Tensor:
    """In every group: each core member sums one part for all, and hands it back."""
    rank, length = attempt.rank, attempt.length
    attempt.hold(0, 0, value)
    seats = attempt.plan.seats(rank)
    for round, seat in enumerate(seats):
        if seat is None:
            break
        parts = split(length, len(seat.core), attempt.codec.unit)
        slices = [(p, value[a:b]) for p, (a, b) in zip(seat.core, parts, strict=True) if p != rank]
        async with attempt.sending(2 * round, "reduce", round, slices):
            if rank == seat.spare:
                continue
            start, stop = parts[seat.core.index(rank)]
            own, room = value[start:stop], new_vector(stop - start, attempt.codec.dtype_of(round + 1))
            mine = await attempt.sum_in_order(2 * round, round, _sources(seat), own, room, start)
        attempt.hold(round + 1, start, mine)
        value = await _gather_group(attempt, round, seat, parts, mine)
        attempt.hold(round + 1, 0, value)
    return await _hand_to_spare(attempt, 2 * len(seats), value)


async def _gather_group(
    attempt: Attempt, round: int, seat: Seat, parts: list[tuple[int, int]], mine: Tensor
) -> Tensor:
    """Everybody's reduced part to the whole group; a part whose owner is gone is summed again from its inputs."""
    phase = 2 * round + 1
    value = attempt.empty()
    async with attempt.sending(phase, "gather", round, [(p, mine) for p in seat.core if p != attempt.rank]):
        start, stop = parts[seat.core.index(attempt.rank)]
        value[start:stop] = mine
        await attempt.gather(phase, round, _of_others(attempt, seat, parts, round + 1), value, _sources(seat))
    return value


def _of_others(attempt: Attempt, seat: Seat, parts: list[tuple[int, int]], done: int) -> list[Want]:
    """The parts that the others of a group own."""
    return [Want(done, p, *part) for p, part in zip(seat.core, parts, strict=True) if p != attempt.rank]


async def grid(attempt: Attempt, value: Tensor) -> Tensor:
    """Reduce-scatter down the rounds, each splitting what is left; then gather back the same way."""
    rank = attempt.rank
    attempt.hold(0, 0, value)
    seats = [seat for seat in attempt.plan.seats(rank) if seat is not None]
    if seats[0].spare == rank:
        return await _grid_spare(attempt, seats[0], value)
    start, stop = 0, attempt.length
    result = attempt.empty()
    steps: list[tuple[Seat, list[tuple[int, int]]]] = []
    for round, seat in enumerate(seats):
        parts = [(start + a, start + b) for a, b in split(stop - start, len(seat.core), attempt.codec.unit)]
        base = start
        slices = [(p, value[a - base : b - base]) for p, (a, b) in zip(seat.core, parts, strict=True) if p != rank]
        start, stop = parts[seat.core.index(rank)]
        async with attempt.sending(round, "reduce", round, slices):
            own = value[start - base : stop - base]
            # the last sum is a part of the mean, and made where it belongs
            last, dtype = round + 1 == len(seats), attempt.codec.dtype_of(round + 1)
            room = result[start:stop] if last else new_vector(stop - start, dtype)
            value = await attempt.sum_in_order(round, round, _sources(seat), own, room, start)
        attempt.hold(round + 1, start, value)
        steps.append((seat, parts))
    return await _grid_gather(attempt, steps, result)


async def _grid_gather(attempt: Attempt, steps: list[tuple[Seat, list[tuple[int, int]]]], result: Tensor) -> Tensor:
    depth = len(steps)
    for round in reversed(range(depth)):
        seat, parts = steps[round]
        phase = 2 * depth - 1 - round
        start, stop = parts[seat.core.index(attempt.rank)]
        mine = result[start:stop]
        attempt.hold(depth, start, mine)
        to = [p for p in seat.core if p != attempt.rank] + ([seat.spare] if seat.spare is not None else [])
        async with attempt.sending(phase, "gather", round, [(p, mine) for p in to]):
            await attempt.gather(phase, round, _of_others(attempt, seat, parts, depth), result)
    return result


async def _grid_spare(attempt: Attempt, seat: Seat, value: Tensor) -> Tensor:
    """A spare hands its parts to the owners of its cell, and takes the results from them in the last phase."""
    depth = len(attempt.plan.rounds)
    parts = split(attempt.length, len(seat.core), attempt.codec.unit)
    result = attempt.empty()
    async with attempt.sending(0, "reduce", 0, [(p, value[a:b]) for p, (a, b) in zip(seat.core, parts, strict=True)]):
        await attempt.gather(2 * depth - 1, 0, _of_others(attempt, seat, parts, depth), result)
    return result


def _sources(seat: Seat) -> tuple[int, ...]:
    """Whose values a group adds, in coordinate order; the spare's comes last."""
    return seat.core if seat.spare is None else (*seat.core, seat.spare)


async def _hand_to_spare(attempt: Attempt, phase: int, value: Tensor) -> Tensor:
    """`full` and `chunked`: a spare takes the whole result from its helper at the end."""
    rounds = len(attempt.plan.rounds)
    for spare, helper in attempt.plan.spares:
        if attempt.rank == spare:
            result = attempt.empty()
            await attempt.gather(phase, rounds, [Want(rounds, helper, 0, attempt.length)], result)
            return result
        if attempt.rank == helper:
            async with attempt.sending(phase, "gather", rounds, [(spare, value)]):
                return value
    return value


EXCHANGES: dict[str, Exchange] = {"full": full, "chunked": chunked, "grid": grid}

PHASES: dict[str, Callable[[Plan], int]] = {  # how many phases an exchange over a plan takes
    "full": lambda layout: len(layout.rounds) + 1,
    "chunked": lambda layout: 2 * len(layout.rounds) + 1,
    "grid": lambda layout: 2 * len(layout.rounds),
}


def register(name: str, exchange: Exchange, phases: Callable[[Plan], int]) -> None:
    """Add an exchange that rosters may name, such as a rival's (see `marfl.techniques`)."""
    EXCHANGES[name], PHASES[name] = exchange, phases


# --- the same in one place, without a network ---


def sum_in_plan_order(layout: Plan, values: Sequence[Tensor]) -> Tensor:
    """The sum over all ranks, added up exactly as the peers of an exact plan do (each partial sum only once)."""
    if not layout.exact:
        raise InputError("only an exact plan gives all peers the same sum")
    if layout.peers == 1:
        return values[0]
    partial: dict[int, Tensor] = dict(enumerate(values))
    for groups in layout.rounds:
        after: dict[int, Tensor] = {}
        for group in groups:
            if group[0] in partial:  # a replica of a group summed already is not summed again
                after[group[0]] = sum_in_turn([partial[rank] for rank in group])
        partial = after
    return partial[0]


def sum_in_turn(values: Sequence[Tensor]) -> Tensor:
    """Sequential adds, as in `Attempt.sum_in_order`; one value is its own sum."""
    if len(values) == 1:
        return values[0]
    total = values[0] + values[1]
    for value in values[2:]:
        total.add_(value)
    return total


def replay_mean(roster: Roster, contributions: Mapping[PeerId, Contribution]) -> Tensor:
    """The mean that every member of this roster must end on, bit for bit; not for small integers."""
    values = [weighted(contributions[member.id]) for member in roster.members]
    if roster.wire != "fp32":
        return decode_mean(sum_of_integers(values).to(DTYPES[roster.wire]), len(values), roster.weight)
    return sum_in_plan_order(plan(len(values), roster.group_size), values) / roster.weight
