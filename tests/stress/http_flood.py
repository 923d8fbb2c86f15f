"""Floods the daemon's HTTP server and the llama.cpp proxy, and looks at their health meanwhile.

python -m tests.stress.http_flood --connections 1000 --seconds 60 --tries 100000

Everything is on the loopback address. Both servers run in processes of their own, and so do the
clients that attack them: silent ones, slow heads, slow bodies, malformed requests, pooled
connections that ask all the time, and clients that read no answer. Prints one line of JSON with the
worst time of a health answer, the most memory and descriptors, and the answers to wrong requests.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.support.http_daemon import HttpDaemon
from tests.support.smuggled_requests import (
    MALFORMED,
    Echo,
    attempt,
    attempt_at_daemon,
    request,
)
from tests.support.store_contract import small

import kvdepot
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.core.private import write_private_file
from kvdepot.testing.daemons import DaemonProcess

TOKEN: Final = "0123456789abcdef-token"
ATTACKS: Final = ("silent", "slow head", "slow body", "malformed", "pooled", "deaf")
_ASK_S: Final = 30.0
_BETWEEN_S: Final = 0.05
_AGAIN_S: Final = 0.2
_HEAD: Final = (
    f"host: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n"
)


@dataclass
class Seen:
    """What was measured of one server."""

    connections: int
    seconds: float
    health_answers: int = 0
    health_failures: list[str] = field(default_factory=list)
    worst_health_s: dict[str, float] = field(default_factory=dict)
    """By path."""
    memory_before_mib: float = 0.0
    memory_most_mib: float = 0.0
    descriptors_before: int = 0
    descriptors_most: int = 0
    threads_most: int = 0
    log_bytes: int = 0


@dataclass
class Smuggled:
    """The result of the tries to smuggle requests."""

    answers: int = 0
    connections: int = 0
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def flooding(address: tuple[str, int], paths: tuple[str, str], connections: int) -> Iterator[None]:
    """Attack a server from another process, within the scope. `paths` are one to get and one to
    post to."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=flood, args=(address, paths, connections), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def flood(address: tuple[str, int], paths: tuple[str, str], connections: int) -> None:
    async def run() -> None:
        await asyncio.gather(
            *(
                attack(address, paths, ATTACKS[number % len(ATTACKS)], random.Random(number))
                for number in range(connections)
            )
        )

    asyncio.run(run())


async def attack(
    address: tuple[str, int], paths: tuple[str, str], kind: str, choice: random.Random
) -> None:
    """Attack for ever, with a new connection whenever one was closed."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            try:
                await attack_once(reader, writer, paths, kind, choice)
            finally:
                writer.transport.abort()
        await asyncio.sleep(_AGAIN_S)


async def attack_once(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    paths: tuple[str, str],
    kind: str,
    choice: random.Random,
) -> None:
    get, post = paths
    if kind == "silent":
        await reader.read(1)
    elif kind == "slow head":
        writer.write(f"GET {get} HTTP/1.1\r\nx: ".encode())
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)
    elif kind == "slow body":
        writer.write(f"POST {post} HTTP/1.1\r\n{_HEAD}content-length: 60000\r\n\r\n".encode())
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)
    elif kind == "malformed":
        framing, body = MALFORMED[choice.choice(list(MALFORMED))]
        writer.write(
            choice.choice([request(get, framing, body), choice.randbytes(200) + b"\r\n\r\n"])
        )
        await reader.read()
    elif kind == "pooled":
        while True:
            writer.write(f"GET {get} HTTP/1.1\r\n{_HEAD}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().splitlines()
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
    else:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not writer.is_closing():
            writer.write(f"GET {get} HTTP/1.1\r\n{_HEAD}\r\n".encode())
            await writer.drain()
            await asyncio.sleep(0.01)


def watch(pid: int, url: str, paths: tuple[str, ...], seen: Seen) -> None:
    """Ask for health until the time is over, each time on a new connection."""
    parts = urlsplit(url)
    seen.memory_before_mib, seen.descriptors_before, _ = usage(pid)
    end_s = time.monotonic() + seen.seconds
    while time.monotonic() < end_s:
        for path in paths:
            began_s = time.monotonic()
            try:
                connection = http.client.HTTPConnection(
                    parts.hostname or "", parts.port, timeout=_ASK_S
                )
                headers = {"authorization": f"Bearer {TOKEN}"}
                connection.request("GET", path, headers=headers)
                status = connection.getresponse().status
                connection.close()
                if status != 200:
                    seen.health_failures.append(f"{path}: {status}")
            except (OSError, http.client.HTTPException) as error:
                seen.health_failures.append(f"{path}: {error!r}")
            seen.health_answers += 1
            took_s = time.monotonic() - began_s
            seen.worst_health_s[path] = max(seen.worst_health_s.get(path, 0.0), round(took_s, 3))
            memory, descriptors, threads = usage(pid)
            seen.memory_most_mib = max(seen.memory_most_mib, memory)
            seen.descriptors_most = max(seen.descriptors_most, descriptors)
            seen.threads_most = max(seen.threads_most, threads)
        time.sleep(_BETWEEN_S)


def usage(pid: int) -> tuple[float, int, int]:
    """The private and shared memory in MiB, the descriptors and the threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.split()[1:]}
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return int(kib["VmRSS"]) / 1024, descriptors, int(kib["Threads"])


