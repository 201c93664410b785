"""How the rows of many peers become the rows of one run."""

from __future__ import annotations

import json
from types import SimpleNamespace

from marfl.config import Config
from marfl.runs import ROW_FIELDS, SUMMARY_FIELDS, RunDir, open_run
from marfl.runs.rows import parse_peer_row
from marfl.swarm import Faults, Kill, Moment, Orders, Swarm, parse_kills
from marfl.swarm.peer_rows import Book, beyond, merged, with_more_sent
from marfl.swarm.record import Recorder

NAMES = {"a": 0, "b": 1, "c": 2}


def line(iteration=1, **changes):
    """What a peer writes of an iteration."""
    row = {name: None if "or null" in kind else 0 for name, kind in ROW_FIELDS.items()} | {
        "iteration": iteration, "status": "committed", "train_loss": 2.0, "test_loss": None, "test_accuracy": None,
        "wall_seconds": 1.0, "update_seconds": 0.5, "aggregate_seconds": 0.5, "model_hash": "aa" * 32,
        "present": ["a", "b", "c"], "missing": {}, "sent": {"payload": 100, "control": 10, "messages": 4, "dht": 3},
        "received": {}, "checks": [],
    }  # fmt: skip
    return row | changes


def peer_row(iteration=1, **changes):
    return parse_peer_row(line(iteration, **changes))


def test_bytes_add_up_and_the_slowest_peer_sets_the_time():
    row = merged(3, {0: peer_row(wall_seconds=1.0), 1: peer_row(wall_seconds=4.0), 2: peer_row()}, NAMES)
    assert (row["bytes_payload"], row["bytes_control"], row["messages"]) == (300, 30, 12)
    assert row["dht_operations"] == 9
    assert sum(row.bytes_sent.values()) == 330
    assert row["wall_seconds"] == 4.0
    assert ROW_FIELDS.keys() <= row.keys()


def test_equal_hashes_are_no_disagreement_and_unequal_ones_are_named():
    assert merged(1, {0: peer_row(), 1: peer_row()}, NAMES)["disagreement"] == 0.0
    split = merged(1, {0: peer_row(), 1: peer_row(), 2: peer_row(model_hash="bb" * 32)}, NAMES)
    assert split["disagreement"] is None
    assert split["model_hash"] == "aa" * 32
    assert "peers 0, 1 hold aaaaaaaa; peers 2 hold bbbbbbbb" in split["checks"]


def test_peers_that_average_without_votes_hold_their_result_like_those_that_commit():
    row = merged(1, {0: peer_row(status="averaged"), 1: peer_row(status="averaged", model_hash="bb" * 32)}, NAMES)
    assert row["checks"] == ["peers 0 hold aaaaaaaa; peers 1 hold bbbbbbbb"]


def test_whoever_is_missing_is_named_with_the_reason_and_by_whom():
    without_c = peer_row(missing={"c": "its data did not arrive"}, present=["a", "b"])
    row = merged(2, {0: without_c, 1: without_c}, NAMES)
    assert row["checks"] == ["peer 2 is missing: its data did not arrive (say 0, 1)"]
    assert (row["participants"], row["aggregators"]) == (2, 2)


def test_attempts_that_were_lost_are_in_the_row_of_the_run_and_peers_have_their_numbers():
    lost = "attempt 0 was lost: no slice of c from anybody"
    row = merged(1, {0: peer_row(checks=[lost, "this peer: its update is 1 iterations late"]), 1: peer_row()}, {"c": 2})
    assert row["checks"] == ["peer 0: attempt 0 was lost: no slice of peer 2 from anybody"]


def test_a_server_is_no_participant_and_a_stale_peer_holds_no_vote_on_the_hash():
    server = peer_row(train_loss=None, present=["a", "b", "server"])
    stale = peer_row(status="stale", train_loss=None, model_hash="cc" * 32, present=[])
    row = merged(1, {0: peer_row(present=["a", "b", "server"]), 1: stale, 3: server}, NAMES)
    assert (row["participants"], row["aggregators"]) == (2, 2)
    assert row["disagreement"] == 0.0
    assert row["checks"] == ["peer 1: stale"]


