"""Masked sums without a network: sharing, keys, graphs, masks that cancel, and what is left when somebody is lost."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.errors import BadPayload, InputError
from marfl.protocol.ballot import quorum
from marfl.protocol.roster import Elector
from marfl.secagg import crypto as shamir
from marfl.secagg.crypto import KeyPair, add_mask, is_key, is_public, is_seed, mask_seed, open_share, seal_share
from marfl.secagg.graph import (
    COLLUDING,
    LEAST_DEGREE,
    SECURITY,
    SHARE_BYTES,
    betrayal,
    degree,
    mask_cost,
    neighbours,
    pledges_needed,
    threshold,
)
from marfl.secagg.session import Session, epoch_of, lift, recovered, spoilt

BASE = bytes(32)
secret_bytes = st.binary(min_size=32, max_size=32)


def sessions(count: int) -> list[Session]:
    """The members of one epoch, with all shares dealt and kept."""
    pairs = [KeyPair() for _ in range(count)]
    keys = tuple(pair.public for pair in pairs)
    names = people(count)
    epoch = epoch_of("run", 1, names, keys)
    members = [Session(epoch, BASE, names, rank, pair, keys) for rank, pair in enumerate(pairs)]
    for member in members:
        for other, sealed in member.deal().items():
            members[other].keep(member.rank, sealed)
    return members


def people(count: int) -> tuple[str, ...]:
    return tuple(f"peer{rank}" for rank in range(count))


def values(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**46), 2**46, (length,), generator=generator) for _ in range(count)]


# --- Shamir's shares ---


@given(secret=secret_bytes, count=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_back(secret, count, data):
    needed = data.draw(st.integers(1, count))
    shares = shamir.cut(secret, needed, count)
    chosen = data.draw(st.permutations(range(count)))[:needed]
    assert shamir.join({place + 1: shares[place] for place in chosen}) == secret


@given(secret=secret_bytes)
@settings(max_examples=30, deadline=None)
def test_one_share_too_few_gives_something_else(secret):
    shares = shamir.cut(secret, 3, 5)
    assert shamir.join({1: shares[0], 4: shares[3]}) != secret


def test_a_share_alone_is_uniform_whatever_the_secret():
    """The first byte below the top one over many cuts of one secret: chi-square against 16 equal bins."""
    bins = [0] * 16
    for _ in range(1600):
        bins[shamir.cut(bytes(32), 2, 3)[0][1] >> 4] += 1
    assert sum((found - 100) ** 2 / 100 for found in bins) < 50  # 15 degrees of freedom: beyond 1e-5


def test_the_modulus_is_a_prime():
    assert all(pow(random.Random(n).randrange(2, shamir.PRIME), shamir.PRIME - 1, shamir.PRIME) == 1 for n in range(40))


@pytest.mark.parametrize(("length", "needed", "count"), [(31, 1, 1), (32, 0, 3), (32, 4, 3)])
def test_shares_that_cannot_be_made_are_refused(length, needed, count):
    with pytest.raises(InputError, match="shares"):
        shamir.cut(bytes(length), needed, count)


# --- keys ---


def test_two_peers_agree_on_a_mask_and_a_third_does_not():
    one, two, three = KeyPair(), KeyPair(), KeyPair()
    agreed = mask_seed(one.mask, two.public, b"epoch")
    assert agreed == mask_seed(two.mask, one.public, b"epoch")
    assert agreed != mask_seed(three.mask, one.public, b"epoch")
    assert agreed != mask_seed(one.mask, two.public, b"another")


def test_only_its_receiver_reads_a_share_and_only_in_its_place():
    one, two, three = KeyPair(), KeyPair(), KeyPair()
    sealed = seal_share(one, two.public, b"here", b"share")
    assert open_share(two, one.public, b"here", sealed) == b"share"
    for reader, context in ((three, b"here"), (two, b"there")):
        with pytest.raises(BadPayload):
            open_share(reader, one.public, context, sealed)


def test_a_public_key_of_low_order_is_refused():
    with pytest.raises(BadPayload, match="agrees on nothing"):
        mask_seed(KeyPair().mask, bytes(64), b"epoch")
    card = KeyPair().public
    assert is_public(card)
    assert not is_public(card[:-1])
    assert not is_public(bytes(32) + card[32:])
    assert not is_public(card[:32] + bytes(32) + card[64:])


def test_shares_cannot_be_read_with_the_key_that_is_reconstructed():
    """Whoever learns a lost member's mask key still cannot open what the others sent it."""
    one, two = KeyPair(), KeyPair()
    sealed = seal_share(one, two.public, b"here", b"share")
    stolen = KeyPair(mask=two.mask, share=two.mask)
    with pytest.raises(BadPayload):
        open_share(stolen, one.public, b"here", sealed)


# --- the graph ---


@given(count=st.integers(1, 300), seed=secret_bytes)
@settings(max_examples=40, deadline=None)
def test_neighbours_are_mutual_distinct_and_as_many_as_promised(count, seed):
    graph = neighbours(seed, people(count))
    for rank, others in enumerate(graph):
        assert len(set(others)) == len(others) == degree(count)
        assert rank not in others
        assert all(rank in graph[other] for other in others)


