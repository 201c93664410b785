"""What a peer says while it works: who is waited for and how long, what came of it, and what a person should look at.

`awaited` reads who is missing; `Narrator` says it, in the log and, where it is wanted, as a bar on the terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from marfl.net.base import PeerId
from marfl.peer.discovery import Wait
from marfl.protocol.messages import LEFT, NOT_YET
from marfl.protocol.participant import Participant

T = TypeVar("T")
log = logging.getLogger("marfl.peer")
FIRST, AGAIN = 2.0, 5.0  # seconds before the first line of a wait, and between two lines
TICK = 0.25  # seconds between two looks
SHOWN = 3  # peers named in a line


def short(peer: PeerId) -> str:
    """A peer's name as a person tells it from others."""
    return f"{peer[:4]}…{peer[-4:]}" if len(peer) > 12 else peer


def awaited(voter: Participant) -> dict[PeerId, str]:
    """Whom this peer's iteration waits for, and what is known of each. Only who leads it knows more than who leads."""
    instance = voter.instance
    if instance is None or instance.over.is_set() or not instance.electors:
        return {}
    leader = instance.electors[0].id
    if leader != voter.net.me:
        return {leader: "leads it"}
    said = dict.fromkeys(instance.lead.answered, NOT_YET)  # it is there, and has nothing to bring yet
    said |= {peer: notice.role for peer, notice in voter.standing.notices.about(instance).items()}
    words = {NOT_YET: "training", LEFT: ""}
    found = {elector.id: words.get(said.get(elector.id, "?"), "") for elector in instance.electors}
    unheard = {elector.id: "not heard of" for elector in instance.electors if elector.id not in said}
    return {peer: why for peer, why in (found | unheard).items() if why and peer != voter.net.me}


def gathers(voter: Participant) -> bool:
    """Whether a run begins, and its peers are not together yet: none of them is an elector who could be named."""
    instance = voter.instance
    if instance is None or instance.electors or instance.over.is_set():
        return False
    return instance.promised < 0 and not instance.lead.closed


def waiting_line(peers: Mapping[PeerId, str], waited: float, patience: float) -> str:
    """`waiting for 12D3…q7 (training), 8 of 20 s`."""
    named = [f"{short(peer)} ({why})" for peer, why in list(peers.items())[:SHOWN]]
    more = f" and {len(peers) - SHOWN} more" if len(peers) > SHOWN else ""
    return f"waiting for {', '.join(named) or 'the others'}{more}, {waited:.0f} of {patience:.0f} s"


def majority_line(electors: int, waited: float, limit: float) -> str:
    """`waiting for a majority of 3 peers to answer, 22 of 60 s`: so it is once those who train have had their time."""
    until = f" of {limit:.0f}" if waited <= limit else ""
    return f"waiting for a majority of {electors} peers to answer, {waited:.0f}{until} s"


def barred_line(waited: float, limit: float) -> str:
    """What a peer says that was stopped while it voted: its old vote may count, and there must not be another one."""
    until = f" of {limit:.0f}" if waited <= limit else ""
    return f"voted in it before a restart and may not again, waiting for the others to decide, {waited:.0f}{until} s"


@dataclass
class Narrator:
    """One peer's voice."""

    patience: float  # seconds that others are waited for
    progress: bool = False
    minority: float = 60.0  # seconds without a majority, before the rest goes on alone
    known: set[PeerId] = field(default_factory=set)  # everybody who was ever heard of in this run
    _stale: int = 0  # iterations in a row
    _bar: Progress | None = None  # while it is on the terminal

    async def during(
        self, voter: Participant, work: Coroutine[Any, Any, T], beginning: Callable[[], Wait | None] = lambda: None
    ) -> T:
        """Do something, and say meanwhile who is waited for; `beginning` is a wait before the iteration, if any."""
        watcher = asyncio.create_task(self._watch(voter, beginning))
        try:
            return await work
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, voter: Participant, beginning: Callable[[], Wait | None]) -> None:
        begun, say_at = voter.net.now(), FIRST
        with self._progress() as self._bar:
            task = self._bar.add_task(f"iteration {voter.record.iteration + 1}", total=self.patience)
            while True:
                await asyncio.sleep(TICK)
                if wait := beginning():
                    begun = voter.net.now()
                    self._show(task, wait.line, wait.waited, wait.patience)
                    continue
                waited = voter.net.now() - begun
                said, limit = self._doing(voter, waited)
                line = f"iteration {voter.record.iteration + 1}: {said or 'averaging'}"
                self._show(task, line, waited, limit)
                if said and waited >= say_at:
                    say_at = waited + AGAIN
                    log.info(line)

    def _doing(self, voter: Participant, waited: float) -> tuple[str, float]:
        """For whom this peer waits, if for anybody, and how long at most."""
        if voter.standing.is_barred:
            return barred_line(waited, self.minority), self.minority
        peers = awaited(voter)
        if not peers and not gathers(voter):
            return "", self.patience
        if peers and waited > self.patience + TICK and voter.instance is not None:
            return majority_line(len(voter.instance.electors), waited, self.minority), self.minority
        return waiting_line(peers, waited, self.patience), self.patience

    def _progress(self) -> Progress:
        console = Console(stderr=True, highlight=False)
        shown = self.progress and (console.is_terminal or console.is_jupyter)
        columns = (TextColumn("{task.description}"), BarColumn())
        return Progress(*columns, console=console, transient=True, disable=not shown)

    def _show(self, task: TaskID, line: str, waited: float, patience: float) -> None:
        if self._bar is not None:
            self._bar.update(task, completed=waited, total=patience, description=line)

    def met(self, *groups: Iterable[PeerId]) -> int:
        """How many peers of the run are known: it never gets less."""
        self.known.update(*groups)
        return len(self.known)

    def told(
        self, iteration: int, status: str, present: int, discarded: str, *, joined: bool, slow: Iterable[str] = ()
    ) -> str:
        """Say what came of an iteration; the warning that goes with it, if there is one."""
        warning = "; ".join(filter(None, [self.warning_of(status, present, discarded, joined=joined), *slow]))
        line = f"iteration {iteration}: {status}, {present} of {len(self.known)} known averaged"
        line += f"; {warning}" if warning else ""
        if self._bar is not None:
            self._bar.stop()  # what is said now stands where it was
        if not self.progress or log.hasHandlers():  # else Python would write a warning beside what is printed here
            log.log(logging.WARNING if warning else logging.INFO, line)
        if self.progress:
            Console(stderr=True, highlight=False).print(line, soft_wrap=True)
        return warning

    def warning_of(self, status: str, present: int, discarded: str, *, joined: bool) -> str:
        """What a person should look at after an iteration that ended so; empty where all is well."""
        self._stale = self._stale + 1 if status == "stale" else 0
        if status == "abstained":
            return f"this peer brought nothing: {discarded}"
        if self._stale > 1:
            return f"stale {self._stale} times in a row: the others do not wait so long (ready_timeout)"
        if status == "undecided":
            return "no majority was heard of in time"
        if status == "committed" and present <= 1 and (joined or len(self.known) > 1):
            others = len(self.known) - 1
            why = f"none of {others} other peers known took part" if others > 1 else "the other peer took no part"
            return f"committed alone: {why if others > 0 else 'nobody else has come'}"
        return ""
