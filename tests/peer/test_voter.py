"""No key ever votes twice: the log of its votes is beside it, whichever process or directory uses it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl import Peer
from marfl.errors import InputError
from marfl.net.base import Parcel
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.state_dir import VOTES_KEPT, VoteLog
from marfl.peer.voter import keep_votes, real_participant
from marfl.protocol.instance import Instance
from marfl.protocol.messages import Ack, Endorse, Ok, Propose
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Member, Roster
from marfl.state import Snapshot, layout_of
from stages.library import QUICK, LibraryProcess, small_model, together, train
from stages.processes import Process, Stage, new_stage
from stages.virtual import Swarm, advance

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
stage = new_stage
START = Snapshot(0, {"theta": torch.zeros(4)}, {})


def begun(key: Path, run: str = "run", peer: str = "me") -> VoteLog:
    log = VoteLog(key)
    log.begin(peer, run)
    return log


def voter(log: VoteLog, network: VirtualNetwork | None = None) -> Participant:
    net = (network or VirtualNetwork(0)).join("me")
    founders = (("me", 0), ("leader", 1))
    layout = layout_of(torch.nn.Linear(3, 1))
    record = genesis(START, founders)
    made = real_participant(net, Settings(), 0, layout, START, record, lambda state, mean, roster: state)
    keep_votes(made, log)
    return made


def proposal(me: Participant) -> Propose:
    """Of the other elector, for the attempt that is its own."""
    instance = Instance.after(me.settings.run, me.record, 0.0)
    attempt = next(a for a in (0, 1) if instance.leader(a) == "leader")
    return Propose(1, attempt, -1, me.record.lineage, START.hash, False, 1, me.terms.digest)


# --- the log ---


def test_votes_survive_the_process_by_run_and_state_and_the_highest_iteration_is_never_forgotten(tmp_path: Path):
    log = begun(tmp_path / "key")
    for iteration in range(1, VOTES_KEPT + 10):
        log.note(iteration, iteration.to_bytes(32))
    log.note(3, b"x" * 32)  # of another lineage, which wins and is younger
    log.close()
    again = begun(tmp_path / "key")
    assert again.highest == VOTES_KEPT + 9
    assert again.cast_before(b"x" * 32)
    assert again.cast_before((VOTES_KEPT + 9).to_bytes(32))
    assert not again.cast_before(b"y" * 32)
    again.note(40, b"z" * 32)
    assert not again.cast_before(b"z" * 32), "what this very process votes in is its own to go on with"
    again.close()
    other = begun(tmp_path / "key", run="another")
    assert (other.highest, other.cast_before(b"x" * 32)) == (0, False)
    other.close()


@pytest.mark.parametrize(
    ("acks", "knows", "goes_on"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_decision_with_a_vote_of_mine_that_nobody_here_cast_ends_this_peer(
    tmp_path: Path, acks: bool, knows: bool, goes_on: bool
):
    """A restored log does not know the vote, and this process has entered the iteration anew before it hears of it."""

    async def play() -> None:
        if knows:  # an earlier process voted, and wrote it down
            earlier = begun(tmp_path / "key")
            earlier.note(1, START.hash)
            earlier.close()
        me = voter(begun(tmp_path / "key"))
        asked = proposal(me)
        instance = me.standing.enter()
        if acks:
            assert me.voting.vote("leader", asked).status == "ack"
        people = (Member("me", 0, 1.0), Member("leader", 1, 1.0))
        start, layout = me.record, me.standing.layout
        roster = Roster("run", 1, asked.attempt, start.lineage, start.hash, layout, "grid", 5, people, (), (), ())
        me.standing.decide(instance, start.after(roster, b"h" * 32), ("leader",))
        assert me.record.iteration == 1
        if goes_on:
            me.standing.enter()
        else:
            with pytest.raises(InputError, match="a vote of this peer in iteration 1 that it has not cast"):
                me.standing.enter()
        me.standing.diary.votes.close()

    run_virtual(play())


def test_every_start_of_a_key_is_another_incarnation_and_counts_up(tmp_path: Path):
    found = []
    for _ in range(3):
        log = begun(tmp_path / "key")
        found.append(log.incarnation)
        log.close()
    assert [incarnation >> 20 for incarnation in found] == [1, 2, 3]
    nobody = VoteLog()
    nobody.begin("me", "run")
    assert nobody.incarnation >> 20 == 0
    assert {file.name for file in tmp_path.iterdir()} == {"key.votes", "key.votes.lock"}


def test_a_key_is_used_by_one_process_at_a_time_also_through_a_link(tmp_path: Path):
    log = VoteLog(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    for name in ("key", "link"):
        with pytest.raises(InputError, match=rf"{name}: another process \(pid {os.getpid()}\) uses this key"):
            VoteLog(tmp_path / name)
    log.close()
    VoteLog(tmp_path / "link").close()


@pytest.mark.parametrize("text", ["nonsense", "[]", "{}", '{"peer": "me", "starts": 1, "runs": {"run": 3}}'])
def test_what_is_no_log_is_one_clear_line(tmp_path: Path, text: str):
    (tmp_path / "key.votes").write_text(text)
    with pytest.raises(InputError, match=r"key\.votes: is no"):
        begun(tmp_path / "key")


def test_the_log_of_another_key_is_not_taken_for_mine(tmp_path: Path):
    begun(tmp_path / "key", peer="somebody").close()
    with pytest.raises(InputError, match="is the vote log of another key, somebody"):
        begun(tmp_path / "key")


def test_a_directory_that_is_not_there_is_one_clear_line(tmp_path: Path):
    with pytest.raises(InputError, match="there is no such directory"):
        VoteLog(tmp_path / "nowhere" / "key")


# --- the vote ---


def test_an_iteration_is_on_the_disk_before_the_vote_in_it_and_barred_after_a_restart(tmp_path: Path):
    async def play(expected: str) -> None:
        log = begun(tmp_path / "key")
        me = voter(log)
        ack = me.voting.vote("leader", proposal(me))
        assert ack.status == expected
        saved = json.loads((tmp_path / "key.votes").read_text())
        assert saved["runs"]["run"] == {"highest": 1, "votes": [[1, START.hash.hex()]]}
        log.close()

    run_virtual(play("ack"))
    run_virtual(play("barred"))
    run_virtual(play("barred"))


def test_a_run_that_begins_anew_from_another_model_is_not_barred(tmp_path: Path):
    """Else a whole swarm that starts over under its old name would stand still where it once ended."""
    log = begun(tmp_path / "key")
    log.note(1, b"another model".ljust(32))
    log.close()

    async def play() -> None:
        again = begun(tmp_path / "key")
        me = voter(again)
        assert me.voting.vote("leader", proposal(me)).status == "ack"
        again.close()

    run_virtual(play())


def test_on_a_full_disk_no_vote_of_any_kind_is_cast_and_the_owner_is_told(disk: Path):
    async def play() -> None:
        log = begun(disk / "key")
        me = voter(log)
        with (disk / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):  # it is full
            while True:
                filler.write(bytes(4096))
        asked = proposal(me)
        assert (await me.voting.answer_propose("leader", asked.parcel())).header == b""
        endorse = Endorse(1, asked.attempt, b"", START.hash)
        answer = await me.voting.answer_endorse("leader", endorse.parcel())
        assert Ok.decode(answer.header).status == "refused"
        assert me.instance is None, "nothing was entered, so nothing can be voted for"
        with pytest.raises(InputError, match=r"key\.votes: cannot be written \(No space left on device\)"):
            await me.run_iteration(None)
        (disk / "filler").unlink()
        assert me.voting.vote("leader", asked).status == "ack"
        log.close()

    run_virtual(play())


# --- real processes ---


@pytest.fixture
def started() -> Iterator[list[LibraryProcess]]:
    found: list[LibraryProcess] = []
    yield found
    for process in found:
        process.close()


def asked_for_a_vote(leader: Peer, peer: str) -> str:
    """What a peer says when this one asks for its vote, in the next attempt that is this one's to lead."""
    me = leader._peer._voter

    async def ask() -> str:
        instance = me.standing.enter()
        rank = instance.rank(me.net.me)
        assert rank is not None
        said: list[Parcel | None] = []
        whole = me.talk.ask

        async def listen(*question: Any) -> Parcel | None:
            said.append(await whole(*question))
            return said[-1]

        me.talk.ask = listen  # type: ignore[method-assign]
        try:
            await me.leader.propose(instance, instance.next_attempt(rank), {peer})
        finally:
            del me.talk.ask
        assert said[0] is not None
        return str(Ack.decode(said[0].header).status)

    return leader._do(ask())


