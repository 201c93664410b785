"""Every technique by its name, for whoever runs one.

Importing this registers the rivals' exchanges with `marfl.protocol.exchange`, so that rosters may name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from marfl.errors import InputError
from marfl.loading import construct, find_class
from marfl.protocol.exchange import register
from marfl.techniques.arfl import ArFl
from marfl.techniques.braintorrent import BrainTorrent
from marfl.techniques.butterfly import Butterfly
from marfl.techniques.fedavg import FedAvg, star
from marfl.techniques.gossip import Gossip
from marfl.techniques.mar import Mar
from marfl.techniques.rdfl import Rdfl, all_gather
from marfl.techniques.ring import Ring, all_reduce
from marfl.techniques.saps import Saps
from marfl.techniques.technique import GlobalSum, NoGlobalAverage, Technique
from marfl.wire.packing import IntegerWire

_RIVALS: tuple[type[Any], ...] = (FedAvg, ArFl, Rdfl, Ring, Butterfly, Saps, BrainTorrent, Gossip)
_OTHERS = {each.name: each for each in _RIVALS}
TECHNIQUES = ("mar", *_OTHERS)

register("star", star, lambda plan: 2)
register("ring", all_reduce, lambda plan: 2 * (plan.peers - 1))
register("rdfl", all_gather, lambda plan: plan.peers - 1)


def technique(
    name: str,
    *,
    group_size: int = 5,
    exchange: str = "grid",
    plan: str = "exact",
    rounds: int | None = None,
    wire: IntegerWire | None = None,
    **options: Any,
) -> Technique:
    """A technique by name. Group size, exchange, plan and rounds are settings of `mar`: the others have no groups.

    Options are the fields of the technique's own dataclass: compression and window of saps, fanout of gossip,
    dimension of mar's keys. A name or option that does not exist, and settings that contradict each other, raise
    `InputError` in one line.
    """
    if ":" in name:
        if wire is not None:
            raise InputError(f"technique = {name}: sends fp32; integers of a few bits need mar or fedavg")
        return own_technique(name, options)
    if name not in TECHNIQUES:
        near = get_close_matches(name, TECHNIQUES, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(f"technique = {name!r}: {hint}must be one of {', '.join(TECHNIQUES)}, or module:Class")
    if name == "mar":
        _check_options(name, options, ["dimension"])
        return Mar(group_size, exchange, plan, rounds, **options, wire=wire)
    _check_options(name, options, [field.name for field in fields(_OTHERS[name]) if field.name != "wire"])
    if wire is not None:
        if _OTHERS[name] is not FedAvg:
            raise InputError(f"technique = {name!r}: sends fp32; integers of a few bits need mar or fedavg")
        return FedAvg(wire)
    made: Technique = _OTHERS[name](**options)
    return made


def own_technique(spec: str, options: Mapping[str, Any]) -> Technique:
    """A technique from outside the package, `module:Class`; one line for what is none."""
    found = find_class("technique", spec, {})
    if not issubclass(found, GlobalSum | NoGlobalAverage):
        raise InputError(f"technique {spec}: {found.__name__} must derive from GlobalSum or NoGlobalAverage")
    made: Technique = construct("technique", spec, found, options)
    if not isinstance(getattr(made, "name", None), str):
        raise InputError(f"technique {spec}: {found.__name__} needs a name")
    return made


def _check_options(name: str, options: dict[str, Any], allowed: list[str]) -> None:
    for option, value in options.items():
        if option not in allowed:
            has = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
            raise InputError(f"{option} = {value!r}: technique {name} has no such option; {has}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{option} = {value!r}: must be a whole number")
