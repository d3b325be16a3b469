"""What stands before a server's application: the key, and how many requests are let in at once.

The number let in follows the time they take, as TCP's window does: while it is reached, a little more after each that
was answered in time, and one more after each that was answered at once; a tenth less after each that was late. So an
overloaded server says 503 instead of being late for everyone, whatever it is that takes the time.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
_FEWEST, _MOST = 2.0, 512.0


class Guard:
    """An ASGI application around another.

    Args:
        key: what X-API-Key must be; None lets everyone in. /healthz is always open.
        wait: seconds in which requests should be answered.
    """

    def __init__(self, app: Application, key: str | None, wait: float) -> None:
        self.app, self.key, self.wait = app, key, wait
        self.active, self.window = 0, 16.0
        self.statuses: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] != "/healthz" and not self._admitted(scope):
            await self._refuse(send, 401, "A valid key is needed: X-API-Key.")
        elif self.active >= self.window and scope["path"] == "/predict":
            await asyncio.sleep(self.wait)  # who asks again at once would take the time of those let in
            await self._refuse(send, 503, "Too many requests wait: try again soon.", (b"retry-after", b"1"))
        else:
            await self._let_in(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.perf_counter(), 500

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.active += 1
        try:
            await self.app(scope, receive, noted)
        finally:
            self.active -= 1
            self.statuses[status] += 1
            if status == 200:
                self._learn(time.perf_counter() - start)

    def _learn(self, seconds: float) -> None:
        """Let in more or fewer after one that took so long."""
        if seconds > self.wait:
            self.window = max(_FEWEST, 0.9 * self.window)
        elif self.active + 1 >= self.window - 1:  # that few are quick says nothing of many
            self.window = min(_MOST, self.window + (1 if seconds < self.wait / 4 else 1 / self.window))

    async def _refuse(self, send: Send, status: int, why: str, *headers: tuple[bytes, bytes]) -> None:
        self.statuses[status] += 1
        body = json.dumps({"error": why}).encode()
        about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
        await send({"type": "http.response.start", "status": status, "headers": about})
        await send({"type": "http.response.body", "body": body})

    def _admitted(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"x-api-key"), b"")
        return self.key is None or hmac.compare_digest(given, self.key.encode())
