"""A peer whose own daemon is gone for a while: its process lives on, loses no task, and goes on when it is back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from marfl.net.virtual import Delivery, Departure
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.protocol_settings import Settings
from stages.masks import Stage

GONE_FOR = 8.0
OPEN = Settings(run="run", exchange="full", group_size=3)


@pytest.mark.parametrize("channel", ["propose", "seal", "reduce", "finish", "held"])
def test_a_peer_without_its_daemon_loses_no_task_and_ends_on_the_others_model(channel: str) -> None:
    stage = Stage(5, settings=replace(OPEN, wire="masked" if channel == "held" else "fixed"))
    victims: list[str] = []
    lost: list[BaseException] = []

    def sever(event: Departure, _: Delivery) -> None:
        if event.tag.channel == channel and event.op in ("call", "send") and not victims:
            victims.append(event.source)
            stage.network.sever(event.source, GONE_FOR)

    def watched(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        task.add_done_callback(lambda t: None if t.cancelled() or t.exception() is None else lost.append(t.exception()))
        return task

    async def scene() -> None:
        asyncio.get_running_loop().set_task_factory(watched)
        await stage.iterate()
        await asyncio.sleep(GONE_FOR)
        for person in stage.living:
            await person.catch_up()

    stage.watch = sever
    run_virtual(scene())
    assert victims
    assert not lost
    assert len({person.state.hash for person in stage.living}) == 1
    assert {person.record.iteration for person in stage.living} == {1}
