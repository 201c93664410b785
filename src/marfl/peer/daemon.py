"""`marfl peer`: one real peer that trains a task and takes part, until it is done or told to leave."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from marfl.config import Config
from marfl.dp.private_agreement import wire_terms
from marfl.errors import InputError
from marfl.from_config import smallest_sum_of, technique_of, wire_of
from marfl.live import Page, Scene, read_page, scene_of_peer, serve_pages
from marfl.net.libp2p.admission import admission_of
from marfl.net.libp2p.connection import Libp2pSettings, is_loopback
from marfl.net.libp2p.p2pd import check_addresses
from marfl.net.libp2p.transport import Libp2pNet
from marfl.peer.about import DAEMON, About, Last, serve_about, version
from marfl.peer.compatibility import daemon_terms, refuse_other_layouts, refuse_other_terms, serve_layout, serve_terms
from marfl.peer.discovery import Discovery, Presence, layouts, terms_shown, unless_lost
from marfl.peer.halts import Moment, halt_at
from marfl.peer.logs import log_to
from marfl.peer.loop import DONE, Loop, Parts, VotedLoop, one_thread, read_parts
from marfl.peer.paper_loop import WEAKER, PaperLoop, grouping_of
from marfl.peer.prometheus import METRICS_TYPE, metrics_text
from marfl.peer.state_dir import Checkpoint, StateDir, VoteLog
from marfl.peer.trainer import Trainer
from marfl.peer.voter import hand_over, keep_votes, noting, real_participant, restore_proofs
from marfl.protocol.moshpit import Moshpit
from marfl.protocol.participant import genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.terms import Terms
from marfl.runs import config_hash
from marfl.runs.files import plain
from marfl.runs.rows import PeerStatus, PeerSummary
from marfl.settings import Network
from marfl.state import frozen_hash

log = logging.getLogger("marfl.peer")
FAREWELL = 2.0  # seconds to tell the others


@dataclass(frozen=True)
class Options:
    """What only this peer needs to know, beside the run's config."""

    index: int
    state_dir: Path
    run: str
    join: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    identity: Path | None = None  # by default in the state directory
    status_port: int | None = None
    token: Path | None = None
    authority: str | None = None
    linger: float = 60.0
    participation: Path | None = None
    server: bool = False
    network: Network = field(default_factory=Network)
    shared_flags: str = ""  # what all peers of the run were started with
    log_format: str = "text"
    halts: tuple[Moment, ...] = ()  # where it stops itself, to be hit by those who test


def protocol_settings(config: Config, options: Options) -> Settings:
    """What all peers of the run agree on, and how patient this one is."""
    if config.semantics != "exact" and config.coordination != "paper":
        raise InputError(f"semantics = {config.semantics}: real peers average exactly, or take --coordination paper")
    chosen = technique_of(config)
    if options.server and not chosen.server:
        raise InputError(f"--server: technique {config.technique} has no server; fedavg does")
    last = config.peers if options.server else config.peers - 1
    if not 0 <= options.index <= last or (options.server and options.index != last):
        allowed = f"{last}" if options.server else f"from 0 to {last}"
        raise InputError(f"--index {options.index}: must be {allowed} with --of {config.peers}")
    expected = config.peers + chosen.server
    terms = {"wire": wire_of(config), "smallest_sum": smallest_sum_of(config)}
    terms |= {"liars": config.liars, "seniority": config.seniority, "alike": config.privacy.mode != "off"}
    terms |= {"audit": config.audit, "on_fraud": config.on_fraud}
    terms["wire_down"] = config.wire_down
    given: dict[str, Any] = options.network.patience() | terms
    if config.coordination == "paper":
        if options.participation is not None:
            raise InputError(f"--cast {options.participation}: with coordination = paper everybody takes part")
        return Settings(run=options.run, expected=expected, group_size=config.group_size, **given)
    given |= chosen.protocol(config.peers)
    return Settings(run=options.run, expected=expected, meet_until=config.meet_until, **given)


