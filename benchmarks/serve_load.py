"""How `slimbayes serve` holds up: speed beside a plain net, malformed requests, overload, shutdown, access.

    python benchmarks/serve_load.py --out results/benchmarks/serve.json [--seconds 60] [--malformed 10000] [--stops 20]
    python benchmarks/serve_load.py --page docs/serving.md --out results/benchmarks/serve.json  # write the table anew

Two small runs are made first, rank-1 with four members and four draws of each, and the same network plain, which the
same server serves with one draw. Overload asks a third one, rank-1 with layers of 2048, of which a core answers some
dozens of rows a second: clients on the other core can offer four times that. Everything goes over the loopback device
of this machine, clients and servers on the same cores; speeds are measured in turn, several times, so that what else
runs there is in both.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

KEY = "a key for tests"
GOOD = json.dumps({"rows": [[0.5] * 8]}).encode()
FIT = """
import sys, torch
from pathlib import Path
from slimbayes.data import Dataset, Split
from slimbayes.lab.configs.files import validate
from slimbayes.lab.execution import Execution
from slimbayes.lab.runs.fit import fit
x, y = torch.randn(400, 8), torch.arange(400) % 10
data = Dataset("mine", {"train": Split(x[:300], y[:300]), "test": Split(x[300:], y[300:])})
tree = {"name": "served", "data": {"name": "mine"}, "model": {"kind": "mlp", "hidden": [64, 64]},
        "train": {"epochs": 1, "batch": 100,
        "optimizer": {"kind": "AdamW", "lr": 0.01}}, "evaluate": {"examples": 0}}
rank1, wide = {"kind": "Rank1", "members": 4}, {"kind": "mlp", "hidden": [2048, 2048]}
more = {"rank1": {"method": rank1}, "plain": {"method": {"kind": "Deterministic"}}}
more["wide"] = {"method": rank1, "model": wide}
for name in sys.argv[2:]:
    fit(validate(tree | more[name]), Path(sys.argv[1]) / name, Execution(accelerator="cpu", workers=0),
        dataset=data, judge=False)
"""
ARROW = "application/vnd.apache.arrow.stream"
GOALS = {
    "R8": "no 5xx, memory grows by less than 32 MiB, the next good request answered",
    "R9": "four times what it can answer: nothing but 200 and 503 with Retry-After, none lost, p99 of those accepted "
    "at most 500 ms, usual within 5 s",
    "R10": "no accepted request lost, ended within 10 s, ports free",
    "R11": "none admitted, only /healthz open, 413 for a byte too many, declared or not",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A server in a process of its own."""

    def __init__(self, *command: str) -> None:
        self.port = free_port()
        words = [
            sys.executable,
            *(word.replace("PORT", str(self.port)) for word in command),
        ]
        env = os.environ | {"SLIMBAYES_API_KEY": KEY}
        self.process = subprocess.Popen(
            words, env=env, stderr=subprocess.PIPE, text=True
        )
        for _ in range(600):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError("The server did not start.")

    def memory(self) -> float:
        """Resident memory in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def stop(self) -> tuple[float, str]:
        """Seconds until it has ended after SIGTERM, and its last words."""
        start = time.time()
        self.process.send_signal(signal.SIGTERM)
        _, words = self.process.communicate(timeout=60)
        return time.time() - start, words


def request(
    body: bytes = GOOD,
    path: str = "/predict",
    key: str | None = KEY,
    verb: str = "POST",
    more: str = "",
) -> bytes:
    head = (
        f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    )
    head += f"X-API-Key: {key}\r\n" if key is not None else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One connection that is kept, and opened again where the server closed it."""

    def __init__(self, port: int) -> None:
        self.port, self.streams = port, None
        self.head, self.used = b"", 0.0  # of the latest answer, and when it came

    async def send(self, data: bytes) -> int:
        """The status of the answer; 0 where the connection ended without one."""
        if (
            time.perf_counter() - self.used > 20
        ):  # servers close what is idle for long, as HTTP says
            self.close()
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            writer.write(data)
            await writer.drain()
            self.head = head = (await reader.readuntil(b"\r\n\r\n")).lower()
            lengths = [
                h for h in head.split(b"\r\n") if h.startswith(b"content-length")
            ]
            await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            self.used = time.perf_counter()
            if b"connection: close" in head or not lengths:
                self.close()
            return int(head.split()[1])
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.close()
            return 0

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def steady(
    port: int, clients: int, seconds: float, body: bytes = GOOD
) -> dict[str, Any]:
    """Clients that ask again as soon as they are answered."""
    times: list[float] = []
    statuses: Counter[int] = Counter()

    async def one() -> None:
        client, end = Client(port), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            status = await client.send(request(body))
            statuses[status] += 1
            if status == 200:
                times.append(time.perf_counter() - start)
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return summary(times, statuses, seconds)