def test_a_library_peer_killed_in_an_iteration_does_not_vote_in_it_again_but_in_the_next(tmp_path, started):
    models = [small_model(seed) for seed in range(2)]
    settings = QUICK | {"expected": 3}
    with Peer(models[0], **settings) as one, Peer(models[1], join=one.addresses, **settings) as two:
        mine = {**settings, "identity": str(tmp_path / "key"), "join": one.addresses}
        started.append(LibraryProcess(**mine))
        name = started[0].hear()["id"]

        def everybody() -> list[Any]:
            for seed, model in enumerate(models):
                train(model, seed)
            return together(one.aggregate, two.aggregate, started[-1].aggregate)

        assert [name in outcome.present for outcome in everybody()[:2]] == [True, True]
        assert asked_for_a_vote(one, name) == "ack"
        started[0].close()

        started.append(LibraryProcess(**mine))
        again = started[1].hear()
        assert (again["id"], again["iteration"]) == (name, 1)
        assert asked_for_a_vote(one, name) == "barred"
        second, _, its = everybody()
        assert (second.status, second.iteration, name in second.missing) == ("committed", 2, True)
        assert its["status"] == "stale"
        third, _, its = everybody()
        assert (third.iteration, name in third.present) == (3, True)
        assert (its["status"], its["iteration"], its["present"]) == ("committed", 3, sorted(third.present))


