"""What a peer keeps on the disk, and what it says of itself."""

from __future__ import annotations

import errno
import json
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    from marfl.peer.compatibility import decode_layout, encode_layout
    from marfl.peer.discovery import Presence, decode_presence
    from marfl.peer.loop import Part, read_parts
    from marfl.peer.state_dir import Checkpoint, StateDir
from marfl.errors import InputError, WireError
from marfl.net.base import Traffic
from marfl.protocol.participant import genesis
from marfl.runs import checkpoint
from marfl.state import Snapshot, layout_of


def memory(version: int = 0, value: float = 1.0) -> Checkpoint:
    state = Snapshot(version, {"theta": torch.full((4,), value), "momentum": torch.zeros(4)}, {"clip": 0.5})
    return Checkpoint(state, genesis(state), consumed=7, trained=3, momentum=torch.ones(4), sent=Traffic(payload=9))


def test_a_state_comes_back_as_it_was_saved(tmp_path):
    store = StateDir(tmp_path, "owner")
    assert store.load() is None
    kept = memory()
    store.save(kept)
    store.close()
    found = StateDir(tmp_path, "owner").load()
    assert found is not None
    assert found.state.hash == kept.state.hash == found.record.hash
    assert (found.consumed, found.trained, found.sent) == (7, 3, Traffic(payload=9))
    assert torch.equal(found.momentum, kept.momentum)


def test_a_peer_may_save_while_a_save_is_under_way(tmp_path):
    store = StateDir(tmp_path, "owner")
    with ThreadPoolExecutor(2) as threads:
        for saved in [threads.submit(store.save, memory()) for _ in range(100)]:
            saved.result()
    assert store.load() is not None


def test_a_full_disk_is_one_clear_line_and_the_old_state_stays(tmp_path, monkeypatch):
    store = StateDir(tmp_path, "owner")
    store.save(memory())

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", refuse)
    with pytest.raises(InputError, match="No space left on device"):
        store.save(memory(value=2.0))
    found = store.load()
    assert found is not None
    assert found.state.hash == memory().state.hash


def test_a_state_directory_has_one_process_at_a_time(tmp_path):
    store = StateDir(tmp_path, "owner")
    with pytest.raises(InputError, match=r"state directory .*another process"):
        StateDir(tmp_path, "owner")
    store.close()
    StateDir(tmp_path, "owner").close()


def test_a_state_of_another_run_is_refused(tmp_path):
    store = StateDir(tmp_path, "owner")
    store.save(memory())
    store.close()
    with pytest.raises(InputError, match="other settings"):
        StateDir(tmp_path, "another").load()


def test_a_peer_listens_where_it_did_before_unless_the_port_is_taken(tmp_path):
    store = StateDir(tmp_path, "owner")
    assert store.reclaim() == ()
    store.begin(["/ip4/127.0.0.1/tcp/0/p2p/me"])
    assert store.reclaim() == ("/ip4/127.0.0.1/tcp/0",)
    assert not (tmp_path / "address").exists()
    store.begin(["/ip4/192.0.2.1/tcp/4001/p2p/me"])  # not an address of this machine
    assert store.reclaim() == ()


def test_layouts_travel_and_junk_is_refused():
    layout = layout_of(torch.nn.Linear(3, 2))
    assert decode_layout(encode_layout(layout)).hash == layout.hash
    for junk in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\x92\xa1a\x90"):
        with pytest.raises(WireError):
            decode_layout(junk)


def test_presence_travels_and_junk_says_nothing():
    presence = Presence(3, b"l" * 32, ("/ip4/192.0.2.1/tcp/1/p2p/x",))
    assert decode_presence(presence.encoded) == presence
    assert [decode_presence(junk) for junk in (b"", b"\xc1", b"\x01", b"\x94\x01\x02\x03\x04")] == [None] * 4


def test_a_cast_says_who_does_what_and_counts_batches_as_the_simulator_does(tmp_path):
    file = tmp_path / "cast.json"
    file.write_text(json.dumps({"2": {"updaters": [0], "aggregators": [0, 1]}}))
    cast = read_parts(file, 1)
    assert [cast.part(iteration) for iteration in (1, 2, 3)] == [Part(), Part(updates=False), Part()]
    assert [cast.consumed(iteration, lambda _: 5) for iteration in (1, 2, 3, 4)] == [0, 5, 5, 10]


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", '{"x": {}}', '{"1": {"updaters": [0], "aggregators": [1]}}', '{"1": 3}']
)
def test_a_wrong_cast_is_refused(tmp_path, text):
    (tmp_path / "cast.json").write_text(text)
    with pytest.raises(InputError, match="--cast"):
        read_parts(tmp_path / "cast.json", 0)
