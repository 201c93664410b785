"""The techniques in one place: names and options, sums, mixing, prices, and what a death costs."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.plan.cost import Messages, count
from marfl.plan.grid import split
from marfl.techniques.catalogue import TECHNIQUES, technique
from marfl.techniques.mar import play
from marfl.techniques.technique import MixContext, Span, ranks_of_dead, stalled_ring_messages

EXACT = ("mar", "fedavg", "arfl", "rdfl", "ring", "butterfly")
LOCAL = ("saps", "braintorrent", "gossip")


def updates(n: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for _ in range(n)]


def context(n: int, iteration: int = 1, **changes) -> MixContext:
    given = {"members": tuple(range(n)), "seed": 7, "memory": {}, "samples": lambda position: 1, "speed": None}
    return MixContext(iteration=iteration, **{**given, **changes})


def spelled_out(phase: Messages) -> list[tuple[int, int, int]]:
    """(source, dest, values) of each message."""
    return list(zip(phase.source.tolist(), phase.dest.tolist(), phase.values.tolist(), strict=True))


def one_hot(n: int) -> list[torch.Tensor]:
    """After mixing these, member i's value is row i of the mixing matrix."""
    return list(torch.eye(n))


def variance_left(matrix: torch.Tensor) -> float:
    n = len(matrix)
    return float(((matrix.double() - 1 / n) ** 2).sum() / (n - 1))


# --- names and options ---


def test_there_are_nine_techniques_each_by_its_name():
    made = [technique(name) for name in TECHNIQUES]
    assert [each.name for each in made] == list(TECHNIQUES)
    assert set(TECHNIQUES) == {*EXACT, *LOCAL}
    assert [each.name for each in made if each.server] == ["fedavg"]
    assert [each.name for each in made if each.exact] == list(EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "brantorent"}, "technique = 'brantorent': did you mean braintorrent.*must be one of mar, fedavg"),
        ({"name": "xyzzy"}, "technique = 'xyzzy': must be one of mar"),
        ({"name": "mar", "exchange": "grud"}, "exchange = 'grud': must be one of full, chunked, grid"),
        ({"name": "mar", "plan": "keys"}, "exchange = 'grid': needs plan = 'exact'"),
        ({"name": "mar", "plan": "best"}, "plan = 'best': must be one of exact, keys, random"),
        ({"name": "mar", "rounds": 3}, "rounds = 3: plan = 'exact' takes as many as it needs"),
        ({"name": "mar", "plan": "keys", "exchange": "full", "rounds": 0}, "rounds = 0: must be at least 1"),
        (
            {"name": "mar", "plan": "random", "exchange": "full", "dimension": 2},
            "dimension = 2: belongs to plan = 'keys'",
        ),
        ({"name": "mar", "group_size": 1}, "group_size = 1: must be at least 2"),
        ({"name": "mar", "fanout": 1}, "fanout = 1: technique mar has no such option; its options are dimension"),
        ({"name": "fedavg", "fanout": 1}, "fanout = 1: technique fedavg has no such option; it has no options"),
        ({"name": "gossip", "fanout": 0}, "fanout = 0: must be at least 1"),
        ({"name": "gossip", "fanout": "2"}, "fanout = '2': must be a whole number"),
        ({"name": "saps", "compression": 0}, "compression = 0: must be at least 1"),
        ({"name": "saps", "window": 0}, "window = 0: must be at least 1"),
    ],
)
def test_unknown_names_and_contradictory_options_are_refused_in_one_line(settings, message):
    with pytest.raises(InputError, match=message) as error:
        technique(**settings)
    assert "\n" not in str(error.value)


def test_settings_of_mar_mean_nothing_to_the_others():
    assert technique("fedavg", group_size=3, exchange="full", plan="keys", rounds=4) == technique("fedavg")


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_can_be_sent_to_another_process(name):
    assert pickle.loads(pickle.dumps(technique(name))) == technique(name)


# --- the ticks of the paper's Table 1, and ours for the techniques that are not in it ---


@pytest.mark.parametrize("name", TECHNIQUES)
def test_partial_communication_means_fewer_messages_to_a_peer_than_there_are_others(name):
    tech, n = technique(name, group_size=4), 64
    messages = tech.cost(n, 6400).messages / n
    assert (messages < n - 1) is (name not in ("arfl", "rdfl", "ring", "butterfly"))


