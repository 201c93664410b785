"""What all peers of a run must agree on, and how patient they are. Seconds are on each peer's own clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from marfl.errors import InputError
from marfl.plan.grid import Plan
from marfl.protocol import exchange as registry
from marfl.protocol.fixed_point import VALUE_BYTES, WIRES, is_masked
from marfl.protocol.pace import Pace, pace_for, vectors_in_phase
from marfl.protocol.roster import BACK, LEAST_PIECE, PIECE, VOID
from marfl.settings import Patience, RunTerms
from marfl.wire.packing import IntegerWire, NoiseRoom, check_down, integer_wire, is_small

EXCHANGES = ("grid", "chunked", "full")  # over a plan; `marfl.techniques` registers those of the rivals beside them

SHARED = (  # by all peers of a run
    "group_size", "exchange", "fallbacks", "meet_until", "wire", "wire_down", "max_weight", "liars", "seniority",
    "smallest_sum", "audit", "on_fraud",
)  # fmt: skip
OWN = (  # where to meet, how patient one is; a roster has its leader's pieces; alike and room follow from privacy
    "run", "piece", "alike", "room", "on_minority", "expected", "ready_timeout", "call_timeout", "phase_timeout",
    "slowest_link", "takeover", "minority_timeout", "iteration_timeout", "poll", "record_ttl", "sync_states",
)  # fmt: skip


@dataclass(frozen=True)
class Settings(Patience, RunTerms):
    """The protocol's settings: the terms of the run, and how long this peer waits."""

    fallbacks: tuple[str, ...] = ("chunked", "full")  # of the second attempt, and of all that follow
    meet_until: int = 0  # in iterations up to this one, groups meet before they average (see `meetings`)
    alike: bool = False  # with privacy all updates count alike: a weight is 0 or 1
    room: NoiseRoom | None = None  # with privacy: what the field of a sum must hold
    piece: int = PIECE  # longer slices travel in pieces of so many bytes; a roster has its leader's

    # Virtual peers: their clock does not run while a machine is busy, so they need less patience than the real ones,
    # which have the defaults of `Patience`.
    ready_timeout: float = 10.0
    call_timeout: float = 3.0
    phase_timeout: float = 4.0
    slowest_link: float = math.inf  # virtual links have times of their own: see `sim.protocol_world.patience`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_exchanges()
        if self.piece < LEAST_PIECE:
            raise InputError(f"piece: {self.piece} bytes are too few; choose {LEAST_PIECE} or more")

    def _check_exchanges(self) -> None:
        for name in (self.exchange, *self.fallbacks):
            if name not in registry.EXCHANGES:
                raise InputError(f"exchange: {name!r} is unknown; choose one of {', '.join(registry.EXCHANGES)}")
        if self.wire not in WIRES:
            raise InputError(f"wire: {self.wire!r} is unknown; choose one of {', '.join(WIRES)}")
        check_down(self.wire, self.wire_down)
        known = {*EXCHANGES} if self.masked else {*EXCHANGES, "star"}
        if (self.masked or is_small(self.wire)) and not {self.exchange, *self.fallbacks} <= known:
            raise InputError(f"wire = {self.wire}: needs the exchanges {', '.join(EXCHANGES)}, not {self.exchange}")
        if is_small(self.wire) and self.audit:
            raise InputError(f"audit = {self.audit:g}: rounded sums cannot be audited; choose wire = fp32 or fixed")
        if not self.fallbacks:
            raise InputError("fallbacks: at least one exchange is needed for the second attempt")

    @property
    def masked(self) -> bool:
        """Whether values travel under masks."""
        return is_masked(self.wire)

    def holds(self, members: int) -> bool:
        """Whether a sum over so many members has room in its field, with its noise."""
        return self.room is None or self.room.holds(members, 8 * VALUE_BYTES[self.wire])

    @property
    def integers(self) -> IntegerWire | None:
        """How values travel, where they are integers of a few bits."""
        return integer_wire(self.wire, self.wire_down)

    @property
    def terms(self) -> dict[str, Any]:
        """What all peers of a run must share of these (see `terms`)."""
        return {name: getattr(self, name) for name in SHARED}

    def may_weigh(self, weight: float) -> bool:
        """Whether an update may count so much."""
        return weight in (0, 1) if self.alike else 0 <= weight <= self.max_weight

    def exchange_of(self, tries: int) -> str:
        """The exchange of the iteration's attempt number `tries` (0 is the first)."""
        return self.exchange if tries == 0 else self.fallbacks[min(tries, len(self.fallbacks)) - 1]

    def meetings(self, iteration: int, layout: Plan) -> int:
        """How many times the groups of a plan meet before they average."""
        return len(layout.rounds) if iteration <= self.meet_until else 0

    def phases(self, exchange: str, iteration: int, layout: Plan) -> int:
        """How many phases an attempt takes, meetings included."""
        if exchange == VOID or exchange.startswith(BACK):
            return 0
        masks = 3 if self.masked else 0  # shares before the sum, pledges and secrets after it
        return self.meetings(iteration, layout) + registry.PHASES[exchange](layout) + masks

    def pace(self, exchange: str, iteration: int, layout: Plan, values: int) -> Pace:
        """How long the phases of an attempt may take, where the agreed state has so many values."""
        each = VALUE_BYTES.get(self.wire, 4)  # small integers begin in 32 bits
        meets = bool(self.meetings(iteration, layout))
        vectors = vectors_in_phase(exchange, layout.peers, self.group_size, meets=meets)
        return pace_for(self.phase_timeout, self.slowest_link, vectors * values * each)

    def state_pace(self, values: int) -> Pace:
        """The same of one whole state that is fetched."""
        return pace_for(self.phase_timeout, self.slowest_link, 4 * values)
