"""Every setting that more than one part of the package needs, each written once: type, default, range and help.

    Optimizer, Partition, Churn, Sessions, Distill, Privacy   the tables of a config file (`marfl.config.Config`)
    Patience, Reach, Network                                  the `[network]` table: how a real peer waits and connects
    RunTerms, Joining                                         the options of `marfl.Peer` and `marfl peer` beside those

The parts import their settings from here; this module imports nothing that takes time to load, so that the command
line can print its help from it. How a field is read: `marfl.schema`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from marfl.errors import InputError
from marfl.schema import Checked

if TYPE_CHECKING:
    from torch import Tensor

ExchangeName = Literal["grid", "chunked", "full"]
WireName = Literal["fp32", "fixed", "int8", "int4"]
WireDown = Annotated[
    int | None, Field(ge=4, le=16, description="bits of the sum on its way back: 4, 8 or 16; by default those of wire")
]
GroupSize = Annotated[int, Field(ge=2, description="largest group; M in the paper")]
Liars = Annotated[
    int, Field(ge=0, le=1000, description="lying peers that a decision bears; fewer than a third of its electors")
]
Seniority = Annotated[
    int, Field(ge=1, le=1000, description="commits to which a newcomer contributes before its vote counts")
]

AuditRate = Annotated[
    float, Field(ge=0, le=1, description="share of all sums that are checked after a commit; 0: nothing is signed")
]
OnFraud = Annotated[
    Literal["go on", "rollback"],
    Field(description="when a sum is proven wrong: go on without the liar, or go back to the state before it"),
]


# --- learning: the tables of a config file ---


@dataclass(frozen=True)
class Optimizer(Checked):
    """Damped momentum SGD, the same on every peer: m ← μ·m + (1−μ)·g, then θ ← θ − η·m."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="η: how far a step goes")] = 0.1
    decay: Annotated[float, Field(ge=0, lt=1, description="μ: how much of the momentum stays")] = 0.9
    slow_above: Annotated[
        float | None, Field(gt=0, lt=1, description="a peer above this accuracy on its own shard takes slow_rate")
    ] = None
    slow_rate: Annotated[float, Field(gt=0, allow_inf_nan=False, description="η of such a peer")] = 0.02

    def descend(self, momentum: Tensor, gradient: Tensor, delta: Tensor) -> None:
        """One step, in place, on vectors or stacks of them; Δ collects −η·m, so that it is never a difference of θ."""
        momentum.mul_(self.decay).add_(gradient, alpha=1 - self.decay)
        delta.add_(momentum, alpha=-self.learning_rate)

    @property
    def slowed(self) -> Optimizer:
        """Of a peer that has passed `slow_above`."""
        return replace(self, learning_rate=self.slow_rate)


@dataclass(frozen=True)
class Partition(Checked):
    """Who holds which samples."""

    kind: Annotated[Literal["dirichlet", "iid"], Field(description="split by label, or at random")] = "dirichlet"
    alpha: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="Dirichlet concentration: small means few labels per peer"),
    ] = 1.0
    min_samples: Annotated[int, Field(ge=1, description="every peer gets at least this many samples")] = 1


@dataclass(frozen=True)
class Sessions(Checked):
    """Peers that come and go: mean times up and down, in iterations.

    Poisson sessions: a peer is up, then down, each for an exponential time with this mean. At the start of the run
    each peer is up with probability up / (up + down), as if the process had run forever.
    """

    up: Annotated[float, Field(gt=0, allow_inf_nan=False, description="mean iterations that a peer stays")]
    down: Annotated[float, Field(gt=0, allow_inf_nan=False, description="mean iterations that it is away")]