@pytest.mark.parametrize("name", ["mar", "fedavg", "saps", "braintorrent", "gossip"])
def test_with_partial_communication_not_every_pair_talks(name):
    tech = technique(name, group_size=4)
    pairs = {frozenset(ends[:2]) for phase in tech.messages(16, 160) for ends in spelled_out(phase)}
    assert len(pairs) < 16 * 15 / 2


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_global_aggregation_leaves_no_disagreement_and_nothing_else_does(name):
    tech = technique(name)
    mixed = tech.mix(updates(16, 50), context(16)).values
    agree = all(torch.equal(mixed[0], other) for other in mixed)
    assert agree is tech.exact


@pytest.mark.parametrize("name", TECHNIQUES)
def test_only_sparsification_leaves_most_coordinates_of_everybody_as_they_were(name):
    tech, before = technique(name), updates(16, 1000)
    after = tech.mix(before, context(16)).values
    sparse = all((new != old).sum() <= 10 for new, old in zip(after, before, strict=True))
    assert sparse is (name == "saps")


# --- exact sums ---


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("n", [1, 2, 5, 9, 16, 97])
def test_a_total_is_the_sum_over_everybody_to_float_precision(name, n):
    tech, values = technique(name), updates(n, 200)
    exact = torch.stack(values).double().sum(0)
    assert tech.exact_for(n)
    assert (tech.total(values).double() - exact).norm() <= 1e-6 * exact.norm()


@given(n=st.integers(1, 12), length=st.integers(1, 40), parts=st.integers(1, 5), name=st.sampled_from(EXACT))
def test_a_slice_of_the_total_is_the_total_of_the_slices_bit_for_bit(n, length, parts, name):
    tech, values = technique(name, group_size=3), updates(n, length)
    whole = tech.total(values)
    for start, stop in split(length, parts):
        piece = tech.total([value[start:stop] for value in values], Span(start, length))
        assert torch.equal(piece, whole[start:stop])


def test_rings_add_each_chunk_from_its_own_peer_on():
    big = 2.0**24  # adding 1 to it changes nothing, adding 2 does
    values = [torch.tensor([x] * 3) for x in (big, 1.0, 1.0)]
    assert technique("ring").total(values).tolist() == [big, big + 2, big]
    assert technique("rdfl").total(values).tolist() == [big] * 3


@pytest.mark.parametrize("name", EXACT)
def test_mixing_by_an_exact_technique_gives_everybody_the_mean(name):
    tech, values = technique(name), updates(10, 30)
    mixed = tech.mix(values, context(10))
    assert all(torch.equal(value, tech.total(values) / 10) for value in mixed.values)
    assert mixed.phases is None  # its usual messages


@pytest.mark.parametrize("name", LOCAL)
def test_without_a_global_aggregate_there_is_no_total_and_no_protocol(name):
    for call in (lambda: technique(name).total(updates(2, 3)), lambda: technique(name).protocol(2)):
        with pytest.raises(InputError, match=f"technique = '{name}': has no global aggregate"):
            call()


# --- prices ---


@pytest.mark.parametrize(
    ("name", "options", "vectors"),
    [
        ("fedavg", {}, 2),
        ("arfl", {}, 124),
        ("rdfl", {}, 124),
        ("mar", {"exchange": "full"}, 12),
        ("mar", {"exchange": "chunked"}, 4.8),
        ("mar", {}, 1.984),
        ("ring", {}, 1.984),
        ("butterfly", {}, 1.984),
        ("saps", {}, 0.01 * 124 / 125),
        ("gossip", {"fanout": 2}, 2),
        ("braintorrent", {}, 124 / 125),
    ],
)
def test_one_vector_among_125_peers_costs_what_the_table_says(name, options, vectors):
    assert technique(name, **options).cost(125, 100_000).bytes_per_peer / 400_000 == pytest.approx(vectors, abs=0.0005)


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("n", [1, 2, 13])
def test_the_messages_of_a_technique_add_up_to_its_cost(name, n):
    tech = technique(name)
    assert count(tech.messages(n, 130), n, servers=tech.server) == tech.cost(n, 130)


