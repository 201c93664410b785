"""How fast p2pd streams are on loopback, by chunk size, and what a small message costs.

    python benchmarks/streams.py [--megabytes 64] [--rounds 7]

Two processes, each with its own daemons, as real peers have. Everything is measured in turns and medians count; a ratio
is against the first line of its table, which is run beside it: a plain TCP socket without encryption for payloads, a
call of hivemind's own (unary) for small messages. "hivemind stream" is its binary stream API with asyncio's buffers.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from marfl.errors import PeerGone
from marfl.net.base import Parcel, PeerId, Tag
from marfl.net.libp2p.connection import KIB, Libp2pSettings, Limits
from marfl.net.libp2p.p2pd import PeerID
from marfl.net.libp2p.transport import Libp2pNet

CHUNKS = (256 * KIB, 512 * KIB, 1024 * KIB)
SIZE = 8  # bytes that announce a payload's length
Measure = Callable[[], Awaitable[None]]


def settings(chunk: int, join: tuple[str, ...] = ()) -> Libp2pSettings:
    return Libp2pSettings(join=join, limits=Limits(chunk=chunk))


async def echo(_: PeerId, question: Parcel) -> Parcel:
    return question


# --- the other side ---


def other_side(pipe: Connection) -> None:
    asyncio.run(answer(pipe))


async def answer(pipe: Connection) -> None:
    """Take everything that comes, until the pipe says that it is over."""
    nets = [await Libp2pNet.start(settings(chunk)) for chunk in CHUNKS]
    plain = await asyncio.start_server(take_payload, "127.0.0.1", 0, limit=2**20)
    try:
        for net in nets:
            net.serve("echo", echo)
        p2p = nets[0]._daemon.p2p
        await p2p.add_binary_stream_handler("sink", lambda _, reader, writer: take_payload(reader, writer))
        await p2p._client.add_unary_handler("unary", unary)
        port = plain.sockets[0].getsockname()[1]
        pipe.send(([(net.me, await net.addresses()) for net in nets], port))
        drop = asyncio.create_task(receive_all(nets))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        drop.cancel()
    finally:
        plain.close()
        await asyncio.gather(*(net.close() for net in nets))


async def receive_all(nets: list[Libp2pNet]) -> None:
    """Forget every message soon after it has come, as a peer does that has used it."""
    while True:
        await asyncio.sleep(0.01)
        for net in nets:
            net.forget(2**62)


async def take_payload(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The receiving end of the streams that we compare with."""
    while size := int.from_bytes(await reader.read(SIZE), "big"):
        payload, done = memoryview(bytearray(size)), 0
        while done < size:
            piece = await reader.read(2**20)
            payload[done : done + len(piece)] = piece
            done += len(piece)
        writer.write(b"k")
        await writer.drain()
    writer.close()


async def unary(data: bytes, _: Any) -> bytes:
    return data


# --- this side ---


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: memoryview, chunk: int) -> None:
    """The sending end of the streams that we compare with."""
    writer.write(payload.nbytes.to_bytes(SIZE, "big"))
    for start in range(0, payload.nbytes, chunk):
        writer.write(payload[start : start + chunk])
        await writer.drain()
    await reader.readexactly(1)


async def take_turns(measures: dict[str, Measure], rounds: int) -> dict[str, float]:
    """The median seconds of each, measured in turns after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds + 1):
        for name, measure in measures.items():
            begun = time.perf_counter()
            await measure()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


async def payloads(nets: list[Libp2pNet], peers: list[PeerId], port: int, size: int, rounds: int) -> dict[str, float]:
    payload = memoryview(bytes(size))
    tags = iter(range(2**40))
    tcp = await asyncio.open_connection(sock=socket.create_connection(("127.0.0.1", port)))
    _, *own = await nets[0]._daemon.p2p.call_binary_stream_handler(PeerID.from_base58(peers[0]), "sink")
    measures: dict[str, Measure] = {"plain TCP": lambda: pour(*tcp, payload, CHUNKS[0])}
    measures["hivemind stream, 64 KiB"] = lambda: pour(*own, payload, 64 * KIB)
    measures[f"hivemind stream, {CHUNKS[0] // KIB} KiB"] = lambda: pour(*own, payload, CHUNKS[0])
    for net, peer, chunk in zip(nets, peers, CHUNKS, strict=True):
        measures[f"ours, {chunk // KIB} KiB"] = lambda net=net, peer=peer: net.send(
            peer, Tag("pour", next(tags)), Parcel(b"", payload), deadline=net.now() + 600
        )
    result = await take_turns(measures, rounds)
    for _, writer in (tcp, own):
        writer.close()
    return result


async def messages(net: Libp2pNet, peer: PeerId, rounds: int) -> dict[str, float]:
    client, remote = net._daemon.p2p._client, PeerID.from_base58(peer)

    async def kept() -> None:
        await net.call(peer, "echo", Parcel(bytes(100)), deadline=net.now() + 60)

    async def fresh() -> None:
        net._dialer.close()
        await kept()

    measures: dict[str, Measure] = {
        "hivemind unary call": lambda: client.call_unary_handler(remote, "unary", bytes(100)),
        "ours, a new stream": fresh,
        "ours, a kept stream": kept,
    }
    return await take_turns(measures, 30 * rounds)


async def dead(net: Libp2pNet, rounds: int) -> float:
    """Median seconds until a peer that has just died is known to be gone."""
    seconds = []
    for _ in range(rounds):
        other = await Libp2pNet.start(settings(CHUNKS[0], await net.addresses()))
        other.serve("echo", echo)
        await net.call(other.me, "echo", Parcel(b""), deadline=net.now() + 60)
        await other.close()
        begun = time.perf_counter()
        try:
            await net.send(other.me, Tag("x"), Parcel(b""), deadline=net.now() + 60)
        except PeerGone:
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


async def measure(pipe: Connection, megabytes: int, rounds: int) -> None:
    others, port = pipe.recv()
    nets = [await Libp2pNet.start(settings(chunk, where)) for chunk, (_, where) in zip(CHUNKS, others, strict=True)]
    try:
        peers = [peer for peer, _ in others]
        size = megabytes * 10**6
        poured = await payloads(nets, peers, port, size, rounds)
        table(f"{megabytes} MB", poured, lambda s: f"{size / s / 1e6:7.0f} MB/s")
        table("100 bytes and back", await messages(nets[0], peers[0], rounds), lambda s: f"{s * 1e3:7.2f} ms  ")
        print(f"a peer that has died is known to be gone after {await dead(nets[0], rounds) * 1e3:.1f} ms")
    finally:
        pipe.send("over")
        await asyncio.gather(*(net.close() for net in nets))


def table(title: str, seconds: dict[str, float], show: Callable[[float], str]) -> None:
    first = next(iter(seconds.values()))
    print(f"{title:28} {'':12} time against the first line")
    for name, value in seconds.items():
        print(f"  {name:26} {show(value)} {value / first:6.2f}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=other_side, args=(there,))
    process.start()
    try:
        asyncio.run(measure(here, arguments.megabytes, arguments.rounds))
    finally:
        process.join(10)
        process.kill()  # its daemons end with it


if __name__ == "__main__":
    main()
