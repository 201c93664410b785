"""The library: three lines in the training loop you already have.

    with marfl.Peer(model, run="demo", join=["/ip4/…/tcp/…/p2p/…"]) as peer:
        for batch in loader:
            ...                       # any training loop, any optimizer
            outcome = peer.aggregate()

`Peer` runs its own event loop in a thread, so that the others get their answers while the model trains; `AsyncPeer` is
the same inside an event loop of yours. Only what training changes travels (see `marfl.state`); the optimizer is yours.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from marfl.dp.private_agreement import wire_terms
from marfl.errors import InputError, SyncError
from marfl.learn.agreement import Agreement
from marfl.learn.local_work import LocalWork
from marfl.learn.small_integers import IntegerUpdates, SmallIntegers
from marfl.learn.strategy import Plain, Strategy, strategy_terms
from marfl.net.base import Net, PeerId, Traffic
from marfl.peer.about import LIBRARY, About, Last, serve_about, version
from marfl.peer.compatibility import library_terms, refuse_other_layouts, refuse_other_terms, serve_layout
from marfl.peer.discovery import LOOK_AGAIN, Discovery, Presence, layouts, terms_shown, unless_lost
from marfl.peer.federated_metrics import FederatedMetrics, metrics_of, number
from marfl.peer.narrator import Narrator
from marfl.peer.options import PeerOptions
from marfl.peer.privacy_ledger import NOTHING_SPENT, Private
from marfl.peer.record_privacy import RecordData
from marfl.peer.state_dir import Checkpoint, StateDir, VoteLog
from marfl.peer.voter import hand_over, keep_votes, noting, real_participant, restore_proofs
from marfl.protocol.exchange import Contribution
from marfl.protocol.fixed_point import abstains
from marfl.protocol.messages import NOT_YET, Head
from marfl.protocol.participant import ABANDONED, Outcome, Participant, genesis, usable
from marfl.protocol.protocol_settings import EXCHANGES
from marfl.protocol.roster import VOID, Roster
from marfl.protocol.terms import Terms, canonical
from marfl.rng import key
from marfl.settings import ExchangeName, Privacy, WireName
from marfl.state import (
    Layout,
    Snapshot,
    check_trainable,
    flatten,
    frozen_hash,
    frozen_layers,
    keep_at_home,
    layout_of,
    trainable_values,
    unflatten,
)
from marfl.wire.error_feedback import ErrorFeedback

log = logging.getLogger("marfl.peer")
T = TypeVar("T")
P = ParamSpec("P")
FAREWELL = 2.0  # seconds to tell the others
NOT_RUNNING = "Peer: is not running; use it as `with Peer(model, …) as peer:`"


@dataclass(frozen=True)
class Aggregated:
    """What `aggregate` came to. The model holds the swarm's state in every case but "undecided"."""

    iteration: int
    status: str  # "committed"; "stale": others went on, my update is discarded; "abstained"; "undecided": no majority
    hash: bytes  # of the agreed state that the model holds now
    attempt: int = -1
    exchange: str = ""
    present: tuple[PeerId, ...] = ()  # whose updates are in the average
    missing: dict[PeerId, str] = field(default_factory=dict)  # who is not in it, and why
    discarded: str = ""  # what of mine was given up
    epsilons: dict[str, float] = field(default_factory=dict)  # of a private peer, so far, by observer
    spent: bool = False  # its target ε has no room for another iteration: time to leave
    sent: Traffic = field(default_factory=Traffic)  # bytes by kind, since the outcome before
    received: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0
    tainted: tuple[int, ...] = ()  # iterations of which it became known since the last one that somebody lied in a sum
    restored: int | None = None  # the iteration whose state the run went back to, because of a lie in the next
    known: int = 0  # peers of the run that were ever heard of, this one included; it never gets less
    warning: str = ""  # what a person should look at: committed alone, abstained, stale again
    age: int = 0  # iterations by which my update in the average is late
    metrics: dict[str, float] = field(default_factory=dict)  # everybody's, averaged: see `mean`


