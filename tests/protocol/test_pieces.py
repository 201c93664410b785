"""Slices longer than a piece travel as several messages, are added piece by piece, and change no bit of the result."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there
from marfl.errors import InputError
from marfl.net.base import Net, Parcel, Tag
from marfl.net.libp2p.connection import Limits
from marfl.net.libp2p.inbox import OVERHEAD
from marfl.net.libp2p.transport import Libp2pNet
from marfl.net.virtual import Delivery, Departure, Interceptor, Link, VirtualNet, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.grid import order, plan
from marfl.protocol.attempt import WINDOW, Attempt, Stuck, resend
from marfl.protocol.exchange import Contribution, mean, replay_mean
from marfl.protocol.fixed_point import VALUE_BYTES
from marfl.protocol.pace import Pace
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import NO_HASH, PIECE, Member, Roster
from stages.libp2p import Stage, Swarm, hivemind_warnings, new_stage, until
from stages.virtual import Swarm as People
from stages.virtual import crash_on

pytestmark = hivemind_warnings
stage = new_stage
LAYOUT = b"l" * 32
EXCHANGES = ("grid", "chunked", "full")


def roster_of(names: list[str], exchange: str, group_size: int, piece: int, wire: str = "fp32") -> Roster:
    people = tuple(Member(name, index, 1.0) for index, name in order("run", 1, list(enumerate(names))))
    return Roster("run", 1, 0, NO_HASH, NO_HASH, LAYOUT, exchange, group_size, people, (), (), (), wire, piece=piece)


def updates(roster: Roster, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randn(length, generator=generator) for name in sorted(roster.ids)}


def expected(roster: Roster, mine: dict[str, torch.Tensor]) -> torch.Tensor:
    return replay_mean(roster, {name: Contribution(b"", value) for name, value in mine.items()})


async def average(
    net: Net,
    roster: Roster,
    value: torch.Tensor,
    phase_timeout: float = 4.0,
    writing: Callable[[], Awaitable[None]] | None = None,
) -> torch.Tensor:
    attempt = Attempt(net, roster, plan(len(roster.members), roster.group_size), value.numel(), Pace(phase_timeout))
    net.serve("resend", lambda _, request: resend(attempt, request), kind="repair")
    attempt.written = asyncio.ensure_future(writing()) if writing is not None else None
    return await attempt.once_written(mean(attempt, value))


def play(
    roster: Roster, mine: dict[str, torch.Tensor], link: Link | None = None, intercept: Interceptor | None = None
) -> tuple[list[torch.Tensor], VirtualNetwork]:
    """The exchange of a roster on the virtual network."""
    network = VirtualNetwork(0, link)
    network.intercept = intercept
    nets = [network.join(name) for name in roster.ids]

    async def everybody() -> list[torch.Tensor]:
        return await asyncio.gather(*(average(net, roster, mine[net.me]) for net in nets))

    return run_virtual(everybody()), network


@given(
    n=st.integers(2, 13),
    group_size=st.integers(2, 5),
    length=st.integers(1, 60),
    piece=st.integers(8, 80),
    exchange=st.sampled_from(EXCHANGES),
    wire=st.sampled_from(["fp32", "fixed"]),
)
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_give_the_bits_and_the_bytes_of_whole_slices(
    n: int, group_size: int, length: int, piece: int, exchange: str, wire: str
) -> None:
    torch.set_num_threads(1)
    roster = roster_of([f"p{i}" for i in range(n)], exchange, group_size, piece, wire)
    mine = updates(roster, length)
    results, network = play(roster, mine)
    assert all(torch.equal(result, expected(roster, mine)) for result in results)
    _, whole = play(replace(roster, piece=PIECE), mine)
    for name in roster.ids:
        (cut, one), same = (each.ports[name].net for each in (network, whole)), ("payload", "repair")
        assert [getattr(cut.sent, kind) for kind in same] == [getattr(one.sent, kind) for kind in same]
        assert [getattr(cut.received, kind) for kind in same] == [getattr(one.received, kind) for kind in same]


def slow_writer(n: int, exchange: str, disk: Callable[[VirtualNet], Awaitable[None]]) -> list[tuple[object, float]]:
    """What becomes of the exchange of n peers, and when, by rank; the first writes something down meanwhile."""
    roster = roster_of([f"p{i}" for i in range(n)], exchange, 3, 80)
    mine, network = updates(roster, 400), VirtualNetwork(0)
    nets = [network.join(name) for name in roster.ids]

    async def one(net: VirtualNet) -> tuple[object, float]:
        try:
            writing = (lambda: disk(net)) if net is nets[0] else None
            found: object = await average(net, roster, mine[net.me], writing=writing)
        except (Stuck, OSError) as error:
            found = error
        right = isinstance(found, torch.Tensor) and torch.equal(found, expected(roster, mine))
        return right or found, net.now()

    async def everybody() -> list[tuple[object, float]]:
        return await asyncio.gather(*(one(net) for net in nets))

    return run_virtual(everybody())


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
def test_nobody_has_a_sum_before_what_a_member_must_write_down_is_on_its_disk(n: int, exchange: str) -> None:
    left: list[int] = []

    async def disk(net: VirtualNet) -> None:
        await asyncio.sleep(2.0)
        left.append(net.sent.payload)

    for found, when in slow_writer(n, exchange, disk):
        assert found is True
        assert when >= 2.0
    assert left[0] > 0 or n == 1, "pieces leave meanwhile"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_what_a_disk_refuses_ends_the_attempt_of_its_peer_at_once_and_nobody_has_the_sum(n: int, exchange: str) -> None:
    async def disk(_: VirtualNet) -> None:
        await asyncio.sleep(0.5)
        raise OSError("no space left")

    (mine, when), *others = slow_writer(n, exchange, disk)
    assert isinstance(mine, OSError)
    assert when == pytest.approx(0.5)
    assert all(isinstance(found, Stuck) for found, _ in others)


@pytest.mark.parametrize("wire", ["fp32", "fixed"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_slice_leaves_in_order_in_pieces_of_one_size_and_a_short_one_as_a_single_message(
    exchange: str, wire: str
) -> None:
    roster = roster_of([f"p{i}" for i in range(5)], exchange, 3, 80, wire)
    mine, per = updates(roster, 100), 80 // VALUE_BYTES[wire]
    _, network = play(roster, mine)
    _, whole = play(replace(roster, piece=PIECE), mine)
    slices = {(e.source, e.dest, e.tag[:4]): e.payload for e in whole.events or []}
    assert len(slices) == len(whole.events or [])
    assert all(e.tag.piece == 0 for e in whole.events or [])
    sent: dict[tuple[str, str, tuple[object, ...]], list[tuple[int, int]]] = defaultdict(list)
    for event in network.events or []:
        sent[event.source, event.dest, event.tag[:4]].append((event.tag.piece, event.payload))
    each = per * VALUE_BYTES[wire]
    for name, size in slices.items():
        sizes = [each] * (size // each) + [size % each] * (size % each > 0)
        assert sent.pop(name) == list(enumerate(sizes))
    assert not sent
    assert max(slices.values()) > WINDOW * each


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("after", [1, 4, 7, 13])
def test_a_death_between_two_pieces_is_named_and_the_survivors_agree(exchange: str, after: int) -> None:
    async def scene() -> None:
        swarm = People(9, exchange=exchange, piece=16)
        swarm.network.intercept = crash_on("reduce", "p4", after)
        outcomes = await swarm.iterate()
        assert {outcome.status for outcome in outcomes.values()} == {"committed"}
        assert len(swarm.hashes()) == 1
        assert all(("p4" in outcome.present) != ("p4" in outcome.missing) for outcome in outcomes.values())

    run_virtual(scene())


LAST = {"grid": ("gather", 0), "chunked": ("gather", 1), "full": ("reduce", 1)}  # phase of nine peers in threes


@pytest.mark.parametrize(("exchange", "last"), LAST.items())
def test_of_a_lost_piece_only_that_piece_is_asked_for_again(exchange: str, last: tuple[str, int]) -> None:
    """In the last phase: in others, peers that wait for whoever waits ask again as well."""
    roster = roster_of([f"p{i}" for i in range(9)], exchange, 3, 16)
    mine = updates(roster, 60)
    lost = lose(lambda tag: (tag.channel, tag.round) == last and tag.piece == 1)
    results, network = play(roster, mine, intercept=lost)
    assert all(torch.equal(result, expected(roster, mine)) for result in results)
    assert sum(network.ports[name].net.sent.repair for name in roster.ids) == 16


def test_of_a_slow_slice_whose_pieces_keep_coming_nothing_is_asked_for_again() -> None:
    roster = roster_of(["p0", "p1"], "full", 2, 400)
    mine = updates(roster, 4000)
    results, network = play(roster, mine, Link(up=7000, down=1e6))  # more than half of a phase
    assert all(torch.equal(result, expected(roster, mine)) for result in results)
    assert [network.ports[name].net.sent.repair for name in roster.ids] == [0, 0]
    assert max(event.time for event in network.events or []) > 2.5


def lose(what: Callable[[Tag], bool]) -> Interceptor:
    """The first message of this kind does not arrive."""
    lost: list[Tag] = []

    def intercept(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "send" and not lost and what(event.tag):
            lost.append(event.tag)
            delivery.copies = 0

    return intercept


def test_everybody_follows_the_pieces_of_the_roster_whatever_its_own_settings_are() -> None:
    async def scene() -> None:
        swarm = People(6, exchange="chunked")
        for piece, me in zip((8, 12, 40, 100, 2**18, 2**20), swarm.people.values(), strict=True):
            me.settings = replace(me.settings, piece=piece)
        for _ in range(3):
            outcomes = await swarm.iterate()
            assert {(o.status, len(o.present), o.sent.repair) for o in outcomes.values()} == {("committed", 6, 0)}
        assert len(swarm.hashes()) == 1

    run_virtual(scene())


def test_a_piece_that_holds_no_value_is_refused() -> None:
    with pytest.raises(InputError, match="piece: 7 bytes are too few; choose 8 or more"):
        Settings(piece=7)


# --- what waits in memory ---


def test_where_links_are_alike_only_a_few_pieces_of_each_slice_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, deliver = Counter[int](), VirtualNet._deliver
    sizes = PIECE, 400

    def watched(net: VirtualNet, source: str, tag: Tag, parcel: Parcel) -> None:
        deliver(net, source, tag, parcel)
        held = (each.size for box in net._inbox.values() for each in box.values() if isinstance(each, tuple))
        peak[roster.piece] = max(peak[roster.piece], sum(held))

    monkeypatch.setattr(VirtualNet, "_deliver", watched)
    for piece in sizes:
        roster = roster_of([f"p{i}" for i in range(5)], "full", 5, piece)
        mine = updates(roster, 4000)
        results, _ = play(roster, mine, Link(up=1e5, down=1e5, latency=0.01))
        assert all(torch.equal(result, expected(roster, mine)) for result in results)
    whole, cut = (peak[piece] for piece in sizes)
    assert whole > 2 * 16_000  # of four
    assert cut < whole / 10


def test_with_little_room_a_long_slice_waits_at_its_senders_and_gets_through(stage: Stage) -> None:
    """The second of three in the order of the sum comes last: the third is early, and must wait."""
    length, piece = 2**18, 2**14
    limits = Limits(message=2 * piece, sender_memory=4 * piece, memory=8 * piece, patience=60.0)

    async def scene(swarm: Swarm) -> None:
        nets = [await swarm.newcomer(await swarm.joining(limits=limits)) for _ in range(3)]
        roster = roster_of([net.me for net in nets], "full", 3, piece)
        mine = updates(roster, length)
        first, late, early = (next(net for net in nets if net.me == name) for name in roster.ids)
        peak = peaks_of(first)

        async def take_part(net: Libp2pNet) -> torch.Tensor:
            return await average(net, roster, mine[net.me], 60.0)

        ahead = [asyncio.create_task(take_part(net)) for net in (first, early)]
        await until(lambda: peak[early.me] > 3 * piece)  # no room for one more
        results = [await take_part(late), *[await task for task in ahead]]
        assert all(torch.equal(result, expected(roster, mine)) for result in results)
        awaited = WINDOW * (piece + OVERHEAD)  # a message that is waited for needs no room
        assert max(peak.values()) <= limits.sender_memory + awaited < 4 * length / 10
        assert not sum((net.refused for net in nets), Counter())
        assert [net.sent.repair for net in nets] == [0] * 3

    stage.play(scene)


def peaks_of(net: Libp2pNet) -> Counter[str]:
    """By sender, the most that was ever held of it, kept up to date."""
    inbox, peak = net._inbox, Counter[str]()
    reserve = inbox.reserve

    async def watched(source: str, size: int, tag: Tag | None = None) -> None:
        await reserve(source, size, tag)
        peak[source] = max(peak[source], inbox._held[source])

    inbox.reserve = watched  # type: ignore[method-assign]
    return peak