def test_the_papers_approximate_setting_saves_a_third_of_the_bytes():
    approximate = technique("mar", group_size=3, plan="keys", exchange="full", rounds=4).cost(125, 1000)
    exact = technique("mar", group_size=5, plan="keys", exchange="full").cost(125, 1000)
    assert approximate.bytes_per_peer / 4000 == pytest.approx(7.94, abs=0.005)
    assert exact.bytes_per_peer / 4000 == 12
    assert 1 - approximate.bytes_total / exact.bytes_total == pytest.approx(0.33, abs=0.01)


# --- Moshpit mixing ---


def test_the_papers_keys_on_a_perfect_grid_leave_everybody_on_the_same_bits():
    tech, values = technique("mar", group_size=5, plan="keys", exchange="full"), updates(125, 20)
    mixed = tech.mix(values, context(125)).values
    assert tech.exact_for(125)
    assert not tech.exact_for(124)
    assert all(torch.equal(mixed[0], other) for other in mixed)
    assert torch.allclose(mixed[0], tech.total(values) / 125, atol=1e-6)


def test_the_papers_approximate_setting_leaves_6_permille_of_the_variance_and_random_groups_twice_that():
    keys = technique("mar", group_size=3, plan="keys", exchange="full", rounds=4)
    chance = technique("mar", group_size=3, plan="random", exchange="full", rounds=4)
    assert not keys.exact_for(125)
    left = variance_left(torch.stack(keys.mix(one_hot(125), context(125)).values))
    assert left == pytest.approx(0.0061, abs=0.0002)
    drawn = [
        variance_left(torch.stack(chance.mix(one_hot(125), context(125, iteration)).values)) for iteration in range(40)
    ]
    assert sum(drawn) / len(drawn) == pytest.approx(0.012, abs=0.001)
    assert len(set(drawn)) > 30  # fresh groups in every iteration


@given(n=st.integers(1, 40), group_size=st.integers(2, 6), plan=st.sampled_from(["keys", "random"]))
def test_groups_never_change_the_mean_and_send_what_they_cost(n, group_size, plan):
    tech = technique("mar", group_size=group_size, plan=plan, exchange="chunked")
    mixed = tech.mix(one_hot(n), context(n))
    assert torch.allclose(torch.stack(mixed.values).sum(0), torch.ones(n), atol=1e-5)
    assert torch.allclose(torch.stack(mixed.values).sum(1), torch.ones(n), atol=1e-5)
    travelled = tech.messages(n, n) if mixed.phases is None else mixed.phases
    assert count(travelled, n).bytes_total == tech.cost(n, n).bytes_total


def test_only_the_exact_plan_runs_among_peers():
    assert technique("mar", group_size=4).protocol(16)["group_size"] == 4
    with pytest.raises(InputError, match="plan = 'keys': runs in the simulator only"):
        technique("mar", plan="keys", exchange="full").protocol(16)


# --- SAPS ---


def test_saps_averages_one_coordinate_in_c_with_one_partner_and_keeps_the_rest():
    tech, before = technique("saps", compression=10), updates(9, 95)
    mixed = tech.mix(before, context(9))
    mask = tech.mask(context(9), 95)
    assert len(mask) == len(set(mask.tolist())) == 10
    pairs = {tuple(sorted(ends[:2])) for ends in spelled_out(mixed.phases[0])}
    assert len(pairs) == 4
    for one, other in pairs:
        expected = (before[one][mask] + before[other][mask]) / 2
        for place in (one, other):
            assert torch.equal(mixed.values[place][mask], expected)
            kept = mixed.values[place].clone()
            kept[mask] = before[place][mask]
            assert torch.equal(kept, before[place])
    left_over = set(range(9)) - {place for pair in pairs for place in pair}
    assert all(torch.equal(mixed.values[place], before[place]) for place in left_over)
    assert count(mixed.phases, 9).bytes_total == tech.cost(9, 95).bytes_total


def test_saps_has_no_global_average_disagreement_stays_and_shrinks_only_slowly():
    tech, values, memory = technique("saps", compression=4), updates(8, 400), {}
    distance = [float(torch.stack(values).std(0).norm())]
    for iteration in range(1, 31):
        mixed = tech.mix(values, context(8, iteration, memory=memory))
        values, memory = mixed.values, mixed.memory
        distance.append(float(torch.stack(values).std(0).norm()))
    assert 0.5 * distance[0] < distance[1] < distance[0]
    assert 0 < distance[-1] < 0.3 * distance[0]


