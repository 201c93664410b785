"""`wire = "fixed"`: updates as integers, so that their sum is exact, whoever adds it in whichever order.

A value v travels as q = round(v·2³²), a signed integer of 64 bits (8 bytes a value, where fp32 takes 4). A sender
refuses |v| > 2¹⁴ and a roster has at most 2¹⁶ members, so a sum stays below 2⁶² and never wraps; with masks, which are
added modulo 2⁶⁴, it is what is left when they are taken off. The step of 2⁻³² is finer than that of fp32 for everything
above 2⁻⁹. 32 bits would cost no more than fp32, but leave n peers 31 − log₂ n bits between the largest value anybody
may bring and the step: too few to fix once for all models, and to agree on them anew would tell about the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marfl.errors import BadPayload, InputError
from marfl.protocol.tensors import LARGEST_INPUT, within
from marfl.wire.packing import BITS, MASKED, MOST_MEMBERS, FieldBits, IntegerWire, NoiseRoom, is_small, small_bits
from marfl.wire.quantiser import LARGEST as LARGEST_SMALL
from marfl.wire.quantiser import can_quantise

NARROW = {16: torch.int16, 32: torch.int32}  # by bits: fields of private integers that need no 64
FRACTION_BITS = 32
LARGEST = 2.0**14  # of one value
AT_A_TIME = 2**15  # values that are worked on together: they stay in the cache
_SCALE = 2.0**FRACTION_BITS
_LARGEST_UNIT = int(LARGEST * _SCALE)

DTYPES = {"fp32": torch.float32, "fixed": torch.int64, "masked": torch.int64} | {
    f"{wire}{bits}": dtype for wire in ("fixed", "masked") for bits, dtype in NARROW.items()
}  # small integers: `slice_codec`
VALUE_BYTES = {wire: dtype.itemsize for wire, dtype in DTYPES.items()}
# How values travel: as they are, as integers, as integers under masks; as integers of a few bits (`marfl.wire`).
WIRES = (*DTYPES, *BITS, *(MASKED + name for name in BITS))


def field_bits(wire: str, integers: IntegerWire | None, members: int) -> FieldBits:
    """The fields of this wire, which is of `integers` where few bits travel, among so many members."""
    return small_bits(integers, members) if integers else FieldBits(*2 * (8 * VALUE_BYTES[wire],))


def is_masked(wire: str) -> bool:
    """Whether values travel under masks."""
    return wire.startswith("masked")


def fits(value: Tensor) -> bool:
    """Whether every value may travel: finite, and within ±2¹⁴. Integers are in the field as they are, and wrap."""
    if not value.is_floating_point():
        return True
    return value.numel() == 0 or bool((value.abs() <= LARGEST).all())  # a NaN compares as false


def can_carry(wire: str, update: Tensor) -> bool:
    """Whether an update may leave: whoever cannot use it must not get it."""
    if is_small(wire):
        return can_quantise(update)
    return within(update, LARGEST_INPUT) if wire == "fp32" else fits(update)  # integers never travel as fp32


def abstains(wire: str) -> str:
    """What is said of a peer whose update may not leave."""
    largest = LARGEST_INPUT if wire == "fp32" else LARGEST_SMALL if is_small(wire) else LARGEST
    return f"its update holds NaN, infinity or a value beyond ±{largest:g}, so it abstains"


_CHECKS = {
    "fp32": "receivers refuse NaN and infinity, and name their sender",
    "fixed": "receivers refuse sums that nobody can have brought, and name their sender",
    "masked": "receivers cannot check values under masks; senders check their own range, everybody that of the sum",
}


def value_checks(wire: str) -> str:
    """What is checked of the values that travel."""
    return _CHECKS["fp32" if wire == "fp32" else "masked" if is_masked(wire) else "fixed"]


def encode(value: Tensor) -> Tensor:
    """q = round(v·2³²), half to even; exact in float64, so the same bits everywhere.

    A private peer's values are integers already, in a unit that follows from its noise (`marfl.dp.lattice`).
    """
    if not value.is_floating_point():
        return value
    if not fits(value):
        worst = float(value.abs().nan_to_num(torch.inf).max())
        raise InputError(f"wire = fixed: a value of {worst:g} would overflow; an update must stay within ±{LARGEST:g}")
    return value.to(torch.float64).mul_(_SCALE).round_().to(torch.int64)


def sum_of_integers(values: Sequence[Tensor]) -> Tensor:
    """Σ of the encoded values: exact, so in any order. In a narrower field it is the same, modulo its size."""
    total = encode(values[0]).clone()
    for value in values[1:]:
        total.add_(encode(value))
    return total


def decode_mean(total: Tensor, members: int, weight: float, room: NoiseRoom | None = None) -> Tensor:
    """The mean in fp32 from a sum of integers, or `BadPayload` when no such sum is possible."""
    check_range(total, members, room)
    mean = torch.empty(total.numel())
    for start in range(0, total.numel(), AT_A_TIME):
        here = slice(start, start + AT_A_TIME)
        mean[here] = total[here].to(torch.float64).div_(_SCALE).div_(weight)
    return mean


def check_range(total: Tensor, members: int, room: NoiseRoom | None = None) -> None:
    """`BadPayload` unless so many members can have brought this sum. Masks that do not cancel never pass.

    `room` says what private members can bring; in a narrow field nobody else's sum can be checked.
    """
    if members > MOST_MEMBERS:
        raise BadPayload(f"a sum over {members} members; wire = fixed adds up at most {MOST_MEMBERS}")
    if total.dtype != torch.int64 and room is None:
        return
    limit = members * _LARGEST_UNIT if room is None else room.largest(members)
    low, high = (int(each) for each in torch.aminmax(total)) if total.numel() else (0, 0)
    if high > limit or low < -limit:
        raise BadPayload("a sum that its members cannot have brought")