class AsyncPeer:
    """A peer inside a running event loop: ``async with AsyncPeer(model, run="demo") as peer: await peer.aggregate()``.

    Train in a thread (`asyncio.to_thread`): while the loop is blocked, nobody gets an answer.
    """

    def __init__(  # noqa: PLR0913 - all options by name, so that an editor can complete them
        self,
        model: nn.Module,
        *,
        reset: torch.optim.Optimizer | None = None,
        run: str = "run",
        join: str | Iterable[str] = (),
        listen: str | Iterable[str] = (),
        expected: int = 0,
        group_size: int = 5,
        exchange: ExchangeName = "grid",
        wire: WireName = "fp32",
        wire_down: int | None = None,
        max_weight: float = 1e6,
        liars: int = 1,
        seniority: int = 2,
        smallest_sum: int = 3,
        audit: float = 0.0,
        on_fraud: Literal["go on", "rollback"] = "go on",
        masks: bool = False,
        privacy: Privacy | Mapping[str, Any] | None = None,
        records: RecordData | None = None,
        strategy: Strategy | str = "plain",
        local: str | Iterable[str] = (),
        metrics: str | Iterable[str] = (),
        state_dir: str | Path | None = None,
        progress: bool = False,
        index: int | None = None,
        identity: str | Path | None = None,
        token: str | Path | None = None,
        authority: str | None = None,
        join_patience: float = 60.0,
        ready_timeout: float = 20.0,
        call_timeout: float = 5.0,
        phase_timeout: float = 10.0,
        slowest_link: float = 5.0,
        takeover: float = 2.0,
        minority_timeout: float = 60.0,
        iteration_timeout: float = 180.0,
        poll: float = 0.25,
        record_ttl: float = 600.0,
        sync_states: float = 10.0,
        on_minority: Literal["fork", "wait"] = "fork",
        announce: str | Iterable[str] = (),
        nat_port_map: bool = False,
        auto_nat: bool = False,
        reachability: Literal["auto", "public", "private"] = "auto",
        relay: bool = False,
        auto_relay: bool = False,
        trusted_relays: str | Iterable[str] = (),
        join_timeout: float = 10.0,
        dht_timeout: float = 1.0,
        start_timeout: float = 120.0,
        refresh: float = 15.0,
    ) -> None:
        """A peer for this model; it joins the run when it is entered with `async with`.

        Args:
            model: what is trained; it holds the agreed state after every `aggregate`
            reset: an optimizer whose state is cleared whenever the model changes
            run: the name of the run; its peers find each other by it
            join: addresses of peers of the run; a first peer needs none
            listen: multiaddresses to listen on; loopback by default, /ip4/0.0.0.0/tcp/0 for a network
            expected: peers to wait for at first or after a restart of all; 0: begin with whoever is there
            group_size: largest group; M in the paper
            exchange: what travels in a group: grid, chunked or full
            wire: values as fp32; fixed: 64-bit integers; int8 or int4: integers of so few bits
            wire_down: bits of the sum on its way back: 4, 8 or 16; by default those of wire
            max_weight: the most that one peer's update may count; see aggregate(weight)
            liars: lying peers that a decision bears; fewer than a third of its electors
            seniority: commits to which a newcomer contributes before its vote counts
            smallest_sum: contributions of known peers that a masked sum must have
            audit: share of all sums that are checked after a commit; 0: nothing is signed
            on_fraud: when a sum is proven wrong: go on without the liar, or go back to the state before it
            masks: only the sum over all is ever seen, by anybody
            privacy: settings of [privacy]: what leaves is clipped and noised
            records: marfl.RecordData, with privacy of one record: the data, and the loss of one record
            strategy: what a mean does: plain, diloco, fedadam, fedyogi, module:Class, or a marfl.Strategy
            local: layers that stay at home, by name or pattern such as head.*: nothing of them travels
            metrics: names of numbers that are averaged along with the model; see mean()
            state_dir: where key, model, iteration and what is left of small integers survive a restart, and what a
                private peer has given away
            progress: a bar on the terminal while others are waited for
            index: the place in the order; by default one from the peer's id
            identity: key file, the log of votes beside it
            token: this peer's token, for a closed run
            authority: the closed run's authority, in hex
            join_patience: seconds to wait for somebody to answer
            ready_timeout: seconds that an iteration waits for peers that still train
            call_timeout: seconds for a small request and its answer, retries included
            phase_timeout: seconds without a sign of life in an exchange; a phase may take longer
            slowest_link: Mbit/s of the slowest peer's link: a phase has time for its bytes there
            takeover: seconds between one leader's silence and the next one's proposal
            minority_timeout: seconds without a majority, before the rest goes on alone
            iteration_timeout: seconds for a whole iteration, decided or not
            poll: seconds between two look-ups while waiting
            record_ttl: seconds that the DHT remembers a peer's word
            sync_states: whole states that one peer may fetch from this one in a minute
            on_minority: without a majority: go on as a new lineage, or wait for it
            announce: addresses to tell others where they differ from listen, such as a forwarded port
            nat_port_map: ask the router to forward a port (UPnP, NAT-PMP)
            auto_nat: find out from others whether this peer can be dialled, and help them to
            reachability: whether others can dial this peer: find out, yes, or no (then through relays alone)
            relay: reach peers behind routers through relays
            auto_relay: be reached through relays when behind a router
            trusted_relays: addresses of peers that relay for this one
            join_timeout: seconds to join through one address
            dht_timeout: seconds for a request to one DHT node: a hung one delays a look-up by so much
            start_timeout: seconds that a run waits for its expected peers to begin
            refresh: seconds between two looks at who is there
        """
        options = {**locals()}
        del options["self"], options["model"], options["reset"]
        check_trainable(model)
        self.model, self.reset = model, reset
        self.options = PeerOptions.of(**options)
        keep_at_home(model, self.options.local)
        self.settings = self.options.settings()
        privacy = self.options.privacy
        self._private = Private(privacy, self.settings.wire, records, model) if privacy else None
        self.strategy: Strategy = self.options.strategy
        self._agreement = self._private.agreement if self._private else agreement_for(model, self.strategy)
        narrowed = wire_terms(self.settings.wire, self._agreement, layout_of(model).length)
        self.settings = replace(self.settings, **narrowed._asdict())
        integers = self.settings.integers
        self._small = SmallIntegers(self._agreement, integers, trainable=0) if integers else None
        self._updates: IntegerUpdates | None = None
        self._metrics = FederatedMetrics(self.options.metrics, self.settings.wire)
        self.addresses: tuple[str, ...] = ()
        self._stack = AsyncExitStack()
        self._billed = Traffic(), Traffic()
        self._base = flatten(model)  # what the model held when it last was the agreed one
        self._rounds = any(slot.dtype != "float32" for slot in layout_of(model).slots)  # half precision rounds it
        self._expected = self.options.expected
        self._learns_from = 0  # the iteration whose state the model held then
        self._free_since = 0.0  # when the user's loop had it last, on the net's clock
        self._doing = "training"
        self._begun = False  # whether it was ever entered
        self._running = False
        self._shapes = _shapes(model)
        self._store: StateDir | None = None
        self._last: Last | None = None  # what others may know of the newest iteration

    async def __aenter__(self) -> Self:
        if self._running:
            raise InputError("Peer: is running already; a second peer needs a model and an object of its own")
        self._running = True
        try:
            await self._begin()
        except BaseException:
            self._running = False
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if not self._voter.standing.diary.revoked:  # else another process may be here in this name
                with suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL):
                        gone = replace(self._presence, addresses=(), here=False)
                        await asyncio.gather(self._voter.farewell(), self._discovery.announce(gone))
                await hand_over(self._voter)
        finally:  # also when a second Ctrl-C cuts the goodbye short
            self._running = False
            await self._stack.aclose()

    async def _begin(self) -> None:
        self._narrator = Narrator(self.settings.ready_timeout, self.options.progress, self.settings.minority_timeout)
        layout = layout_of(self.model)
        self._frozen = await asyncio.to_thread(frozen_layers, self.model)
        options, kept = self._open_store(layout)
        votes = VoteLog(options.identity)
        self._stack.callback(votes.close)
        net = await options.start_net()
        self._stack.push_async_callback(net.close)
        votes.begin(net.me, options.run)
        if self._private is not None and self._store is not None:
            self._private.begin(self._store, net.me)
            layout = self._private.layout(layout)
        layout = self._metrics.layout(layout)
        self._voter, self._begun = self._participant(net, layout, kept), True
        if self._small is not None:
            keep = self._store.save_feedback if self._store else None
            memory = self._store.load_feedback() if self._store else ErrorFeedback()
            self._updates = IntegerUpdates(self._small, key(0, options.run), self._voter.index, memory, keep)
        keep_votes(self._voter, votes)
        self._stack.callback(self._voter.talk.drop_asides)
        met = (self._store.known_peers(), self._store.keep_peers) if self._store else ()
        self._discovery = Discovery(net, self._voter.talk.dht, options.run, options.network, log.info, *met)
        self.addresses = await net.addresses()
        if self._store is not None:
            self._store.begin(self.addresses)
        self._presence = Presence(self._voter.index, layout.hash, self.addresses, self._voter.terms.digest)
        serve_about(net, self._about, net.seen)
        await self._discovery.enter(options.join, patience=options.join_patience)
        await self._enter_run(layout, came_back=kept is not None)
        self._free_since, self._learns_from = net.now(), self._voter.state.version
        keeper = asyncio.create_task(self._discovery.stay(self._presence))
        self._stack.callback(keeper.cancel)

    def _open_store(self, layout: Layout) -> tuple[PeerOptions, Checkpoint | None]:
        """Take hold of the state directory, if there is one: it has this peer's key and place, and what it held."""
        options = self.options
        if options.state_dir is None:
            return options, None
        own = "" if isinstance(self.strategy, Plain) else canonical(strategy_terms(self.strategy)).hex()
        owner = hashlib.sha256(f"{options.run}:{layout.hash.hex()}{own}".encode()).hexdigest()
        self._store = StateDir(options.state_dir, owner)
        self._stack.callback(self._store.close)
        kept = self._store.load()
        listen, identity = options.listen or self._store.reclaim(), options.identity or self._store.identity
        return replace(options, listen=listen, identity=identity), kept

    def _participant(self, net: Net, layout: Layout, kept: Checkpoint | None) -> Participant:
        start = kept.state if kept else (self._small or self._agreement).start(self._base)
        record = kept.record if kept else genesis(start)
        index = self.options.index if self.options.index is not None else index_of(net.me)
        self._broken: asyncio.Future[InputError] = asyncio.get_running_loop().create_future()
        advance = noting(self._advance, self._broken)
        voter = real_participant(net, self.settings, index, layout, start, record, advance)
        serve_layout(net, layout, self._frozen)
        private = self._private.config if self._private else None
        voter.standing.carries = self._private is None  # noise is for one iteration: what comes late is lost
        frozen, metrics = frozen_hash(self._frozen), self.options.metrics
        voter.terms = Terms(library_terms(private, self.settings, frozen, metrics, self.strategy))
        if kept and kept.proofs:
            restore_proofs(voter, kept.proofs)
        return voter

    async def _enter_run(self, layout: Layout, *, came_back: bool) -> None:
        """Start from the swarm's state where there is one; else be the one that others start from."""
        net, voter = self._discovery.net, self._voter
        here = await self._discovery.look()
        await refuse_other_terms(net, self.options.run, voter.terms, terms_shown(here, net.me), self._frozen)
        await refuse_other_layouts(net, self.options.run, layout, layouts(here, net.me))
        if came_back:
            await self._come_back()
        elif heads := await self._heads():
            await self._adopt(heads)
        else:
            await voter.standing.announce_head()
        await self._discovery.announce(self._presence)

    async def _come_back(self) -> None:
        """Go on from what the state directory has, or from the swarm's newest state where that won meanwhile."""
        voter = self._voter
        limit = voter.net.now() + self.options.join_patience
        await voter.standing.announce_head()
        while not await voter.catch_up():
            if voter.net.now() > limit:
                raise SyncError(f"run {self.options.run!r}: others went on, and nobody gives their state")
            await asyncio.sleep(LOOK_AGAIN)
        self._load()
        log.info("back in run %r after iteration %d", self.options.run, self.iteration)

    async def _heads(self) -> list[tuple[PeerId, Head]]:
        """The swarm's heads. Where there is a swarm there is one: a look-up that fails must not found a second run.

        A joiner has nothing to check a head by, so it believes whom it joins through before all others.
        """
        net = self._discovery.net
        limit = net.now() + self.options.join_patience
        while not (heads := await self._voter.standing.heads(every=True)) and self.options.join:
            if net.now() > limit:
                raise SyncError(f"run {self.options.run!r}: no peer that was joined knows of a model")
            await asyncio.sleep(LOOK_AGAIN)
        joined = {address.rpartition("/p2p/")[2] for address in self.options.join}
        return sorted(heads, key=lambda at: at[0] not in joined)

    async def _adopt(self, heads: list[tuple[PeerId, Head]]) -> None:
        """A joiner takes the swarm's state even at the very beginning, when its own might win the tie."""
        voter = self._voter
        if not any(head.hash == voter.state.hash for _, head in heads):
            await self._take(heads)
        elif not await voter.catch_up():  # all began with the same model: from there it is proven how they went on
            raise SyncError(f"run {self.options.run!r}: others went on, and nobody gives their state")
        await voter.readiness.announce(NOT_YET)  # the next iteration waits for me for a while
        self._load()

    async def _take(self, heads: list[tuple[PeerId, Head]]) -> None:
        """Hold the state of one of these heads, or a later one of whoever announced them."""
        voter, said = self._voter, ""
        for digest in dict.fromkeys(head.hash for _, head in heads):
            donors = [peer for peer, head in heads if head.hash == digest]
            try:
                voter.standing.install(await voter.transfer.fetch(donors, digest))
                break
            except SyncError as error:
                said = str(error)
        else:  # it has moved on meanwhile
            try:
                voter.standing.install(await voter.transfer.fetch([peer for peer, _ in heads], None, believed=True))
            except SyncError:
                raise SyncError(f"run {self.options.run!r}: its state cannot be had; {said}") from None

    def _about(self) -> About:
        run, doing = self.options.run, "exchanging" if self._voter.exchanging else self._doing
        net, size = self._discovery.net, self.settings.group_size
        return About(
            run, version(), LIBRARY, self._presence.index, self.iteration, doing, self.hash.hex(), group_size=size,
            sent=net.sent.total(), last=self._last,
        )  # fmt: skip

    # --- what the user sees ---

    def _entered(self) -> Participant:
        if not self._begun:
            raise InputError(NOT_RUNNING)
        return self._voter

    @property
    def id(self) -> PeerId:
        return self._entered().net.me

    @property
    def iteration(self) -> int:
        """The last iteration whose state the model holds."""
        return self._entered().state.version

    @property
    def hash(self) -> bytes:
        """Of the agreed state."""
        return self._entered().state.hash

    @property
    def refused(self) -> dict[str, int]:
        """What was not let in, by reason."""
        return dict(self._entered().net.refused)

    @property
    def refused_from(self) -> dict[PeerId, dict[str, int]]:
        """The same by who sent it, where that is known: no proof of a lie, but where to look."""
        return self._entered().net.refused.named()

    async def aggregate(self, weight: float = 1.0) -> Aggregated:
        """Average what the model has learned since the last time with the others; the model then holds the result.

        Whoever is slow is hardly waited for: its update is in a later average (`Aggregated.age`), once. Where that
        cannot be, it is discarded ("stale"), never averaged twice, and the model takes the swarm's newest state. A
        model with NaN or infinity abstains and is given the agreed state, and so does a peer whose privacy budget is
        spent. `NetError` when this peer's own way to the network is lost for good.
        """
        if not self._running:
            raise InputError(NOT_RUNNING)
        if self._doing == "waiting":
            raise InputError("aggregate: another call is under way; a peer averages one update after the other")
        self._check_model()
        weight = number("weight", weight)
        self._doing = "waiting"
        try:
            work = self._narrator.during(self._voter, self._aggregate(weight), lambda: self._discovery.wait)
            return await unless_lost(self._discovery.net, work, self._broken)
        finally:
            self._doing = "training"

    def mean(self, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Average these numbers with everybody's, along with the next `aggregate`: `Aggregated.metrics` has the result.

        `metrics` of the peer names them, the same for all. `weight` is how much mine count, such as the examples that
        they are of. They are summed as the update is: exactly, and under masks where it is. A number that is not finite
        is left out, and so are those of a peer that is not in the average.
        """
        for name in self._metrics.note(metrics, number("mean: weight", weight)):
            log.warning("%s is not a finite number here: it is left out of the average", name)

    def _check_model(self) -> None:
        """`InputError` when what travels is no longer what this peer joined with."""
        then, now = self._shapes, _shapes(self.model)
        if then == now:
            return
        name = next(name for name in {**then, **now} if then.get(name) != now.get(name))
        before, after = (str(list(found[name])) if name in found else "nothing" for found in (then, now))
        raise InputError(
            f"model: {name} was {before} when the peer began and is {after} now; what travels must stay the same"
        )

    async def _aggregate(self, weight: float) -> Aggregated:
        voter = self._voter
        await self._wait_for_expected()
        begun = voter.net.now()
        trained = begun - self._free_since
        delta = flatten(self.model).sub_(self._base)
        mine, why = await self._contribution(weight, delta)
        outcome = await voter.run_iteration(mine)
        if outcome.status == "stale" and mine is not None and voter.may_carry(mine):
            mine, outcome = await self._carried(mine, outcome, delta)
        await self._settle_updates()
        self._metrics.forget()
        voter.standing.last_mean = None  # θ is the whole state: whoever is behind gets it for the price of a change
        discarded = why if mine is None else ""
        if outcome.exchange == VOID and mine is not None:
            discarded = f"the update: {ABANDONED}"
        if outcome.restored is not None:
            discarded = f"the update: the run went back to iteration {outcome.restored}"
        if outcome.status == "stale" or voter.behind:
            discarded = await self._resync(outcome, discarded)
            await self._settle_updates()
        if outcome.status != "undecided" or mine is None:
            self._load()
        spent = await asyncio.to_thread(self._private.settle, voter) if self._private else NOTHING_SPENT
        await self._save()
        self._free_since = voter.net.now()
        voter.talk.aside(voter.readiness.say_how_long(trained))
        status = "abstained" if outcome.status == "committed" and mine is None else outcome.status
        seconds, (sent, received) = voter.net.now() - begun, self._bill()
        if outcome.status == "committed":
            self._last = Last(
                outcome.iteration, outcome.present, dict(outcome.missing), outcome.exchange, voter.state.hash.hex(),
                seconds, sent.total(),
            )  # fmt: skip
        return Aggregated(
            outcome.iteration, status, voter.state.hash, outcome.attempt, outcome.exchange, outcome.present,
            dict(outcome.missing), discarded, *spent, sent, received, seconds, outcome.tainted, outcome.restored,
            *self._narrated(outcome, status, discarded),
            mine.age if mine is not None and self.id in outcome.present else 0,
            metrics_of(voter.state) if outcome.exchange in EXCHANGES or outcome.status == "stale" else {},
        )  # fmt: skip

    def _narrated(self, outcome: Outcome, status: str, discarded: str) -> tuple[int, str]:
        """How many peers are known, and the warning that goes with this outcome."""
        here, met = self._discovery.here, self._discovery.met
        known = self._narrator.met({self.id}, outcome.present, outcome.missing, here, met)
        present, joined = len(outcome.present), bool(self.options.join) or self.options.expected > 1
        for line in outcome.lost:
            log.info("iteration %d: %s", outcome.iteration, line)
        told = self._narrator.told(outcome.iteration, status, present, discarded, joined=joined, slow=outcome.slow)
        return known, told

    async def _save(self) -> None:
        """Keep the agreed state, where this peer holds it and has a place for it."""
        voter = self._voter
        if self._store is None or voter.behind:
            return
        kept = Checkpoint(voter.state, voter.record, proofs=voter.standing.kept)
        await asyncio.to_thread(self._store.save, kept)

    async def _carried(self, mine: Contribution, outcome: Outcome, delta: Tensor) -> tuple[Contribution, Outcome]:
        """Bring an update that came too late to a later iteration, once: on top of the state that the others hold."""
        voter = self._voter
        voter.discarded = 0
        if not await voter.catch_up() or voter.discarded:
            return mine, outcome  # it was learned from a state that was given up
        late, why = await self._contribution(mine.weight, delta)
        if late is None or why:
            return mine, outcome
        return late, await voter.run_iteration(late)

    async def _contribution(self, weight: float, delta: Tensor) -> tuple[Contribution | None, str]:
        """What the model has learned since it was the agreed one; None where that may not leave, and why."""
        state = self._voter.state
        if self._private is not None:
            if weight != 1:
                raise InputError(f"weight: {weight:g} must be 1 with privacy, or one peer would count for many")
            return await asyncio.to_thread(self._private.contribution, state, delta)
        whole = self._metrics.brought(delta, weight)
        mine = Contribution(state.hash, whole, weight, age=max(0, state.version - self._learns_from))
        why = "" if usable(mine, self.settings) else abstains(self.settings.wire)
        if self._updates is not None and not why:
            standing = self._voter.standing
            self._updates.settle(standing.decisions)  # after a restart, too
            sender = self._updates.sender(state, standing.chain)
            if not sender.can_send(delta, weight):
                why = abstains(self.settings.wire)
            quantise = partial(self._updates.quantise, sender)
            mine = replace(mine, quantise=quantise, write_down=self._updates.write_down)
        return (None, why) if why else (mine, "")

    async def _settle_updates(self) -> None:
        """What became of the integers that were sent; what is left of them is on the disk when this returns."""
        updates = self._updates
        if updates is not None:
            updates.settle(self._voter.standing.decisions)
            if updates.write_down is not None:
                await asyncio.to_thread(updates.write_down)

    def _bill(self) -> tuple[Traffic, Traffic]:
        """What was sent and received since the last time: also what was said to latecomers in between."""
        net, (sent, received) = self._discovery.net, self._billed
        self._billed = net.sent.copy(), net.received.copy()
        return net.sent.minus(sent), net.received.minus(received)

    async def _resync(self, outcome: Outcome, discarded: str) -> str:
        """Hold the swarm's newest state; what was given up for it."""
        voter = self._voter
        voter.discarded = 0
        if not await voter.catch_up():
            raise SyncError(
                f"run {self.options.run!r}: others committed iteration {voter.record.iteration}, and nobody here has "
                "its state; this model is as it was: wait for them, or go on with it in a run of another name"
            )
        if voter.discarded:
            return f"the update, and {voter.discarded} committed iterations"
        in_it = outcome.status == "committed" and voter.net.me in outcome.present
        return discarded if in_it else discarded or "the update: the others went on without it"

    async def _wait_for_expected(self) -> None:
        """Before anybody goes on: wait for as many as are expected, else only for those who are there."""
        voter, restarted = self._voter, self._voter.record.iteration > 0
        if not restarted and not voter.settings.expected:
            here = await self._discovery.look()
            voter.standing.company = len(here.keys() | {self.id})
        if self._expected and not (restarted and await voter.standing.heads(every=True)):
            voter.standing.company = await self._discovery.wait_for(
                self._expected, "to go on" if restarted else "to begin"
            )
            net, shown = self._discovery.net, terms_shown(self._discovery.here, self._discovery.net.me)
            await refuse_other_terms(net, self.options.run, self._voter.terms, shown, self._frozen)
        self._expected = 0

    def _load(self) -> None:
        """The model becomes the agreed one."""
        theta = self._voter.state.vectors["theta"]
        self._learns_from = self._voter.state.version
        unflatten(theta, self.model)
        self._base = flatten(self.model) if self._rounds else theta
        if self.reset is not None:
            self.reset.state.clear()

    def _advance(self, state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
        if self._small is not None:
            return self._small.advance(state, mean, roster.weight, roster.contributions)
        following = self._agreement.advance(state, mean, roster.contributions)
        told = self._metrics.told(mean, following.vectors["theta"].numel())
        return replace(following, scalars={**following.scalars, **told}) if told else following


def _arguments_of(
    other: Callable[Concatenate[AsyncPeer, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Peer, P], None]]:
    """Give `Peer` the signature and the documentation of `AsyncPeer`, for editors and type checkers."""

    def same(init: Callable[..., None]) -> Callable[Concatenate[Peer, P], None]:
        return wraps(other)(init)

    return same


class Peer:
    """The same for a plain loop: ``with Peer(model, run="demo", join=[…]) as peer: … peer.aggregate()``."""

    @_arguments_of(AsyncPeer.__init__)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._peer = AsyncPeer(*arguments, **options)
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        """Join the run. A SIGTERM is a goodbye from now on, unless the program has a handler of its own for it."""
        if self._loop is not None:
            raise InputError("Peer: is running already; a second peer needs a model and an object of its own")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="marfl.Peer", daemon=True)
        self._thread.start()
        try:
            self._do(self._peer.__aenter__())
        except BaseException:
            self._end()
            raise
        self._leaves_on_sigterm = _unwind_on_sigterm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._do(self._peer.__aexit__(kind, error, at))
        finally:
            self._end()
            if self._leaves_on_sigterm and signal.getsignal(signal.SIGTERM) is _unwind:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise InputError(NOT_RUNNING)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # a Ctrl-C ends the wait: nobody is left to want the result
            del future  # an error in it names this frame: they would keep each other, and the update

    def _end(self) -> None:
        """All in the peer's own thread: in the caller's a loop may run already, as in a notebook."""
        loop, self._loop = self._loop, None
        assert loop is not None
        try:
            asyncio.run_coroutine_threadsafe(_finish_the_rest(), loop).result()
            asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def mean(self, metrics: Mapping[str, float], weight: float = 1.0) -> None:
        """Average these numbers with everybody's; see `AsyncPeer.mean`."""
        self._peer.mean(metrics, weight)

    def aggregate(self, weight: float = 1.0) -> Aggregated:
        """Average with the others; see `AsyncPeer.aggregate`."""
        return self._do(self._peer.aggregate(weight))

    @property
    def addresses(self) -> tuple[str, ...]:
        """What others put in `join`."""
        return self._peer.addresses

    @property
    def id(self) -> PeerId:
        return self._peer.id

    @property
    def iteration(self) -> int:
        """The last iteration whose state the model holds."""
        return self._peer.iteration

    @property
    def hash(self) -> bytes:
        """Of the agreed state."""
        return self._peer.hash

    @property
    def refused(self) -> dict[str, int]:
        """What was not let in, by reason."""
        return self._peer.refused

    @property
    def refused_from(self) -> dict[PeerId, dict[str, int]]:
        """The same by who sent it, where that is known."""
        return self._peer.refused_from


def _unwind_on_sigterm() -> bool:
    """Have a SIGTERM end the program as Ctrl-C does, so that peers say goodbye; whether this was done here."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False  # the program has a handler of its own, or hears of no signals here
    signal.signal(signal.SIGTERM, _unwind)
    return True


def _unwind(number: int, _: object) -> None:
    raise SystemExit(128 + number)


async def _finish_the_rest() -> None:
    """What was cut short by a Ctrl-C cleans up after itself; whatever then is left is cancelled."""
    for last in (False, True):
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest if last else ():
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=FAREWELL)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """What travels of a model, by name."""
    return {slot.name: slot.shape for slot in layout_of(model).slots}


def agreement_for(model: nn.Module, strategy: Strategy) -> Agreement:
    """What the library's peers agree on: θ, and what the strategy keeps. The optimizer is the user's own."""
    return Agreement(LocalWork(strategy=strategy), momentum="local", trainable=trainable_values(model))


def index_of(peer: PeerId) -> int:
    """A place in the order that needs nobody to hand it out: from the hash of the peer's own name."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:6])
