"""Flags from settings: a command names the settings that it has flags for, and takes all others with `--set`.

The type, default, range and help of a flag are those of its setting (`marfl.settings`, `marfl.config`); this module
knows only how flags are spelled. `takes_settings` gives a command its flags, `option` makes a single one. Values that
are not settings have parsers at the end (`whole_number`, `one_of`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from marfl.config import PRESETS, Config
from marfl.errors import InputError
from marfl.schema import Setting, settings_of
from marfl.settings import Joining, Network

Given = dict[str, Any]  # what was said about settings, by dotted name
KEYWORD = inspect.Parameter.KEYWORD_ONLY
SETTINGS = settings_of(Config)
NETWORK = settings_of(Network, "network.")

SPELLED = {  # flags that are not the last word of their setting
    "privacy.mode": "--privacy",
    "partition.kind": "--partition",
    "distill.iterations": "--distill",
    "distill.match_local_steps": "--local-steps-match-distill",
    **{f"distill.{name}": f"--distill-{name}" for name in ("teacher", "temperature", "keep", "epochs", "batches")},
}
PANELS = (  # of --help: a title, and the settings below it
    ("What is learned", ("task", "iterations", "local_batches", "batch", "optimizer", "seed", "test_every",
                         "target_accuracy", "patience")),
    ("How peers average", ("technique", "strategy", "exchange", "wire", "wire_down", "group_size", "liars", "seniority",
                           "audit", "on_fraud", "momentum", "overlap", "semantics", "plan", "rounds", "coordination")),
    ("Peers and their data", ("peers", "partition")),
    ("Who takes part", ("churn",)),
    ("Distillation", ("distill",)),
    ("Privacy", ("privacy",)),
    ("How it is computed", ("links", "engine", "device", "workers", "cluster", "other_nodes",
                            "checkpoint_every")),
)  # fmt: skip
WIDEST = 12  # letters of choices beside a flag: on 80 columns a longer column would cut off the names of flags
ANY_SETTING, NETWORKING, FAULTS = "Any setting", "Network", "Faults"  # panels of flags that are no single setting
LEARNING = (  # of every command that trains
    "task", "technique", "strategy", "exchange", "wire", "wire_down", "privacy.masks", "group_size", "liars",
    "seniority", "audit", "on_fraud", "iterations", "local_batches", "batch", "optimizer.learning_rate", "momentum",
    "overlap", "distill.iterations", "distill.teacher", "distill.temperature", "distill.keep", "distill.epochs",
    "distill.batches", "distill.match_local_steps", "privacy.mode", "privacy.noise_multiplier", "privacy.unit",
    "privacy.records", "privacy.clip", "privacy.tolerated_loss", "privacy.colluders", "privacy.delta",
    "privacy.target_epsilon", "privacy.target_observer", "seed", "test_every",
)  # fmt: skip
OF_MANY = (  # of the commands that run all peers of a run
    "peers", "churn.participation", "churn.update_participation", "churn.aggregate_participation", "churn.dropout",
    "churn.slow", "churn.slowness", "churn.sessions", "churn.trace", "partition.alpha", "partition.min_samples",
)  # fmt: skip

Preset = Annotated[str | None, typer.Option(help=f"Start from one of {', '.join(PRESETS)}.")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file, such as a run's config.toml.")]
TaskOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the task; may be repeated.")
]
Out = Annotated[Path | None, typer.Option(help="Run directory to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is there.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, by its own settings; --iterations prolongs it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


def takes_settings(
    *names: str, network: bool = False, spelled: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings, and `--set` for all; with `network`, also those of `[network]`.

    The command gets what was said, and nothing else, as its argument `given`: values by dotted name.
    """
    flags = {(spelled or {}).get(name) or _spelling(name): name for name in names}
    known = {**SETTINGS, **NETWORK} if network else SETTINGS
    others = {"--privacy-setting": "privacy."} | ({"--network": "network."} if network else {}) | {"--set": ""}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            said = {name: arguments.pop(_parameter(flag)) for flag, name in flags.items()}
            given = {name: value for name, value in said.items() if value is not None and value is not False}
            for flag, table in others.items():
                for pair in arguments.pop(_parameter(flag)) or ():
                    name, value = parse_pair(pair, known, flag, table)
                    given[name] = value  # what is said last counts
            command(given=given, **arguments)

        signature = inspect.signature(command, eval_str=True)
        own = [each.replace(kind=KEYWORD) for each in signature.parameters.values() if each.name != "given"]
        parameters = own + [_flag(*each) for each in flags.items()] + [_pairs(*each) for each in others.items()]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def option(name: str, *flags: str, show_default: bool | str = True) -> Any:
    """A typer option for one setting: it parses, explains and refuses as the setting says."""
    if name == "churn.sessions":
        shown = "mean iterations that a peer is up and down, such as 20,5"
        panel = _panel(name)
        return typer.Option(
            *flags, parser=_sessions, metavar="UP,DOWN", help=sentence(shown), rich_help_panel=panel
        )
    setting = SETTINGS[name]
    shown, panel = sentence(_help(setting)), _panel(name)
    if setting.kind is bool:
        return typer.Option(*flags or [_spelling(name)], help=shown, rich_help_panel=panel)

    def parse(text: str) -> Any:
        try:
            return setting.parse(text)
        except ValueError:
            raise typer.BadParameter(f"must be {setting.allowed}, not {text!r}") from None

    return typer.Option(
        *flags, parser=parse, metavar=_metavar(setting), help=shown, show_default=show_default, rich_help_panel=panel
    )


