"""A swarm's run directory: what its peers read when they start, and the files that `marfl simulate` writes as well.

`orders_for` and `prepare` come before the start. A `Recorder` writes the rows while the swarm runs, and the summary.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marfl.byte_kinds import ByteKind
from marfl.config import Config, read_toml
from marfl.dp.accounting import COLUMNS
from marfl.dp.ledger import promised
from marfl.errors import InputError
from marfl.from_config import wire_of
from marfl.learn import Task, label_table, shard_of
from marfl.learn.data import labels_of
from marfl.peer.loop import ALONE, LEFT_OUT
from marfl.peer.trainer import task_of
from marfl.protocol.fixed_point import value_checks
from marfl.runs import RunDir, holds_run
from marfl.runs.config_file import dumps
from marfl.runs.files import write_atomic, write_json
from marfl.runs.rows import Row, SwarmRow, SwarmSummary, settings_summed
from marfl.settings import Churn
from marfl.sim.churn import participation
from marfl.state import layout_of
from marfl.swarm.fault_flags import Faults
from marfl.swarm.peer_rows import add_ledgers, beyond, merged, widths, with_more_sent
from marfl.swarm.peers import PeerProcess
from marfl.swarm.run import Orders, Swarm
from marfl.techniques.catalogue import technique

DONE = "all iterations done"
PEERS, SETTINGS, PARTS = "peers", "peers/settings.toml", "peers/parts.json"  # in the run directory


def orders_for(config: Config, out: Path, faults: Faults, bandwidth: str | None, timeout: float | None) -> Orders:
    """What the swarm of this config is told to do."""
    chosen = technique(config.technique, group_size=config.group_size, **config.technique_options)
    if not chosen.exact:
        raise InputError(f"technique = {config.technique}: has no exact average; run it with marfl simulate")
    arguments = ["--config", str(out / SETTINGS), "--run", config.run_name]
    if _has_churn(config):
        arguments += ["--cast", str(out / PARTS)]
    settles = config.coordination != "paper"
    return Orders(config.peers, out / PEERS, tuple(arguments), faults, chosen.server, bandwidth, timeout, settles)


def network_of(out: Path) -> dict[str, Any]:
    """The `[network]` settings that the peers of a swarm in this directory were started with."""
    table: dict[str, Any] = read_toml(out / SETTINGS).get("network", {})
    return table


def check_free(out: Path) -> None:
    """`InputError` when state directories would be written among files that are not of a run."""
    if (out / PEERS).exists() and not holds_run(out):
        raise InputError(f"{out / PEERS}: is there already, but not of a run; move it away or choose another --out")


def prepare(config: Config, run: RunDir, network: dict[str, Any], *, resume: bool = False) -> int:
    """Write what peers read at their start; how many bytes a model has. A resumed swarm finds its peers' states."""
    if resume:
        run.keep_rows(0)  # the peers' own rows are all there, and make them again
    else:
        shutil.rmtree(run.path / PEERS, ignore_errors=True)  # of the run that is replaced
    (run.path / PEERS).mkdir(exist_ok=True)
    write_atomic(run.path / SETTINGS, dumps({**config.as_dict(), "network": network}).encode())
    if _has_churn(config):
        write_json(run.path / PARTS, parts_of(config))
    task = task_of(config)
    if config.privacy.mode == "off":  # a private run tells nobody's labels
        _write_split(config, task, run)
    return 4 * layout_of(task.model()).length


def parts_of(config: Config) -> dict[str, dict[str, Any]]:
    """Who updates and who aggregates in every iteration, and who is slow: the simulator's draw."""
    drawn = {t: participation(config.churn, config.peers, t, config.seed) for t in range(1, config.iterations + 1)}
    parts: dict[str, dict[str, Any]] = {
        str(t): {"updaters": sorted(p.updaters), "aggregators": sorted(p.aggregators)} for t, p in drawn.items()
    }
    for t, who in drawn.items() if config.churn.slow else ():
        parts[str(t)] |= {"ages": dict(who.ages), "slow": sorted(who.updaters - who.aggregators)}
    return parts


def _has_churn(config: Config) -> bool:
    return config.churn != Churn()


def _write_split(config: Config, task: Task, run: RunDir) -> None:
    try:
        shards = [labels_of(shard_of(task, peer, config.peers, config.seed)) for peer in range(config.peers)]
    except InputError:
        return  # a task of the user's own without labels: there is nothing to draw
    counts = label_table(shards)
    run.write_split(range(counts.shape[1]), counts.tolist())


