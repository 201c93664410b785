"""Results that need no training: from plans, from the accountant of privacy, and from a race of real peers."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.budget import default_delta
from marfl.dp.calibration import NoisePlan
from marfl.errors import BrokenPromise
from marfl.plan.grid import Plan
from marfl.plan.keys import first_key, keys_plan, next_key, random_plan
from marfl.reproduce import hivemind_averager, real_peers

Vector = NDArray[np.float64]
Result = Mapping[str, float]
Groups = Sequence[Sequence[Sequence[int]]]  # of every round
RANDOM_PLANS = 20  # to average over
CHURN_DRAWS = 200


def growth(small: int, large: int) -> Result:
    """How much N·log N and N² grow between two numbers of peers; AR-FL's N(N−1) stands for N²."""
    nlogn = large * math.log(large) / (small * math.log(small))
    return {"nlogn": nlogn, "square": large * (large - 1) / (small * (small - 1))}


def mixing_law(peers: int, groups: int, trials: int) -> Result:
    """One round of random groups of equal size, by Monte Carlo; Equation 1's factor, and the exact (r−1)/(N−1)."""
    rng = np.random.default_rng(0)
    left = 0.0
    for _ in range(trials):
        values = rng.standard_normal(peers)
        values -= values.mean()
        means = rng.permutation(values).reshape(groups, -1).mean(axis=1)
        left += float(np.mean(means**2) / np.mean(values**2))
    return {
        "measured": left / trials,
        "paper": (groups - 1) / peers + groups / peers**2,
        "exact": (groups - 1) / (peers - 1),
    }


def variance_left(peers: int, group_size: int, rounds: int, dimension: int | None = None) -> Result:
    """The part of the variance that is left after the rounds: by the paper's keys, and by random groups."""
    keys = _variance(keys_plan(peers, group_size, rounds, dimension))
    drawn = [_variance(random_plan(peers, group_size, rounds, seed)) for seed in range(RANDOM_PLANS)]
    return {"keys": keys, "random": float(np.mean(drawn))}


def _variance(plan: Plan) -> float:
    return _variance_of(plan.peers, plan.rounds)


def _variance_of(count: int, rounds: Groups) -> float:
    """The expected part of the variance of independent values: the squared distance of the mixing matrix from 1/n."""
    mixing = np.eye(count)
    for groups in rounds:
        for group in groups:
            mixing[list(group)] = mixing[list(group)].mean(axis=0)
    distance = float(((mixing - 1 / count) ** 2).sum())
    return 0.0 if distance < 1e-20 else distance / (count - 1)


def thinned_groups(peers: int, group_size: int, participation: float, dropout: float) -> Result:
    """How many times MAR-FL's vectors AR-FL sends among those whom churn leaves, and the variance that MAR-FL leaves.

    `filled`: they are numbered anew and fill their groups up. `holes`: they keep the keys that they have on the full
    grid, so that whoever is absent leaves a hole in its groups, and the groups send less but mix worse.
    """
    rng = np.random.default_rng(0)
    sent: dict[str, float] = defaultdict(float)
    left: dict[str, float] = defaultdict(float)
    for _ in range(CHURN_DRAWS):
        drawn = rng.permutation(peers)[: round(participation * peers)]
        there = sorted(int(peer) for peer in drawn[rng.random(len(drawn)) >= dropout])
        sent["all to all"] += len(there) * (len(there) - 1)
        for name, rounds in (
            ("filled", keys_plan(len(there), group_size).rounds),
            ("holes", _groups_with_holes(peers, group_size, there)),
        ):
            sent[name] += sum(len(group) * (len(group) - 1) for groups in rounds for group in groups)
            left[f"variance_{name}"] += _variance_of(len(there), rounds) / CHURN_DRAWS
    return {name: sent["all to all"] / sent[name] for name in ("filled", "holes")} | dict(left)


def _groups_with_holes(peers: int, group_size: int, there: Sequence[int]) -> Groups:
    """The groups of the full grid's keys when only some are there; their members by place in `there`."""
    dimension = len(keys_plan(peers, group_size).rounds)
    keys = [first_key(peer, group_size, dimension) for peer in there]
    rounds: list[list[list[int]]] = []
    for _ in range(dimension):
        groups = defaultdict(list)
        for member, key in enumerate(keys):
            groups[key].append(member)
        rounds.append(list(groups.values()))
        for key, group in groups.items():
            for place, member in enumerate(group):
                keys[member] = next_key(key, place)
    return rounds


