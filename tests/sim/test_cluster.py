"""The executor on a real Ray cluster of two nodes: the same hashes, whatever dies, and one line for what is wrong.

What needs Ray takes half a minute to start it: all of that is slow. Errors before Ray is asked are not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marfl.cli import main
from marfl.config import load
from marfl.errors import InputError
from marfl.sim import cluster
from marfl.sim.engine import Simulation, simulate
from marfl.sim.executor import Job, portions

PATHS = os.pathsep.join([*(path for path in sys.path if path), str(Path(__file__).parents[1])])
NODE = {"num_cpus": 1, "object_store_memory": 150_000_000, "node_ip_address": "127.0.0.2"}
SLOW_TASK = "stages.slow_task:SlowTask"
SMALL: dict[str, Any] = {"task": "synthetic", "task_options": {"samples": 400}, "peers": 9, "group_size": 3,
                         "iterations": 3, "batch": 16}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "mar": {},
    "momentum sent": {"momentum": "send"},
    "momentum local": {"momentum": "local"},
    "fedavg": {"technique": "fedavg"},
    "rdfl": {"technique": "rdfl"},
    "arfl": {"technique": "arfl"},
    "ring": {"technique": "ring"},
    "butterfly": {"technique": "butterfly"},
    "as published": {"semantics": "paper", "churn.participation": 0.7},
    "saps": {"semantics": "paper", "technique": "saps"},
    "braintorrent": {"semantics": "paper", "technique": "braintorrent"},
    "gossip": {"semantics": "paper", "technique": "gossip"},
    "dying": {"churn.participation": 0.7, "churn.dropout": 0.2, "churn.death": 0.1},
    "slow peers": {"momentum": "send", "churn.slow": 0.4, "churn.slowness": 2, "iterations": 5},
    "distilled": {"distill.iterations": 2},
    "distilled as published": {"distill.iterations": 2, "semantics": "paper"},
    "int4": {"wire": "int4"},
    "fixed": {"wire": "fixed"},
    "masked": {"privacy.masks": True},
    "private": {"privacy.noise_multiplier": 1.0},
    "private records": {"privacy.noise_multiplier": 1.0, "privacy.unit": "record", "privacy.records": 40},
    "private as published": {"privacy.noise_multiplier": 0.5, "privacy.mode": "paper", "semantics": "paper"},
    "fast": {"engine": "fast"},
    "fast, not pooled": {"engine": "fast", "distill.iterations": 2},
    "protocol": {"engine": "protocol"},
    "protocol, dying": {"engine": "protocol", "churn.participation": 0.7, "churn.death": 0.1},
    "protocol, private": {"engine": "protocol", "privacy.noise_multiplier": 1.0},
    "dropout of torch": {"task": SLOW_TASK, "task_options": {}},
    "one worker": {"workers": 1},
}


def config(**settings: Any) -> Any:
    return load(overrides=SMALL | settings)


def run(**settings: Any) -> dict[str, Any]:
    return dict(simulate(config(**settings)))


# --- without Ray ---


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["simulate", "--peers", "3", "--iterations", "1", "--cluster", "auto"]) == 2
    assert capsys.readouterr().err == "marfl: --cluster: Ray is not installed; pip install 'marfl[cluster]'\n"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://10.0.0.1:10001", "must be auto, local, or HOST:PORT"),
        ("somewhere", "must be auto, local, or HOST:PORT"),
        ("127.0.0.2:1", "nobody answers at 127.0.0.2:1"),
        ("127.0.0.2:99999", "nobody answers at 127.0.0.2:99999"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_line(address: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        cluster._address(None, address)


def test_a_cluster_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says that a node took longer than its 30 seconds with a plain Exception, and lines of advice."""
    constants = SimpleNamespace(ENABLE_RAY_CLUSTERS_ENV_VAR="RAY_ENABLE", ENABLE_RAY_CLUSTER=True)
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", cast(Any, constants))

    def too_late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because")

    ray = SimpleNamespace(is_initialized=lambda: False, init=too_late)
    with pytest.raises(InputError, match=r"^--cluster local: cannot be started \(The current node timed out.*\)$"):
        cluster._join(ray, "local", 1)


def test_machines_say_in_what_they_differ() -> None:
    here = cluster.Machine.here()
    assert here.differences(here) == ""
    other = here._replace(cpu="Z80", torch="0.1")
    assert here.differences(other) == f"CPU Z80 instead of {here.cpu}, torch 0.1 instead of {here.torch}"


