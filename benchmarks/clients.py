"""Many environments over one client: requests a second and latency of `health`, by tasks and by threads.

    .venv/bin/python benchmarks/clients.py SOCKET [--tasks 64] [--threads 64] [--seconds 5]

Bare asyncio streams, which read nothing of the answer but its length, are the floor beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

from mirrord import AsyncClient, Client

_REQUEST = b"GET /v1/health HTTP/1.1\r\nhost: m\r\n\r\n"


def report(name: str, count: int, taken: list[float], seconds: float) -> None:
    taken.sort()
    p50, p99, longest = (
        1000 * taken[min(int(len(taken) * part), len(taken) - 1)] for part in (0.5, 0.99, 1)
    )
    print(
        f"{name:8} {count:4}: {len(taken) / seconds:7.0f}/s  p50 {p50:6.1f}  p99 {p99:6.1f}  max {longest:6.1f} ms"
    )


async def streams(socket: str, count: int, seconds: float) -> list[float]:
    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))

    opened = [await asyncio.open_unix_connection(socket) for _ in range(count)]
    taken = await _by_tasks([partial(ask, *pair) for pair in opened], seconds)
    for _, writer in opened:
        writer.close()
    return taken


async def tasks(socket: str, count: int, seconds: float) -> list[float]:
    async with AsyncClient(socket) as client:
        return await _by_tasks([client.health] * count, seconds)


async def _by_tasks(calls: list[Callable[[], Awaitable[object]]], seconds: float) -> list[float]:
    taken: list[float] = []
    ends = time.perf_counter() + seconds

    async def work(call: Callable[[], Awaitable[object]]) -> None:
        while (begun := time.perf_counter()) < ends:
            await call()
            taken.append(time.perf_counter() - begun)

    await asyncio.gather(*map(work, calls))
    return taken


def threads(socket: str, count: int, seconds: float) -> list[float]:
    taken: list[float] = []
    ends = time.perf_counter() + seconds

    def work() -> None:
        while (begun := time.perf_counter()) < ends:
            client.health()
            taken.append(time.perf_counter() - begun)

    with Client(socket) as client:
        workers = [threading.Thread(target=work) for _ in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("socket")
    parser.add_argument("--tasks", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    for count in given.tasks:
        report(
            "streams",
            count,
            asyncio.run(streams(given.socket, count, given.seconds)),
            given.seconds,
        )
        report(
            "tasks", count, asyncio.run(tasks(given.socket, count, given.seconds)), given.seconds
        )
    for count in given.threads:
        report("threads", count, threads(given.socket, count, given.seconds), given.seconds)


if __name__ == "__main__":
    main()
