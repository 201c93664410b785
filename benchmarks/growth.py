"""How an aggregation grows with the swarm: seconds and bytes from 64 to 4,096 peers, and their exponents.

    python benchmarks/growth.py [--json] [--peers 64 125 512 1000 4096] [--parameters 1024] [--group-size 8]

The whole protocol on the virtual network, `grid`, small vectors, one thread, CPU seconds. Payload is tensor bytes,
control all else that peers send: headers, votes, rosters, DHT records. An exponent is the slope of a least-squares line
through the logarithms: 1 grows with the swarm (each peer's share stays the same), 2 with its square.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

import torch
from aggregate import Case, aggregate

Row: TypeAlias = dict[str, float]  # what one swarm cost, by column
COLUMNS = ("cpu_seconds", "payload", "control", "messages")


def measure(case: Case) -> Row:
    """One aggregation of this many peers."""
    run = aggregate(case.deltas(), case.group_size, "grid")
    gc.collect()  # a swarm is full of cycles: let it go before the next one
    return {"peers": case.peers} | dict(
        zip(COLUMNS, (run.seconds.cpu, run.payload, run.control, run.messages), strict=True)
    )


def exponent(rows: Sequence[Row], column: str) -> float:
    """b of the least-squares fit column = a · peers^b, in logarithms."""
    points = [(math.log(row["peers"]), math.log(row[column])) for row in rows]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def print_table(rows: Sequence[Row], exponents: dict[str, float]) -> None:
    print(f"{'peers':>8}  {'CPU s':>7}  {'payload':>11}  {'control':>11}  {'messages':>9}  {'control a peer':>14}")
    for row in rows:
        sent = f"{row['payload'] / 1e6:8.2f} MB  {row['control'] / 1e6:8.2f} MB  {row['messages']:9,}"
        print(f"{row['peers']:8,}  {row['cpu_seconds']:7.2f}  {sent}  {row['control'] / row['peers'] / 1e3:11.2f} kB")
    seconds, payload, control, messages = (f"N^{exponents[column]:.2f}" for column in COLUMNS)
    print(f"{'grows as':>8}  {seconds:>7}  {payload:>11}  {control:>11}  {messages:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[64, 125, 512, 1000, 4096])
    parser.add_argument("--parameters", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if len(set(arguments.peers)) < 2:
        parser.error(f"--peers: {arguments.peers} has one size; an exponent needs at least two")
    torch.set_num_threads(1)
    cases = [Case(peers, arguments.parameters, arguments.group_size) for peers in arguments.peers]
    measure(cases[0])  # whatever is loaded on first use is not the smallest swarm's
    rows = [measure(case) for case in cases]
    exponents = {column: exponent(rows, column) for column in COLUMNS}
    if arguments.json:
        print(json.dumps({"parameters": arguments.parameters, "rows": rows, "exponents": exponents}, indent=2))
    else:
        print_table(rows, exponents)


if __name__ == "__main__":
    main()
