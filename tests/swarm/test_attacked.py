"""Whole swarms under attack, real processes on loopback: all of it is refused and counted, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there
from marfl.config import Config, load
from marfl.net.libp2p.admission import TokenAdmission, new_authority, parse_authority, read_token, sign_token
from marfl.net.libp2p.cleanup import PREFIX, SHORT
from marfl.net.libp2p.connection import Libp2pSettings
from marfl.net.libp2p.identity import load_identity
from marfl.net.libp2p.transport import Libp2pNet
from marfl.sim.engine import simulate
from stages.attackers import CUT_OFF, Bomb, Stranger, forge_rosters
from stages.libp2p import hivemind_warnings
from stages.processes import PROGRAMS, SMALL_CONFIG, Process, Stage, new_stage

pytestmark = hivemind_warnings
stage = new_stage
RUN = Config().run_name
LIMIT = 400  # seconds for a process
# A run begins when everybody is there, and waits for the slowest, however loaded the machine is.
PATIENCE = (
    "--linger", "300", "--network", f"start_timeout={LIMIT}", "--network", "ready_timeout=100",
    "--network", "phase_timeout=15", "--network", "call_timeout=10",
)  # fmt: skip


@dataclass(frozen=True)
class Keys:
    """A closed run's authority, and who has a token of it."""

    folder: Path

    def authority(self, name: str = "authority") -> str:
        return new_authority(self.folder / f"{name}.key")

    def token(self, identity: Path, name: str = "authority") -> Path:
        """A token for the peer whose key is in a file, which is made where it is missing."""
        identity.parent.mkdir(exist_ok=True)
        place = identity.with_name(f"{identity.name}.{name}.token")
        place.write_text(sign_token(self.folder / f"{name}.key", RUN, load_identity(identity).peer, days=1))
        return place


