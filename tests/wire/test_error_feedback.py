"""Residuals: kept with the record they belong to, so that nothing counts twice, whatever becomes of an attempt."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from marfl.wire.error_feedback import KEPT, CommittedSum, ErrorFeedback, OnItsWay, RecordChain, Residual
from marfl.wire.quantiser import quantise, rounding_dice

MAIN, OTHER = b"main", b"other"


def left(value: float) -> Tensor:
    return torch.tensor([value])


def chain(lineage: bytes = MAIN, **commits: bytes) -> RecordChain:
    return RecordChain(lineage, {int(name[1:]): record for name, record in commits.items()})


def test_a_committed_contribution_leaves_its_residual_to_the_next_one():
    memory = ErrorFeedback()
    assert memory.current(chain(_0=b"r0")) is None
    memory.sent(b"roster", 1, left(0.5))
    memory.decided(CommittedSum(1, b"roster", b"r1", MAIN))
    assert memory.current(chain(_0=b"r0", _1=b"r1")) == left(0.5)
    assert memory.lost == 0


def test_an_update_that_was_discarded_leaves_the_residual_as_it_was():
    memory = ErrorFeedback()
    memory.sent(b"one", 1, left(0.5))
    memory.decided(CommittedSum(1, b"one", b"r1", MAIN))
    memory.sent(b"two", 2, left(0.7))
    memory.decided(CommittedSum(2, b"another roster", b"r2", MAIN))
    assert memory.current(chain(_1=b"r1", _2=b"r2")) == left(0.5)


def test_of_several_attempts_the_committed_one_counts():
    memory = ErrorFeedback()
    memory.sent(b"first", 1, left(0.1))
    memory.sent(b"second", 1, left(0.2))
    memory.decided(CommittedSum(1, b"first", b"r1", MAIN))
    assert memory.current(chain(_1=b"r1")) == left(0.1)


def test_whoever_was_absent_goes_on_with_what_it_had():
    memory = ErrorFeedback([Residual(3, b"r3", MAIN, left(0.5))])
    assert memory.current(chain(_3=b"r3", _9=b"r9")) == left(0.5)
    assert memory.current(chain(_8=b"r8", _9=b"r9")) == left(0.5), "so long ago that only the lineage tells"
    assert memory.lost == 0


def test_in_another_lineage_the_residual_of_the_common_record_returns():
    memory = ErrorFeedback([Residual(3, b"r3", MAIN, left(0.3)), Residual(4, b"r4", MAIN, left(0.4))])
    assert memory.current(chain(OTHER, _3=b"r3", _4=b"x4", _5=b"x5")) == left(0.3)
    assert memory.lost == 0


def test_without_a_common_record_nothing_is_left_and_that_is_counted():
    memory = ErrorFeedback([Residual(4, b"r4", MAIN, left(0.4))])
    assert memory.current(chain(OTHER, _3=b"r3", _4=b"x4")) is None
    assert memory.lost == 1
    assert memory.current(chain(OTHER, _3=b"r3", _4=b"x4")) is None
    assert memory.lost == 1, "counted once"


def test_where_it_is_not_known_whether_a_contribution_counted_nothing_is_left():
    memory = ErrorFeedback([Residual(4, b"r4", MAIN, left(0.4))])
    memory.sent(b"roster", 5, left(0.5))
    assert memory.current(chain(_4=b"r4", _7=b"r7")) is None
    assert memory.lost == 1


def test_an_iteration_that_is_tried_again_takes_the_same_residual():
    memory = ErrorFeedback([Residual(4, b"r4", MAIN, left(0.4))])
    memory.sent(b"roster", 5, left(0.5))
    assert memory.current(chain(_4=b"r4")) == left(0.4)


def test_what_is_on_its_way_at_a_restart_is_settled_by_the_record_it_comes_back_to():
    kept = Residual(4, b"r4", MAIN, left(0.4))
    memory = ErrorFeedback([kept], on_its_way=[OnItsWay(b"roster", 5, left(0.5))])
    memory.decided(CommittedSum(5, b"roster", b"r5", MAIN))
    assert memory.current(chain(_5=b"r5", _9=b"r9")) == left(0.5)


def test_an_iteration_that_went_by_leaves_what_was_left():
    memory = ErrorFeedback([Residual(4, b"r4", MAIN, left(0.4))])
    memory.sent(b"roster", 5, left(0.5))
    memory.decided(CommittedSum(5, None, b"r4 once more", MAIN))
    assert memory.current(chain(_4=b"r4", _5=b"r4 once more")) == left(0.4)


class OnePeer(RuleBasedStateMachine):
    """A peer whose contributions are committed, discarded, repeated, missed and undone, in any order.

    What the lineage it stands in has taken in of it, plus what is left, is what the committed updates had learned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = ErrorFeedback()
        self.lineage, self.named, self.lost = MAIN, 0, 0
        self.commits: dict[int, bytes] = {0: b"start"}
        self.ledger = {b"start": (0.0, 0.0)}  # by record: learned and sent by this peer, in its lineage

    def _record(self) -> bytes:
        self.named += 1
        return f"record {self.named}".encode()

    def _contribute(self, value: float, roster: bytes) -> tuple[float, float]:
        learned = torch.tensor([value], dtype=torch.float32)
        self.nothing_counts_twice()
        here = self.memory.current(RecordChain(self.lineage, self.commits))
        iteration = max(self.commits) + 1
        found = quantise(learned, here, np.array([-4], dtype=np.int32), 7, rounding_dice(0, 0, self.named))
        self.memory.sent(roster, iteration, found.left)
        return float(np.rint(np.float64(learned[0]) * 2**16) / 2**16), float(found.sent[0]) / 16  # the fixed point

    def _commit(self, roster: bytes, learned: float, sent: float, *, told: bool = True) -> None:
        before, record = self.commits[max(self.commits)], self._record()
        iteration = max(self.commits) + 1
        self.commits[iteration] = record
        had = self.ledger[before]
        self.ledger[record] = had[0] + learned, had[1] + sent
        if told:
            self.memory.decided(CommittedSum(iteration, roster, record, self.lineage))

    @rule(value=st.floats(-2, 2, width=32))
    def is_committed(self, value):
        self._commit(b"mine", *self._contribute(value, b"mine"))

    @rule(value=st.floats(-2, 2, width=32))
    def is_discarded(self, value):
        self._contribute(value, b"mine")
        self._commit(b"others", 0.0, 0.0)

    @rule(value=st.floats(-2, 2, width=32))
    def is_tried_twice(self, value):
        self._contribute(value, b"lost attempt")
        self._commit(b"mine", *self._contribute(value, b"mine"))

    @rule()
    def is_absent(self):
        self._commit(b"others", 0.0, 0.0)

    @precondition(lambda self: len(self.commits) > 2)
    @rule(back=st.integers(1, KEPT))
    def another_lineage_wins(self, back):
        newest = max(self.commits)
        self.commits = {at: record for at, record in self.commits.items() if at <= max(0, newest - back)}
        self.lineage = self._record()
        for _ in range(back + 1):
            self._commit(b"theirs", 0.0, 0.0, told=False)

    @rule(value=st.floats(-2, 2, width=32))
    def never_hears_what_became_of_it(self, value):
        learned, sent = self._contribute(value, b"mine")
        self._commit(b"mine", learned, sent, told=False)
        self._commit(b"others", 0.0, 0.0, told=False)

    @invariant()
    def nothing_counts_twice(self):
        here = self.memory.current(RecordChain(self.lineage, self.commits))
        if self.memory.lost > self.lost:  # nothing is left: what was learned before is not counted any more
            self.lost, self.ledger = self.memory.lost, dict.fromkeys(self.ledger, (0.0, 0.0))
        learned, sent = self.ledger[self.commits[max(self.commits)]]
        assert learned == sent + (0.0 if here is None else here[0])


TestOnePeer = OnePeer.TestCase
TestOnePeer.settings = settings(max_examples=60, stateful_step_count=20)
