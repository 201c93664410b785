"""Chaos on real processes: ``python -m marfl.testing.chaos --minutes 10 [--seed N]``, or ``make chaos``.

Daemons (`marfl peer`) and library peers (`marfl.testing.chaos_peer`) take part in one run. By the dice of a seed they
are killed, stopped, cut off, robbed of their p2pd, told to leave, brought back and joined by others. Then all is calm,
and what must hold is checked (`chaos_checks`). A seed repeats what is done, not what comes of it: time is real here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from marfl.swarm import processes
from marfl.swarm.namespaces import Namespaces, why_not
from marfl.testing.chaos_checks import (
    ENOUGH,
    MIB,
    Commit,
    Usage,
    bounded,
    nothing_left,
    one_commit,
    read_commits,
    said_nothing_wrong,
    settled,
)

POLL = 0.5  # seconds
CALM = 240.0  # seconds in which everybody must come together again
LEAVE = 30.0  # seconds for a goodbye
PAUSE = (1.0, 7.0)  # between two strikes
START = 120.0  # seconds for the first iterations
RUN = "chaos"
SHARDS = 16
TASK = "marfl.testing.chaos_peer:SlowDigits"
P2PD = "p2pd"
NETWORK = {  # as patient as peers on one busy machine need, and no more: a run has many endings to see
    "start_timeout": 10, "ready_timeout": 10, "call_timeout": 3, "phase_timeout": 6, "minority_timeout": 25,
    "iteration_timeout": 90, "refresh": 5,
}  # fmt: skip


@dataclass
class Victim:
    """A peer through all its lives."""

    index: int
    daemon: bool
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    pids: list[int] = field(default_factory=list)  # of every life
    impaired: str = ""  # what was done to it, until that is over
    leaving: float = 0.0  # until when it must have gone
    gone: bool = False  # for good
    commits: list[Commit] = field(default_factory=list)  # every one that was ever seen
    _seen: set[Commit] = field(default_factory=set)
    _life: int = 0  # commits before this life

    @property
    def name(self) -> str:
        return f"{'daemon' if self.daemon else 'library'}{self.index}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.pids[-1]

    @property
    def address(self) -> str | None:
        try:
            return (self.folder / "address").read_text().split()[0]
        except (FileNotFoundError, IndexError):
            return None

    @property
    def at_work(self) -> bool:
        """Whether it has come through a few iterations in this life."""
        return len(self.commits) >= self._life + ENOUGH

    def start(self, command: list[str], scratch: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "address").unlink(missing_ok=True)
        self._life = len(self.commits)
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **threads, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
                preexec_fn=processes.die_with_parent,
            )  # fmt: skip
        self.pids.append(self.process.pid)
        self.impaired = ""

    def read(self) -> None:
        """Take in the rows. A daemon that comes back cuts its file: what was seen before stays seen."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return
        fresh = [commit for commit in read_commits(self.name, lines) if commit not in self._seen]
        self.commits += fresh
        self._seen.update(fresh)

    def p2pd(self) -> list[int]:
        return [pid for pid in processes.group_members(self.pid) if processes.command_name(pid) == P2PD]


