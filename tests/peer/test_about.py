"""Who is in a run, as somebody sees it who only looks; and what may keep a peer from taking part, in one line each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgpack
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    import marfl.net.libp2p.transport  # noqa: F401 - while its warnings are ignored
from marfl import AsyncPeer
from marfl.cli import main
from marfl.commands.peers_seen import duration
from marfl.errors import InputError, PeerGone, WireError
from marfl.net.libp2p.admission import new_authority, sign_token
from marfl.net.libp2p.identity import load_identity
from marfl.peer.about import About, decode_about, guest
from marfl.peer.checkup import LEAVING, Finding, Patient, examine
from marfl.settings import Network
from stages.library import QUICK, small_model

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
HERE = About("demo", "1.0", "library", 3, 7, "training", "ab" * 32, 1.5, "/ip4/127.0.0.1/tcp/1")


async def found(patient: Patient) -> dict[str, Finding]:
    return {finding.subject: finding async for finding in examine(patient)}


def test_what_a_peer_says_of_itself_comes_through_and_nonsense_is_refused():
    assert decode_about(HERE.encoded) == HERE
    later = msgpack.packb(msgpack.unpackb(HERE.encoded) | {"mood": "good"})
    assert decode_about(later) == HERE, "a later version may say more"
    for bad in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"run": "demo"}), msgpack.packb({"index": "x"})):
        with pytest.raises(WireError):
            decode_about(bad)
    rude = msgpack.packb(msgpack.unpackb(HERE.encoded) | {"state": "\x1b[2J" + "x" * 1000})
    assert decode_about(rude).state.startswith("?[2J")
    assert len(decode_about(rude).state) == 200


async def test_a_guest_sees_who_is_there_and_who_cannot_be_reached_and_the_swarm_keeps_nothing_with_it():
    async with AsyncPeer(small_model(0), **QUICK) as one, AsyncPeer(small_model(0), join=one.addresses, **QUICK) as two:
        await one.aggregate()
        gone = two._discovery.net
        async with guest(one.addresses[0]) as visitor:
            assert visitor.run == QUICK["run"]
            seen = {each.peer: each for each in await visitor.look()}
            assert set(seen) == {one.id, two.id}
            assert seen[one.id].about.iteration == 1
            assert seen[one.id].about.model == one.hash.hex()
            assert seen[one.id].about.state == "training"
            assert seen[one.id].about.sees.startswith("/ip4/127.0.0.1/tcp/")
            assert visitor.net.me not in one._discovery.here, "who only looks is not one of them"
            await gone.close()
            after = {each.peer: each for each in await visitor.look()}
            assert after[two.id].about is None
            assert after[two.id].why
            assert after[one.id].about is not None


async def test_a_closed_run_is_shown_to_who_holds_a_token(tmp_path: Path):
    authority = new_authority(tmp_path / "authority")

    def secrets(name: str) -> dict[str, object]:
        identity, token = tmp_path / name, tmp_path / f"{name}.token"
        token.write_text(sign_token(tmp_path / "authority", QUICK["run"], load_identity(identity).peer, 2.0))
        return {"identity": identity, "token": token, "authority": authority}

    async with AsyncPeer(small_model(0), **QUICK, **secrets("one")) as one:
        with pytest.raises(InputError, match="the run is closed"):
            async with guest(one.addresses[0]):
                pass
        async with guest(one.addresses[0], QUICK["run"], **secrets("eye")) as visitor:
            assert [each.peer for each in await visitor.look()] == [one.id]
        patient = Patient(QUICK["run"], join=one.addresses, **secrets("new"))
        says = await found(patient)
        assert says["join"].good
        assert not says["token"].good, "it ends in two days"
        assert "holds for 2.0 more days" in says["token"].says
        stranger = await found(Patient(QUICK["run"], join=one.addresses))
        assert "refuses this peer: the run is closed" in stranger["join"].says
        stolen = secrets("two") | {"identity": tmp_path / "three"}
        says = await found(Patient(QUICK["run"], join=one.addresses, **stolen))
        assert "has not signed it for" in says["token"].says
        assert says["port"].good, "a token is no matter of the port"
        assert "refuses this peer: the run is closed" in says["join"].says


async def test_the_doctor_finds_nothing_wrong_with_a_peer_that_can_take_part(tmp_path: Path):
    async with AsyncPeer(small_model(0), **QUICK) as one:
        says = await found(Patient("test", join=one.addresses, state_dir=tmp_path / "peer"))
    assert [finding for finding in says.values() if not finding.good] == []
    assert set(says) == {"versions", "disk", "port", "DHT", "join", "clock", "address"}
    assert "127.0.0.1, where it listens" in says["address"].says


async def test_the_doctor_names_a_port_that_is_taken_a_disk_that_is_closed_and_a_clock_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        (tmp_path / "file").write_text("")
        says = await found(Patient("test", (address,), state_dir=tmp_path / "file" / "peer"))
    assert not says["disk"].good
    assert "cannot be written" in says["disk"].says
    assert not says["port"].good
    assert address in says["port"].says
    async with AsyncPeer(small_model(0), **QUICK) as one:

        async def off(*_: object) -> float:
            return 3600.0

        monkeypatch.setattr("marfl.peer.checkup_network.ask_clock", off)
        says = await found(Patient("test", join=one.addresses))
        assert str(says["clock"]).startswith("PROBLEM  clock: 3600.0 seconds behind that of")
        nobody = one.addresses[0].rpartition("/p2p/")[0] + "/p2p/" + load_identity(tmp_path / "nobody").peer
        assert not (await found(Patient("test", join=(nobody,))))["join"].good


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Three addresses where somebody takes calls, and never says a word."""
    with ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        me = load_identity(Path(stack.enter_context(TemporaryDirectory())) / "key").peer
        yield [f"/ip4/127.0.0.1/tcp/{door.getsockname()[1]}/p2p/{me}" for door in doors]