def sentence(text: str) -> str:
    """A help text as a sentence: a capital first, unless a symbol or an address begins it, and a full stop."""
    first = text[0].upper() + text[1:] if re.match("[a-z]{2}", text) else text
    return first if first.endswith((".", "…")) else f"{first}."


def _panel(name: str) -> str | None:
    table = name.partition(".")[0]
    return next((title for title, names in PANELS if table in names), None)


def parse_pair(
    pair: str, known: Mapping[str, Setting] = SETTINGS, flag: str = "--set", table: str = ""
) -> tuple[str, Any]:
    """`name=value` as a setting's dotted name and its value; `InputError` for a name or a value that cannot be."""
    name, text = _parts(pair, flag)
    name = table + name
    setting = known.get(name)
    if setting is None:
        owner, _, inner = name.partition(".")
        owner = f"{owner}_options" if f"{owner}_options" in known else owner  # strategy.mu is an option of the strategy
        if inner and owner in known and known[owner].is_table:
            return f"{owner}.{inner}", _json_or_text(text)
        raise InputError(f"{flag} {pair}: {name} is not a setting; {_suggestion(name, known)}")
    try:
        return name, setting.parse(text)
    except ValueError:
        raise InputError(f"{flag} {pair}: {name} must be {setting.allowed}") from None


def parse_options(pairs: list[str] | None, flag: str = "--option") -> dict[str, Any] | None:
    """name=value pairs of somebody else's options, such as a task's; a value is JSON where it can be, else text."""
    parts = [_parts(pair, flag) for pair in pairs or ()]
    return {name: _json_or_text(text) for name, text in parts} or None


def joining(name: str, more: str = "") -> Any:
    """A typer option for what one peer says about how it joins a run."""
    setting = settings_of(Joining)[name]
    shown = sentence(f"{setting.help}; {more}" if more else setting.help)
    return typer.Option(help=shown, rich_help_panel=NETWORKING)


def split_network(given: Given) -> tuple[Given, Given]:
    """(settings of the config, settings of its `[network]` table without the table's name)."""
    network = {name.removeprefix("network."): value for name, value in given.items() if name.startswith("network.")}
    return {name: value for name, value in given.items() if not name.startswith("network.")}, network


def with_coordination(given: dict[str, Any]) -> dict[str, Any]:
    """`coordination = paper` brings the paper's semantics along."""
    return {"semantics": "paper", **given} if given.get("coordination") == "paper" else given


def _suggestion(name: str, known: Iterable[str]) -> str:
    """The setting that was probably meant: also one whose last word alone was given."""
    by_last = {each.rpartition(".")[2]: each for each in known}
    whole = get_close_matches(name, known, n=1, cutoff=0.7)
    near = whole or [by_last[word] for word in get_close_matches(name.rpartition(".")[2], by_last, n=1)]
    return f"did you mean {near[0]}?" if near else "docs/config.md lists them all"


def _parts(pair: str, flag: str) -> tuple[str, str]:
    name, equals, text = pair.partition("=")
    if not equals or not name:
        raise InputError(f"{flag} {pair}: must be name=value")
    return name, text


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _sessions(text: str) -> dict[str, float]:
    """`20,5`: mean iterations up and down."""
    try:
        up, down = map(float, text.split(","))
    except ValueError:
        raise InputError(f"--sessions {text}: must be two numbers, mean iterations up and down, such as 20,5") from None
    return {"up": up, "down": down}


def _help(setting: Setting) -> str:
    named = [each for each in setting.choices if each not in setting.help]  # those that are not said in it
    choices = f"one of {', '.join(setting.choices)}" if named and len("|".join(setting.choices)) > WIDEST else ""
    limits = "; ".join(filter(None, [setting.range, choices]))
    return f"{setting.help} ({limits})" if limits else setting.help


def _metavar(setting: Setting) -> str:
    words = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "FILE"}
    choices = "|".join(setting.choices)
    return choices if 0 < len(choices) <= WIDEST else words.get(setting.kind, "NAME")


def _spelling(name: str) -> str:
    return SPELLED.get(name) or "--" + name.rpartition(".")[2].replace("_", "-")


def _parameter(flag: str) -> str:
    """How the value of a flag is called among a command's arguments."""
    return flag[2:].replace("-", "_")


def _flag(flag: str, name: str) -> inspect.Parameter:
    """The parameter of a flag. It is None unless it is typed: what is not said is the file's or the preset's to say."""
    setting = SETTINGS.get(name)
    default = None if setting is None else setting.default
    made = option(name, flag, show_default=False if default is None else str(default))
    if setting is not None and setting.kind is bool:
        return _keyword(flag, Annotated[bool, made], False)
    return _keyword(flag, Annotated[Any, made], None)


def _pairs(flag: str, table: str) -> inspect.Parameter:
    """The parameter of `--set`, or of a flag from before it that sets one table."""
    any_of = "any setting, named as in the config file, such as churn.dropout=0.2; may be repeated"
    shown = f"the same as --set {table}NAME=VALUE" if table else any_of
    made = typer.Option(flag, metavar="NAME=VALUE", help=sentence(shown), rich_help_panel=ANY_SETTING)
    return _keyword(flag, Annotated[list[str] | None, made], None)


def _keyword(flag: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(_parameter(flag), KEYWORD, default=default, annotation=annotation)


# --- values that are not settings: a parser refuses one in one line, with what is allowed ---


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
