"""What stands before the endpoints: security headers, a limit on the size of requests, tokens, and a rate of writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.auth import Buckets, Identity, Role, Tokens

MAX_BODY = 1 << 20
WRITES_PER_SECOND, WRITES_AT_ONCE = 5.0, 20.0
NO_TOKENS = (
    "writing is off: start the controller with --tokens-file FILE, one 'role name token' a line, "
    "or with such lines in LENITY_TOKENS"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Not an error of the scheme itself: whether a token is needed depends on how the controller was started.
_bearer = HTTPBearer(auto_error=False, description="a token of --tokens-file")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


class Access:
    """Who may read and who may write.

    ``tokens`` are those for writing; None refuses every write. Reading is open unless ``read_tokens`` are given; then
    it needs one of those, or any token for writing. ``clock`` is monotonic seconds, for the rate of writes.
    """

    def __init__(self, tokens: Tokens | None, read_tokens: Tokens | None, clock: Callable[[], float]):
        self.tokens, self.read_tokens = tokens, read_tokens
        self._buckets = Buckets(WRITES_PER_SECOND, WRITES_AT_ONCE, clock)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the files of tokens; the last good ones are in force."""
        return [f"tokens: {t.problem}" for t in (self.tokens, self.read_tokens) if t is not None and t.problem]

    async def reader(self, credentials: Credentials) -> Identity | None:
        """The reader, None where reading is open; raises 401."""
        if self.read_tokens is None:
            return None
        identity = self._identify(credentials, self.read_tokens, self.tokens)
        if identity is None:
            raise HTTPException(401, "reading needs a token", {"WWW-Authenticate": "Bearer"})
        return identity

    def writer(self, role: Role) -> Callable[[Credentials], Identity]:
        """A dependency that admits ``role`` and above; raises 401, 403, or 429 when that token writes too often."""

        def admit(credentials: Credentials) -> Identity:
            if self.tokens is None:
                raise HTTPException(403, NO_TOKENS)
            identity = self._identify(credentials, self.tokens)
            if identity is None:
                why = "writing needs a token" if credentials is None else "this token is not known"
                raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})
            if not identity.may(role):
                raise HTTPException(403, f"{identity.name} is a {identity.role}; this needs the role {role}")
            wait = self._buckets.take(identity.name)
            if wait > 0:
                raise HTTPException(429, "too many writes; send labels in batches", {"Retry-After": f"{_whole(wait)}"})
            return identity

        return admit

    @staticmethod
    def _identify(credentials: HTTPAuthorizationCredentials | None, *where: Tokens | None) -> Identity | None:
        if credentials is None:
            return None
        found = [tokens.identify(credentials.credentials) for tokens in where if tokens is not None]
        return next((identity for identity in found if identity is not None), None)


WRITE_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the body is not JSON"},
    401: {"description": "no token, or one that is not known"},
    403: {"description": "writing is off, or the token's role is too low"},
    413: {"description": "the request is too large"},
    429: {"description": "too many writes"},
    503: {"description": "a store is away; try again"},
}


class SecurityHeaders:
    """ASGI middleware: the same security headers on every answer, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class BodyLimit:
    """ASGI middleware: a body beyond ``limit`` bytes is a 413, whether announced or only sent."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdigit() or int(announced) > self.limit:
            await JSONResponse({"detail": self._refusal}, 413)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit:
                raise HTTPException(413, self._refusal)
            return message

        await self.app(scope, counted, send)

    @property
    def _refusal(self) -> str:
        return f"the request is larger than {self.limit} bytes"


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))