class ClosedSwarm:
    """Peers of a closed run, each in a place of its own where everything that it writes is noted."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.keys = stage, Keys(stage.path)
        self.public = self.keys.authority()
        self.keys.authority("forger")
        self.processes: list[Process] = []
        for name in ("home", "work", "scratch"):
            (stage.path / name).mkdir()

    def start(self, join: list[str]) -> Process:
        index = len(self.processes)
        token = self.keys.token(self.stage.path / str(index) / "identity")
        places = {"HOME": self.stage.path / "home", "TMPDIR": self.stage.path / "scratch"}
        process = self.stage.start(
            index, "--token", str(token), "--authority", self.public, *PATIENCE, *join,
            program=(str(PROGRAMS / "watched_peer.py"), str(self.stage.path / f"notes{index}")), limit=LIMIT,
            cwd=self.stage.path / "work", env=os.environ | places | {"PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def hear(self, words: str) -> None:
        """Until all have said it."""
        await asyncio.gather(*(asyncio.to_thread(process.until, words) for process in self.processes))

    def names(self) -> tuple[str, ...]:
        """Of those that listen."""
        return tuple(load_identity(self.stage.path / str(i) / "identity").peer for i in range(len(self.processes)))

    def strays(self, index: int) -> Iterator[str]:
        """What a peer did beside writing in its state directory and its scratch, and listening."""
        own = (self.stage.path / str(index), self.stage.path / "scratch", Path(os.devnull))
        for line in (self.stage.path / f"notes{index}").read_text().splitlines():
            what, _, where = line.partition(" ")
            private = where.startswith(f"{SHORT}/{PREFIX}")  # where the path of its scratch is too long for a socket
            inside = private or any(Path(where).is_relative_to(each) for each in own)
            if what != "bound" and not (what == "wrote" and inside):
                yield line


@asynccontextmanager
async def attackers(swarm: ClosedSwarm, join: str, crater: Path) -> AsyncIterator[tuple[Stranger, Libp2pNet]]:
    """Somebody without a token, and a token holder that is not of the swarm."""
    folder = swarm.stage.path
    insider_token, stranger_key = swarm.keys.token(folder / "insider"), folder / "stranger"
    wrong = read_token(swarm.keys.token(stranger_key, "forger"))
    async with AsyncExitStack() as stack:
        places = Libp2pSettings(join=(join,), identity=stranger_key)
        stranger = await stack.enter_async_context(Libp2pNet.create(places))
        token = read_token(insider_token)
        admission = TokenAdmission(parse_authority(swarm.public), RUN, token)
        insider = Libp2pNet.create(replace(places, identity=folder / "insider"), admission)
        bomb = pickle.dumps(Bomb(crater))
        outsider = Stranger(stranger, swarm.names(), RUN, bomb, stolen=token, wrong=wrong)
        yield outsider, await stack.enter_async_context(insider)


@pytest.mark.parametrize(
    ("stage", "blobs"), [((3, 3), 60), pytest.param((4, 6), 10_000, marks=pytest.mark.slow)], indirect=["stage"]
)
def test_attackers_are_refused_and_counted_and_the_swarm_ends_on_the_same_model(stage: Stage, blobs: int):
    swarm, crater = ClosedSwarm(stage), stage.path / "crater"
    first = swarm.start([])
    first.until("to join this run")
    join = stage.read(0, "address").split()[0]
    for index in range(1, stage.peers - 1):
        swarm.start(["--join", join]).until(f"waiting for {stage.peers} peers")
        assert stage.read(index, "address")

    async def scene() -> tuple[dict[str, set[str]], Counter[tuple[str, str]], Stranger]:
        async with attackers(swarm, join, crater) as (stranger, insider):
            attack = asyncio.gather(stranger.say_everything(), stranger.throw_blobs(blobs, seed=7))
            swarm.start(["--join", join])  # the run begins when the attack has
            forged: Counter[tuple[str, str]] = Counter()
            for iteration in range(1, stage.iterations + 1):  # all through the run
                forged += await forge_rosters(insider, swarm.names(), RUN)
                await swarm.hear(f"iteration {iteration}:")
            await swarm.hear(f"all {stage.iterations} iterations are done")
            return (await attack)[0], forged, stranger

    said, forged, stranger = asyncio.run(scene())
    assert [process.signal(signal.SIGTERM) for process in swarm.processes] == [0] * stage.peers
    token = {"not allowed"}
    assert said == {
        "no token, a message": token, "no token, a roster": token, "no token, a sync request": token,
        "no token, a pickle": token, "oversized": {"oversized"}, "oversized header": {"oversized"},
        "truncated": {CUT_OFF}, "slow loris": {"too slow"}, "a bare pickle": {"garbage"},
        "record": {"refused"}, "token": {"refused"},
    }  # fmt: skip
    assert forged.keys() == {(name, "refused") for name in swarm.names()}
    assert stranger.refusals.total() == blobs
    assert stranger.refusals.keys() <= {"garbage", "oversized", "truncated", "too slow", "not allowed", CUT_OFF}
    summaries = [stage.summary(index) for index in range(stage.peers)]
    assert_counted(summaries, blobs)
    for name, summary in zip(swarm.names(), summaries, strict=True):
        assert summary["refused"]["not entitled"] >= forged[name, "refused"]
    expected = simulate(load(overrides=SMALL_CONFIG | {"peers": stage.peers, "iterations": stage.iterations}))
    assert {summary["model_hash"] for summary in summaries} == {expected["model_hash"]}
    assert sum(summary["sent"]["payload"] for summary in summaries) == expected["bytes_total"]
    assert [list(swarm.strays(index)) for index in range(stage.peers)] == [[]] * stage.peers
    for index in range(stage.peers):
        assert "checkpoint" in (stage.path / f"notes{index}").read_text()  # they were watched
    assert [list((stage.path / name).iterdir()) for name in ("home", "work", "scratch")] == [[]] * 3
    assert not crater.exists()


def assert_counted(summaries: list[dict[str, Any]], blobs: int) -> None:
    """Every peer counted what was done to it."""
    for summary in summaries[:-1]:  # those that were there when the attack began
        counts = summary["refused"]
        assert counts["not allowed"] >= 4
        assert counts["bad token"] >= 4
        assert counts["bad signature"] >= 3
        assert counts["oversized"] >= 2
        assert counts["truncated"] >= 1
        assert counts["too slow"] >= 1
        assert counts["garbage"] >= 1
        named = sum(map(Counter, summary["refused_from"].values()), Counter())
        unnamed = {"bad signature", "bad times"}  # records in another's name: nobody knows whose they are
        assert all(named[reason] for reason in ("not allowed", "bad token", "oversized", "truncated", "too slow"))
        assert not named.keys() & unnamed
        late = {"truncated", "not entitled"}  # a frame that was cut off, a question after its time
        for other in summaries:
            assert summary["refused_from"].get(other["peer"], {}).keys() <= late
    assert sum(sum(summary["refused"].values()) for summary in summaries) >= blobs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [(5, 4)], indirect=True)
def test_a_member_that_sends_nan_is_named_and_counted_and_the_others_average_as_if_it_were_not_there(stage: Stage):
    first = stage.start(0, *PATIENCE, limit=LIMIT)
    first.until("to join this run")
    join = ["--join", stage.read(0, "address").split()[0]]
    honest = [first, *(stage.start(index, *PATIENCE, *join, limit=LIMIT) for index in (1, 2, 3))]
    stage.start(4, *PATIENCE, *join, program=(str(PROGRAMS / "nan_peer.py"),), limit=LIMIT)
    for process in honest:
        process.until("all 4 iterations are done")
    assert [process.signal(signal.SIGTERM) for process in honest] == [0] * 4
    attacker = load_identity(stage.path / "4" / "identity").peer
    for row in (row for index in range(4) for row in stage.rows(index)):
        assert (row["status"], row["aggregators"]) == ("committed", 4), row
        assert row["missing"] == {attacker: "a chunk with NaN or infinity"}, row
    summaries = [stage.summary(index) for index in range(4)]
    assert sum(summary["refused"].get("bad data", 0) for summary in summaries) >= 4  # once in each iteration, at least
    assert {summary["model_hash"] for summary in summaries} == {without_the_fifth(stage.path)}


def without_the_fifth(folder: Path) -> str:
    """The model of the same run among five, one of which never comes."""
    (folder / "trace.csv").write_text("0,4,down\n")
    changes = SMALL_CONFIG | {"peers": 5, "iterations": 4, "churn": {"trace": folder / "trace.csv"}}
    return str(simulate(load(overrides=changes))["model_hash"])
