"""Peers that lie: whatever one of them says, the others end on the model that they have without it, and count it."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from marfl.net.base import Parcel, PeerId
from marfl.protocol.ballot import BAD_ACK
from marfl.protocol.chain import Next, Skip, Signer
from marfl.protocol.commits import electors_of
from marfl.protocol.member import BAD_VOTE
from marfl.protocol.messages import (
    Ack,
    Decided,
    Endorse,
    Finish,
    Heavier,
    Ready,
    Ruling,
    Vouch,
)
from marfl.protocol.roster import Elector, Member, Record, brief, brief_record
from marfl.protocol.statements import Certificate, cast, certificate
from marfl.protocol.transfer import UNPROVEN
from marfl.protocol.voting import GROUNDLESS
from stages.liars import (
    Liar,
    announce,
    fork,
    given,
    packed,
    play,
    played,
    signed_by,
)

SIZES = pytest.mark.parametrize("n", [4, 7, 16])


# --- strangers and newcomers ---


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("own_lineage", [False, True])
@pytest.mark.parametrize(("n", "liars"), [(4, 1), (7, 0), (16, 1)])
def test_a_head_that_nobody_certified_is_not_followed(n: int, liars: int, own_lineage: bool, when: str):
    async def attack(liar: Liar) -> None:
        stranger = liar.swarm.network.join("stranger")
        state = liar.state(10**6)
        lineage = b"x" * 32 if own_lineage else liar.before.lineage
        roster = liar.roster(liar.others, iteration=10**6, lineage=lineage)
        record = Record(roster, state.hash, 10**9)

        async def sync(_: PeerId, __: Parcel) -> Parcel:
            return given(record, state)

        stranger.serve("sync", sync)
        await announce(stranger, record, liar.me.terms.digest)

    scene = play(attack, n, liars=liars, before=when == "before")
    assert scene.refused()[UNPROVEN] > 0


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("n", "liars", "length"), [(4, 1, 1), (4, 1, 30), (7, 0, 5), (16, 1, 5)])
def test_a_lineage_that_strangers_found_among_themselves_is_not_followed(n: int, liars: int, length: int, when: str):
    async def attack(liar: Liar) -> None:
        nets = [liar.swarm.network.join(f"stranger{i}") for i in range(5)]
        theirs = fork(nets, liar.before, length)
        for net in nets:

            async def sync(_: PeerId, request: Parcel) -> Parcel:
                return given(theirs.head, theirs.states[-1], theirs.proof)

            net.serve("sync", sync)
            await announce(net, theirs.head, liar.me.terms.digest)

    play(attack, n, liars=liars, before=when == "before")


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("length", [1, 30])
@SIZES
def test_an_elector_that_forks_alone_is_not_followed_however_long_its_chain_is(n: int, length: int, when: str):
    async def attack(liar: Liar) -> None:
        theirs = fork([liar.net], liar.before, length, named=liar.electors)
        liar.donate(theirs.head, theirs.states[-1], theirs.proof)
        await liar.announce(theirs.head)

    play(attack, n, before=when == "before")