def summary(
    times: list[float], statuses: Counter[int], seconds: float
) -> dict[str, Any]:
    p50, p99 = (
        (round(1000 * float(np.quantile(times, q)), 1) for q in (0.5, 0.99))
        if times
        else (None, None)
    )
    rate = round(len(times) / seconds, 1)
    return {
        "per_second": rate,
        "p50_ms": p50,
        "p99_ms": p99,
        "statuses": {str(k): v for k, v in statuses.items()},
    }


async def overload(port: int, seconds: float) -> dict[str, Any]:
    """Requests at four times the rate that 16 patient clients get answered, over 512 connections at most, whether or
    not answers come; then how soon a usual one is answered at once again. What finds no connection free is not sent:
    the client's own delays are not the server's.
    """
    await steady(port, 16, 2)
    capacity = max([(await steady(port, 16, 4))["per_second"] for _ in range(4)])
    rate = 4 * capacity
    times: list[float] = []
    statuses: Counter[int] = Counter()
    idle, silent = [Client(port) for _ in range(512)], 0
    running: set[asyncio.Task[None]] = set()

    async def one(client: Client) -> None:
        nonlocal silent
        start = time.perf_counter()
        status = await client.send(request())
        statuses[status] += 1
        silent += status == 503 and b"retry-after" not in client.head
        if status == 200:
            times.append(time.perf_counter() - start)
        idle.append(client)

    start = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        if not idle:
            continue
        task = asyncio.create_task(one(idle.pop()))
        running.add(task)
        task.add_done_callback(running.discard)
    spent = time.perf_counter() - start
    await asyncio.gather(*running)
    ended, client = time.perf_counter(), Client(port)
    while await client.send(request()) != 200:
        await asyncio.sleep(0.05)
    told = {
        "offered_per_second": round(sum(statuses.values()) / spent, 1),
        "without_retry_after": silent,
    }
    told |= {"capacity_per_second": capacity}
    told |= {
        "lost": statuses[0],
        "normal_after_s": round(time.perf_counter() - ended, 2),
    }
    return told | summary(times, statuses, spent)


KINDS: list[Callable[[], bytes]] = [
    lambda: request(b"{"), lambda: request(b""), lambda: request(b"[" * 5000), lambda: request(os.urandom(200)),
    lambda: request(b'{"rows": [[NaN,1,2,3,4,5,6,7]]}'), lambda: request(b'{"rows": [[1e400,1,2,3,4,5,6,7]]}'),
    lambda: request(b'{"rows": [[1,2],[3]]}'), lambda: request(b'{"rows": [["a"]]}'), lambda: request(b'{"rows": []}'),
    lambda: request(b'{"rows": [[1,2,3,4,5,6,7,8]], "draws": 1000000000}'),
    lambda: request(b'{"rows": [[1,2,3,4,5,6,7,8]], "level": 2}'),
    lambda: request(b'{"rows": [[1,2,3,4,5,6,7,8]], "extra": 1}'),
    lambda: request(b'{"rows": [[1,2,3,4,5,6,7,8]], "rows": 1}'), lambda: request(b'{"rows": {"a": 1}}'),
    lambda: request(json.dumps({"rows": [[0] * 8] * 2000}).encode()), lambda: request(b"x" * 70000),
    lambda: request(b"\x93NUMPY" + os.urandom(60), more="X: y\r\n").replace(b"application/json", b"application/x-npy"),
    lambda: request().replace(b"application/json", b"text/html"), lambda: request(path="/../../etc/passwd"),
    lambda: request(b'{"rows": [{"a": 1}, {"b": 2}]}'), lambda: request(b'{"rows": [{"a": {"b": 1}}]}'),
    lambda: request(path="/predict?draws=1e9"),
    lambda: request(os.urandom(900)).replace(b"application/json", ARROW.encode()),
    lambda: request(b"\xff\xff\xff\xff" + os.urandom(400)).replace(b"application/json", ARROW.encode()),
    lambda: request(verb="DELETE"), lambda: b"\x00\x01\x02 nonsense\r\n\r\n",
    lambda: request(more="X-Long: " + "y" * 100000 + "\r\n"),
    lambda: request().replace(b"Content-Length", b"Content-Length: -5\r\nY"),
]  # fmt: skip