def test_small_swarms_share_with_everybody_and_large_ones_with_few():
    assert [degree(n) for n in (1, 2, 3, 8, 33)] == [0, 1, 2, 7, 32]
    assert [degree(n) for n in (34, 100, 125, 1000, 10_000)] == [LEAST_DEGREE, LEAST_DEGREE, 40, 120, 156]
    assert all(threshold(degree(n)) > 2 * degree(n) / 3 for n in range(2, 200))


def test_another_state_or_member_gives_another_graph_and_another_order_of_members_does_not():
    names, base = people(100), random.randbytes(32)
    graph = neighbours(base, names)
    assert neighbours(base[:31] + b"x", names) != graph
    assert neighbours(base, (*names[:99], "another")) != graph
    back = neighbours(base, names[::-1])
    assert [{names[::-1][other] for other in circle} for circle in back[::-1]] == [
        {names[other] for other in circle} for circle in graph
    ]


def test_a_tenth_that_lies_with_a_leader_never_gets_both_secrets_of_anybody():
    """A hundred draws of liars among 1,000 members; the bound says less than one in 2⁴⁰."""
    graph, needed = neighbours(bytes(32), people(1000)), betrayal(degree(1000))
    draw = random.Random(0)
    for _ in range(100):
        colluders = set(draw.sample(range(1000), math.ceil(COLLUDING * 1000)))
        assert all(len(colluders.intersection(circle)) < needed for circle in graph)
    assert SECURITY == 2.0**-40


def test_two_secrets_of_one_peer_take_more_shares_than_its_neighbours_give_unless_a_third_lies():
    for each in range(2, 200):
        lying = betrayal(each) - 1
        assert (each - lying) + 2 * lying < 2 * threshold(each)  # each gives one share, whoever lies gives both
        assert betrayal(each) > each / 3


def test_as_many_pledges_are_needed_as_make_a_quorum():
    for n, liars in ((n, liars) for n in range(1, 30) for liars in range(4)):
        electors = tuple(Elector(f"p{i}", i) for i in range(n))
        ids, needed = [elector.id for elector in electors], pledges_needed(n, liars)
        assert quorum(electors, ids[n - needed :], liars)
        assert not quorum(electors, ids[n - needed + 1 :], liars)


def test_the_cost_of_masks_grows_with_the_neighbours_and_the_lists_of_keys():
    n, each, pledges = 125, 40, 63
    keys = (n - 1) * (96 * (n + 1) + 64 * (each + 1))
    assert mask_cost(1).bytes_total == 0
    assert mask_cost(n).bytes_total == (
        n * each * SHARE_BYTES + keys + (n - 1) * (n + 1) * 32 + (n - 1) * 64 * (1 + pledges)
    )
    assert mask_cost(n).messages == n * each + 4 * (n - 1)
    more = mask_cost(n, leader_inside=False).bytes_total - mask_cost(n).bytes_total
    assert more == keys / (n - 1) + (n + 1) * 32 + 64 * (1 + pledges)
    assert mask_cost(n, liars=1).bytes_total - mask_cost(n).bytes_total == (n - 1) * 64
    assert mask_cost(n).bytes_per_peer < 2 * 14_623.232  # what it was without signatures


def test_electors_that_bring_nothing_cost_their_pledges_where_the_members_are_no_quorum():
    few, many = mask_cost(5, electors=10), mask_cost(5, electors=20)
    assert few.messages == mask_cost(5).messages  # half of them, with the leader
    assert many.messages == mask_cost(5).messages + 2 * 15
    outside = mask_cost(5, electors=20, leader_inside=False)
    assert outside.messages == mask_cost(5, leader_inside=False).messages + 2 * 14


# --- masks ---


