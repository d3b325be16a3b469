"""How `slimbayes serve` holds up: speed beside plain PyTorch, malformed requests, overload, shutdown, access.

    python benchmarks/serve_load.py --out results/benchmarks/serve.json [--seconds 60] [--malformed 10000] [--stops 20]

A small run (rank-1, four members, four draws of each) is made first; everything goes over the loopback device of this
machine, clients and server on the same cores. "plain" is the same network without posteriors behind the same kind of
server, one row and one forward for each request.
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
from slimbayes.lab.config_files import validate
from slimbayes.lab.execution import Execution
from slimbayes.lab.fit import fit
x, y = torch.randn(400, 8), torch.arange(400) % 10
data = Dataset("mine", {"train": Split(x[:300], y[:300]), "test": Split(x[300:], y[300:])})
tree = {"name": "served", "data": {"name": "mine"}, "model": {"kind": "mlp", "hidden": [64, 64]},
        "method": {"kind": "Rank1", "members": 4}, "train": {"epochs": 1, "batch": 100,
        "optimizer": {"kind": "AdamW", "lr": 0.01}}, "evaluate": {"examples": 0}}
fit(validate(tree), Path(sys.argv[1]), Execution(accelerator="cpu", workers=0), dataset=data)
"""
PLAIN = """
import sys, torch, uvicorn
from fastapi import FastAPI
from slimbayes.models import mlp
net, app = mlp(8, (64, 64), 10).eval(), FastAPI()
@app.get("/healthz")
async def healthz(): return {}
@app.post("/predict")
def predict(body: dict):
    with torch.no_grad(): return {"probs": net(torch.tensor(body["rows"])).softmax(1).tolist()}
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A server in a process of its own."""

    def __init__(self, *command: str) -> None:
        self.port = free_port()
        words = [sys.executable, *(word.replace("PORT", str(self.port)) for word in command)]
        env = os.environ | {"SLIMBAYES_API_KEY": KEY}
        self.process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
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
    body: bytes = GOOD, path: str = "/predict", key: str | None = KEY, verb: str = "POST", more: str = ""
) -> bytes:
    head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    head += f"X-API-Key: {key}\r\n" if key is not None else ""
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """One connection that is kept, and opened again where the server closed it."""

    def __init__(self, port: int) -> None:
        self.port, self.streams = port, None

    async def send(self, data: bytes) -> int:
        """The status of the answer; 0 where the connection ended without one."""
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            writer.write(data)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")]
            await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
            if b"connection: close" in head.lower() or not lengths:
                self.close()
            return int(head.split()[1])
        except (OSError, asyncio.IncompleteReadError, ValueError):
            self.close()
            return 0

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def steady(port: int, clients: int, seconds: float, body: bytes = GOOD) -> dict[str, Any]:
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


def summary(times: list[float], statuses: Counter[int], seconds: float) -> dict[str, Any]:
    p50, p99 = (round(1000 * float(np.quantile(times, q)), 1) for q in (0.5, 0.99)) if times else (None, None)
    rate = round(len(times) / seconds, 1)
    return {"per_second": rate, "p50_ms": p50, "p99_ms": p99, "statuses": {str(k): v for k, v in statuses.items()}}


async def overload(port: int, rate: float, seconds: float) -> dict[str, Any]:
    """Requests at a fixed rate over 256 connections at most, whether or not answers come; then how soon a usual one is
    answered at once again. What finds no connection free is not sent: the client's own delays are not the server's.
    """
    times: list[float] = []
    statuses: Counter[int] = Counter()
    idle = [Client(port) for _ in range(256)]
    running: set[asyncio.Task[None]] = set()

    async def one(client: Client) -> None:
        start = time.perf_counter()
        status = await client.send(request())
        statuses[status] += 1
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
    offered = round(sum(statuses.values()) / spent, 1)
    return {"offered_per_second": offered, "normal_after_s": round(time.perf_counter() - ended, 2)} | summary(
        times, statuses, spent
    )


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
            statuses[await asyncio.wait_for(client.send(KINDS[number % len(KINDS)]()), 30)] += 1
        client.close()

    await asyncio.gather(*(some(range(first, count, 8)) for first in range(8)))
    after, good = server.memory(), await Client(server.port).send(request())
    told = {str(k): v for k, v in sorted(statuses.items())}
    return {"kinds": len(KINDS), "statuses": told, "memory_mib": [round(before), round(after)], "good_after": good}


