"""What all peers of a run must agree on, and how patient they are. Seconds are on each peer's own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marfl.errors import InputError
from marfl.plan.grid import Plan
from marfl.protocol import exchange as registry
from marfl.protocol.fixed_point import WIRES
from marfl.protocol.roster import LEAST_PIECE, PIECE, VOID

EXCHANGES = ("grid", "chunked", "full")  # over a plan; `marfl.techniques` registers those of the rivals beside them

SHARED = ("group_size", "exchange", "fallbacks", "meet_until", "wire", "max_weight")  # by all peers of a run
OWN = (  # where to meet, and how patient one is; a roster has its leader's pieces
    "run", "piece", "on_minority", "expected", "ready_timeout", "call_timeout", "phase_timeout", "takeover",
    "minority_timeout", "iteration_timeout", "poll", "record_ttl", "sync_states",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The protocol's settings."""

    run: str = "run"
    group_size: int = 5  # M in the paper
    exchange: str = "grid"  # of the first attempt
    fallbacks: tuple[str, ...] = ("chunked", "full")  # of the second attempt, and of all that follow
    meet_until: int = 0  # in iterations up to this one, groups meet before they average (see `meetings`)
    wire: str = "fp32"  # how values travel: "fixed" sums integers, exactly
    max_weight: float = 1e6  # the most that one peer's update may count; an update weighs 1 unless its owner says more
    piece: int = PIECE  # longer slices travel in pieces of so many bytes; a roster has its leader's
    on_minority: str = "fork"  # without a majority of electors: "fork" founds a new lineage, "wait" waits for them
    expected: int = 0  # peers to wait for before a run begins, when its founders are not known by name
    ready_timeout: float = 10.0  # how long a leader waits for electors that are not ready
    call_timeout: float = 3.0  # a small request and its answer, retries included
    phase_timeout: float = 4.0  # one phase of an exchange
    takeover: float = 2.0  # between one leader's silence and the next one's proposal
    minority_timeout: float = 60.0  # without a quorum, before a new lineage may be founded
    iteration_timeout: float = 180.0  # then the iteration returns, decided or not
    poll: float = 0.25  # between two look-ups while waiting
    record_ttl: float = 600.0  # of DHT records
    sync_states: float = 10.0  # whole states that one peer may fetch from me in a minute

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise InputError(f"group_size: {self.group_size} is too small; a group has at least 2 peers")
        self._check_exchanges()
        if not 0 < self.max_weight < 2.0**60:
            raise InputError(f"max_weight: {self.max_weight:g} must be more than 0 and less than 2**60")
        if self.piece < LEAST_PIECE:
            raise InputError(f"piece: {self.piece} bytes are too few; choose {LEAST_PIECE} or more")
        if not self.sync_states > 0:
            raise InputError(f"sync_states: {self.sync_states} is too few; others must be able to catch up")
        if self.on_minority not in ("fork", "wait"):
            raise InputError(f"on_minority: {self.on_minority!r} is unknown; choose fork or wait")

    def _check_exchanges(self) -> None:
        for name in (self.exchange, *self.fallbacks):
            if name not in registry.EXCHANGES:
                raise InputError(f"exchange: {name!r} is unknown; choose one of {', '.join(registry.EXCHANGES)}")
        if self.wire not in WIRES:
            raise InputError(f"wire: {self.wire!r} is unknown; choose one of {', '.join(WIRES)}")
        if self.wire != "fp32" and not {self.exchange, *self.fallbacks} <= {*EXCHANGES}:
            raise InputError(f"wire = {self.wire}: needs the exchanges {', '.join(EXCHANGES)}, not {self.exchange}")
        if not self.fallbacks:
            raise InputError("fallbacks: at least one exchange is needed for the second attempt")

    @property
    def terms(self) -> dict[str, Any]:
        """What all peers of a run must share of these (see `terms`)."""
        return {name: getattr(self, name) for name in SHARED}

    def exchange_of(self, tries: int) -> str:
        """The exchange of the iteration's attempt number `tries` (0 is the first)."""
        return self.exchange if tries == 0 else self.fallbacks[min(tries, len(self.fallbacks)) - 1]

    def meetings(self, iteration: int, layout: Plan) -> int:
        """How many times the groups of a plan meet before they average."""
        return len(layout.rounds) if iteration <= self.meet_until else 0

    def phases(self, exchange: str, iteration: int, layout: Plan) -> int:
        """How many phases an attempt takes, meetings included."""
        if exchange == VOID:
            return 0
        masks = 3 if self.wire == "masked" else 0  # shares before the sum, pledges and secrets after it
        return self.meetings(iteration, layout) + registry.PHASES[exchange](layout) + masks
