"""What a class of settings says about each of its fields: name, type, default, range and help.

A setting is written once, as a field `name: Annotated[type, Field(range, description=help)] = default` of a frozen
dataclass in `marfl.settings`, or of `marfl.config.Config`. The flags, `--set`, error messages and docs/config.md read
it from there with `settings_of`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from marfl.errors import InputError

T = TypeVar("T")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
REQUIRED = PydanticUndefined  # the default of a setting that has none


class Checked:
    """The base of every settings dataclass: a value outside its field's type or range is an `InputError`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name, setting in settings_of(type(self)).items():
            if "." not in name:
                setting.check(getattr(self, name))


@dataclass(frozen=True)
class Setting:
    """One setting: a leaf of the tree, by its dotted name."""

    name: str
    info: FieldInfo  # its type and its range
    default: Any
    help: str

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = typing.Annotated[self.info.annotation, self.info]
        return TypeAdapter(kind)

    @property
    def kind(self) -> Any:
        """The type, without the None of a setting that may be left out."""
        return _without_none(self.info.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it can be; none where it is not a choice of words."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is typing.Literal else ()

    @property
    def is_table(self) -> bool:
        """Whether it holds names and values of somebody else's: the options of a task or technique."""
        return typing.get_origin(self.kind) is dict

    @property
    def allowed(self) -> str:
        """What it may be, in words: the type, and both ends of the range."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if typing.get_origin(self.kind) is tuple:
            return "a list of texts"
        finite = any(getattr(limit, "allow_inf_nan", True) is False for limit in self.info.metadata)
        word = "a finite number" if finite else _WORDS.get(self.kind, "a table")
        return f"{word}, {self.range}" if self.range else word

    @property
    def range(self) -> str:
        """Both ends of its range, such as "above 0, at most 1"; empty where it has none."""
        limits = [(words, getattr(limit, bound, None)) for limit in self.info.metadata for bound, words in _BOUNDS]
        return ", ".join(f"{words} {_short(value)}" for words, value in limits if value is not None)

    def parse(self, text: str) -> Any:
        """The value that a text of the command line means; `ValueError` for one that it cannot be."""
        given: Any = text
        if self.is_table:
            given = json.loads(text)
        elif typing.get_origin(self.kind) is tuple:
            given = tuple(filter(None, text.split(",")))
        return self._adapter.validate_python(given)

    def check(self, value: Any) -> None:
        """`InputError` with the name, the value and what is allowed, when it cannot be this."""
        try:
            self._adapter.validate_python(value)
        except ValidationError:
            raise InputError(f"{self.name} = {value!r:.60}: must be {self.allowed}") from None


_known: dict[tuple[type[Any], str], dict[str, Setting]] = {}  # read once for each class


def settings_of(model: type[Any], prefix: str = "") -> Mapping[str, Setting]:
    """Every setting of a class and of the classes nested in it, by dotted name, in the order they are written."""
    if (model, prefix) in _known:
        return _known[model, prefix]
    found: dict[str, Setting] = {}
    for name, info in _fields(model):
        inner = nested_in(info.annotation)
        if inner is not None:
            found |= settings_of(inner, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True, validated_data={})
            found[prefix + name] = Setting(prefix + name, info, default, info.description or "")
    _known[model, prefix] = found
    return found


def tables_of(model: type[Any], prefix: str = "") -> Iterator[tuple[str, type[Any]]]:
    """A class and those nested in it, each with its dotted name; the class itself has no name."""
    yield prefix.rstrip("."), model
    for name, info in _fields(model):
        if (inner := nested_in(info.annotation)) is not None:
            yield from tables_of(inner, f"{prefix}{name}.")


def validated(model: type[T], tree: Mapping[str, Any], prefix: str = "") -> T:
    """The settings of a tree of plain values, such as a TOML file; the first thing wrong is one clear line."""
    try:
        return TypeAdapter(model).validate_python(dict(tree))
    except ValidationError as error:
        raise InputError(_first(error, model, prefix)) from None


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say about a name that is not among these."""
    names = list(names)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}must be one of {', '.join(names)}"


def nested_in(annotation: Any) -> type[Any] | None:
    """The class of settings that a field holds, if it holds one."""
    kind = _without_none(annotation)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, Checked | BaseModel):
        return kind
    return None


def _first(error: ValidationError, model: type, prefix: str) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = prefix + ".".join(path)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        place = dict(tables_of(model))[".".join(path[:-1])]
        return f"config: {where} is not a setting; {nearest(path[-1], (name for name, _ in _fields(place)))}"
    setting = next((found for name, found in settings_of(model).items() if _within(path, name)), None)
    allowed = setting.allowed if setting else "a table"
    if first["type"] in ("missing", "missing_argument"):
        return f"config: {where} is missing; must be {allowed}"
    return f"{where} = {first['input']!r:.60}: must be {allowed}"


def _within(path: list[str], name: str) -> bool:
    """Whether a place in the tree, such as an item of a list, belongs to this setting."""
    return path[: name.count(".") + 1] == name.split(".")


def _fields(model: type[Any]) -> Iterator[tuple[str, FieldInfo]]:
    if issubclass(model, BaseModel):
        yield from model.model_fields.items()
        return
    hints = typing.get_type_hints(model, include_extras=True)
    for field in dataclasses.fields(model):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if default is dataclasses.MISSING:
            yield field.name, FieldInfo.from_annotation(hints[field.name])
        else:
            yield field.name, FieldInfo.from_annotated_attribute(hints[field.name], default)


def _short(limit: float) -> str:
    """A limit as a person would write it: 2**62, not its nineteen digits."""
    power = int(limit).bit_length() - 1
    return f"2**{power}" if power > 32 and limit == 2**power else f"{limit}"


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation
