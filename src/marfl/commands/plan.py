"""`marfl plan`: who meets whom, and what it costs beside the rivals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from marfl.commands.flags import SETTINGS, option, whole_number
from marfl.errors import InputError
from marfl.plan.cost import BYTES_PER_VALUE, Cost, cost
from marfl.plan.grid import Plan, Round, plan
from marfl.plan.schedule import EXCHANGES
from marfl.secagg.graph import degree, mask_cost, threshold
from marfl.settings import RunTerms
from marfl.wire.packing import MASKED, IntegerWire, check_down, check_members, integer_wire, small_bits

PAPER_CNN_BYTES = 4_799_528  # the paper's MNIST model: 1,199,882 fp32 parameters
ROWS = {
    "full": "MAR full (paper)",
    "chunked": "MAR chunked",
    "grid": "MAR grid",
    "fedavg": "FedAvg",
    "arfl": "AR-FL",
    "rdfl": "RDFL",
    "ring": "ring all-reduce",
    "butterfly": "butterfly",
}
LOOK: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
SHOWN_WHOLE = 32  # up to so many peers the table lists every group of a round


MASKED_VALUE_BYTES = 8  # an integer modulo 2⁶⁴ (marfl.protocol.fixed_point)

ModelBytes = Annotated[
    int,
    typer.Option(
        parser=whole_number(BYTES_PER_VALUE, multiple_of=BYTES_PER_VALUE), metavar="S", help="Bytes of one fp32 model."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def show_plan(  # noqa: PLR0913 - a command line has as many options as it has
    peers: Annotated[int, option("peers")],
    group_size: Annotated[int, option("group_size")],
    exchange: Annotated[str, option("exchange")] = "grid",
    model_bytes: ModelBytes = PAPER_CNN_BYTES,
    masks: Annotated[bool, option("privacy.masks")] = False,
    wire: Annotated[str, option("wire")] = "fp32",
    wire_down: Annotated[int | None, option("wire_down")] = None,
    noise_multiplier: Annotated[float | None, option("privacy.noise_multiplier")] = None,
    unit: Annotated[str, option("privacy.unit")] = SETTINGS["privacy.unit"].default,
    records: Annotated[int | None, option("privacy.records")] = None,
    batch: Annotated[int | None, option("batch")] = None,
    as_json: AsJson = False,
) -> None:
    """Show who meets whom in one iteration, and what that costs beside FedAvg, AR-FL and RDFL.

    The cost is that of one vector when nobody fails, on fp32 unless said; FedAvg gets the same small integers, the
    other rivals send fp32. With noise, values are private integers in a field that their sum fits; where single records
    are hidden, so does a sum over batches that vary. Examples:

      marfl plan --peers 125 --group-size 5

      marfl plan --peers 125 --group-size 5 --noise-multiplier 1 --masks

      marfl plan --peers 16 --group-size 4 --noise-multiplier 1 --unit record --records 5000 --batch 64 --masks

      marfl plan --peers 125 --group-size 5 --wire int4 --wire-down 8

      marfl plan --peers 97 --group-size 5 --exchange chunked --json
    """
    chosen = plan(peers, group_size)
    check_down(wire, wire_down)
    check_members("fixed" if wire == "fp32" and (masks or noise_multiplier is not None) else wire, peers)
    integers = integer_wire(MASKED + wire if masks else wire, wire_down)
    length = model_bytes // BYTES_PER_VALUE
    given = {
        "peers": peers, "group_size": group_size, "wire": None if wire == "fp32" else wire, "batch": batch,
        "privacy.noise_multiplier": noise_multiplier, "privacy.records": records,
        "privacy.unit": None if unit == SETTINGS["privacy.unit"].default else unit,
    }  # fmt: skip
    if unit != "record" and (records is not None or batch is not None):
        raise InputError("--records and --batch: go with --unit record; else nothing that travels depends on them")
    private = _private(length, given) if noise_multiplier is not None or unit == "record" else None
    costs = _costs(chosen, length, integers, private.values if private else length)
    value_bits = integers.mask_width(peers) if integers else private.bits if private else 8 * MASKED_VALUE_BYTES
    if private or wire == "fixed" or (masks and integers is None):
        costs |= {name: costs[name].with_values_of(value_bits // 8) for name in EXCHANGES}
    if as_json:
        whole = value_bits if private or masks or wire == "fixed" else 8 * BYTES_PER_VALUE
        bits = small_bits(integers, peers) if integers else (whole, whole)
        name = "fixed" if private or (masks and not integers) else wire
        said = _as_json(chosen, exchange, model_bytes, costs)
        said["wire"] = {"name": name, "bits_up": bits[0], "bits_down": bits[1]}
        typer.echo(json.dumps(said | {"masks": _masks_json(peers, value_bits)} if masks else said))
        return
    _print(chosen, exchange, model_bytes, costs)
    if integers:
        first = cost(exchange, chosen, length, integers.first)
        typer.echo(_wire_line(integers, costs[exchange], first))
    if private:
        typer.echo(_private_line(private, costs[exchange]))
    if masks:
        typer.echo(_masks_line(peers, value_bits))


class PrivateValues(NamedTuple):
    """What a private peer sends."""

    values: int  # those of the model, and its clipping indicator
    bits: int  # of each: what the sum of all with their noise fits in


def _private(length: int, given: Mapping[str, Any]) -> PrivateValues:
    """The integers of a run with these settings, or `InputError` where it would be refused."""
    from marfl.config import load  # torch takes a second: only when something is private
    from marfl.dp.private_agreement import lattice_in

    lattice = lattice_in(load(overrides={name: value for name, value in given.items() if value is not None}), length)
    return PrivateValues(lattice.values, lattice.width)


def _costs(chosen: Plan, length: int, wire: IntegerWire | None, values: int) -> dict[str, Cost]:
    """What every row of the table costs, by its name; our own exchanges carry so many values."""
    from marfl.techniques.arfl import ArFl  # numpy takes a moment: only when something is counted
    from marfl.techniques.butterfly import Butterfly
    from marfl.techniques.fedavg import FedAvg
    from marfl.techniques.rdfl import Rdfl
    from marfl.techniques.ring import Ring

    costs = {name: cost(name, chosen, values, wire) for name in EXCHANGES}
    rivals = (FedAvg(wire and replace(wire, masked=False)), ArFl(), Rdfl(), Ring(), Butterfly())
    return costs | {rival.name: rival.cost(chosen.peers, length) for rival in rivals}


def _as_json(chosen: Plan, exchange: str, model_bytes: int, costs: Mapping[str, Cost]) -> dict[str, Any]:
    return {
        "peers": chosen.peers,
        "group_size": chosen.group_size,
        "factors": chosen.factors,
        "rounds": chosen.rounds,
        "spares": chosen.spares,
        "exchange": exchange,
        "model_bytes": model_bytes,
        "phases": {name: each.phases for name, each in costs.items()},
        "messages": {name: each.messages for name, each in costs.items()},
        "bytes_per_peer": {name: each.bytes_per_peer for name, each in costs.items()},
        "max_bytes_sent": {name: max(each.bytes_sent) for name, each in costs.items()},
        "max_bytes_received": {name: max(each.bytes_received) for name, each in costs.items()},
        "bytes_total": {name: each.bytes_total for name, each in costs.items()},
        "bytes_down": {name: each.bytes_down for name, each in costs.items()},
    }


def _private_line(private: PrivateValues, usual: Cost) -> str:
    """How wide private values are, and which way the bytes of the chosen exchange go."""
    up, down = _directions(usual)
    return (
        f"\nPrivate integers of {private.bits} bits, which hold the sum of all with its noise:\n"
        f"a peer sends {up} of updates and partial sums, and {down} of the result."
    )


def _directions(usual: Cost) -> tuple[str, str]:
    """What a peer sends up and down."""
    down = decimal(round(usual.bytes_down / usual.peers))
    return decimal(round((usual.bytes_total - usual.bytes_down) / usual.peers)), down


def _wire_line(wire: IntegerWire, usual: Cost, first: Cost) -> str:
    """Which way the bytes of the chosen exchange go, and what the iteration costs that finds the scales."""
    up, down = _directions(usual)
    if wire.masked:
        return (
            f"\nIntegers of {wire.up} bits under masks of {wire.mask_width(usual.peers)} bits: "
            f"a peer sends {up} of updates\n"
            f"and partial sums, and {down} of the masked result. The first iteration finds\n"
            f"the scales in 32 bits: {decimal(round(first.bytes_per_peer))} per peer."
        )
    return (
        f"\nIntegers of {wire.up} bits: a peer sends {up} of updates and partial sums,\n"
        f"and {down} of the result in {wire.down} bits. The first iteration finds the scales\n"
        f"in 32 bits: {decimal(round(first.bytes_per_peer))} per peer."
    )


def _masks_json(peers: int, value_bits: int) -> dict[str, Any]:
    added = mask_cost(peers, liars=RunTerms.liars)
    return {
        "neighbours": degree(peers), "threshold": threshold(degree(peers)), "value_bytes": value_bits // 8,
        "messages": added.messages, "bytes_per_peer": added.bytes_per_peer, "bytes_total": added.bytes_total,
    }  # fmt: skip


def _masks_line(peers: int, value_bits: int) -> str:
    """What masks add to every exchange: the table above has the wider values already."""
    added, each = mask_cost(peers, liars=RunTerms.liars), degree(peers)
    return (
        f"\nMasked: MAR's values take {value_bits // 8} bytes; keys, shares, pledges, seeds add "
        f"{decimal(round(added.bytes_per_peer))} per peer,\n{decimal(added.bytes_total)} in all, "
        f"in {added.messages:,} messages. {each} neighbours hold a peer's shares, {threshold(each)} of them suffice."
    )


def _print(chosen: Plan, exchange: str, model_bytes: int, costs: Mapping[str, Cost]) -> None:
    console = Console(highlight=False)
    console.print(_headline(chosen), style="bold")
    if chosen.rounds:
        console.print("", _rounds_table(chosen.rounds), sep="\n")
    if chosen.spares:
        console.print("\n" + _spares_line(chosen, exchange))
    console.print(f"\nBytes sent for one vector of {model_bytes:,} bytes (S); > marks the exchange chosen,")
    console.print("busiest is the most that any one node sends and receives together\n")
    console.print(_cost_table(exchange, model_bytes, costs))


def _headline(chosen: Plan) -> str:
    grid = "×".join(map(str, chosen.factors))
    spares = f" and {_counted(len(chosen.spares), 'spare')}" if chosen.spares else ""
    rounds = _counted(len(chosen.rounds), "round")
    return f"{_counted(chosen.peers, 'peer')}: a grid of {grid}{spares}, exact after {rounds}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _rounds_table(rounds: tuple[Round, ...]) -> Table:
    table = Table("round", "groups", "members", "who meets (ranks)", **LOOK)
    for number, groups in enumerate(rounds, start=1):
        sizes = Counter(map(len, groups))
        shown = groups if sum(map(len, groups)) <= SHOWN_WHOLE else groups[:2]
        who = "  ".join(" ".join(map(str, group)) for group in shown)
        more = "" if len(shown) == len(groups) else "  …"
        members = ", ".join(f"{count}×{size}" for size, count in sorted(sizes.items()))
        table.add_row(str(number), str(len(groups)), members, who + more)
    return table


def _spares_line(chosen: Plan, exchange: str) -> str:
    shown = chosen.spares if len(chosen.spares) <= SHOWN_WHOLE else chosen.spares[:SHOWN_WHOLE]
    pairs = ", ".join(f"{spare}←{helper}" for spare, helper in shown)
    more = "" if len(shown) == len(chosen.spares) else ", …"
    source = "all owners of their cell" if exchange == "grid" else "their helper"
    return f"Spares sit out after round 1 and get the result from {source};\nspare←helper: {pairs}{more}"


def _cost_table(exchange: str, model_bytes: int, costs: Mapping[str, Cost]) -> Table:
    table = Table(**LOOK)
    table.add_column(no_wrap=True)
    for head in ("per peer", "in S", "in all", "busiest", "phases", "messages"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, each in costs.items():
        chosen = name == exchange
        table.add_row(
            ("> " if chosen else "  ") + ROWS[name],
            decimal(round(each.bytes_per_peer)),
            f"{each.bytes_per_peer / model_bytes:.3f}",
            decimal(each.bytes_total),
            decimal(each.busiest),
            f"{each.phases:,}",
            f"{each.messages:,}",
            style="bold" if chosen else None,
            end_section=name == EXCHANGES[-1],
        )
    return table