class Chaos:
    """One run of it."""

    def __init__(self, seed: int, folder: Path, scratch: Path, namespaces: Namespaces | None, most: int) -> None:
        self.dice = random.Random(seed)
        self.folder, self.scratch, self.namespaces, self.most = folder, scratch, namespaces, most
        self.victims: list[Victim] = []
        self.struck: Counter[str] = Counter()
        self.usages: dict[int, Usage] = {}
        self.sockets: set[Path] = set()
        self.broken: list[str] = []
        self.begun = time.monotonic()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._polls = 0

    # --- peers ---

    def add(self, *, daemon: bool) -> Victim:
        index = len(self.victims)
        victim = Victim(index, daemon, self.folder / f"peer{index}")
        self.victims.append(victim)
        self.start(victim)
        return victim

    def start(self, victim: Victim) -> None:
        """Begin a life; it joins whoever listens."""
        join = [other.address for other in self.living if other is not victim and other.address]
        listen = f"/ip4/{self.namespaces.address(victim.index)}/tcp/0" if self.namespaces else "/ip4/127.0.0.1/tcp/0"
        python = [sys.executable, "-m"]
        if victim.daemon:
            command = [*python, "marfl", "peer", "--index", str(victim.index), "--of", str(SHARDS), "--task", TASK,
                       "--momentum", "local", "--group-size", "3", "--iterations", "1000000", "--test-every", "1000000",
                       "--state-dir", str(victim.folder), "--linger", "0", "--run", RUN]  # fmt: skip
            command += [word for name, value in NETWORK.items() for word in ("--network", f"{name}={value}")]
        else:
            command = [*python, "marfl.testing.chaos_peer", "--folder", str(victim.folder), "--run", RUN,
                       "--seed", str(victim.index), "--network", json.dumps(NETWORK)]  # fmt: skip
        command += ["--listen", listen, *(word for address in join for word in ("--join", str(address)))]
        where = self.namespaces.command(victim.index) if self.namespaces else []
        victim.start([*where, *command], self.scratch)

    @property
    def living(self) -> list[Victim]:
        return [victim for victim in self.victims if victim.alive]

    @property
    def staying(self) -> list[Victim]:
        return [victim for victim in self.victims if not victim.gone]

    # --- what is done to them ---

    def strike(self) -> None:
        """Throw the dice: who, and what."""
        free = [victim for victim in self.living if not victim.impaired and victim.address]
        impaired = len(self.staying) - len(free)
        if 2 * (impaired + 1) >= len(self.staying) and self.dice.random() > 0.1:
            return  # mostly a majority is left alone
        if not free:
            return
        victim = self.dice.choice(free)
        faults: list[Callable[[Victim], str]] = [
            self._kill, self._kill, self._stop, self._stop, self._stop_p2pd, self._kill_p2pd, self._leave,
            *([self._join] if len(self.staying) < self.most and len(self.victims) < SHARDS else []),
            *([self._cut, self._cut] if self.namespaces else []),
        ]  # fmt: skip
        fault = self.dice.choice(faults)
        self.say(fault(victim))
        self.struck[fault.__name__.strip("_").replace("_", " ")] += 1

    def _kill(self, victim: Victim) -> str:
        seconds = self.dice.choice([0.0, self.dice.uniform(1, 15)])
        victim.impaired = "killed"
        processes.signal_group(victim.pid, signal.SIGKILL)
        self._after(seconds, lambda: self._back(victim))
        return f"kill -9 {victim.name}, back after {seconds:.1f} s"

    def _stop(self, victim: Victim) -> str:
        seconds = self.dice.uniform(1, 20)
        victim.impaired = "stopped"
        processes.signal_group(victim.pid, signal.SIGSTOP)
        self._after(seconds, lambda: self._go_on(victim))
        return f"stop {victim.name} for {seconds:.1f} s"

    def _stop_p2pd(self, victim: Victim) -> str:
        """The peer runs, and its network hangs."""
        seconds, pids = self.dice.uniform(1, 20), victim.p2pd()
        victim.impaired = "stopped"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._after(seconds, lambda: self._go_on(victim))
        return f"stop p2pd of {victim.name} for {seconds:.1f} s"

    def _kill_p2pd(self, victim: Victim) -> str:
        for pid in victim.p2pd():
            os.kill(pid, signal.SIGKILL)
        return f"kill -9 p2pd of {victim.name}"

    def _leave(self, victim: Victim) -> str:
        victim.impaired, victim.leaving = "leaving", time.monotonic() + LEAVE
        os.kill(victim.pid, signal.SIGTERM)
        if len(self.staying) > self.most - 1 and self.dice.random() < 0.5:
            victim.gone = True
            return f"{victim.name} leaves for good"
        seconds = self.dice.uniform(3, 15)
        self._after(seconds, lambda: self._back(victim))
        return f"{victim.name} leaves, back after {seconds:.1f} s"

    def _join(self, _: Victim) -> str:
        return f"{self.add(daemon=self.dice.random() < 0.5).name} joins"

    def _cut(self, victim: Victim) -> str:
        """The victim, and perhaps one more, cannot reach the others, nor they it."""
        others = [other for other in self.living if other is not victim and not other.impaired]
        away = [victim, *self.dice.sample(others, min(len(others), self.dice.choice([0, 0, 1])))]
        seconds = self.dice.uniform(3, 30)
        for each in away:
            each.impaired = "cut"
        self._plug()
        self._after(seconds, lambda: self._mend(away))
        return f"cut off {', '.join(each.name for each in away)} for {seconds:.1f} s"

    def _plug(self) -> None:
        assert self.namespaces is not None
        cut = {victim.index for victim in self.victims if victim.impaired == "cut"}
        self.namespaces.split([int(index in cut) for index in range(SHARDS)])

    # --- what is mended ---

    def _back(self, victim: Victim) -> None:
        """Come back, once the last life is over."""
        if victim.alive:
            self._after(POLL, lambda: self._back(victim))
        elif not victim.gone:
            victim.leaving = 0.0
            self.start(victim)

    def _go_on(self, victim: Victim) -> None:
        processes.signal_group(victim.pid, signal.SIGCONT)
        victim.impaired = "" if victim.impaired == "stopped" else victim.impaired

    def _mend(self, away: list[Victim]) -> None:
        for victim in away:
            victim.impaired = "" if victim.impaired == "cut" else victim.impaired
        self._plug()

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what))

    # --- what is seen ---

    def poll(self) -> None:
        """Do what is due, read what peers wrote, and look at what they take."""
        time.sleep(POLL)
        now = time.monotonic()
        due = [what for when, what in self._later if when <= now]
        self._later = [(when, what) for when, what in self._later if when > now]
        for what in due:
            what()
        self._polls += 1
        for victim in self.victims:
            victim.read()
            if victim.alive:
                self._look(victim)
            elif not victim.impaired and not victim.gone:
                self._gave_up(victim)
            if victim.leaving and now > victim.leaving and victim.alive:
                self.broken.append(f"{victim.name}: did not leave in {LEAVE:.0f} seconds when told to")
                victim.leaving = 0.0
                processes.signal_group(victim.pid, signal.SIGKILL)

    def _gave_up(self, victim: Victim) -> None:
        """It ended by itself, as one that nobody lets in does; its output says why. Somebody starts it again."""
        assert victim.process is not None
        self.say(f"{victim.name} ended by itself, with {victim.process.returncode}: {_last_line(victim.folder)}")
        self.struck["ended by itself"] += 1
        victim.impaired = "ended"
        self._after(3.0, lambda: self._back(victim))

    def _look(self, victim: Victim) -> None:
        members = processes.group_members(victim.pid)
        for pid in (pid for pid in members if pid == victim.pid or processes.command_name(pid) == P2PD):
            what = f"{victim.name}, life {len(victim.pids)}" + (", p2pd" if processes.command_name(pid) == P2PD else "")
            usage = self.usages.setdefault(pid, Usage(what))
            size = processes.resident_bytes(pid)
            usage.peak = max(usage.peak, size)
            if victim.at_work and not usage.base:
                usage.base = usage.peak = size
            usage.descriptors = max(usage.descriptors, _descriptors(pid))
        if self._polls % 10 == victim.index % 10:
            self.sockets |= processes.sockets_of(members)

    def say(self, what: str) -> None:
        newest = max((victim.commits[-1].iteration for victim in self.victims if victim.commits), default=0)
        print(f"{time.monotonic() - self.begun:7.1f} s  iteration {newest:4}  {what}", flush=True)

    # --- the whole ---

    def play(self, seconds: float) -> None:
        """Begin, strike for so long, then wait until all have come together."""
        for daemon in (True, False, True, False, True):
            self.add(daemon=daemon)
            self._until(lambda: self.victims[0].address is not None, START)
        self._until(lambda: all(victim.at_work for victim in self.victims), START)
        self.say(f"{len(self.victims)} peers are at work")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pause = time.monotonic() + self.dice.uniform(*PAUSE)
            self._until(lambda pause=pause: time.monotonic() >= pause, seconds)  # type: ignore[misc]
            self.strike()
        self._calm()

    def _calm(self) -> None:
        self.say("calm")
        for victim in self.living:
            processes.signal_group(victim.pid, signal.SIGCONT)
        self._later = [(0.0, what) for _, what in self._later]
        for _ in range(2):
            self.poll()
        before = {victim.name: len(victim.commits) for victim in self.victims}

        def wrong() -> list[str]:
            return settled({v.name: v.commits[before[v.name] :] for v in self.staying})

        self._until(lambda: not wrong(), CALM)
        self.broken += wrong()
        self.say("together again" if not wrong() else "not together")

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not done() and time.monotonic() < limit:
            self.poll()

    def end(self) -> None:
        """Tell everybody to leave; whoever does not is killed, and named."""
        with processes.undisturbed():
            living = self.living
            for victim in living:
                processes.signal_group(victim.pid, signal.SIGCONT)
                os.kill(victim.pid, signal.SIGTERM)
            limit = time.monotonic() + LEAVE
            for victim in living:
                try:
                    assert victim.process is not None
                    victim.process.wait(max(0.1, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self.broken.append(f"{victim.name}: did not leave in {LEAVE:.0f} seconds at the end")
            time.sleep(POLL)
            left = {pid: processes.command_name(pid) for pid in _with_environment(f"TMPDIR={self.scratch}")}
            files = [*map(str, self.scratch.iterdir()), *(str(path) for path in self.sockets if path.exists())]
            self.broken += nothing_left(left, files)
            for victim in self.victims:
                if victim.process is not None:
                    processes.signal_group(victim.pid, signal.SIGKILL)
                    victim.process.wait()

    def judge(self) -> list[str]:
        """Every broken promise."""
        outputs = {victim.name: _text(victim.folder / "output") for victim in self.victims}
        commits = [commit for victim in self.victims for commit in victim.commits]
        return [*self.broken, *one_commit(commits), *bounded(self.usages.values()), *said_nothing_wrong(outputs)]

    def table(self) -> str:
        """Who lived how often and got how far, and what was done."""
        lines = [f"{'peer':10}{'lives':>6}{'commits':>9}{'last':>7}{'growth, peak':>16}{'of p2pd':>16}{'files':>8}"]
        for victim in self.victims:
            mine = [self.usages[pid] for pid in self.usages if self.usages[pid].process.startswith(f"{victim.name},")]
            parts = [[u for u in mine if u.process.endswith(P2PD) == daemon] for daemon in (False, True)]
            sizes = [f"{max((u.peak - u.base for u in part if u.base), default=0) / MIB:5.0f},"
                     f"{max((u.peak for u in part), default=0) / MIB:5.0f} MiB" for part in parts]  # fmt: skip
            last = victim.commits[-1].iteration if victim.commits else 0
            files = max((u.descriptors for u in mine), default=0)
            lines.append(f"{victim.name:10}{len(victim.pids):6}{len(victim.commits):9}{last:7}{sizes[0]:>16}{sizes[1]:>16}"
                         f"{files:8}")  # fmt: skip
        done = ", ".join(f"{count} × {what}" for what, count in sorted(self.struck.items()))
        lineages = len({commit.lineage for victim in self.victims for commit in victim.commits})
        return "\n".join([*lines, f"done: {done or 'nothing'}; {lineages} lineages"])


def _last_line(folder: Path) -> str:
    lines = _text(folder / "output").strip().splitlines()
    return lines[-1][:200] if lines else "it wrote nothing"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0  # it has just ended


def _with_environment(setting: str) -> Iterator[int]:
    """The processes that were started with this in their environment."""
    wanted = setting.encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                yield int(name)
        except OSError:
            continue  # it has just ended, or is somebody else's


@contextmanager
def _network(wanted: bool) -> Iterator[Namespaces | None]:
    """Namespaces where they can be made: without them nobody can be cut off, which is said."""
    why = why_not() if wanted else "not wanted"
    if why is not None:
        print(f"no network namespaces ({why}): nobody is cut off, peers and their p2pd are only stopped")
        yield None
    else:
        with Namespaces(SHARDS) as namespaces:
            yield namespaces


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Chaos on real peers, and what must hold all the same.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--most", type=int, default=7, help="peers at once")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="where the logs of a failing run stay")
    parser.add_argument("--no-namespaces", action="store_true")
    given = parser.parse_args(argv)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = (given.out / f"{seed}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    print(f"seed {seed}, {given.minutes:g} minutes, logs in {folder}", flush=True)
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="marfl-chaos-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        namespaces = stack.enter_context(_network(not given.no_namespaces))
        chaos = Chaos(seed, folder, scratch, namespaces, given.most)
        try:
            chaos.play(60 * given.minutes)
        finally:
            chaos.end()
    broken = chaos.judge()
    print(chaos.table())
    for line in broken:
        print(f"broken: {line}")
    print(f"seed {seed}: " + (f"{len(broken)} promises broken; logs in {folder}" if broken else "all promises kept"))
    if not broken:
        shutil.rmtree(folder)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