@given(count=st.integers(1, 6), length=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_masks_cancel_and_the_seeds_take_the_rest_off(count, length):
    members, plain = sessions(count), values(count, length)
    total = sum(member.masked(value) for member, value in zip(members, plain, strict=True))
    seeds = {member.rank: member.seed for member in members}
    assert torch.equal(lift(total, members[0], seeds, {}), sum(plain))


@given(count=st.sampled_from([3, 4, 5, 8, 13, 36]), data=st.data())
@settings(max_examples=12, deadline=None)
def test_lost_members_masks_come_off_with_their_neighbours_shares(count, data):
    """Some never sent anything (their keys are recovered), some died after the sum (their seeds are)."""
    members, plain = sessions(count), values(count, 5)
    allowed = degree(count) - threshold(degree(count))
    gone = set(data.draw(st.lists(st.integers(0, count - 1), max_size=allowed, unique=True)))
    absent = set(data.draw(st.lists(st.sampled_from(sorted(gone)), unique=True))) if gone else set()
    alive = [member for member in members if member.rank not in gone]
    graph, keys = members[0].graph, members[0].keys
    total = sum(members[rank].masked(plain[rank]) for rank in range(count) if rank not in absent)
    seeds = {member.rank: member.seed for member in alive}
    for rank in gone - absent:
        shares = {m.rank: m.seed_share(rank) for m in alive if rank in m.neighbours}
        seeds[rank] = recovered(graph[rank], shares, partial(is_seed, keys[rank]))
    lost = {}
    for rank in absent:
        shares = {m.rank: m.key_share(rank) for m in alive if rank in m.neighbours}
        lost[rank] = recovered(graph[rank], shares, partial(is_key, keys[rank]))
    expected = sum(plain[rank] for rank in range(count) if rank not in absent)
    assert torch.equal(lift(total, members[0], seeds, lost), expected)


def test_one_share_fewer_than_the_threshold_gives_neither_the_seed_nor_the_key():
    for share, secret in (("seed_share", "seed"), ("key_share", "secret")):
        members = sessions(8)
        owner, needed = members[0].pair, threshold(degree(8))
        shares = {m.rank: getattr(m, share)(0) for m in members[1 : needed + 1]}
        assert shamir.join(shares) == getattr(owner, secret)  # neighbour 1 has place 1, and so on
        assert shamir.join(dict(list(shares.items())[1:])) != getattr(owner, secret)


def test_a_value_that_arrives_late_stays_hidden_when_its_owners_key_is_known():
    """All its pairwise masks come off, and its own is still there."""
    members, plain = sessions(4), values(4, 50)
    seen = members[2].masked(plain[2]).clone()
    for other in members[2].neighbours:
        add_mask(seen, mask_seed(members[2].pair.mask, members[2].keys[other], members[2].epoch), negative=other > 2)
    assert not bool((seen == plain[2]).any())
    assert torch.equal(add_mask(seen, members[2].seed, negative=True), plain[2])


def test_whoever_knows_all_seeds_still_cannot_read_a_single_value():
    members, plain = sessions(4), values(4, 50)
    for member, value in zip(members, plain, strict=True):
        seen = add_mask(member.masked(value).clone(), member.seed, negative=True)
        assert not bool((seen == value).any())


def test_too_few_neighbours_recover_nothing():
    members = sessions(8)
    shares = {m.rank: m.seed_share(0) for m in members[1:5]}  # four, and the threshold is five
    assert recovered(members[0].neighbours, shares, lambda _: True) is None
    assert not spoilt(members[0].neighbours, shares)


@pytest.mark.parametrize("count", [8, 13, 33])
def test_a_secret_is_recovered_although_some_shares_are_wrong_and_is_the_published_one_or_none(count):
    members = sessions(count)
    owner, circle = members[0], members[0].neighbours
    fits = partial(is_seed, owner.keys[0])
    shares = {m.rank: m.seed_share(0) for m in members[1:]}
    bearable = (len(shares) - threshold(len(circle))) // 2
    wrong = shares | dict.fromkeys(list(shares)[:bearable], bytes(shamir.SHARE_SIZE))
    assert bearable
    assert recovered(circle, wrong, fits) == owner.seed
    hopeless = dict.fromkeys(shares, bytes(shamir.SHARE_SIZE))
    assert recovered(circle, hopeless, fits) is None
    assert spoilt(circle, hopeless)


def test_what_is_recovered_must_be_what_its_owner_published():
    one, two = KeyPair(), KeyPair()
    assert is_seed(one.public, one.seed)
    assert is_key(one.public, one.secret)
    for secret in (two.seed, one.secret, b""):
        assert not is_seed(one.public, secret)
    for secret in (two.secret, one.seed, b""):
        assert not is_key(one.public, secret)


def test_a_member_gives_away_a_seed_or_a_key_and_never_both():
    _, second, third = sessions(3)
    assert second.seed_share(0) is not None
    assert second.key_share(0) is None
    assert third.key_share(0) is not None
    assert third.seed_share(0) is None


def test_a_masked_value_is_made_once():
    member = sessions(3)[0]
    first = member.masked(torch.arange(4))
    assert member.masked(torch.zeros(4, dtype=torch.int64)) is first
    assert member.spent


def test_a_share_from_a_stranger_or_spoilt_is_refused():
    members = sessions(40)
    stranger = next(rank for rank in range(40) if rank not in (0, *members[0].neighbours))
    with pytest.raises(BadPayload, match="stranger"):
        members[0].keep(stranger, bytes(SHARE_BYTES))
    with pytest.raises(BadPayload, match="did not seal"):
        members[0].keep(members[0].neighbours[0], bytes(SHARE_BYTES))


def test_a_mask_is_the_same_whatever_the_vectors_length():
    """Longer than one chunk of the stream, and a prefix of it."""
    long = add_mask(torch.zeros(40_000, dtype=torch.int64), bytes(32))
    short = add_mask(torch.zeros(100, dtype=torch.int64), bytes(32))
    assert torch.equal(long[:100], short)
    assert torch.equal(add_mask(long, bytes(32), negative=True), torch.zeros(40_000, dtype=torch.int64))
