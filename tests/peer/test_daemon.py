"""`marfl peer`: real processes on loopback, killed and restarted, end on the simulator's bits."""

from __future__ import annotations

import json
import signal
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    import marfl.peer.daemon  # noqa: F401 - while its warnings are ignored

from marfl.cli import main
from marfl.config import load
from marfl.net.libp2p.admission import new_authority, sign_token
from marfl.net.libp2p.connection import Libp2pSettings
from marfl.net.libp2p.identity import load_identity
from marfl.net.libp2p.p2pd import check_addresses
from marfl.peer.daemon import Daemon, Options
from marfl.peer.loop import ALONE, DONE, LEFT_OUT, Part, VotedLoop
from marfl.sim.engine import simulate
from stages.processes import SMALL_CONFIG, Process, new_stage

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
stage = new_stage


@pytest.mark.parametrize("stage", [(3, 4)], indirect=True)
def test_three_peers_end_on_the_simulators_hash_and_bytes_and_the_printed_line_is_all_one_types_to_join(stage):
    """With momentum that peers keep, which must be in that line; the other kind is what real swarms are tested with."""
    first = stage.start(0, "--momentum", "local", "--network", "ready_timeout=30")
    line = first.until("to join this run")
    page_at = first.until("the live page: http://127.0.0.1:")
    assert line.rstrip().endswith("--momentum local --test-every 100 --network ready_timeout=30")
    processes = (first, stage.type(line, 1), stage.type(line, 2))
    for process in processes:
        process.until("all 4 iterations are done")
    page = stage.status(0)
    assert (page["index"], page["iteration"], page["state"]) == (0, 4, "done")
    assert page["pid"] == int(stage.read(0, "pid"))
    assert "marfl_iteration{" in stage.get(0, "metrics")
    assert "<title>marfl</title>" in stage.get(0, "page")
    assert f":{stage.read(0, 'status').strip()}/page" in page_at
    shown = json.loads(stage.get(0, "data"))
    assert [len(each["present"]) for each in shown["iterations"]] == [3] * 4
    assert [peer["here"] for peer in shown["peers"]] == [True] * 3
    ways = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert [process.signal(way) for process, way in zip(processes, ways, strict=True)] == [0, 0, 0]
    summaries = [stage.summary(index) for index in range(3)]
    expected, other = (
        simulate(load(overrides=SMALL_CONFIG | {"peers": 3, "iterations": 4, "momentum": momentum}))
        for momentum in ("local", "derive")
    )
    assert {summary["model_hash"] for summary in summaries} == {expected["model_hash"]} != {other["model_hash"]}
    assert sum(summary["sent"]["payload"] for summary in summaries) == expected["bytes_total"]
    rows = [json.loads(line) for line in stage.read(2, "metrics.jsonl").splitlines()]
    assert [(row["iteration"], row["status"], row["aggregators"], row["missing"]) for row in rows] == [
        (iteration, "committed", 3, {}) for iteration in range(1, 5)
    ]


async def test_the_line_to_join_a_closed_run_has_the_authority_and_room_for_a_token(tmp_path):
    authority, token = new_authority(tmp_path / "authority"), tmp_path / "token"
    token.write_text(sign_token(tmp_path / "authority", "demo", load_identity(tmp_path / "key").peer, 30.0))
    config = load(overrides={"peers": 3})
    shared = f"--authority {authority} --task digits"
    closed = Options(0, tmp_path / "peer", "demo", token=token, authority=authority, shared_flags=shared)
    daemon = Daemon(config, closed)
    daemon.addresses = ("/ip4/127.0.0.1/tcp/1/p2p/x",)
    line = daemon._how_to_join()
    daemon.store.close()
    assert line == f"--index I --of 3 --state-dir DIR --token TOKEN --run demo --join {daemon.addresses[0]} {shared}"


@pytest.mark.parametrize(("counted", "company", "ended"), [(0, True, LEFT_OUT), (1, True, DONE), (2, False, ALONE)])
async def test_a_peer_whose_updates_did_not_count_or_that_was_alone_does_not_say_that_all_is_done(
    counted, company, ended
):
    record = SimpleNamespace(iteration=0)
    voter = SimpleNamespace(record=record, behind=False)
    loop = SimpleNamespace(voter=voter, end=2, account=None, ended=DONE, brought=0, counted=0, state="")
    loop.accompanied, loop.parts, loop.config = company, None, SimpleNamespace(peers=3)

    async def take_part(iteration, part):
        record.iteration, loop.brought, loop.counted = iteration, iteration, counted
        return False

    async def at_once(work):
        return work()

    async def caught_up():
        return True

    loop._in_thread, loop._last_iteration, loop.catch_up = at_once, lambda: 2, caught_up
    loop._part, loop._take_part = lambda _: Part(), take_part
    await VotedLoop.run(loop)
    assert loop.ended.startswith(ended)


