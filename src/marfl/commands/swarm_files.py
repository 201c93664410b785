"""What `marfl swarm` puts on the disk before its peers start: their settings, their casts, who holds which samples."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from marfl.config import Config
from marfl.errors import InputError
from marfl.learn import Task, label_table, shard_of
from marfl.learn.data import labels_of
from marfl.peer.trainer import task_of
from marfl.runs import RunDir, holds_run
from marfl.runs.config_file import dumps
from marfl.runs.files import write_atomic, write_json
from marfl.settings import Churn
from marfl.sim.churn import participation
from marfl.state import layout_of
from marfl.swarm.faults import Faults
from marfl.swarm.run import Orders
from marfl.techniques.catalogue import technique

PEERS, SETTINGS, CASTS = "peers", "peers/settings.toml", "peers/casts.json"  # in the run directory


def orders_for(config: Config, out: Path, faults: Faults, bandwidth: str | None, timeout: float | None) -> Orders:
    """What the swarm of this config is told to do."""
    chosen = technique(config.technique, group_size=config.group_size, **config.technique_options)
    if not chosen.exact:
        raise InputError(f"technique = {config.technique}: has no exact average; run it with marfl simulate")
    arguments = ["--config", str(out / SETTINGS), "--run", config.run_name]
    if _has_churn(config):
        arguments += ["--cast", str(out / CASTS)]
    settles = config.coordination != "paper"
    return Orders(config.peers, out / PEERS, tuple(arguments), faults, chosen.server, bandwidth, timeout, settles)


def check_free(out: Path) -> None:
    """`InputError` when state directories would be written among files that are not of a run."""
    if (out / PEERS).exists() and not holds_run(out):
        raise InputError(f"{out / PEERS}: is there already, but not of a run; move it away or choose another --out")


def prepare(config: Config, run: RunDir, network: dict[str, Any]) -> int:
    """Write what peers read at their start; how many bytes a model has."""
    shutil.rmtree(run.path / PEERS, ignore_errors=True)  # of the run that is replaced
    (run.path / PEERS).mkdir()
    write_atomic(run.path / SETTINGS, dumps({**config.as_dict(), "network": network}).encode())
    if _has_churn(config):
        write_json(run.path / CASTS, casts(config))
    task = task_of(config)
    if config.privacy.mode == "off":  # a private run tells nobody's labels
        _write_split(config, task, run)
    return 4 * layout_of(task.model()).length


def casts(config: Config) -> dict[str, dict[str, list[int]]]:
    """Who updates and who aggregates in every iteration: the simulator's draw."""
    players = {t: participation(config.churn, config.peers, t, config.seed) for t in range(1, config.iterations + 1)}
    return {str(t): {"updaters": sorted(c.updaters), "aggregators": sorted(c.aggregators)} for t, c in players.items()}


def _has_churn(config: Config) -> bool:
    return config.churn != Churn()


def _write_split(config: Config, task: Task, run: RunDir) -> None:
    try:
        shards = [labels_of(shard_of(task, peer, config.peers, config.seed)) for peer in range(config.peers)]
    except InputError:
        return  # a task of the user's own without labels: there is nothing to draw
    counts = label_table(shards)
    run.write_split(range(counts.shape[1]), counts.tolist())