@pytest.mark.parametrize(("jobs", "workers"), [(0, 2), (1, 2), (125, 2), (125, 64), (10_000, 3)])
def test_every_job_is_handed_out_once_and_the_last_ones_alone(jobs: int, workers: int) -> None:
    everything = [Job(peer, 1, 0, 0, 0, peer) for peer in range(jobs)]
    found = portions(everything, workers, cluster.MOST_JOBS)
    assert [job for portion in found for job in portion] == everything
    sizes = [len(portion) for portion in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1:] == [1] * bool(jobs)
    assert max(sizes, default=0) <= cluster.MOST_JOBS


# --- with a real cluster of two nodes ---


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes on this machine, and this process in their cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        patch.setenv("PYTHONPATH", PATHS)
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'marfl[cluster]'")
        utilities = pytest.importorskip("ray.cluster_utils")
        head = {**NODE, "include_dashboard": False}
        made = started(lambda: utilities.Cluster(initialize_head=True, head_node_args=head))
        started(lambda: made.add_node(**NODE))
        ray.init(address=made.address, log_to_driver=False, logging_level="error", configure_logging=False)
        yield made
        ray.shutdown()
        made.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """What is started, at the third try at the latest: Ray gives a node 30 seconds, which a busy machine may not."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def second(nodes: Any) -> Any:
    return next(node for node in nodes.list_all_nodes() if not node.head)


needs_ray = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray warns of much that is its own


def slow(function: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_ray:
        function = mark(function)
    return function


@slow
@pytest.mark.parametrize("name", RUNS)
def test_a_cluster_ends_on_the_hash_of_one_process(nodes: Any, name: str) -> None:
    there, here = run(**RUNS[name], cluster="auto"), run(**RUNS[name])
    assert there["model_hash"] == here["model_hash"]
    assert there["bytes_total"] == here["bytes_total"]
    assert there["final_accuracy"] == here["final_accuracy"]
    if RUNS[name].get("engine") != "fast" or "distill.iterations" in RUNS[name]:
        assert there["cluster"]["stored_bytes"] > 0


@slow
def test_both_nodes_work_and_load_the_task_once_for_each_process(nodes: Any, tmp_path: Path) -> None:
    options = {"seconds": 0.1, "says": str(tmp_path / "pids")}
    run(task=SLOW_TASK, task_options=options, iterations=4, cluster="auto")
    workers = {path.name for path in (tmp_path / "pids").iterdir()} - {str(os.getpid())}
    assert len(workers) == 2


@slow
def test_a_killed_worker_and_two_killed_nodes_cost_their_jobs_and_nothing_else(nodes: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"task": SLOW_TASK, "iterations": 6}
    options = {"seconds": 0.25, "says": str(tmp_path / "pids")}
    simulation = Simulation(config(**given, task_options=options, cluster="auto"))
    lost: list[str] = []

    def kill_worker() -> None:
        os.kill(next(pid for path in (tmp_path / "pids").iterdir() if (pid := int(path.name)) != os.getpid()), 9)
        lost.append("worker")

    def kill_node() -> None:
        nodes.remove_node(second(nodes), allow_graceful=False)
        lost.append("node")

    for row in simulation.rows():  # an iteration takes more than a second
        plan = {1: kill_worker, 2: kill_node, 4: kill_node}.get(row["iteration"])
        if plan is not None:
            threading.Timer(0.5, plan).start()
        elif len(nodes.list_all_nodes()) < 2:
            started(lambda: nodes.add_node(**NODE))
    assert lost == ["worker", "node", "node"]
    assert simulation.summary()["model_hash"] == run(**given, task_options={})["model_hash"]


@slow
def test_one_node_that_is_left_does_all_the_work(nodes: Any) -> None:
    given: dict[str, Any] = {"task": SLOW_TASK, "iterations": 3, "peers": 6}
    simulation = Simulation(config(**given, task_options={"seconds": 0.05}, cluster="auto"))
    rows = simulation.rows()
    next(rows)
    nodes.remove_node(second(nodes), allow_graceful=False)
    assert len(list(rows)) == 2
    assert simulation.summary()["model_hash"] == run(**given, task_options={})["model_hash"]
    started(lambda: nodes.add_node(**NODE))


@slow
def test_a_node_that_would_not_compute_the_same_bits_is_refused_or_named(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = cluster.Machine.here()
    monkeypatch.setattr(cluster.Machine, "here", classmethod(lambda cls: here._replace(cpu="Z80")))
    with pytest.raises(InputError, match=r"node .* would not compute the same bits \(CPU .* instead of Z80\); leave"):
        run(cluster="auto")
    named = run(cluster="auto", other_nodes="name")
    assert named["cluster"]["not_bit_equal"]
    assert "may differ in the last bits (CPU" in caplog.text
    assert run(cluster="auto", engine="fast", **{"distill.iterations": 1})["cluster"]["not_bit_equal"]
    with pytest.raises(InputError, match="would not compute the same bits"):
        run(cluster="auto", engine="fast", other_nodes="refuse", **{"distill.iterations": 1})


@slow
@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [({"breaks": True}, ZeroDivisionError, "a loss that raises"), ({"refuses": os.getpid()}, InputError, "on node .*")],
)
def test_a_task_that_raises_on_a_node_says_what_it_says_here(
    nodes: Any, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        run(task=SLOW_TASK, task_options=options, cluster="auto")


@slow
def test_a_store_that_is_too_small_spills(nodes: Any) -> None:
    """30 peers of 3 MB each, twice: more than the store of 150 MB holds."""
    wide: dict[str, Any] = {"task_options": {"samples": 400, "features": 2000, "hidden": [400]}, "peers": 30}
    given = wide | {"semantics": "paper", "distill.iterations": 1, "iterations": 1}
    there = run(**given, cluster="auto")
    assert there["cluster"]["stored_bytes"] > 300_000_000
    assert there["model_hash"] == run(**given)["model_hash"]


COMMAND = [sys.executable, "-m", "marfl", "simulate", "--task", SLOW_TASK, "--peers", "6", "--group-size", "3",
           "--iterations", "8", "--batch", "16", "--set", "checkpoint_every=2", "--option", "seconds=0.2"]  # fmt: skip
PATIENCE = 600  # seconds: where ten times more work than cores is to be done, Ray takes minutes to start


def outside(folder: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, "--out", str(folder), *more], env=environment, **pipes)


def wait_for_rows(driver: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Until a driver has written so many rows. One that ends before fails with what it said."""
    rows, deadline = folder / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (rows.exists() and rows.read_text().count("\n") >= count):
        assert driver.poll() is None, f"{folder}: ended with {driver.returncode}: {driver.communicate()[1]}"
        assert time.monotonic() < deadline, f"{folder} has not got {count} rows"
        time.sleep(0.1)


