"""Networks of our own for peers on one machine: partitions and slow links, without touching the machine's network.

One namespace is the hub and holds bridges; every peer lives in a namespace of its own, with one veth to the hub. To cut
peers off is to plug their cables into another bridge. Everything is inside namespaces made here, and goes with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from marfl.errors import InputError, NetError

CLONE_NEWNET = 0x40000000  # setns(2)
FOLDER = "/run/netns"
MAX_PEERS = 250  # addresses of one /24


def parse_bandwidth(text: str | None) -> str | None:
    """A rate as `tc` writes it, such as 10mbit; `InputError` for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or not float(match[1]):
        raise InputError(f"--bandwidth {text}: must be a rate such as 500kbit, 10mbit or 1gbit")
    return text


def why_not() -> str | None:
    """Why no namespace can be made here, or None when it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (package iproute2)" if missing else None


class Namespaces:
    """A namespace per peer around a hub. A context manager: at its end all of them are gone."""

    def __init__(self, peers: int, bandwidth: str | None = None) -> None:
        if peers > MAX_PEERS:
            raise InputError(f"--peers {peers}: at most {MAX_PEERS} fit in one partitioned or limited network")
        self._peers, self._bandwidth = peers, bandwidth
        self._prefix = f"marfl-{os.getpid()}-{id(self) & 0xFFFF:x}"  # several swarms may run at once
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._add("hub")
            self._bridge("side0")
            for peer in range(self._peers):
                self._plug_in(peer)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def name(self, peer: int) -> str:
        return f"{self._prefix}-{peer}"

    def address(self, peer: int) -> str:
        """Where this peer listens."""
        return f"10.123.0.{peer + 1}"

    def command(self, peer: int) -> list[str]:
        """What to put before a command so that it runs where this peer lives."""
        return ["ip", "netns", "exec", self.name(peer)]

    def socket(self, peer: int) -> socket.socket:
        """A TCP socket that lives in this peer's namespace, for this process to use."""
        # a thread of its own enters the namespace, and ends there: this one never leaves home
        with ThreadPoolExecutor(1) as visitor:
            try:
                return visitor.submit(_socket_in, self.name(peer)).result()
            except OSError as error:
                raise NetError(f"peer {peer}: its network namespace cannot be entered ({error.strerror})") from None

    def split(self, sides: list[int]) -> None:
        """Put peer i on side `sides[i]`: only peers of one side reach each other. All 0 heals."""
        for side in sorted(set(sides) - {0}):
            with contextlib.suppress(NetError):  # it is there from an earlier split
                self._bridge(f"side{side}")
        for peer, side in enumerate(sides):
            self._ip("-n", self._hub, "link", "set", f"p{peer}", "master", f"side{side}")

    def remove(self) -> None:
        """Delete what was made; whatever cannot be deleted is named."""
        failed = []
        while self._made:
            name = self._made.pop()
            try:
                self._ip("netns", "del", name)
            except NetError as error:
                failed.append(str(error))
        if failed:
            raise NetError("; ".join(failed))

    @property
    def _hub(self) -> str:
        return f"{self._prefix}-hub"

    def _add(self, name: str) -> None:
        full = f"{self._prefix}-{name}"
        self._ip("netns", "add", full)
        self._made.append(full)
        self._ip("-n", full, "link", "set", "lo", "up")

    def _bridge(self, name: str) -> None:
        self._ip("-n", self._hub, "link", "add", name, "type", "bridge", "forward_delay", "0")
        self._ip("-n", self._hub, "link", "set", name, "up")

    def _plug_in(self, peer: int) -> None:
        """A veth from the peer's namespace to the hub, limited at both ends."""
        self._add(str(peer))
        mine, port = self.name(peer), f"p{peer}"
        self._ip("link", "add", "eth0", "netns", mine, "type", "veth", "peer", "name", port, "netns", self._hub)
        self._ip("-n", mine, "addr", "add", f"{self.address(peer)}/24", "dev", "eth0")
        self._ip("-n", self._hub, "link", "set", port, "master", "side0")
        for namespace, device in ((mine, "eth0"), (self._hub, port)):
            self._ip("-n", namespace, "link", "set", device, "up")
            if self._bandwidth is not None:
                limit = ["rate", self._bandwidth, "burst", "64kb", "latency", "400ms"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def _ip(self, *arguments: str) -> None:
        _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip()}")


def _socket_in(namespace: str) -> socket.socket:
    with open(os.path.join(FOLDER, namespace), "rb") as door:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(door.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