@pytest.mark.parametrize("n", [2, 3, 16, 33, 100])
def test_the_pairs_of_every_block_of_a_window_connect_all_peers(n):
    window = (n - 1).bit_length()
    tech, memory = technique("saps", window=window), {}
    for block in range(1, 4):
        reached, edges = {0}, []
        for iteration in range(block * window, (block + 1) * window):
            found = tech.matching(context(n, iteration, memory=memory))
            memory = json.loads(json.dumps(found.memory))
            edges += found.pairs
            assert len({place for pair in found.pairs for place in pair}) == 2 * len(found.pairs) == n - n % 2
        for _ in range(n):
            reached |= {b for a, b in edges if a in reached} | {a for a, b in edges if b in reached}
        assert reached == set(range(n))


def test_fast_links_are_preferred_but_not_the_only_ones():
    def speed(a: int, b: int) -> float:
        return float(min(a, b))  # a link is as fast as its slower end

    every = [speed(a, b) for a in range(40) for b in range(a)]
    chosen, pairs, memory = [], set(), {}
    for iteration in range(60):
        found = technique("saps").matching(context(40, iteration, memory=memory, speed=speed))
        memory = found.memory
        chosen += [speed(*pair) for pair in found.pairs]
        pairs |= {frozenset(pair) for pair in found.pairs}
    assert sum(chosen) / len(chosen) > 1.25 * sum(every) / len(every)
    assert min(chosen) == 0
    assert len(pairs) > 780 / 3  # of all there are


def test_a_window_that_cannot_connect_so_many_peers_is_refused():
    with pytest.raises(InputError, match="window = 3: 9 peers need at least 4 iterations"):
        technique("saps", window=3).matching(context(9))


def test_peers_that_come_and_go_are_matched_among_those_present():
    tech, memory = technique("saps"), {}
    for iteration, members in enumerate([(0, 1, 2, 3), (7, 2, 5), (0, 3, 7, 9, 11)]):
        found = tech.matching(context(len(members), iteration, members=members, memory=memory))
        memory = found.memory
        assert len(found.pairs) == len(members) // 2


# --- BrainTorrent ---


def play_braintorrent(n: int, iterations: int):
    """Iterations of mixing constants, the memory kept as JSON; who initiated, and what was fetched, in each."""
    tech, memory, log = technique("braintorrent"), {}, []
    values = [torch.full((3,), float(i)) for i in range(n)]
    for iteration in range(iterations):
        ctx = context(n, iteration, memory=memory, samples=lambda position: position + 1)
        mixed = tech.mix(values, ctx)
        memory = json.loads(json.dumps(mixed.memory))
        fetched = [source for phase in mixed.phases for source in phase.source.tolist()]
        log.append((tech.initiator(ctx), fetched, values, mixed.values))
        values = mixed.values
    return log, memory


def test_an_initiator_fetches_everything_first_and_later_only_what_is_newer():
    log, memory = play_braintorrent(6, 40)
    turns: dict[int, int] = {}
    for iteration, (initiator, fetched, _, _) in enumerate(log):
        since = turns.get(initiator)
        newer = (
            {i for i, *_ in log[since:iteration]} - {initiator} if since is not None else set(range(6)) - {initiator}
        )
        assert set(fetched) == newer
        turns[initiator] = iteration
    assert set(turns) == set(range(6))
    versions = {str(peer): sum(initiator == peer for initiator, *_ in log) for peer in range(6)}
    assert memory["versions"] == versions


def test_only_the_initiator_changes_and_takes_the_mean_weighted_by_samples():
    log, _ = play_braintorrent(6, 10)
    for initiator, fetched, before, after in log:
        assert all(after[i] is before[i] for i in range(6) if i != initiator)
        who = [initiator, *fetched]
        mean = sum(float(before[i][0]) * (i + 1) for i in who) / sum(i + 1 for i in who)
        assert after[initiator].tolist() == pytest.approx([mean] * 3)


def test_in_the_long_run_half_of_the_others_are_newer():
    log, _ = play_braintorrent(12, 1200)
    late = [len(fetched) for _, fetched, _, _ in log[200:]]
    assert sum(late) / len(late) == pytest.approx(11 / 2, rel=0.1)