def lost_peer(peers: int, group_size: int) -> Result:
    """Whose value changes when peer 0 vanishes before a round: in the round (first, last), and at the end (all)."""
    plan = keys_plan(peers, group_size)
    start = np.random.default_rng(0).standard_normal(peers)
    final = _mixed(plan.rounds, start, lost_in=None)
    touched = [_touched(plan, start, round_number) for round_number in range(len(plan.rounds))]
    changed = np.abs(_mixed(plan.rounds, start, lost_in=0) - final) > 1e-12
    return {"first": touched[0], "last": touched[-1], "all": int(changed[1:].sum())}


def _touched(plan: Plan, start: Vector, round_number: int) -> int:
    """How many others hold another value right after the round in which peer 0 is missing."""
    rounds = plan.rounds[: round_number + 1]
    whole, without = _mixed(rounds, start, lost_in=None), _mixed(rounds, start, lost_in=round_number)
    return int((np.abs(whole - without) > 1e-12)[1:].sum())


def _mixed(rounds: Groups, start: Vector, lost_in: int | None) -> Vector:
    values = start.copy()
    for number, groups in enumerate(rounds):
        for group in groups:
            there = [peer for peer in group if peer != 0 or lost_in is None or number < lost_in]
            if there:
                values[there] = values[there].mean()
    return values


def sampling(noise: float, share: float, peers: int, iterations: int) -> Result:
    """An outsider's ε at δ = N^−1.1: at full participation, and for a share of the peers in each iteration.

    `formula` is the usual q²Tα/(2σ²) with the best α, `secret` the exact account of a secret sample, `public` that of
    a peer that was in its share of all public rosters.
    """
    delta = default_delta(peers)

    def epsilon(members: int, count: int, rate: float = 1.0) -> float:
        release = NoisePlan(noise, members, sampling=rate).release(members)
        return PrivacyLedger().add(release, count).epsilon(Observer.OUTSIDER, delta)

    orders = np.arange(1.01, 200.0, 0.01)
    curve = share**2 * iterations * orders / (2 * noise**2) + math.log(1 / delta) / (orders - 1)
    return {
        "full": epsilon(peers, iterations),
        "formula": float(curve.min()),
        "secret": epsilon(peers, iterations, share),
        "public": epsilon(peers, max(1, round(share * iterations))),
    }


def beside_hivemind(peers: int, parameters: int, steps: int, repetition: int) -> Result:
    """Seconds of an average among real peers on this machine, the slowest peer's: ours, and hivemind's own averager's.

    hivemind averages in one group of all, and in rounds of groups of two; each at the shortest matchmaking time at
    which all its groups form in every step.
    """
    ours = [step for step in real_peers.run(real_peers.TimedSwarm(peers, parameters, steps)).steps if step.whole]
    if len(ours) < steps:
        raise BrokenPromise(f"in {steps - len(ours)} of {steps} averages somebody was left out")
    found = {"seed": float(repetition), "ours": statistics.median(step.seconds for step in ours)}
    for name, group_size, rounds in (("one_group", peers, 1), ("pairs", 2, (peers - 1).bit_length())):
        found[name], found[f"matchmaking_{name}"] = _hivemind(peers, parameters, steps, group_size, rounds)
    return found


def _hivemind(peers: int, parameters: int, steps: int, group_size: int, rounds: int) -> tuple[float, float]:
    """(seconds, matchmaking time) of hivemind where all its groups form."""
    for matchmaking in hivemind_averager.MATCHMAKING:
        swarm = hivemind_averager.HivemindSwarm(peers, parameters, group_size, rounds, matchmaking, steps)
        done = hivemind_averager.run(swarm)
        if len(done) == steps and all(step.formed for step in done):
            return statistics.median(step.seconds for step in done), matchmaking
    raise BrokenPromise(f"hivemind formed its groups of {group_size} at none of these matchmaking times")


FUNCTIONS: dict[str, Callable[..., Result]] = {
    each.__name__: each
    for each in (growth, mixing_law, variance_left, thinned_groups, lost_peer, sampling, beside_hivemind)
}