async def test_the_doctor_asks_everybody_at_once_and_names_who_did_not_answer_in_time(silent: list[str]):
    begun = time.monotonic()
    relays = Network(trusted_relays=(silent[2],), relay=True, auto_relay=True)
    patient = Patient("test", join=tuple(silent[:2]), network=relays)
    says = [finding async for finding in examine(patient, 3.0)]
    assert time.monotonic() - begun < 3.0 + LEAVING + 1, "one after the other they would take much longer"
    missing = [finding for finding in says if not finding.good]
    assert [(each.subject, each.says) for each in missing] == [
        ("join", f"{silent[0]} did not answer within 3 seconds"),
        ("join", f"{silent[1]} did not answer within 3 seconds"),
        ("relay", f"{silent[2]} did not answer within 3 seconds"),
    ]
    assert {each.subject for each in says if each.good} == {"versions", "port", "DHT"}


SLOW_LIBRARY = "import threading; threading.Event().wait()"
DOCTOR = """
import sys
from marfl.peer import checkup
assert not {"torch", "hivemind", "scipy"} & set(sys.modules), "they take seconds, on a busy machine many"
from marfl.cli import main
checkup.run_doctor.__defaults__ = (checkup.seconds_since_start() + checkup.LEAVING + checkup.ENDING + 1.0,)
sys.exit(main(["doctor", "--state-dir", sys.argv[1], *sys.argv[2:]]))
"""


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_the_doctor_does_not_wait_for_a_library_that_takes_for_ever_to_load(tmp_path: Path, more: tuple[str, ...]):
    (tmp_path / "hivemind.py").write_text(SLOW_LIBRARY)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", DOCTOR, str(tmp_path / "peer"), *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "can be written" in done.stdout, "what needs no library was looked at"
    assert "torch and hivemind did not answer within" in done.stdout


async def test_an_address_where_nobody_is_is_one_line():
    with pytest.raises(PeerGone, match="nobody answers"):
        async with guest("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWD1nAPMZVPVJ2kyDgUcrXwgBt8FnyfFa3Q7ssFG4dMmqh"):
            pass


def test_the_id_of_a_peer_is_known_before_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["id", "--state-dir", str(tmp_path / "new" / "peer")]) == 0
    said = capsys.readouterr().out.strip()
    assert said == load_identity(tmp_path / "new" / "peer" / "identity").peer
    assert main(["id", "--identity", str(tmp_path / "new" / "peer" / "identity")]) == 0
    assert capsys.readouterr().out.strip() == said
    assert main(["id"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["id", "--state-dir", str(tmp_path / "file" / "peer")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("seconds", "said"), [(9.6, "10 s"), (99, "99 s"), (600, "10 min"), (36_000, "10.0 h"), (864_000, "10.0 d")]
)
def test_an_age_is_said_as_a_person_says_it(seconds: float, said: str):
    assert duration(seconds) == said