async def malformed(server: Server, count: int) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    for _ in range(3):
        await Client(server.port).send(request())
    before = server.memory()

    async def some(numbers: range) -> None:
        client = Client(server.port)
        for number in numbers:
            statuses[
                await asyncio.wait_for(client.send(KINDS[number % len(KINDS)]()), 30)
            ] += 1
        client.close()

    await asyncio.gather(*(some(range(first, count, 8)) for first in range(8)))
    after, good = server.memory(), await Client(server.port).send(request())
    told = {str(k): v for k, v in sorted(statuses.items())}
    return {
        "kinds": len(KINDS),
        "statuses": told,
        "memory_mib": [round(before), round(after)],
        "good_after": good,
    }


async def access(port: int, count: int) -> dict[str, Any]:
    """Wrong and missing keys at every address, bodies just beyond the limit, plain and in chunks."""
    client, admitted = Client(port), 0
    paths = [
        "/predict",
        "/about",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/",
        "/healthz/../about",
    ]
    for number in range(count):
        key = (
            None
            if number % 3 == 0
            else random.choice([KEY[:-1], KEY + "x", "", "é", KEY.upper()])
        )
        verb = "POST" if number % 2 else "GET"
        status = await client.send(
            request(path=paths[number % len(paths)], key=key, verb=verb).replace(
                "é".encode(), b"e"
            )
        )
        admitted += status not in (0, 400, 401)
    over, chunks = (
        b"x" * (64 * 1024 + 1),
        request(b"").replace(
            b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
        ),
    )
    chunks += (
        b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(65)) + b"0\r\n\r\n"
    )
    plain, chunked = (
        await Client(port).send(request(over)),
        await Client(port).send(chunks),
    )
    open_ = await client.send(request(b"", path="/healthz", key=None, verb="GET"))
    return {
        "tried": count,
        "admitted": admitted,
        "healthz": open_,
        "over_limit": plain,
        "over_limit_chunked": chunked,
    }


async def stop_under_load(server: Server) -> dict[str, Any]:
    """SIGTERM while clients ask."""
    load = asyncio.create_task(steady(server.port, 16, 3))
    await asyncio.sleep(random.uniform(0.5, 1.5))
    seconds, words = await asyncio.to_thread(server.stop)
    load.cancel()
    answered, accepted = map(int, re.findall(r"(\d+) of (\d+) accepted", words)[0])
    with socket.socket() as one:
        free = one.connect_ex(("127.0.0.1", server.port)) != 0
    return {
        "seconds": round(seconds, 2),
        "accepted": accepted,
        "lost": accepted - answered,
        "port_free": free,
    }