def flood_daemon(folder: Path, connections: int, seconds: float) -> Seen:
    """Flood the HTTP server of a daemon."""
    token = folder / "token"
    write_private_file(token, TOKEN.encode())
    seen = Seen(connections, seconds)
    options = ("--http", "127.0.0.1:0", "--http-token-file", str(token))
    with DaemonProcess(folder, small(folder / "kv"), *options) as daemon:
        url = daemon.ready["http"]
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or 0)
        with flooding(address, ("/api/stats", "/api/hints"), connections):
            watch(daemon.pid, url, ("/healthz", "/readyz", "/metrics"), seen)
        with kvdepot.open(daemon.address) as store:
            assert "daemon" in store.stats(), "clients of the socket are served"
        seen.log_bytes = (folder / "daemon.log").stat().st_size
    return seen


def flood_proxy(folder: Path, connections: int, seconds: float) -> Seen:
    """Flood a proxy before a server that only says what it was asked."""
    slots = folder / "slots"
    slots.mkdir(mode=0o700)
    seen = Seen(connections, seconds)
    log = folder / "proxy.log"
    with echoing() as echo, log.open("w") as errors:
        options = ["--upstream", f"http://127.0.0.1:{echo.server_address[1]}", "--json"]
        options += ["--listen", "127.0.0.1:0", "--slots", str(slots), "--set", "dram=8MiB"]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvdepot", "proxy", "llama-server", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            parts = urlsplit(url)
            address = (parts.hostname or "", parts.port or 0)
            with flooding(address, ("/any", "/completion"), connections):
                watch(process.pid, url, ("/kvdepot/status",), seen)
        finally:
            process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
    seen.log_bytes = log.stat().st_size
    return seen


@contextlib.contextmanager
def echoing() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def smuggle_at_daemon(first: int, tries: int) -> Smuggled:
    """Send requests to a daemon in this process until there were so many answers."""
    with tempfile.TemporaryDirectory() as folder, HttpDaemon(Path(folder), TOKEN) as daemon:
        parts = urlsplit(daemon.url)
        address = (parts.hostname or "", parts.port or 0)
        return smuggled(first, tries, partial(attempt_at_daemon, address, TOKEN))


def smuggle_at_proxy(first: int, tries: int) -> Smuggled:
    """Send requests to a proxy in this process until there were so many answers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        echo = stack.enter_context(echoing())
        dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
        depot = stack.enter_context(kvdepot.open(dram=dram))
        link = LinkSettings(f"http://127.0.0.1:{echo.server_address[1]}", folder)
        proxy = LlamaProxy(link, depot)
        stack.callback(proxy.close)
        server = stack.enter_context(ProxyServer(("127.0.0.1", 0), proxy))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        address = ("127.0.0.1", int(server.server_address[1]))
        return smuggled(first, tries, partial(attempt, address, echo))


def smuggled(first: int, tries: int, attempt_with: Callable[[int], tuple[int, str]]) -> Smuggled:
    """Make attempts with the seeds from `first` on until there were so many answers."""
    found = Smuggled()
    while found.answers < tries:
        seed = first + found.connections
        answers, wrong = attempt_with(seed)
        found.answers += answers
        found.connections += 1
        if wrong:
            found.wrong.append(f"seed {seed}: {wrong}")
    return found


def smuggle_in_processes(
    smuggle: Callable[[int, int], Smuggled], processes: int, tries: int
) -> Smuggled:
    each = -(-tries // processes)
    whole = Smuggled()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        firsts = [number * 10**7 for number in range(processes)]
        for part in pool.map(smuggle, firsts, [each] * processes):
            whole.answers += part.answers
            whole.connections += part.connections
            whole.wrong += part.wrong
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tries", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    told: dict[str, Any] = {}
    for name, run in (("daemon", flood_daemon), ("proxy", flood_proxy)):
        if args.connections:
            with tempfile.TemporaryDirectory() as folder:
                told[name] = asdict(run(Path(folder), args.connections, args.seconds))
    for name, smuggle in (("daemon", smuggle_at_daemon), ("proxy", smuggle_at_proxy)):
        if args.tries:
            found = smuggle_in_processes(smuggle, args.processes, args.tries)
            told[f"smuggled past the {name}"] = asdict(found)
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