async def access(port: int, count: int) -> dict[str, Any]:
    """Wrong and missing keys at every address, bodies just beyond the limit, plain and in chunks."""
    client, admitted = Client(port), 0
    paths = ["/predict", "/about", "/metrics", "/openapi.json", "/docs", "/", "/healthz/../about"]
    for number in range(count):
        key = None if number % 3 == 0 else random.choice([KEY[:-1], KEY + "x", "", "é", KEY.upper()])
        verb = "POST" if number % 2 else "GET"
        status = await client.send(
            request(path=paths[number % len(paths)], key=key, verb=verb).replace("é".encode(), b"e")
        )
        admitted += status not in (0, 400, 401)
    over, chunks = (
        b"x" * (64 * 1024 + 1),
        request(b"").replace(b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"),
    )
    chunks += b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(65)) + b"0\r\n\r\n"
    plain, chunked = await Client(port).send(request(over)), await Client(port).send(chunks)
    open_ = await client.send(request(b"", path="/healthz", key=None, verb="GET"))
    return {"tried": count, "admitted": admitted, "healthz": open_, "over_limit": plain, "over_limit_chunked": chunked}


async def stop_under_load(server: Server) -> dict[str, Any]:
    """SIGTERM while clients ask."""
    load = asyncio.create_task(steady(server.port, 16, 3))
    await asyncio.sleep(random.uniform(0.5, 1.5))
    seconds, words = await asyncio.to_thread(server.stop)
    load.cancel()
    answered, accepted = map(int, re.findall(r"(\d+) of (\d+) accepted", words)[0])
    with socket.socket() as one:
        free = one.connect_ex(("127.0.0.1", server.port)) != 0
    return {"seconds": round(seconds, 2), "accepted": accepted, "lost": accepted - answered, "port_free": free}


async def measured(run: Path, args: argparse.Namespace) -> dict[str, Any]:
    ours = ("-m", "slimbayes", "serve", str(run), "--port", "PORT", "--draws", "4", "--max-body", str(64 * 1024))
    out: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "speed": {}}
    server, plain = Server(*ours), Server("-c", PLAIN, "PORT")
    for clients in (1, 16, 64):
        for name, port in (("slimbayes", server.port), ("plain", plain.port)):
            await steady(port, clients, 1)
            out["speed"][f"{name}, {clients} clients"] = await steady(port, clients, args.speed_seconds)
    plain.process.terminate()
    plain.process.communicate()
    capacity = max(v["per_second"] for k, v in out["speed"].items() if k.startswith("slimbayes"))
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "R8 malformed": lambda: malformed(server, args.malformed),
        "R9 overload": lambda: overload(server.port, 4 * capacity, args.seconds),
        "R11 access": lambda: access(server.port, 1000),
    }
    for name, step in steps.items():
        if name.split()[0] in args.parts:
            out[name] = await step()
            print(name, json.dumps(out[name]), flush=True)
    every = [await stop_under_load(server)]
    if "R10" not in args.parts:
        return out
    every += [await stop_under_load(Server(*ours)) for _ in range(args.stops - 1)]
    out["R10 stops"] = {
        "stops": len(every), "accepted": sum(s["accepted"] for s in every), "lost": sum(s["lost"] for s in every),
        "slowest_s": max(s["seconds"] for s in every), "ports_free": all(s["port_free"] for s in every),
    }  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--speed-seconds", type=float, default=6)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--parts", nargs="*", default=["R8", "R9", "R10", "R11"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-W", "ignore", "-c", FIT, folder + "/run"], check=True)
        found = asyncio.run(measured(Path(folder) / "run", args))
    former = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.write_text(json.dumps(former | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