async def speeds(
    servers: dict[str, Server], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """What both answer, in turn, at some numbers of clients."""
    rows = []
    for clients in (1, 16, 64):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for _ in range(args.repeats):
            for name, server in servers.items():
                await steady(server.port, clients, 0.5)
                found[name].append(
                    await steady(server.port, clients, args.speed_seconds)
                )
        ratios = [
            a["per_second"] / b["per_second"]
            for a, b in zip(found["rank1"], found["plain"], strict=True)
        ]
        rows.append(
            {
                "clients": clients,
                "ratio": round(float(np.median(ratios)), 3),
                "ratios": [round(r, 3) for r in ratios],
            }
            | found
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def measured(runs: Path, args: argparse.Namespace) -> dict[str, Any]:
    def ours(name: str, draws: int) -> tuple[str, ...]:
        limits = ("--draws", str(draws), "--max-body", str(64 * 1024))
        return ("-m", "slimbayes", "serve", str(runs / name), "--port", "PORT", *limits)

    out: dict[str, Any] = {"cores": os.cpu_count()}
    if "R9" in args.parts:
        wide, load = Server(*ours("wide", 4)), round(os.getloadavg()[0], 1)
        out["R9"] = await overload(wide.port, args.seconds) | {"load_before": load}
        wide.stop()
        print("R9", json.dumps(out["R9"]), flush=True)
    if args.parts == ["R9"]:
        return out
    out["load_before"] = round(os.getloadavg()[0], 1)
    server = Server(*ours("rank1", 4))
    if "speed" in args.parts:
        plain = Server(*ours("plain", 1))
        out["speed"] = await speeds({"rank1": server, "plain": plain}, args)
        plain.stop()
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "R8": lambda: malformed(server, args.malformed),
        "R11": lambda: access(server.port, 1000),
    }
    for name in args.parts:
        if name in steps:
            out[name] = await steps[name]()
            print(name, json.dumps(out[name]), flush=True)
    every = [await stop_under_load(server)]
    if "R10" not in args.parts:
        return out
    every += [
        await stop_under_load(Server(*ours("rank1", 4))) for _ in range(args.stops - 1)
    ]
    out["R10"] = {
        "stops": len(every), "accepted": sum(s["accepted"] for s in every), "lost": sum(s["lost"] for s in every),
        "slowest_s": max(s["seconds"] for s in every), "ports_free": all(s["port_free"] for s in every),
    }  # fmt: skip
    return out


# --- the page ---

BEGIN, END = "<!-- serve_load.py writes this -->", "<!-- to here -->"


def held(name: str, found: dict[str, Any]) -> tuple[str, bool]:
    """What was found of a promise, and whether it holds."""
    if name == "R8":
        grown = found["memory_mib"][1] - found["memory_mib"][0]
        failed = sum(
            count
            for status, count in found["statuses"].items()
            if status.startswith("5")
        )
        total = sum(found["statuses"].values())
        told = f"{total:,} requests of {found['kinds']} kinds: {failed} of 5xx, memory {grown:+d} MiB"
        return (
            f"{told}, then {found['good_after']}",
            not failed and grown < 32 and found["good_after"] == 200,
        )
    if name == "R9":
        counts = found["statuses"]
        can = max(
            found["capacity_per_second"], found["per_second"]
        )  # other work leaves more of a core at times
        times = found["offered_per_second"] / can
        told = (
            f"{found['offered_per_second']:,.0f} requests a second offered to a network that answers "
            f"{can:,.0f} ({times:.1f} times as many; load {found['load_before']}), "
            f"{counts.get('200', 0):,} answered and "
            f"{counts.get('503', 0):,} refused ({found['without_retry_after']} without Retry-After), {found['lost']} "
            f"lost; p50 {found['p50_ms']:.0f} ms, p99 {found['p99_ms']:.0f} ms; usual after {found['normal_after_s']} s"
        )
        fine = (
            set(counts) <= {"200", "503"}
            and not found["without_retry_after"]
            and found["normal_after_s"] <= 5
        )
        return told, fine and found["p99_ms"] <= 500 and not found[
            "lost"
        ] and times >= 3.8
    if name == "R10":
        told = f"{found['stops']} stops, {found['accepted']:,} accepted, {found['lost']} lost"
        return f"{told}, slowest {found['slowest_s']} s", not found["lost"] and found[
            "slowest_s"
        ] <= 10 and found["ports_free"]
    codes = f"{found['over_limit']} and {found['over_limit_chunked']}"
    told = f"{found['tried']:,} wrong or missing keys, {found['admitted']} admitted; a byte too many: {codes}"
    return told, not found["admitted"] and codes == "413 and 413" and found[
        "healthz"
    ] == 200


def page(found: dict[str, Any]) -> str:
    """The tables of docs/serving.md."""
    lines = [
        "| clients | rank-1, 16 draws: a second, p50, p99 | plain: a second, p50, p99 | ratio of requests a second |",
        "|---|---|---|---|",
    ]
    for row in found["speed"]:
        cells = []
        for name in ("rank1", "plain"):
            middle = {
                key: float(np.median([one[key] for one in row[name]]))
                for key in ("per_second", "p50_ms", "p99_ms")
            }
            cells.append(
                "{per_second:.0f}, {p50_ms:.0f} ms, {p99_ms:.0f} ms".format(**middle)
            )
        span = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        lines.append(
            f"| {row['clients']} | {cells[0]} | {cells[1]} | {row['ratio']:.2f} ({span}) |"
        )
    lines += ["", "| promise | found | holds |", "|---|---|---|"]
    for name, goal in GOALS.items():
        if name in found:
            told, fine = held(name, found[name])
            lines.append(f"| {goal} | {told} | {'yes' if fine else 'no'} |")
    shared = f"shared by servers, clients and other work (load {found['load_before']} at the start)"
    lines += ["", f"{found['cores']} cores, {shared}."]
    return "\n".join(lines)


def write_page(file: Path, found: dict[str, Any]) -> None:
    before, _, rest = file.read_text().partition(BEGIN)
    file.write_text(f"{before}{BEGIN}\n{page(found)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--speed-seconds", type=float, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument(
        "--parts", nargs="*", default=["speed", "R8", "R9", "R10", "R11"]
    )
    args = parser.parse_args()
    if args.page is not None:
        return write_page(args.page, json.loads(args.out.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        runs = ["wide"] if args.parts == ["R9"] else ["rank1", "plain", "wide"]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FIT, folder, *runs], check=True
        )
        found = asyncio.run(measured(Path(folder), args))
    former = json.loads(args.out.read_text()) if args.out.exists() else {}
    kept = {
        name: value
        for name, value in former.items()
        if name in (*GOALS, "speed", "load_before")
    }  # parts that were not run again
    args.out.write_text(json.dumps(kept | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
