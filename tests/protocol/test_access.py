"""Who may ask what: the table, and what it keeps strangers and the wrong members from, on the virtual network."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.access import TABLE, Who, rows
from stages.access_contract import AccessContract
from stages.net_contract import VirtualWorld, World, new_participant

T = TypeVar("T")
DOCS = Path(__file__).parents[2] / "docs" / "security.md"
SOURCE = Path(__file__).parents[2] / "src" / "marfl"
SERVED_ELSEWHERE = {"hello", "layout", "clock", "about"}


class TestOnTheVirtualNetwork(AccessContract):
    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        async def whole() -> T:
            world = VirtualWorld()
            world.network.link = Link(latency=0.01)  # an exchange takes a moment, in which others can ask
            return await scene(world)

        return run_virtual(whole())


def test_the_table_has_every_channel_that_is_served_and_no_other():
    me = new_participant(VirtualNetwork(0).join("a"))
    assert TABLE.keys() == me._answers().keys() | SERVED_ELSEWHERE
    serving = [path.name for path in SOURCE.rglob("*.py") if re.search(r"\.serve\((?!\))", path.read_text())]
    known = ["about.py", "compatibility.py", "discovery.py", "participant.py", "transport.py"]
    assert sorted(serving) == known  # another one belongs in the table, too


def test_only_what_everybody_admitted_may_ask_is_not_checked():
    unchecked = {channel for channel, rule in TABLE.items() if rule.asks is None}
    assert unchecked <= {channel for channel, rule in TABLE.items() if rule.who in (Who.STRANGER, Who.ADMITTED)}


def test_the_documentation_shows_the_same_table():
    lines = DOCS.read_text().splitlines()
    first = lines.index("| channel | who | what it is for | and else |")
    assert lines[first + 2 : first + 2 + len(rows())] == rows()
    assert lines[first + 2 + len(rows())] == ""
