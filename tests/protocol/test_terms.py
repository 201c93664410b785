"""The settings that all peers of a run share: one digest, the first difference by name, no commit that mixes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl.config import Config, load
from marfl.errors import InputError, WireError
from marfl.net.base import Parcel
from marfl.net.virtual_clock import run_virtual
from marfl.peer import compatibility as tables
from marfl.peer.compatibility import daemon_terms, library_terms, refuse_other_terms
from marfl.peer.options import PeerOptions
from marfl.peer.privacy_ledger import Private
from marfl.protocol import protocol_settings as protocol_tables
from marfl.protocol.participant import Participant
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.terms import MAX_BYTES, MOST, OTHERS, Difference, Terms, canonical, difference, digest_of, parsed
from marfl.schema import settings_of
from stages.virtual import LAYOUT, Swarm, advance

NOISE = {"privacy.noise_multiplier": 0.2, "peers": 3}


# --- who decides about a setting ---


@pytest.mark.parametrize(
    ("decided", "there_are"),
    [
        (
            [tables.SHARED, tables.OF_DISTILLATION, tables.OF_PRIVACY, tables.IN_PROTOCOL, tables.OWN],
            list(settings_of(Config)),
        ),
        ([protocol_tables.SHARED, protocol_tables.OWN], [field.name for field in dataclasses.fields(Settings)]),
        ([tables.SHARED_OPTIONS, tables.OWN_OPTIONS], [field.name for field in dataclasses.fields(PeerOptions)]),
    ],
    ids=["Config", "Settings", "PeerOptions"],
)
def test_whoever_adds_a_setting_decides_whether_all_peers_share_it(decided, there_are):
    names = list(itertools.chain(*decided))
    assert sorted(names) == sorted(there_are), "put the new setting in one of the tables of peer/compatibility.py"


OTHER: dict[str, Any] = {  # another value for every shared setting of a daemon
    "task": "digits", "task_options": {"classes": 3}, "technique": "fedavg", "technique_options": {"fanout": 2},
    "strategy": "diloco", "strategy_options": {"momentum": 0.5}, "local": ("head.*",), "overlap": True,
    "semantics": "paper", "coordination": "roster", "plan": "keys", "rounds": 2, "peers": 4, "seed": 1,
    "partition.kind": "iid", "partition.alpha": 2.0, "partition.min_samples": 2, "local_batches": 2, "batch": 8,
    "momentum": "local", "optimizer.learning_rate": 0.2, "optimizer.decay": 0.5, "churn.participation": 0.9,
    "churn.update_participation": 0.9, "churn.aggregate_participation": 0.9, "churn.dropout": 0.1, "churn.death": 0.1,
    "churn.sessions.up": 3.0, "churn.sessions.down": 2.0, "churn.slow": 0.5, "churn.slowness": 3, "global_batch": 64,
    "share_tests": True,
    "distill.iterations": 3, "distill.temperature": 2.0, "distill.keep": 0.5, "distill.epochs": 2,
    "distill.batches": 2, "distill.teacher": "previous", "distill.match_local_steps": True,
    "privacy.mode": "paper", "privacy.noise_multiplier": 0.1, "privacy.clip": 0.2, "privacy.target_quantile": 0.6,
    "privacy.clip_step": 0.3, "privacy.indicator_noise": 0.14, "privacy.shares": 4, "privacy.tolerated_loss": 0.1,
    "privacy.unit": "record", "privacy.records": 100,
}  # fmt: skip


def changed(config: Config, name: str, value: Any) -> Config:
    """This config with one leaf changed, whether or not it could run so."""
    tree = config.model_dump()
    if name.startswith("churn.sessions"):
        tree["churn"]["sessions"] = {"up": 1.0, "down": 1.0}
    if name == "churn.slow":
        tree["churn"]["sessions"] = None  # slow peers are for runs in which everybody is there
    *path, last = name.split(".")
    place = tree
    for part in path:
        place = place[part]
    place[last] = value
    return Config.model_validate(tree)


@pytest.mark.parametrize("name", [*tables.SHARED, *tables.OF_DISTILLATION, *tables.OF_PRIVACY])
def test_every_shared_setting_of_a_daemon_makes_another_digest_and_is_named(name: str):
    private = load(overrides=NOISE | {"task": "synthetic"})
    base = changed(changed(private, "distill.iterations", 2), "churn.sessions.up", 1.0)
    other = changed(base, name, OTHER[name])
    mine, theirs = (daemon_terms(config, Settings()) for config in (base, other))
    assert digest_of(canonical(mine)) != digest_of(canonical(theirs))
    found = difference(mine, theirs)
    assert found is not None
    assert found.name == name
    assert json.loads(json.dumps(OTHER[name])) == found.theirs


@pytest.mark.parametrize("name", tables.OWN)
def test_what_is_a_peers_own_makes_no_difference(name: str):
    own: dict[str, Any] = {
        "iterations": 7, "links": "wifi", "compute_seconds": 1.0, "engine": "fast", "workers": 3, "test_every": 9,
        "target_accuracy": 0.5, "patience": 3, "checkpoint_every": 3, "churn.trace": "trace.csv",
        "privacy.delta": 0.01, "privacy.target_epsilon": 99.0, "privacy.target_observer": "outsider", "device": "auto",
        "privacy.colluders": 1, "cluster": "auto", "other_nodes": "name", "test_on": "shards",
        "optimizer.slow_above": 0.5, "optimizer.slow_rate": 0.5,
    }  # fmt: skip
    base = load(overrides=NOISE)
    assert daemon_terms(changed(base, name, own[name]), Settings()) == daemon_terms(base, Settings())


def test_a_default_that_somebody_writes_out_makes_no_difference():
    base = load(overrides=NOISE)
    said = load(overrides=NOISE | {"privacy.shares": 3, "privacy.indicator_noise": 1.5 * 0.2, "privacy.mode": "sound"})
    assert daemon_terms(base, Settings()) == daemon_terms(said, Settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_size", 3), ("exchange", "full"), ("fallbacks", ("full",)), ("meet_until", 2), ("wire", "fixed")],
)
def test_every_shared_setting_of_the_protocol_is_named(name: str, value: Any):
    mine, theirs = (Terms(library_terms(None, each)) for each in (Settings(), replace(Settings(), **{name: value})))
    mine.learn(theirs.digest, theirs.encoded)
    found = mine.difference(theirs.digest)
    assert found is not None
    assert found.name == name
    assert name in protocol_tables.SHARED


def test_a_library_peer_shares_what_it_has_with_a_daemon():
    settings = Settings()
    daemon = daemon_terms(load(overrides={"momentum": "local"}), settings)
    library = library_terms(None, settings)
    assert difference(library, daemon) is None
    assert difference(daemon, library) is None
    derived = daemon_terms(load(), settings)
    assert difference(library, derived) == Difference("momentum", "local", "derive")
    private = Private({"noise_multiplier": 0.2, "shares": 3}, "fp32").config
    both = library_terms(private, settings), daemon_terms(load(overrides=NOISE | {"momentum": "local"}), settings)
    assert difference(both[0], library) == Difference("privacy.mode", "sound", "off")
    assert difference(*both) is None


def test_among_peers_of_one_kind_a_name_that_one_lacks_is_a_difference():
    assert difference({"kind": "daemon", "a": 1}, {"kind": "daemon", "a": 1, "b": 2}) == Difference("b", None, 2)
    assert str(Difference("b", None, 2)) == "b is not set here and 2 there"


# --- what travels ---


def test_terms_travel_and_junk_is_refused():
    mine = Terms(library_terms(None, Settings()))
    assert parsed(mine.encoded) == mine.mine
    spaced = json.dumps(mine.mine).encode()
    names = b'{"a\\nb":1}', b'{"%b":1}' % (b"a" * 61)
    for junk in (b"", b"[]", b"nonsense", b"\xff", spaced, b'{"a":NaN}', *names, b"[" * 100_000, bytes(MAX_BYTES + 1)):
        with pytest.raises(WireError):
            parsed(junk)
    with pytest.raises(WireError):
        mine.learn(bytes(32), mine.encoded)


def test_strangers_do_not_fill_the_memory_of_digests():
    mine = Terms({"a": 1})
    for value in range(2, 2 * MOST):
        other = canonical({"a": value})
        mine.learn(digest_of(other), other)
    assert len(mine._others) == MOST
    assert mine.agree(mine.digest)
    assert not mine.agree(bytes(32))


# --- among peers ---


def newcomer(swarm: Swarm, name: str, **settings: Any) -> Participant:
    """A peer with other settings that asks nobody whether it may."""
    net = swarm.network.join(name)
    other = replace(swarm.settings, **settings)
    me = Participant(net, other, int(name[1:]), LAYOUT, swarm.start, swarm.record, advance)
    swarm.people[name] = me
    return me


@pytest.mark.parametrize("named", [True, False], ids=["electors", "founding"])
@pytest.mark.parametrize("odd", range(5))
def test_whoever_leads_no_commit_mixes_peers_with_other_settings_and_they_are_named(odd: int, named: bool):
    """Every peer in turn is the one with another group size, so that the first to lead is it as well."""

    async def play() -> None:
        swarm = Swarm(5, named=named, expected=5)
        name = f"p{odd}"
        swarm.network.crash(name)
        newcomer(swarm, name, group_size=4)
        others = [other for other in swarm.names if other != name]
        for iteration in (1, 2, 3):
            outcomes = await swarm.iterate(skip=(name,) if named and iteration > 1 else ())
            for other in others:
                assert outcomes[other].status == "committed"
                assert set(outcomes[other].present) == set(others)
            if iteration == 1:
                why = "has other settings: group_size is 4, not 3"
                assert {outcomes[other].missing.get(name) for other in others} == {why}
        assert len(swarm.hashes(others)) == 1
        assert sum(swarm.people[other].net.refused[OTHERS] for other in others) > 0
        mine = swarm.people[name]
        assert mine.record.roster is None or set(mine.record.roster.ids) == {name}

    run_virtual(play())


def test_a_digest_that_is_not_known_yet_is_asked_for_and_counts_once_it_turns_out_to_agree():
    async def play() -> None:
        swarm = Swarm(4)
        shared = swarm.settings.terms
        for name, me in swarm.people.items():
            more = {"task": "digits"} if name != "p3" else {}
            me.terms = Terms({"kind": "daemon" if more else "library", **shared, **more})
        await swarm.iterate()
        assert await swarm.people["p3"].catch_up()
        outcomes = await swarm.iterate()
        assert {len(outcome.present) for outcome in outcomes.values()} == {4}

    run_virtual(play())


def test_a_joiner_is_refused_by_most_and_only_by_those_who_answer():
    async def play() -> None:
        swarm = Swarm(4)
        odd = Terms({**swarm.settings.terms, "group_size": 9})
        swarm.people["p2"].terms = swarm.people["p3"].terms = odd
        shown = {name: me.terms.digest for name, me in swarm.people.items()}
        net, mine = swarm.people["p0"].net, swarm.people["p0"].terms
        await refuse_other_terms(net, "test", mine, {name: shown[name] for name in ("p1", "p2")})
        await refuse_other_terms(net, "test", mine, {"nobody": bytes(32), "p1": shown["p1"]})
        await refuse_other_terms(net, "test", mine, {})
        with pytest.raises(InputError, match=r"peers have other settings: group_size is 3 here and 9 there \(p2\)"):
            await refuse_other_terms(net, "test", mine, {name: shown[name] for name in ("p1", "p2", "p3")})

    run_virtual(play())


def test_whoever_lies_about_its_terms_is_not_believed():
    async def play() -> None:
        swarm = Swarm(3)
        me, liar = swarm.people["p0"], swarm.people["p2"]

        async def lie(*_: Any) -> Parcel:
            return Parcel(me.terms.encoded)

        liar.net.serve("terms", lie)
        other = Terms({**swarm.settings.terms, "group_size": 9}).digest
        await me.terms.ask(me.talk, "p2", other)
        assert not me.terms.agree(other)
        assert me.terms.why(other) == "has other settings"

    run_virtual(play())
