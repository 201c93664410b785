"""The agreed state where updates travel as integers of a few bits, and what one peer sends of an update.

What travels is the fresh part of an update: what is left of it when everybody's public part is taken off, which is what
the agreed momentum alone would do in as many steps. To the mean of the fresh parts the public part is added again. The
scales are a vector of the agreed state: in its hash, in checkpoints, and given to whoever catches up.

With overlap, updates begin from the state before the newest and from its momentum, so the state keeps that one as well.
Without the newest momentum's part instead, what travels would be mostly the difference of the two, in which four bits
lose what was learned. Who trains from the newest state all the same sends that difference along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from marfl.errors import BadPayload, InputError
from marfl.learn.agreement import Agreement
from marfl.state import Snapshot
from marfl.wire.error_feedback import CommittedSum, ErrorFeedback, RecordChain
from marfl.wire.packing import IntegerWire
from marfl.wire.quantiser import (
    SCALES,
    Exponents,
    Quantised,
    can_quantise,
    dequantise,
    exponents_in,
    quantise,
    rounding_dice,
    unset,
    wire_at,
)

EARLIER = "earlier_momentum"  # a vector of the agreed state: the momentum of the state before


@dataclass(frozen=True)
class SmallIntegers:
    """How peers agree whose updates travel in a few bits."""

    agreement: Agreement
    wire: IntegerWire
    trainable: int  # values before the buffers, which momentum does not move
    overlap: bool = False
    _newest: dict[Snapshot, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def start(self, theta: Tensor) -> Snapshot:
        """The state of the beginning, without scales yet."""
        begin = self.agreement.start(theta)
        scales = torch.from_numpy(unset(self.agreement.values(theta.numel()))).to(torch.float32)
        earlier = {EARLIER: torch.zeros_like(theta)} if self.overlap else {}
        return Snapshot(begin.version, {**begin.vectors, **earlier, SCALES: scales}, begin.scalars)

    def exponents(self, state: Snapshot) -> Exponents:
        return exponents_in(state.vectors[SCALES].numpy())

    def wire_at(self, state: Snapshot) -> IntegerWire:
        """How updates travel from this state."""
        return wire_at(self.wire, self.exponents(state))

    def public(self, state: Snapshot) -> Tensor | None:
        """What everybody would send without a gradient; None where nobody knows another's momentum.

        That of one state is kept, because a peer needs it twice: for what it sends, and for the state that follows.
        """
        if self.agreement.momentum == "local":
            return None
        if state not in self._newest:
            found = self._public(state)
            self._newest.clear()
            self._newest[state] = found
        return self._newest[state]

    def _public(self, state: Snapshot) -> Tensor:
        began = state.vectors.get(EARLIER if self.overlap else "momentum")
        if began is None:
            raise InputError("overlap with few bits: a state of an earlier version; begin anew")
        optimizer, velocity = self.agreement.optimizer, began.clone()
        velocity[self.trainable :] = 0
        travelled = torch.zeros_like(velocity)
        for _ in range(self.agreement.local_work.steps(state.version + 1)):
            travelled.add_(velocity.mul_(optimizer.decay))
        travelled.mul_(-optimizer.learning_rate)
        return torch.cat((travelled, velocity)) if self.agreement.momentum == "send" else travelled

    def advance(self, state: Snapshot, total: Tensor, weight: float, contributions: int) -> Snapshot:
        """The next agreed state from the sum of so many contributions; `BadPayload` for one of another length."""
        exponents = self.exponents(state)
        if total.numel() != self.agreement.values(state.vectors["theta"].numel()):
            raise BadPayload(f"a sum of {total.numel()} values")
        mean, scales = dequantise(total, exponents, weight, contributions, self.wire)
        public = self.public(state)
        self._newest.clear()
        following = self.agreement.advance(state, mean if public is None else mean.add_(public), contributions)
        earlier = {EARLIER: state.vectors["momentum"]} if self.overlap else {}
        vectors = {**following.vectors, **earlier, SCALES: torch.from_numpy(scales).to(torch.float32)}
        return Snapshot(following.version, vectors, following.scalars)


@dataclass(frozen=True, eq=False)
class Sender:
    """What one peer sends in one iteration."""

    integers: SmallIntegers
    state: Snapshot  # that the update starts from
    public: Tensor | None  # of an update from this state
    left: Tensor | None  # of the peer's updates before
    seed: int
    peer: int

    def can_send(self, update: Tensor, weight: float = 1.0) -> bool:
        """Whether what is new in an update may leave: finite, and small enough."""
        return can_quantise(*self._weighed(update, weight))

    def quantised(self, update: Tensor, weight: float, contributions: int) -> Quantised:
        """Integers of w times what is new in an update, for a roster with so many contributions; and what is left."""
        limit = self.integers.wire_at(self.state).limit(contributions)
        dice = rounding_dice(self.seed, self.peer, self.state.version + 1)
        learned, public = self._weighed(update, weight)
        return quantise(learned, self.left, self.integers.exponents(self.state), limit, dice, public)

    def _weighed(self, update: Tensor, weight: float) -> tuple[Tensor, Tensor | None]:
        """w times an update, and w times what in it is public; what counts once is not copied."""
        if weight == 1.0:
            return update, self.public
        return (update if self.public is None else update - self.public) * weight, None


class SealedRoster(Protocol):
    """What must be known of a roster to send it something."""

    @property
    def digest(self) -> bytes: ...

    @property
    def contributions(self) -> int: ...


@dataclass
class IntegerUpdates:
    """All that one peer sends in a few bits, iteration after iteration, and what is left of it."""

    integers: SmallIntegers
    seed: int
    peer: int
    memory: ErrorFeedback = field(default_factory=ErrorFeedback)
    keep: Callable[[ErrorFeedback], None] | None = None  # writes down what is left, or will be

    def settle(self, decisions: Iterable[CommittedSum]) -> None:
        """What was committed here, as far as it is known, oldest first."""
        for decision in decisions:
            self.memory.decided(decision)

    def sender(self, state: Snapshot, chain: RecordChain) -> Sender:
        """For an update from this state; `settle` comes first."""
        left = self.memory.current(chain)
        return Sender(self.integers, state, self.integers.public(state), left, self.seed, self.peer)

    def quantise(self, sender: Sender, update: Tensor, weight: float, roster: SealedRoster) -> Tensor | None:
        """Integers for a sealed roster, or None where they cannot carry the update. What is left is remembered."""
        if not sender.can_send(update, weight):
            return None
        found = sender.quantised(update, weight, roster.contributions)
        self.memory.sent(roster.digest, sender.state.version + 1, found.left)
        return found.sent

    @property
    def write_down(self) -> Callable[[], None] | None:
        """To be done before what was quantised can be in a sum; None where nothing is kept."""
        return partial(self.keep, self.memory) if self.keep is not None else None