def _owner(config: Config, run: str) -> str:
    """What a checkpoint belongs to: all that decides the state; a run may be prolonged, or tested more often."""
    free = ("iterations", "test_every")
    return config_hash({name: value for name, value in config.as_dict().items() if name not in free} | {"run": run})


class Daemon:
    """The life of a peer: begin, take part, linger, leave."""

    def __init__(self, config: Config, options: Options) -> None:
        self.config, self.options = config, options
        self.settings = protocol_settings(config, options)
        check_addresses(replace(Libp2pSettings.of(options.network, options.listen, None), join=options.join))
        self.admission = admission_of(options.run, options.authority, options.token)
        self.parts: Parts | None = read_parts(options.participation, options.index) if options.participation else None
        self.store = StateDir(options.state_dir, _owner(config, options.run))
        self.stop = asyncio.Event()
        self.broken: asyncio.Future[InputError] = asyncio.get_running_loop().create_future()
        self.addresses: tuple[str, ...] = ()

    async def run(self) -> str:
        """Live; why it ended."""
        running = asyncio.get_running_loop()
        ends = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup makes it
            ends.append(signal.SIGHUP)
        for number in ends:
            running.add_signal_handler(number, self.stop.set)
        async with AsyncExitStack() as stack:
            stack.callback(self.store.close)
            same = {"run": self.options.run, "index": self.options.index}
            stack.callback(log_to(self.store.path / "log", self.options.log_format, same))
            return await self._live(stack)

    async def _live(self, stack: AsyncExitStack) -> str:
        thread = stack.enter_context(one_thread())
        options, running = self.options, asyncio.get_running_loop()
        make = partial(Trainer, self.config, options.index, server=options.server)
        trainer = await running.run_in_executor(thread, make)
        narrowed = wire_terms(self.settings.wire, trainer.agreement, trainer.worker.flat.numel())
        self.settings = replace(self.settings, **narrowed._asdict())
        strategy = trainer.agreement.strategy
        self.terms = Terms(daemon_terms(self.config, self.settings, frozen_hash(trainer.frozen), strategy))
        kept = self.store.load() or Checkpoint(trainer.start, genesis(trainer.start))
        trainer.own = kept.momentum if kept.momentum is not None else trainer.own
        trainer.home = kept.home
        before = self.store.reclaim()
        listen = options.listen or before
        identity = options.identity or self.store.identity
        self.votes = VoteLog(identity)
        stack.callback(self.votes.close)
        net = await Libp2pNet.start(Libp2pSettings.of(options.network, listen, identity), self.admission)
        stack.push_async_callback(net.close)
        self.votes.begin(net.me, options.run)
        loop = self._loop(net, trainer, kept, thread)
        known, keep = self.store.known_peers(), self.store.keep_peers
        discovery = Discovery(net, loop.speaker.dht, options.run, options.network, log.info, known, keep)
        await self._listen(net)
        serve_about(net, lambda: self._about(loop), net.seen)
        if options.status_port is not None:
            await self._serve_status(stack, options.status_port, loop, discovery)
        presence = Presence(options.index, trainer.layout.hash, self.addresses, self.terms.digest)
        life = self._take_part(loop, discovery, presence)
        why = await self._until_stopped(unless_lost(net, life, self.broken), loop)
        await self._leave(loop, discovery, presence, why)
        return why

    def _loop(self, net: Libp2pNet, trainer: Trainer, kept: Checkpoint, thread: ThreadPoolExecutor) -> Loop:
        """How this peer goes through the run: with votes, or as the paper does."""
        layout, index = trainer.layout, self.options.index
        serve_layout(net, layout, trainer.frozen)
        if self.config.coordination == "paper":
            log.warning(WEAKER)
            serve_terms(net, self.terms)
            moshpit = Moshpit(net, self.settings, index, layout.hash, grouping_of(self.config))
            return PaperLoop(self.config, trainer, self.store, kept, thread, moshpit)
        settings, advance = self.settings, noting(trainer.advance, self.broken)
        voter = real_participant(net, settings, index, layout, kept.state, kept.record, advance)
        voter.terms = self.terms
        if kept.proofs:
            restore_proofs(voter, kept.proofs)
        keep_votes(voter, self.votes)
        return VotedLoop(self.config, trainer, self.store, kept, thread, voter, self.parts, self.options.server)

    async def _listen(self, net: Libp2pNet) -> None:
        self.addresses = await net.addresses()
        self.store.begin(self.addresses)
        log.info("peer %d of %d is %s", self.options.index, self.config.peers, net.me)
        log.info("to join this run: marfl peer %s", self._how_to_join())
        if self.options.authority:
            log.info("TOKEN is for one peer: marfl id --state-dir DIR prints its ID, and who has the authority's key "
                     "types marfl swarm-key --sign ID --run %s > TOKEN", self.options.run)  # fmt: skip

    def _how_to_join(self) -> str:
        """What another peer of this run types after `marfl peer`."""
        place = next((a for a in self.addresses if not is_loopback(a)), self.addresses[0])
        listen = "" if is_loopback(place) else " --listen /ip4/0.0.0.0/tcp/0"
        token = " --token TOKEN" if self.options.token else ""
        own = f"--index I --of {self.config.peers} --state-dir DIR{listen}{token}"
        return f"{own} --run {self.options.run} --join {place} {self.options.shared_flags}".rstrip()

    async def _take_part(self, loop: Loop, discovery: Discovery, presence: Presence) -> None:
        """Join, run through all iterations, and then be there for those who are not done."""
        layout = loop.trainer.layout
        await discovery.enter(self.options.join)
        here = await discovery.look()
        await self._refuse_others(loop, discovery)
        await refuse_other_layouts(discovery.net, discovery.run, layout, layouts(here, discovery.net.me))
        for peer in (p for p, other in here.items() if other.index == presence.index and p != discovery.net.me):
            log.warning("%s has index %d, too: both train on the same shard", peer, presence.index)
        await discovery.announce(presence)
        keeper = asyncio.create_task(discovery.stay(presence))
        try:
            if await loop.begins():
                role = "to go on" if loop.iteration else "to begin"
                loop.begin_with(await discovery.wait_for(self.settings.expected, role))
                await self._refuse_others(loop, discovery)
            await self._run(loop)
            done = f"all {self.config.iterations} iterations are done" if loop.ended == DONE else loop.ended
            log.info("%s; serving the others for %g seconds", done, self.options.linger)
            await loop.serve()
            await self._linger(loop)
        finally:
            keeper.cancel()

    async def _run(self, loop: Loop) -> None:
        halting = asyncio.create_task(halt_at(self.options.halts, loop))
        try:
            await loop.run()
        finally:
            halting.cancel()

    async def _refuse_others(self, loop: Loop, discovery: Discovery) -> None:
        shown = terms_shown(discovery.here, discovery.net.me)
        await refuse_other_terms(discovery.net, discovery.run, self.terms, shown, loop.trainer.frozen)

    async def _linger(self, loop: Loop) -> None:
        """Serve the others, and look now and then whether there is something to go on with."""
        net = loop.net
        limit = net.now() + self.options.linger
        while net.now() < limit:
            await asyncio.sleep(min(self.options.network.refresh, limit - net.now()))
            await loop.go_on()

    async def _until_stopped(self, work: Coroutine[Any, Any, None], loop: Loop) -> str:
        """Run until it ends or somebody says stop; an exchange under way is finished first."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            await task  # its error, if it ended by one
            return loop.ended
        log.info("told to leave")
        limit = loop.net.now() + self.options.network.phase_timeout
        while loop.exchanging and loop.net.now() < limit and not task.done():
            await asyncio.wait({task}, timeout=self.options.network.poll)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return loop.ended if loop.state == "done" else "told to leave"

    async def _leave(self, loop: Loop, discovery: Discovery, presence: Presence, why: str) -> None:
        """Say goodbye, keep the state, and write down how it ended."""
        gone = replace(presence, addresses=(), here=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await asyncio.gather(loop.farewell(), discovery.announce(gone))
        await loop.save()
        if isinstance(loop, VotedLoop):
            await hand_over(loop.voter)
        self.store.write_summary(self._summary(loop, why))
        log.info("left: %s, iteration %d, model %s", why, loop.iteration, loop.model_hash.hex()[:12])

    def _summary(self, loop: Loop, why: str | None = None) -> PeerSummary:
        return PeerSummary(
            index=self.options.index,
            run=self.options.run,
            peer=loop.net.me,
            model_hash=loop.model_hash.hex(),
            iteration=loop.held.version,
            accuracy=loop.accuracy,
            sent=asdict(loop.sent),
            received=asdict(loop.received),
            dht_operations=loop.sent.dht,
            refused=dict(loop.net.refused),
            refused_from=loop.net.refused.named(),
            stopped_because=why,
            lost_updates=loop.lost if isinstance(loop, VotedLoop) else 0,
            **self._of_audits(loop),
        )

    def _of_audits(self, loop: Loop) -> dict[str, Any]:
        """What this peer knows of liars."""
        if not isinstance(loop, VotedLoop):
            return {}
        audits, standing = loop.voter.audits, loop.voter.standing
        known = {"left_out": dict(standing.banned), "tainted": sorted(standing.lies)}
        return known | ({"audits": asdict(audits.total.plus(audits.counts))} if self.config.audit else {})

    def _about(self, loop: Loop) -> About:
        row, last = loop.newest, None
        if row is not None:
            last = Last(
                row.iteration, tuple(row.present), row.missing, row.exchange or "", row.model_hash or "",
                row.wall_seconds or 0.0, sum(row.bytes_sent.values()), loop.accuracy,
            )  # fmt: skip
        return About(
            self.options.run, version(), DAEMON, self.options.index, loop.iteration, loop.doing, loop.model_hash.hex(),
            group_size=self.config.group_size, sent=loop.sent.total(), last=last,
        )  # fmt: skip

    def _scene(self, loop: Loop, discovery: Discovery) -> Scene:
        """The run as this peer sees it, for the live page."""
        title = f"run {self.options.run}: peer {self.options.index}"
        scene = scene_of_peer(self.store.path, title, self.config.group_size)
        for peer in discovery.met:
            scene.meet(peer, here=peer in discovery.here)
        for peer, presence in discovery.here.items():
            scene.meet(peer, index=presence.index, here=True)
        scene.meet(
            loop.net.me, index=self.options.index, iteration=loop.iteration, state=loop.doing, here=True,
            model=loop.model_hash.hex(), accuracy=loop.accuracy, sent=loop.sent.total(),
        )  # fmt: skip
        return scene

    async def _serve_status(self, stack: AsyncExitStack, port: int, loop: Loop, discovery: Discovery) -> None:
        """JSON for programs, the live page for a browser, and numbers for Prometheus, on loopback."""

        def status() -> bytes:
            return json.dumps(plain(self._page(loop, discovery))).encode()

        def numbers() -> bytes:
            return metrics_text(self._page(loop, discovery), len(discovery.here), loop.newest)

        pages = {
            "/": Page("application/json", status),
            "/status": Page("application/json", status),
            "/page": Page("text/html; charset=utf-8", read_page),
            "/data": Page("application/json", lambda: self._scene(loop, discovery).as_json()),
            "/metrics": Page(METRICS_TYPE, numbers),
        }
        server = await serve_pages(port, pages, "--status-port", browsers="/page")
        stack.callback(server.close)
        where = server.sockets[0].getsockname()[1]
        self.store.write_text("status", [where])
        log.info("the live page: http://127.0.0.1:%d/page (numbers for Prometheus: /metrics)", where)

    def _page(self, loop: Loop, discovery: Discovery) -> PeerStatus:
        known = {**self._summary(loop), "iteration": loop.iteration}
        return PeerStatus(
            **known,
            state=loop.doing,
            peers_seen=len((discovery.here.keys() | discovery.met.keys()) - {discovery.net.me}),
            hash=loop.model_hash.hex(),
            last_outcome=loop.last,
            address=list(self.addresses),
            pid=os.getpid(),
        )


def run_daemon(config: Config, options: Options) -> str:
    """Live as a peer until the end; why it ended. Wrong input is an `InputError`."""

    async def live() -> str:
        return await Daemon(config, options).run()

    return asyncio.run(live())
