"""The virtual network keeps the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from net_contract import NetContract, World, play_virtually

T = TypeVar("T")


class TestVirtualNet(NetContract):
    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return play_virtually(scene)