def test_a_peer_that_was_left_out_of_all_iterations_ends_with_code_1(monkeypatch, tmp_path):
    ends = iter([f"{LEFT_OUT}: none of its 2 updates is in an average", f"{ALONE}: …", DONE])
    monkeypatch.setattr("marfl.peer.daemon.run_daemon", lambda *_: next(ends))
    command = ["peer", "--index", "0", "--of", "2", "--state-dir", str(tmp_path)]
    assert [main(command) for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("stage", [(3, 6)], indirect=True)
def test_the_bootstrap_peer_killed_and_restarted_rejoins_and_ends_on_the_swarms_hash(stage):
    quick = ["--network", "ready_timeout=3"]
    first = stage.start(0, *quick)
    first.until("to join this run")
    join = ["--join", stage.read(0, "address").split()[0]]
    others = [stage.start(index, *join, *quick) for index in (1, 2)]
    first.until("iteration 2:")
    first.signal(signal.SIGKILL)
    assert not (stage.path / "0" / "summary.json").exists()
    for process in others:
        process.until("all 6 iterations are done")
    killed = json.loads(stage.read(0, "identity.votes"))["runs"]["seed-0"]["highest"]
    again = stage.start(0, *quick)  # no --join: it remembers whom it met
    again.until("all 6 iterations are done")
    assert any("caught up: iteration 6" in line for line in again.said)
    assert [process.signal(signal.SIGTERM) for process in (*others, again)] == [0, 0, 0]
    summaries = [stage.summary(index) for index in range(3)]
    assert len({summary["model_hash"] for summary in summaries}) == 1
    assert killed in (2, 3, 4)
    missing = [json.loads(line)["missing"] for line in stage.read(1, "metrics.jsonl").splitlines()]
    assert sum(summaries[0]["peer"] in named for named in missing) == 1, "it is named once, then no longer expected"
    assert [summary["iteration"] for summary in summaries] == [6, 6, 6]


@pytest.mark.parametrize("coordination", ["roster", "paper"])
@pytest.mark.parametrize("stage", [(3, 2)], indirect=True)
def test_after_a_restart_of_all_the_first_ones_wait_for_the_last_however_long_its_start_takes(stage, coordination):
    def start(index: int, *join: str) -> Process:
        return stage.start(index, *join, "--coordination", coordination, "--network", "ready_timeout=2")

    def begin() -> tuple[Process, list[str]]:
        first = start(0)
        first.until("to join this run")
        return first, ["--join", stage.read(0, "address").split()[0]]

    first, join = begin()
    processes = [first, *(start(index, *join) for index in (1, 2))]
    for process in processes:
        process.until("all 2 iterations are done")
    assert [process.signal(signal.SIGTERM) for process in processes] == [0, 0, 0]
    stage.iterations = 3
    first, join = begin()
    second = start(1, *join)
    first.until("waiting for 3 peers to go on: 2 here")
    processes = [first, second, start(2, *join)]
    for process in processes:
        process.until("all 3 iterations are done")
    assert [process.signal(signal.SIGTERM) for process in processes] == [0, 0, 0]
    assert [row["aggregators"] for row in stage.rows(0)] == [3, 3, 3]


RELAYED = ["--index", "0", "--of", "3", "--network", "relay=true", "--network", "auto_relay=true", "--network"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--index", "3", "--of", "3"], "--index 3: must be from 0 to 2"),
        (["--index", "0", "--of", "3", "--server"], "--server: technique mar has no server"),
        (["--index", "0", "--of", "3", "--listen", "nowhere"], "listen: 'nowhere' is not a multiaddress"),
        (["--index", "0", "--of", "3", "--join", "/ip4/127.0.0.1/tcp/1"], "does not name its peer"),
        (["--index", "0", "--of", "3", "--authority", "ab"], "needs both"),
        (["--index", "0", "--of", "3", "--network", "reddy_timeout=3"], "did you mean network.ready_timeout?"),
        (["--index", "0", "--of", "3", "--network", "poll=often"], "network.poll must be a number, above 0"),
        (["--index", "0", "--of", "3", "--network", "reachability=no"], "network.reachability must be one of auto,"),
        ([*RELAYED, "trusted_relays=you"], "trusted_relays: 'you' is not a multiaddress"),
        ([*RELAYED, "trusted_relays=/ip4/1.2.3.4/tcp/1"], "does not name its peer"),
        (["--index", "0", "--of", "3", "--network", "trusted_relays=/ip4/1.2.3.4/tcp/1"], "needs auto_relay as well"),
        (["--index", "0", "--of", "3", "--cast", "missing.json"], "--cast missing.json: cannot be read"),
        (["--index", "0", "--of", "3", "--task", "digitz"], "task 'digitz'"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments, says, tmp_path, capsys):
    assert main(["peer", *arguments, "--state-dir", str(tmp_path / "peer")]) == 2
    error = capsys.readouterr().err.splitlines()
    assert says in error[-1]


@pytest.mark.parametrize("flag", ["--join", "--listen"])
def test_a_malformed_address_is_refused_before_anything_is_written(flag, tmp_path, capsys):
    arguments = ["--index", "0", "--of", "2", "--state-dir", str(tmp_path / "peer"), flag, "/ip4/nowhere/tcp/1"]
    assert main(["peer", *arguments]) == 2
    assert "'/ip4/nowhere/tcp/1' is not a multiaddress" in capsys.readouterr().err
    assert not (tmp_path / "peer").exists()


def test_a_peer_that_others_cannot_call_back_is_warned(caplog):
    away = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWHg9eR8c12tdrv59hk488un3rzja1DQcHBkf9sdjbJ3W1"
    check_addresses(Libp2pSettings(join=(away,)))
    assert f"such as {away}, cannot call it" in caplog.text
    caplog.clear()
    check_addresses(Libp2pSettings(listen=("/ip4/0.0.0.0/tcp/0",), join=(away,)))
    check_addresses(Libp2pSettings(join=(away.replace("192.0.2.7", "127.0.0.1"),)))
    assert not caplog.text


def test_a_state_directory_that_cannot_be_used_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["peer", "--index", "0", "--of", "1", "--state-dir", str(tmp_path / "file" / "peer")]) == 2
    assert "state directory" in capsys.readouterr().err
