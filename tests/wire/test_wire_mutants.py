"""Mutants of the integer wire, each with one rule broken: a test must notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

import test_error_feedback as feedback
import test_packing as packing
import test_quantiser as rounding
import test_rounded_sum as back
from marfl.wire import packing as fields
from marfl.wire import quantiser, rounded_sum
from marfl.wire.error_feedback import ErrorFeedback
from stages.mutation import Edit, mutate


class Broken(NamedTuple):
    """A broken rule, and the test that must notice."""

    function: Callable[..., Any]
    old: str
    new: str
    test: Callable[[], Any]


MUTANTS = {
    "a discarded update counts": Broken(
        ErrorFeedback.decided, "each.roster == roster", "True",
        feedback.test_an_update_that_was_discarded_leaves_the_residual_as_it_was,
    ),
    "what may have counted is sent again": Broken(
        ErrorFeedback.current, "self._forget()", "self.on_its_way = []",
        feedback.test_where_it_is_not_known_whether_a_contribution_counted_nothing_is_left,
    ),
    "a residual of another lineage is used": Broken(
        ErrorFeedback.current, "not _is_of(self.kept[-1], chain)", "False",
        feedback.test_in_another_lineage_the_residual_of_the_common_record_returns,
    ),
    "a loss is not counted": Broken(
        ErrorFeedback.current, "self.lost += had and (not self.kept)", "pass",
        feedback.test_without_a_common_record_nothing_is_left_and_that_is_counted,
    ),
    "what is cut off is lost": Broken(
        quantiser.quantise, "torch.addcmul(exact, chosen",
        "torch.addcmul(exact.clamp_(limit * back, -limit * back), chosen",
        rounding.test_what_was_sent_plus_what_is_left_is_what_was_learned_to_the_last_bit,
    ),
    "what was learned is not rounded to the fixed point": Broken(
        quantiser.quantise, "torch.add(fresh, steps, out=whole).sub_(steps)", "whole.copy_(fresh)",
        rounding.test_what_was_sent_plus_what_is_left_is_what_was_learned_to_the_last_bit,
    ),
    "always down": Broken(
        quantiser.quantise, "_rows_like(new, draws, turn)", "0 * _rows_like(new, draws, turn)",
        rounding.test_rounding_is_right_on_average,
    ),
    "a silent block shrinks": Broken(
        quantiser._next_exponents, "np.where(silent, following, following + steps)",
        "following + np.where(silent, -1, steps)", rounding.test_a_block_in_which_nothing_was_sent_keeps_its_scale,
    ),
    "a value out of range leaves": Broken(
        quantiser.can_quantise, "high <= LARGEST", "high <= LARGEST * 4",
        partial(rounding.test_what_is_not_a_number_or_out_of_range_never_leaves, 2 * rounding.LARGEST),
    ),
    "ties go up on the way back": Broken(
        rounded_sum.round_back, ".round_()", ".add_(0.5).floor_()",
        back.test_rounding_back_leans_to_neither_side,
    ),
    "a shift is not checked": Broken(
        rounded_sum.unpack_slice, "int(shifts.max()) > most_shift", "False",
        back.test_a_shift_out_of_range_is_refused,
    ),
    "a field that is too narrow": Broken(
        fields.IntegerWire.partial, "contributions * largest(self.up)", "largest(self.up)",
        partial(packing.test_a_partial_sum_travels_in_the_narrowest_field_that_holds_it, 4, 5, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MUTANTS[name]
    mutate([Edit(broken.function, broken.old, broken.new)], monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, ExceptionGroup, OverflowError, ValueError)):
        broken.test()
