"""Who is in a run, as somebody sees it who only looks; and what may keep a peer from taking part, in one line each."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path

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
from marfl.peer.checkup import Finding, Patient, examine
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
        assert "has not signed it for" in (await found(Patient(QUICK["run"], **stolen)))["token"].says


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

        monkeypatch.setattr("marfl.peer.checkup.ask_clock", off)
        says = await found(Patient("test", join=one.addresses))
        assert str(says["clock"]).startswith("PROBLEM  clock: 3600.0 seconds behind that of")
        nobody = one.addresses[0].rpartition("/p2p/")[0] + "/p2p/" + load_identity(tmp_path / "nobody").peer
        assert not (await found(Patient("test", join=(nobody,))))["join"].good


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