def test_a_delta_that_says_little_is_warned_of_in_the_rows_of_the_whole_swarm():
    warned = merged(1, {0: peer_row(), 1: peer_row(privacy_warnings=["delta = 0.02"])}, {})
    assert warned.more["privacy_warnings"] == ["delta = 0.02"]
    assert "privacy_warnings" not in merged(1, {0: peer_row()}, {}).more


def test_the_row_of_a_swarm_says_how_wide_values_were_if_a_peer_knows():
    row = merged(2, {0: peer_row(bits_up=4, bits_down=8), 1: peer_row(status="stale")}, {})
    assert (row.more["bits_up"], row.more["bits_down"]) == (4, 8)
    assert "bits_up" not in merged(1, {0: peer_row()}, {}).more


def test_bytes_that_are_in_no_row_are_counted_once():
    row = merged(1, {0: peer_row()}, NAMES)
    known, written = {"payload": 150, "control": 5, "messages": 6}, {"payload": 100, "control": 10, "messages": 4}
    row = with_more_sent(row, beyond(known, written))
    assert (row["bytes_payload"], row["bytes_control"], row["messages"]) == (150, 10, 6)
    assert with_more_sent(row, {"dht": 2}).dht_operations == 5


def test_the_book_leaves_a_torn_line_for_later_and_sees_a_file_that_was_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    book = Book([tmp_path, tmp_path / "not-there"])
    first, second = (json.dumps(line(t)) for t in (1, 2))
    file.write_text(f"{first}\n{second[:20]}")
    book.read()
    assert (book.last(0), book.last(1)) == (1, 0)
    file.write_text(f"{first}\n{second}\n")
    book.read()
    assert book.last(0) == 2
    assert book.sent(0)["payload"] == 200
    file.write_text(f"{first}\n")
    book.read()
    assert book.last(0) == 1
    assert book.of(1).keys() == {0}


def test_the_run_directory_of_a_swarm_has_every_field_that_a_simulations_has(tmp_path):
    config = Config(peers=1).resolved()
    file = tmp_path / "peer" / "metrics.jsonl"
    file.parent.mkdir()
    rows = [line(t, test_accuracy=t / 4, present=["a"]) for t in (1, 2)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    book = Book([file.parent])
    book.read()
    sent = {"payload": 230, "control": 20, "messages": 8, "dht": 6}
    peer = SimpleNamespace(
        index=0, name="a", fate="ended", sent=sent, status={"model_hash": "aa" * 32}, pids=[1], daemons=set(),
        resident=0, committed=2,
    )  # fmt: skip
    swarm = SimpleNamespace(peers=[peer], book=book, missing={}, notes=[], start_seconds=0.5)
    with RunDir.create(tmp_path / "run", config.as_dict()) as run:
        recorder = Recorder(config, run, swarm, model_bytes=40)
        recorder.look()
        summary = recorder.finish("all iterations done")
    opened = open_run(tmp_path / "run")
    assert SUMMARY_FIELDS.keys() - summary.keys() == {"config_hash"}  # the run directory fills it in
    assert (summary.engine, summary.final_accuracy, summary.bytes_total) == ("swarm", 0.5, 250)
    assert [row.bytes_total for row in opened.rows] == [110, 250]  # what is in no row of its own is in the last
    assert opened.summary == {**summary, "config_hash": opened.summary.config_hash}
    assert opened.finished


def test_a_kill_that_comes_too_late_is_an_error(tmp_path):
    swarm = Swarm(Orders(peers=2, folder=tmp_path, arguments=(), faults=Faults(parse_kills("0@2"))))
    (tmp_path / "0").mkdir()
    lines = [json.dumps(line(iteration)) for iteration in (1, 2, 3)]
    (tmp_path / "0" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (late,) = swarm.orders.faults.kills
    swarm._do(late)
    assert swarm.missed == ["--kill 0@2: came too late, in iteration 4"]
    swarm.missed.clear()
    swarm._do(Kill(0, Moment(4)))
    swarm._do(Kill(0, Moment(2, "exchanging")))  # in this state, in iteration 2 or later
    assert swarm.missed == []