def test_a_second_process_with_the_same_key_is_refused_by_one_line(tmp_path, started):
    started.append(LibraryProcess(run="test", identity=str(tmp_path / "key")))
    first = started[0].hear()
    assert first["iteration"] == 0
    with (
        pytest.raises(InputError, match=r"identity .*key: another process \(pid \d+\) uses this key; stop it"),
        Peer(small_model(0), run="another", identity=tmp_path / "key"),
    ):
        pass
    started[0].close()
    with Peer(small_model(0), run="test", identity=tmp_path / "key") as later:
        assert later.id == first["id"]


# --- votes that the log does not know ---


def restarted(swarm: Swarm, key: Path) -> Participant:
    """The peer p2 in a new process that begins with nothing but its key and its log."""
    swarm.network.crash("p2")
    net = swarm.network.join("p2")
    layout = layout_of(torch.nn.Linear(3, 1))
    me = real_participant(net, swarm.settings, 2, layout, swarm.start, swarm.record, advance)
    me.standing.layout = swarm.people["p0"].standing.layout
    keep_votes(me, begun(key, run="test", peer="p2"))
    swarm.people["p2"] = me
    return me


def test_a_peer_whose_log_is_older_than_its_votes_says_so_and_votes_no_more(tmp_path: Path):
    async def play() -> None:
        swarm = Swarm(3)
        me = restarted(swarm, tmp_path / "key")
        for iteration in (1, 2, 3):
            if iteration == 2:
                shutil.copy(tmp_path / "key.votes", tmp_path / "backup")
            await swarm.iterate()
        me.standing.diary.votes.close()
        me = restarted(swarm, tmp_path / "key")
        assert await me.catch_up(), "its own log knows of the vote in iteration 3"
        me.standing.diary.votes.close()
        shutil.copy(tmp_path / "backup", tmp_path / "key.votes")
        me = restarted(swarm, tmp_path / "key")
        line = r"a vote of this peer in iteration 3, but its vote log .*key\.votes ends with iteration 1: .* a new key"
        with pytest.raises(InputError, match=line):
            await me.catch_up()
        with pytest.raises(InputError, match=line):
            await me.run_iteration(None)
        with pytest.raises(InputError, match=line):
            me.standing.enter()
        other = swarm.people["p0"].standing
        heard = other.notices.about(other.enter())
        await me.farewell()
        assert other.notices.about(other.enter()) == heard, "it says no goodbye for a twin"
        me.standing.diary.votes.close()

    run_virtual(play())