@dataclass(frozen=True)
class Churn(Checked):
    """Who takes part in an iteration, and who is lost on the way. The default is that everybody is always there."""

    participation: Annotated[float, Field(gt=0, le=1, description="share of the peers in the whole iteration")] = 1.0
    update_participation: Annotated[
        float | None, Field(gt=0, le=1, description="or apart: the share that updates")
    ] = None
    aggregate_participation: Annotated[
        float | None, Field(gt=0, le=1, description="and the share that aggregates")
    ] = None
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="likelihood of being lost between update and aggregation")
    ] = 0.0
    death: Annotated[
        float, Field(ge=0, lt=1, description="likelihood of dying, per peer and round of the exchange")
    ] = 0.0
    slow: Annotated[
        float, Field(ge=0, lt=1, description="share of the peers whose updates take several iterations, and come late")
    ] = 0.0
    slowness: Annotated[int, Field(ge=2, le=1000, description="iterations that the update of a slow peer takes")] = 5
    sessions: Sessions | None = None
    trace: Annotated[Path | None, Field(description="CSV file: time, peer, up or down")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separate and self.participation != 1:
            raise InputError(
                f"participation = {self.participation}: is for the entire iteration, "
                "and excludes update_participation and aggregate_participation"
            )
        if self.trace is not None and self.sessions is not None:
            raise InputError(f"trace = {self.trace}: says who is up and when, and excludes sessions")
        others = (self.participation != 1, self.separate, self.dropout, self.death, self.sessions, self.trace)
        if self.slow and any(others):
            raise InputError(f"slow = {self.slow:g}: is for runs in which everybody is there, without other churn")

    @property
    def separate(self) -> bool:
        """Whether those who update and those who aggregate are drawn apart."""
        return self.update_participation is not None or self.aggregate_participation is not None


@dataclass(frozen=True)
class Distill(Checked):
    """Moshpit-KD: peers learn from the models of their groups before they average. The defaults are the paper's."""

    iterations: Annotated[int, Field(ge=0, description="K: distil in the first so many iterations; 0: never")] = 0
    temperature: Annotated[float, Field(gt=0, description="τ: the higher, the softer the teachers' answers")] = 3.0
    keep: Annotated[float, Field(gt=0, le=1, description="ρ: share of the group's models that teach")] = 0.4
    epochs: Annotated[int, Field(ge=1, description="E: passes over the batches of a round")] = 1
    batches: Annotated[
        int, Field(ge=1, description="most mini-batches of a round, reused in all rounds; the paper's code: 8")
    ] = 1
    teacher: Annotated[
        Literal["group", "previous"], Field(description="the group's models, or the model before, which costs no bytes")
    ] = "group"
    match_local_steps: Annotated[bool, Field(description="no distillation, but as many local steps instead")] = False

    def active(self, iteration: int) -> bool:
        """Whether this iteration (counted from 1) distils at all."""
        return 1 <= iteration <= self.iterations

    def weight(self, iteration: int) -> float:
        """λ = max(0, 1 − (t−1)/K): the teachers' part in the loss, 1 at first and 0 after K iterations."""
        return max(0.0, 1 - (iteration - 1) / self.iterations)

    def kept(self, candidates: int) -> int:
        """ℓ = max(1, ⌊ρ·|C|⌋)."""
        return max(1, math.floor(self.keep * candidates))


@dataclass(frozen=True)
class Privacy(Checked):
    """What others may learn from a peer: differential privacy of all its data or of one record, and masked sums."""

    mode: Annotated[
        Literal["off", "sound", "paper"] | None, Field(description="sound where there is noise, else off")
    ] = None
    noise_multiplier: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, description="σ: noise on the sum of updates, over the clip")
    ] = None
    unit: Annotated[
        Literal["peer", "record"], Field(description="what is hidden: all data of a peer, or one record of it")
    ] = "peer"
    records: Annotated[
        int | None,
        Field(ge=1, description="with unit = record: the public number that batch / records is the sampling rate by"),
    ] = None
    clip: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="C of the first iteration; default 0.1, of a record 1"),
    ] = None
    target_quantile: Annotated[
        float, Field(ge=0, le=1, description="γ: the part of the updates that should fit C")
    ] = 0.5
    clip_step: Annotated[
        float | None, Field(ge=0, lt=100, description="η_C: how fast C follows them; default 0.2, of a record 0: fixed")
    ] = None
    indicator_noise: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="σ_b: noise on the sum of indicators; else max(shares/20, 1.5σ)"),
    ] = None
    shares: Annotated[
        int | None, Field(ge=1, description="n that the noise is cut for; by default who should take part")
    ] = None
    tolerated_loss: Annotated[
        float, Field(ge=0, lt=1, description="f: σ holds when this part of the shares is lost")
    ] = 0.0
    colluders: Annotated[
        int, Field(ge=0, description="peers that may tell an observer their shares of noise")
    ] = 0
    delta: Annotated[
        float | None, Field(gt=0, lt=0.5, description="δ; default: the number of peers, or of all records, to the -1.1")
    ] = None
    target_epsilon: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, description="stop before ε exceeds this")
    ] = None
    target_observer: Annotated[
        Literal["outsider", "insider", "insider_masked"] | None, Field(description="for whom that ε is")
    ] = None
    masks: Annotated[bool, Field(description="only the sum over the whole roster is ever seen, by anybody")] = False
    smallest_sum: Annotated[
        int | None,
        Field(ge=3, le=2**16, description="contributions of known peers that a masked sum must have; default 3"),
    ] = None


# --- the network table: how a real peer waits and connects ---


