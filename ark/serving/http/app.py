"""The routes of the server as one ASGI application, which ark.serving.http.run runs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ark.errors import BaseError
from ark.serving.http.bodies import decoded
from ark.serving.http.chats import Chat
from ark.serving.http.completions import Completion
from ark.serving.http.embeddings import Embedding, EmbeddingEngine, no_embeddings
from ark.serving.http.errors import SERVER_ERROR, ApiError
from ark.serving.http.jobs import Dispatcher
from ark.serving.http.keys import KeyMiddleware
from ark.serving.http.metrics import Metrics
from ark.serving.http.model import ServedModel, aside
from ark.serving.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from ark.serving.types import EngineLike

PAGE = Path(__file__).parent / "page.html"
CLOSED_BY_CLIENT = 499
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """The limits of one request. body_bytes: the most bytes of its body. body_s: the most seconds
    until the body is complete. request_s: the most seconds until the answer is complete. queue: the
    most choices (answers) of all requests together that may wait for a free slot of the engine.
    """

    body_bytes: int = 16 << 20
    body_s: float = 30.0
    request_s: float = 600.0
    queue: int = 256


class Service:
    """The state that the routes share. Created on the event loop. on_failure: called on the event
    loop if the engine fails, after all requests were ended with an error.
    """

    def __init__(self, engine: EngineLike, model: ServedModel, limits: Limits) -> None:
        self.engine = engine
        self.model = model
        self.limits = limits
        self.draining = False  # True: new requests are refused; running ones go on
        self.failure = ""  # why the engine has failed
        self.on_failure: Callable[[], None] = lambda: None
        self.metrics = Metrics(engine, model.name)
        room = engine.stats().slots + limits.queue
        self.dispatcher = Dispatcher(engine, self.metrics, room)
        self.embedding: Embedding | None = None
        if isinstance(engine, EmbeddingEngine):
            self.embedding = Embedding(engine, limits.queue, limits.request_s)
        loop = asyncio.get_running_loop()

        def failed(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._fail, reason)

        engine.on_failure = failed

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._end_all(ApiError(500, reason, kind=SERVER_ERROR, code="engine_failed"))
        self.on_failure()

    def abort(self) -> None:
        """Ends all running requests with an error to their clients."""
        message = "the server is shutting down"
        self._end_all(ApiError(503, message, kind=SERVER_ERROR, code="shutdown"))

    def _end_all(self, error: ApiError) -> None:
        self.dispatcher.end_all(error)
        if self.embedding:
            self.embedding.error = error

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = decoded(await self._body(request), CompletionRequest)
        began = Completion.begin(self.model, self.dispatcher, asked, self.limits.request_s)
        return await _while_connected(request, _response(began))

    async def chats(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = decoded(await self._body(request), ChatRequest)
        began = Chat.begin(self.model, self.dispatcher, asked, self.limits.request_s)
        return await _while_connected(request, _response(began))

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = decoded(await self._body(request), EmbeddingRequest)
        if self.embedding is None:
            raise no_embeddings()
        embedding = self.embedding

        async def response() -> Response:
            return _json(await embedding.answer(self.model, asked))

        return await _while_connected(request, response())

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        models = (self.model, *self.model.variants.values())
        return _json({"object": "list", "data": [self._card(model) for model in models]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        return _json(self._card(self.model.named(request.path_params["name"])))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        asked = decoded(await self._body(request), TokenizeRequest)
        self.model.named(asked.model)
        if (asked.prompt is None) == (not asked.messages):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if asked.messages:
            tokens = await self.model.chat_tokens(asked.messages)
        else:
            framed = asked.add_special_tokens is not False
            text = str(asked.prompt)
            (tokens,) = await self.model.encoded([text], ["prompt"], framed=framed)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.model.context,
            "tokens": tokens,
        }
        if asked.return_token_strs:
            answer["token_strs"] = [self.model.tokenizer.backend.id_to_token(t) for t in tokens]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        asked = decoded(await self._body(request), DetokenizeRequest)
        self.model.named(asked.model)
        self.model.check_tokens(asked.tokens, "tokens")
        decode = partial(self.model.tokenizer.backend.decode, asked.tokens, False)
        return _json({"prompt": await aside(len(asked.tokens), decode)})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the server accepts requests, else 503."""
        if self.failure or self.draining:
            reason = self.failure or "the server is shutting down"
            raise ApiError(503, reason, kind=SERVER_ERROR)
        return _json({"status": "ok"})

    async def metrics_text(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, request: Request) -> Response:
        """GET /stats: the engine's state and recent rates, as JSON for the page of `GET /`."""
        now = msgspec.to_builtins(self.engine.stats())
        now["slot_ids"] = [bool(name) for name in now["slot_ids"]]
        own = {"model": self.model.name, "chat": bool(self.model.templates.texts)}
        return _json({**own, **now, **self.metrics.recent()})

    async def page(self, request: Request) -> Response:
        """GET /: the server's web page."""
        return Response(PAGE.read_bytes(), 200, PAGE_HEADERS, "text/html; charset=utf-8")

    def _card(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "ark",
            "max_model_len": model.context,
            **({"parent": self.model.name} if model.adapter else {}),
        }

    async def _body(self, request: Request) -> bytes:
        """The body of a request. Raises ApiError if it exceeds the limits."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type is {kind!r:.60}; send JSON as application/json")
        most = self.limits.body_bytes
        too_large = ApiError(
            413, f"the body has more than {most:,} bytes, the server's limit; shorten it"
        )
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > most:
            raise too_large

        async def read() -> bytes:
            parts, size = [], 0
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
            return b"".join(parts)

        try:
            return await asyncio.wait_for(read(), self.limits.body_s)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self.limits.body_s:g} s"
            ) from None


class EventStream(StreamingResponse):
    """Sends the chunks of an answer as server-sent events. When the response ends, the engine's
    slots that its choices use are freed.
    """

    def __init__(self, completion: Completion | Chat) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers=EVENT_HEADERS)
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.answer.close()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._completion.chunks():
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        except ApiError as error:
            yield b"data: " + error.body() + b"\n\n"
        except Exception as error:
            yield b"data: " + _unexpected(error).body() + b"\n\n"
        yield b"data: [DONE]\n\n"


async def _while_connected(request: Request, response: Coroutine[Any, Any, Response]) -> Response:
    """The response of a route. The route is cancelled if the client disconnects."""
    work = asyncio.ensure_future(response)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=CLOSED_BY_CLIENT)
    finally:
        for task in (work, disconnected):
            task.cancel()
        await asyncio.gather(work, disconnected, return_exceptions=True)


async def _response(began: Coroutine[Any, Any, Completion | Chat]) -> Response:
    """The HTTP response to a completion or chat that was submitted to the engine: a stream of
    events, or the whole answer.
    """
    completion = await began
    if completion.streamed:
        return EventStream(completion)
    try:
        return _json(await completion.whole())
    finally:
        completion.answer.close()


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection. Called after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _unexpected(error: Exception) -> ApiError:
    """The error for an unexpected exception, whose traceback is written to standard error."""
    traceback.print_exception(error, file=sys.stderr)
    return ApiError(500, "the server failed; its log has the cause", kind=SERVER_ERROR)


def _failed(request: Request, error: Exception) -> Response:
    """The response to an error that a route has raised."""
    if isinstance(error, HTTPException):
        routes = {404: "there is no such route", 405: "the route does not take this method"}
        message = routes.get(error.status_code, str(error.detail))
        error = ApiError(error.status_code, f"{message}: {request.method} {request.url.path:.200}")
    elif isinstance(error, ClientDisconnect):
        return Response(status_code=CLOSED_BY_CLIENT)
    elif isinstance(error, BaseError):
        error = ApiError(500, str(error), kind=SERVER_ERROR)
    elif isinstance(error, RecursionError):
        error = ApiError(400, "the body has too many levels of objects and lists; use fewer")
    elif not isinstance(error, ApiError):
        error = _unexpected(error)
    return Response(error.body(), error.status, error.headers())


def application(
    service: Service, *, keys: Sequence[str] = (), origins: Sequence[str] = ()
) -> Starlette:
    """The ASGI application. keys: API keys; a request must have one of them. origins: the origins
    of other sites' pages that may use the server.
    """

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                response = await handler(request)
            except Exception as error:
                response = _failed(request, error)
            service.metrics.response(path, response.status_code)
            return response

        return Route(path, endpoint, methods=[method])

    routes = [
        route("/", "GET", service.page),
        route("/health", "GET", service.health),
        route("/metrics", "GET", service.metrics_text),
        route("/stats", "GET", service.stats),
        route("/v1/models", "GET", service.models),
        route("/v1/models/{name:path}", "GET", service.one_model),
        route("/v1/completions", "POST", service.completions),
        route("/v1/chat/completions", "POST", service.chats),
        route("/v1/embeddings", "POST", service.embeddings),
        route("/tokenize", "POST", service.tokenize),
        route("/detokenize", "POST", service.detokenize),
    ]
    middleware = []
    if origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
        middleware.append(cors)
    if keys:
        middleware.append(Middleware(KeyMiddleware, keys=tuple(keys)))
    handlers = {HTTPException: _failed}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