def test_a_state_that_is_newer_than_the_log_beside_it_is_refused_at_once(tmp_path: Path):
    async def play() -> None:
        swarm = Swarm(3)
        await swarm.iterate()
        swarm.record, swarm.start = swarm.people["p0"].record, swarm.people["p0"].state
        with pytest.raises(InputError, match=r"in iteration 1, but its vote log .* ends with iteration 0"):
            restarted(swarm, tmp_path / "key")

    run_virtual(play())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [(3, 100_000)], indirect=True)
def test_a_restored_backup_of_a_state_directory_is_told_so_and_ends(stage: Stage, tmp_path: Path):
    first = stage.start(0)
    first.until("to join this run")
    join = ["--join", stage.read(0, "address").split()[0]]
    others = [stage.start(index, *join) for index in (1, 2)]
    others[1].until("iteration 1:")
    ended(others[1])
    shutil.copytree(tmp_path / "2", tmp_path / "backup")
    again = stage.start(2, *join)
    again.until("3 of 3 known averaged")
    again.until("3 of 3 known averaged")
    ended(again)
    shutil.rmtree(tmp_path / "2")
    shutil.copytree(tmp_path / "backup", tmp_path / "2")
    restored = stage.start(2, *join)
    line = restored.until("marfl: ")
    assert re.search(r"a vote of this peer in iteration \d+, but its vote log .*identity\.votes ends with", line)
    assert restored.popen.wait() == 2


def ended(process: Process) -> None:
    process.signal(signal.SIGKILL)
    assert process.popen.stderr is not None
    process.popen.stderr.read()  # its end: nobody of its group is left


def test_of_two_processes_with_one_key_only_one_counts_and_the_other_is_named(tmp_path, started):
    """Copies of a key and its log on two machines: neither lock nor log tells them apart, but their incarnations do."""
    model = small_model(0)
    with Peer(model, **QUICK | {"expected": 2}) as one:
        for name in ("key", "twin"):
            started.append(LibraryProcess(**QUICK, identity=str(tmp_path / name), join=one.addresses))
            said = started[-1].hear()
            if name == "key":
                me = said["id"]
                assert me in together(one.aggregate, started[0].aggregate)[0].present
                started[0].close()
                for ending in ("", ".votes"):
                    shutil.copy(tmp_path / f"key{ending}", tmp_path / f"twin{ending}")
                started[0] = LibraryProcess(**QUICK, identity=str(tmp_path / "key"), join=one.addresses)
                assert started[0].hear()["id"] == me
                assert me in together(one.aggregate, started[0].aggregate)[0].present
        assert said["says"].startswith("run 'test': the others count a vote of this peer in iteration 2, but its vote")
        assert me in together(one.aggregate, started[0].aggregate)[0].present, "the first is not disturbed"


@pytest.mark.slow
def test_a_restored_backup_that_nobody_tells_so_is_named_and_not_counted(tmp_path, started):
    """The others have gone on without it: no record shows it that its log is old, but they know its incarnation."""
    with Peer(small_model(0), **QUICK | {"expected": 2}) as one:
        mine = {**QUICK, "identity": str(tmp_path / "key"), "join": one.addresses}
        for _ in range(3):
            started.append(LibraryProcess(**mine))
            me = started[-1].hear()["id"]
            assert me in together(one.aggregate, started[-1].aggregate)[0].present
            assert started[-1].quit() == 0
            if len(started) == 1:
                shutil.copy(tmp_path / "key.votes", tmp_path / "backup")
            assert one.aggregate().present == (one.id,)
        shutil.copy(tmp_path / "backup", tmp_path / "key.votes")
        started.append(LibraryProcess(**mine))
        assert started[-1].hear()["iteration"] == 6
        outcome, its = together(one.aggregate, started[-1].aggregate)
        why = "is a restored backup, or another process uses its key (incarnation 2 after 3)"
        assert (outcome.present, outcome.missing) == ((one.id,), {me: why})
        assert its["status"] == "stale"
        assert one.refused["second incarnation"] > 0