def test_initiators_without_any_samples_around_them_keep_their_model():
    tech, values = technique("braintorrent"), updates(3, 4)
    mixed = tech.mix(values, context(3, samples=lambda position: 0))
    assert all(torch.equal(new, old) for new, old in zip(mixed.values, values, strict=True))


# --- gossip ---


@given(n=st.integers(1, 30), fanout=st.integers(1, 5), iteration=st.integers(0, 50))
def test_gossip_averages_with_fanout_others_and_keeps_the_mean_over_all(n, fanout, iteration):
    tech = technique("gossip", fanout=fanout)
    mixed = tech.mix(one_hot(n), context(n, iteration))
    matrix, partners = torch.stack(mixed.values), min(fanout, n - 1)
    assert torch.allclose(matrix.sum(0), torch.ones(n), atol=1e-5)
    assert ((matrix > 0).sum(1) == partners + 1).all()
    assert (matrix.diagonal() > 0).all()
    assert count(mixed.phases, n) == tech.cost(n, n)


def test_gossip_meets_other_partners_in_another_iteration():
    tech = technique("gossip")
    assert tech.pushed_by(context(20, 1)) != tech.pushed_by(context(20, 2))
    assert tech.pushed_by(context(20, 1)) == tech.pushed_by(context(20, 1))


# --- deaths ---


@given(n=st.integers(2, 14), data=st.data())
def test_the_closed_form_for_rings_is_a_play_of_their_messages(n, data):
    deaths, died_in = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 2))
    played = play(technique("rdfl").messages(n, 1), n, ranks_of_dead(n, deaths), died_in)
    assert played.sent == 4 * stalled_ring_messages(n, n - 1, deaths, died_in)
    played = play(technique("ring").messages(n, n), n, ranks_of_dead(n, deaths), died_in)
    assert played.sent == 4 * stalled_ring_messages(n, 2 * (n - 1), deaths, died_in)


@given(n=st.integers(2, 14), data=st.data())
def test_the_closed_form_for_the_butterfly_is_a_play_of_its_messages(n, data):
    deaths, died_in = data.draw(st.integers(1, n)), data.draw(st.integers(0, 1))
    played = play(technique("butterfly").messages(n, n), n, ranks_of_dead(n, deaths), died_in)
    assert technique("butterfly").lost(n, n, died_in, deaths).wasted_bytes == played.sent


@pytest.mark.parametrize(
    ("name", "options", "outcomes"),
    [
        ("mar", {}, ["retry", "retry", "retry", "retry", "absorbed", "absorbed"]),
        ("mar", {"exchange": "chunked"}, ["retry", "retry", "absorbed", "absorbed", "absorbed", "absorbed"]),
        ("mar", {"exchange": "full"}, ["retry", "absorbed", "absorbed"]),
        ("mar", {"exchange": "full", "plan": "keys"}, ["absorbed"] * 3),
        ("fedavg", {}, ["absorbed"] * 2),
        ("arfl", {}, ["absorbed"]),
        ("butterfly", {}, ["partial"] * 2),
        ("rdfl", {}, ["stall"] * 124),
        ("ring", {}, ["stall"] * 248),
        ("saps", {}, ["absorbed"]),
        ("braintorrent", {}, ["absorbed"]),
        ("gossip", {}, ["absorbed"]),
    ],
)
def test_what_one_death_among_125_does_depends_on_technique_and_phase(name, options, outcomes):
    tech = technique(name, **options)
    losses = [tech.lost(125, 1250, phase, 1) for phase in range(tech.cost(125, 1250).phases)]
    assert [loss.outcome for loss in losses] == outcomes
    assert all((loss.wasted_bytes > 0) == (loss.outcome != "absorbed") for loss in losses)
    assert all(loss.wasted_bytes < tech.cost(125, 1250).bytes_total for loss in losses)


def test_when_all_replicas_of_a_sum_are_likely_gone_the_attempt_is_repeated():
    tech = technique("mar", exchange="full")
    assert [tech.lost(125, 10, 1, deaths).outcome for deaths in (25, 50, 100)] == ["absorbed", "absorbed", "retry"]


def test_more_deaths_than_peers_are_refused():
    with pytest.raises(InputError, match="deaths = 6: must be between 1 and the 5 peers"):
        technique("rdfl").lost(5, 10, 0, 6)
