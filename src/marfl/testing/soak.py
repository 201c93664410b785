"""Thousands of random fault schedules on the virtual network: ``python -m marfl.testing.soak --seeds 2000``.

Prints which fault struck how often, in which phase, under which exchange; a combination that can happen and never did
fails the soak, and so does a broken promise. A failing seed is printed and replays exactly (``--seed N``); the dice may
start anywhere (``--start N``). ``--calm`` leaves all faults out: then nobody may be left out of anything. ``--carry``
makes some slow, who bring what came too late to a later iteration.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial

from marfl.protocol.protocol_settings import EXCHANGES
from marfl.testing.faults import PHASES, Fault, strikeable
from marfl.testing.world import Report, World


def play(seed: int, *, calm: bool = False, carries: bool = False) -> Report:
    """One world, from its seed alone."""
    return World(seed, calm=calm, carries=carries).run()


def soak(
    seeds: Iterable[int], *, processes: int = 1, speak: bool = False, calm: bool = False, carries: bool = False
) -> list[Report]:
    """Play many worlds, in order; `speak` says on stderr how far it is, and what broke as soon as it breaks."""
    one = partial(play, calm=calm, carries=carries)
    if processes == 1:
        return _followed(map(one, seeds), speak)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return _followed(pool.imap(one, seeds, chunksize=8), speak)


def _followed(reports: Iterable[Report], speak: bool) -> list[Report]:
    done: list[Report] = []
    for report in reports:
        done.append(report)
        if speak:
            for line in _broken([report]):
                print(line, file=sys.stderr, flush=True)
            if len(done) % 100 == 0:
                print(f"{len(done)} worlds", file=sys.stderr, flush=True)
    return done


def _broken(reports: Iterable[Report]) -> list[str]:
    return [f"seed {r.seed} ({r.exchange}, {r.peers} peers): {line}" for r in reports for line in r.broken]


def missing(reports: Iterable[Report]) -> list[str]:
    """Every fault × phase × exchange that can happen and did not."""
    hits: Counter[tuple[Fault, str, str]] = Counter()
    for report in reports:
        for (fault, phase), count in report.hits.items():
            hits[fault, phase, report.exchange] += count
    return [
        f"{fault.name} in {phase} with {exchange}"
        for fault in Fault
        for phase in PHASES
        for exchange in EXCHANGES
        if strikeable(fault, phase, exchange) and not hits[fault, phase, exchange]
    ]


def table(reports: list[Report]) -> str:
    """Hits per fault (rows) and phase/exchange (columns)."""
    hits: Counter[tuple[Fault, str, str]] = Counter()
    for report in reports:
        for (fault, phase), count in report.hits.items():
            hits[fault, phase, report.exchange] += count
    columns = [(phase, exchange) for phase in PHASES for exchange in EXCHANGES]
    lines = [f"{'hits':14}" + "".join(f"{p[:4]}/{e[:2]:2} " for p, e in columns)]
    for fault in Fault:
        cells = (
            f"{hits[fault, p, e]:7} " if strikeable(fault, p, e) else f"{'·':>7} "  # · cannot happen
            for p, e in columns
        )
        lines.append(f"{fault.name.lower():14}" + "".join(cells))
    return "\n".join(lines)


def verdict(reports: list[Report]) -> list[str]:
    """What is wrong with a soak, one line each; empty when all promises were kept."""
    wrong = _broken(reports)
    attempted, committed = (sum(getattr(r, k) for r in reports if r.light) for k in ("attempted", "committed"))
    if attempted and committed < 0.95 * attempted:
        wrong.append(f"only {committed} of {attempted} iterations committed while a majority lived")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation testing of the protocol.")
    parser.add_argument("--seeds", type=int, default=300, help="how many worlds to play (default 300)")
    parser.add_argument("--start", type=int, default=0, help="the first world's seed (default 0)")
    parser.add_argument("--seed", type=int, help="play only this world, and say everything about it")
    parser.add_argument("--calm", action="store_true", help="no faults: nobody may be left out, nothing may be lost")
    parser.add_argument("--carry", action="store_true", help="what is learned too late goes to a later iteration")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds: {options.seeds} is too few; play at least one world")
    if options.seed is not None:
        report = play(options.seed, calm=options.calm, carries=options.carry)
        print(report)
        return 1 if report.broken else 0
    seeds = range(options.start, options.start + options.seeds)
    kind = {"calm": options.calm, "carries": options.carry}
    reports = soak(seeds, processes=options.processes, speak=True, **kind)
    if not options.calm:
        print(table(reports))
    light = [r for r in reports if r.light]
    rate = sum(r.committed for r in light) / max(1, sum(r.attempted for r in light))
    whole = f"{len(reports)} worlds (seeds {seeds[0]} to {seeds[-1]}), {len(light)} of them light"
    print(f"{whole}; {rate:.2%} of their iterations committed")
    never = [] if options.calm else missing(reports)
    wrong = verdict(reports) + [f"never happened: {what}" for what in never]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