@dataclass(frozen=True)
class Patience(Checked):
    """How long a real peer waits for others, on its own clock; virtual peers differ (`protocol.protocol_settings`)."""

    ready_timeout: Annotated[
        float, Field(gt=0, description="seconds that an iteration waits for peers that still train")
    ] = 20.0
    call_timeout: Annotated[
        float, Field(gt=0, description="seconds for a small request and its answer, retries included")
    ] = 5.0
    phase_timeout: Annotated[
        float, Field(gt=0, description="seconds without a sign of life in an exchange; a phase may take longer")
    ] = 10.0
    slowest_link: Annotated[
        float, Field(gt=0, description="Mbit/s of the slowest peer's link: a phase has time for its bytes there")
    ] = 5.0
    takeover: Annotated[
        float, Field(gt=0, description="seconds between one leader's silence and the next one's proposal")
    ] = 2.0
    minority_timeout: Annotated[
        float, Field(gt=0, description="seconds without a majority, before the rest goes on alone")
    ] = 60.0
    iteration_timeout: Annotated[
        float, Field(gt=0, description="seconds for a whole iteration, decided or not")
    ] = 180.0
    poll: Annotated[float, Field(gt=0, description="seconds between two look-ups while waiting")] = 0.25
    record_ttl: Annotated[
        float, Field(gt=0, le=86_400, description="seconds that the DHT remembers a peer's word")
    ] = 600.0
    sync_states: Annotated[
        float, Field(gt=0, description="whole states that one peer may fetch from this one in a minute")
    ] = 10.0
    on_minority: Annotated[
        Literal["fork", "wait"], Field(description="without a majority: go on as a new lineage, or wait for it")
    ] = "fork"


def _several(given: Any) -> Any:
    """A flag has one text for all the addresses, with commas between them."""
    return tuple(given.split(",")) if isinstance(given, str) else given


@dataclass(frozen=True)
class Reach(Checked):
    """How a real peer is reached, and gets through routers. The defaults are for loopback and local networks."""

    announce: Annotated[
        tuple[str, ...],
        BeforeValidator(_several),
        Field(description="addresses to tell others where they differ from listen, such as a forwarded port"),
    ] = ()
    nat_port_map: Annotated[bool, Field(description="ask the router to forward a port (UPnP, NAT-PMP)")] = False
    auto_nat: Annotated[
        bool, Field(description="find out from others whether this peer can be dialled, and help them to")
    ] = False
    reachability: Annotated[
        Literal["auto", "public", "private"],
        Field(description="whether others can dial this peer: find out, yes, or no (then through relays alone)"),
    ] = "auto"
    relay: Annotated[bool, Field(description="reach peers behind routers through relays")] = False
    auto_relay: Annotated[bool, Field(description="be reached through relays when behind a router")] = False
    trusted_relays: Annotated[
        tuple[str, ...], BeforeValidator(_several), Field(description="addresses of peers that relay for this one")
    ] = ()
    join_timeout: Annotated[float, Field(gt=0, description="seconds to join through one address")] = 10.0
    dht_timeout: Annotated[
        float, Field(gt=0, description="seconds for a request to one DHT node: a hung one delays a look-up by so much")
    ] = 1.0


@dataclass(frozen=True)
class Network(Reach, Patience):
    """How a real peer reaches the others, and how long it waits for them. Times are seconds."""

    start_timeout: Annotated[
        float, Field(ge=0, description="seconds that a run waits for its expected peers to begin")
    ] = 120.0
    refresh: Annotated[float, Field(gt=0, description="seconds between two looks at who is there")] = 15.0

    def patience(self) -> dict[str, Any]:
        """The part that `marfl.protocol.protocol_settings.Settings` takes."""
        return {field.name: getattr(self, field.name) for field in fields(Patience)}

    def reach(self) -> dict[str, Any]:
        """The part that `marfl.net.libp2p.connection.Libp2pSettings` takes."""
        return {field.name: getattr(self, field.name) for field in fields(Reach)}


# --- the options of a peer: of `marfl.Peer`, and where it has them, of `marfl peer` ---


@dataclass(frozen=True)
class RunTerms(Checked):
    """Which run it is, and how its peers average."""

    run: Annotated[str, Field(description="the name of the run; its peers find each other by it")] = "run"
    group_size: GroupSize = 5
    exchange: Annotated[str, Field(description="what travels in a group: grid, chunked or full")] = "grid"
    wire: Annotated[
        str, Field(description="values as fp32; fixed: 64-bit integers; int8 or int4: integers of so few bits")
    ] = "fp32"
    wire_down: WireDown = None
    max_weight: Annotated[
        float, Field(gt=0, lt=2**60, description="the most that one peer's update may count; see aggregate(weight)")
    ] = 1e6
    liars: Liars = 1
    seniority: Seniority = 2
    smallest_sum: Annotated[
        int, Field(ge=3, le=2**16, description="contributions of known peers that a masked sum must have")
    ] = 3
    audit: AuditRate = 0.0
    on_fraud: OnFraud = "go on"
    expected: Annotated[
        int,
        Field(ge=0, description="peers to wait for at first or after a restart of all; 0: begin with whoever is there"),
    ] = 0


@dataclass(frozen=True)
class Joining(Checked):
    """As whom, through whom and with what right one peer joins a run."""

    join: Annotated[tuple[str, ...], Field(description="addresses of peers of the run; a first peer needs none")] = ()
    listen: Annotated[
        tuple[str, ...],
        Field(description="multiaddresses to listen on; loopback by default, /ip4/0.0.0.0/tcp/0 for a network"),
    ] = ()
    identity: Annotated[Path | None, Field(description="key file, the log of votes beside it")] = None
    token: Annotated[Path | None, Field(description="this peer's token, for a closed run")] = None
    authority: Annotated[str | None, Field(description="the closed run's authority, in hex")] = None
