"""Checks API keys: a request without a valid one is refused before its body is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ark.serving.http.errors import ApiError

OPEN_PATHS = ("/", "/health", "/metrics")


class KeyMiddleware:
    """Requires `Authorization: Bearer KEY` on all paths except the open ones."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._has(scope):
            error = ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
            await Response(error.body(), error.status, error.headers())(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        right = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        # All keys are compared, so the response time does not depend on which key matches.
        return any(right)