class Recorder:
    """Writes a row as soon as everybody who is there has passed an iteration; the newest waits for the next.

    What peers send after their last iteration, or sent before they were killed, is counted in the last row.
    """

    def __init__(self, config: Config, run: RunDir, swarm: Swarm, model_bytes: int) -> None:
        self._config, self._run, self._swarm, self._model_bytes = config, run, swarm, model_bytes
        self._held: SwarmRow | None = None
        self._next = 1
        self._total = 0
        self._begun = time.monotonic()

    @property
    def iterations(self) -> int:
        """How many there are to be."""
        return self._config.iterations

    def look(self) -> None:
        """Write what is complete."""
        book = self._swarm.book
        awaited = [p.index for p in self._swarm.peers if p.index not in self._swarm.missing and p.fate != "stopped"]
        if any(self._swarm.peers[peer].name is None for peer in awaited):
            return  # a resumed swarm has rows before it knows who is who
        while awaited and all(book.last(peer) >= self._next for peer in awaited):
            self._take(self._next)

    def finish(self, stopped_because: str) -> SwarmSummary:
        """Write the rest and the summary, after all peers have ended."""
        book = self._swarm.book
        for iteration in range(self._next, max(book.last(p.index) for p in self._swarm.peers) + 1):
            self._take(iteration)
        if self._held is not None:
            for peer in self._swarm.peers:
                self._held = with_more_sent(self._held, beyond(peer.sent, book.sent(peer.index)))
            self._write(self._held)
        summary = self._summary(stopped_because, self._run.rows())
        self._run.write_summary(summary)
        return summary

    def _why_done(self) -> str:
        """Why those who are left ended: a privacy budget may end a run before its last iteration."""
        left = [peer for peer in self._swarm.peers[: self._config.peers] if peer.index not in self._swarm.missing]
        said = [peer.status.get("stopped_because") for peer in left]
        own = (DONE, "told to leave", ALONE, LEFT_OUT)  # those say how one peer ended, not why the run did
        return next((why for why in said if why and not why.startswith(own)), DONE)

    def _take(self, iteration: int) -> None:
        self._next = iteration + 1
        rows = self._swarm.book.of(iteration)
        if not rows:
            return  # nobody who is left knows of it
        if self._held is not None:
            self._write(self._held)
        self._held = merged(iteration, rows, self._names())

    def _names(self) -> dict[str, int]:
        """The peers that hold data, by the name they go by in each other's rows."""
        return {p.name: p.index for p in self._swarm.peers[: self._config.peers] if p.name is not None}

    def _write(self, row: SwarmRow) -> None:
        self._total += sum(row.bytes_sent.values())
        self._run.append_row(replace(row, bytes_total=self._total))

    def _summary(self, stopped_because: str, rows: Sequence[Row]) -> SwarmSummary:
        config, swarm = self._config, self._swarm
        tested = [row.test_accuracy for row in rows if row.test_accuracy is not None]
        last = rows[-1] if rows else None
        total = last.bytes_total if last else 0
        steady = [row for peer in swarm.peers for t, row in swarm.book.rows[peer.index].items() if t > 1]
        each, taken = add_ledgers(row.sent for row in steady), add_ledgers(row.received for row in steady)
        done = max(1, len(steady))
        finals = {peer.status.get("model_hash") for peer in swarm.peers if peer.index not in swarm.missing}
        return SwarmSummary(
            **settings_summed(config),
            iterations=last.iteration if last else 0,
            final_accuracy=tested[-1] if tested else None,
            best_accuracy=max(tested, default=None),
            bytes_total=total,
            bytes_per_peer_iteration=total / config.peers / max(1, len(rows)),
            model_bytes=self._model_bytes,
            disagreement=last.disagreement if last else None,
            model_hash=last.model_hash if last else None,
            wall_seconds=time.monotonic() - self._begun,
            virtual_seconds=None,
            engine="swarm",
            engine_reason="real peers on this machine, over libp2p",
            finished=stopped_because == DONE,
            stopped_because=self._why_done() if stopped_because == DONE else stopped_because,
            value_checks=value_checks(wire_of(config)),
            coordination=config.coordination or "roster",
            privacy=promised(config, {name: last[name] if last else None for name in COLUMNS}),
            missing={str(index): why for index, why in swarm.missing.items()},
            notes=swarm.notes,
            **_of_audits([peer.status for peer in swarm.peers]),
            agreed=len(finals) == 1,
            payload_bytes=add_ledgers(peer.sent for peer in swarm.peers).get(ByteKind.PAYLOAD, 0),
            control_bytes_per_peer_iteration=each.get(ByteKind.CONTROL, 0) / done,
            control_bytes_received_per_peer_iteration=taken.get(ByteKind.CONTROL, 0) / done,
            dht_operations_per_peer_iteration=each.get("dht", 0) / done,
            start_seconds=swarm.start_seconds,
            processes=[_process(peer) for peer in swarm.peers],
            more={"wire": wire_of(config)} | widths(rows),
        )


def _of_audits(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the peers say of liars, put together."""
    audits = [each.get("audits") or {} for each in said]
    left_out: dict[str, str] = {}
    for each in said:
        left_out |= each.get("left_out") or {}
    counted = {name: sum(each.get(name, 0) for each in audits) for name in ("made", "unshown")}
    return {
        "audits": counted | {"proven": max((each.get("proven", 0) for each in audits), default=0)},
        "left_out": left_out,
        "tainted": sorted({iteration for each in said for iteration in each.get("tainted") or ()}),
    }


def _process(peer: PeerProcess) -> dict[str, Any]:
    return {
        "index": peer.index, "name": peer.name, "pids": peer.pids, "daemons": sorted(peer.daemons), "fate": peer.fate,
        "resident_bytes": peer.resident,
        "iteration": peer.committed, "model_hash": peer.status.get("model_hash"), "sent": peer.sent,
    }  # fmt: skip
