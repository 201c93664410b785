"""Parsers of option values: what they refuse, they refuse in one line with the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer


def whole_number(low: int, high: int | None = None, multiple_of: int = 1) -> Callable[[str], int]:
    """A parser of whole numbers from `low` to `high` that `multiple_of` divides."""
    kind = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"
    allowed = f"{kind}, at least {low}" + ("" if high is None else f", at most {high}")

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise _refused(text, allowed) from None
        if number < low or (high is not None and number > high) or number % multiple_of:
            raise _refused(text, allowed)
        return number

    return parse


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A parser that takes exactly these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise _refused(text, f"one of {', '.join(names)}")
        return text

    return parse


def _refused(text: str, allowed: str) -> typer.BadParameter:
    return typer.BadParameter(f"must be {allowed}, not {text!r}")