@slow
def test_a_killed_driver_goes_on_beside_another_one(nodes: Any, tmp_path: Path) -> None:
    """Two drivers share the cluster; one is killed in an iteration, and one is stopped by Ctrl-C. Both go on."""
    drivers = [outside(tmp_path / name, "--cluster", nodes.address) for name in ("killed", "stopped")]
    wait_for_rows(drivers[0], tmp_path / "killed", 3)
    drivers[0].kill()
    wait_for_rows(drivers[1], tmp_path / "stopped", 3)
    drivers[1].send_signal(signal.SIGINT)
    said = drivers[1].communicate(timeout=PATIENCE)[1]
    drivers[0].communicate(timeout=PATIENCE)
    assert drivers[1].returncode == 130, said
    assert said.splitlines()[-1].startswith("marfl: stopped by Ctrl-C; go on with marfl simulate --resume")
    hashes = set()
    for name, more in (("killed", ["--cluster", nodes.address]), ("stopped", [])):
        again = outside(tmp_path / name, "--resume", "--json", *more)
        out, error = again.communicate(timeout=PATIENCE)
        assert again.returncode == 0, error
        hashes.add(out[out.index('"model_hash"') :].split('"')[3])
    assert len(hashes) == 1


def below(pid: int) -> set[int]:
    """All processes that a process started, and theirs."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # others end while we look
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    for _ in range(5):
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@slow
def test_a_cluster_of_this_machine_alone_is_out_of_reach_and_dies_with_its_driver(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'marfl[cluster]'")
    if shutil.which("ss") is None:
        pytest.skip("ss is not installed: who listens where cannot be seen")
    driver = outside(tmp_path / "local", "--cluster", "local", "--workers", "1")
    wait_for_rows(driver, tmp_path / "local", 1)
    started = below(driver.pid)
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line.split()[3] for line in listening if any(f"pid={pid}," in line for pid in started)]
    assert len(ours) > 3
    assert all(address.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:")) for address in ours)
    driver.kill()
    driver.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and any(map(lives, started)):
        time.sleep(0.2)
    assert not list(filter(lives, started))
