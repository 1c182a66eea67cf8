"""Replicas of `ark serve` behind Ray Serve, which routes requests by the prefixes of their prompts.

    pip install 'ark-gpu[cpu,serve]' 'ray[serve]>=2.60'
    serve run examples.ray_serve:app [model=examples/noah] [replicas=2]

Each replica is an engine with all routes of `ark serve`. A front process passes requests to the
replicas. If a replica dies before its answer has begun, the front gives the request to another
replica. Two headers of an answer describe this: x-replica names the replica that answered, with its
process id, and x-attempt counts the replicas that were tried before.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ark.cli import build_parser
from ark.cli.serve import opened
from ark.errors import SystemError
from ark.serving.http.app import Service, application
from ark.serving.http.errors import SERVER_ERROR, ApiError

NOAH = str(Path(__file__).resolve().parents[1] / "noah")
# ray.serve.llm.request_router has the same class, but its package needs vLLM.
ROUTER_MODULE = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
ROUTER = f"{ROUTER_MODULE}.PrefixCacheAffinityRouter"
try:
    importlib.import_module(ROUTER_MODULE)
except ImportError as error:
    raise ImportError(
        f"Ray {ray.__version__} does not provide the prefix-aware router ({error}); "
        "install 'ray[serve]==2.60.0', with which this example was tested"
    ) from error
MAX_ATTEMPTS = 5  # each at another replica
PAUSE_S = 0.5  # before the next attempt: Ray takes a moment to notice a dead replica
MAX_BODY_BYTES = 16 << 20
MAX_RUNNING_REQUESTS = 8
MAX_WAITING_REQUESTS = 256


@dataclass(frozen=True)
class Asked:
    """An HTTP request. prompt: the text by which Ray's router chooses a replica."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    prompt: str


@dataclass(frozen=True)
class Head:
    """The first part of an answer. The following parts are bytes of its body."""

    status: int
    headers: Mapping[str, str]


@serve.deployment(
    max_ongoing_requests=MAX_RUNNING_REQUESTS + MAX_WAITING_REQUESTS,
    request_router_config=RequestRouterConfig(
        request_router_class=ROUTER,
        # Requests with the same prefix go to the same replica, unless it has this many requests
        # more than another replica.
        request_router_kwargs={"imbalanced_threshold": MAX_RUNNING_REQUESTS},
    ),
    health_check_period_s=2,
)
class Model:
    """One replica: an engine and ark's routes."""

    def __init__(self, words: Sequence[str]) -> None:
        """words: the arguments of `ark serve`."""
        args = build_parser(words).parse_args(words)
        self._opened = contextlib.ExitStack()
        engine, model, options = self._opened.enter_context(opened(args))
        self._name = f"{serve.get_replica_context().replica_id.unique_id}.{os.getpid()}"
        self._service = Service(engine, model, options.limits)
        self._app = application(self._service, keys=options.keys, origins=options.origins)

    async def check_health(self) -> None:
        """Raises an error if the engine has failed; Ray then starts another replica."""
        if self._service.failure:
            raise SystemError(self._service.failure)

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """Yields the answer in parts. Closing the iterator frees the request's slots."""
        parts: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        disconnected = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": asked.method,
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": asked.query,
            "headers": asked.headers,
            "root_path": "",
        }
        bodies = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Mapping[str, Any]:
            if bodies:
                return bodies.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(scope, receive, parts.put))  # type: ignore[arg-type]
        task.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await parts.get()) is not None:
                if part["type"] == "http.response.start":
                    headers = {k.decode(): v.decode() for k, v in part["headers"]}
                    yield Head(part["status"], {**headers, "x-replica": self._name})
                elif part["body"]:
                    yield part["body"]
        finally:
            disconnected.set()
            await task


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
class Front:
    """Accepts HTTP requests and passes them to replicas."""

    def __init__(self, model: DeploymentHandle) -> None:
        self._model = model.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Returns the answer of a replica. If the replica dies before its answer has begun, another
        replica answers.
        """
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > MAX_BODY_BYTES:
                error = ApiError(
                    413, f"the body has more than {MAX_BODY_BYTES:,} bytes; shorten it"
                )
                return Response(error.body(), error.status, error.headers())
        body = b"".join(parts)
        asked = Asked(
            request.method,
            request.url.path,
            request.url.query.encode(),
            request.headers.raw,
            body,
            prompt_of(body) or request.url.path,
        )
        for attempt in range(MAX_ATTEMPTS):
            answer = self._model.answer.remote(asked)
            try:
                head = await anext(answer)
                first = await anext(answer, b"")
            except RayActorError:
                await asyncio.sleep(PAUSE_S)
                continue
            headers = {k: v for k, v in head.headers.items() if k != "content-length"}
            headers["x-attempt"] = str(attempt)
            return StreamingResponse(rest(first, answer), head.status, headers)
        return Response(lost().body(), lost().status, lost().headers())


async def rest(first: bytes, parts: Any) -> AsyncIterator[bytes]:
    """Yields the body of an answer, including its first part."""
    try:
        yield first
        async for part in parts:
            yield part
    except RayActorError:
        yield b"data: " + lost().body() + b"\n\ndata: [DONE]\n\n"
    finally:
        parts.cancel()


def lost() -> ApiError:
    """The error for a request that no replica has answered."""
    message = "the replica ended before it answered; send the request again"
    return ApiError(503, message, kind=SERVER_ERROR, code="replica_lost")


def prompt_of(body: bytes) -> str:
    """The prompt in a request's body; empty if it cannot be read. The replica refuses invalid
    requests later.
    """
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    prompt = asked.get("prompt") or asked.get("messages") or asked.get("input") or ""
    return prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()


def app(arguments: Mapping[str, str]) -> serve.Application:
    """The application. arguments: `model`, a directory or a hub name (examples/noah); `replicas`
    (2); `cpus` and `gpus` of a replica (1 and 0); `options`, further words of `ark serve`
    (`--backend cpu`).
    """
    words = [
        "serve",
        arguments.get("model", NOAH),
        "--slots",
        str(MAX_RUNNING_REQUESTS),
        "--queue",
        str(MAX_WAITING_REQUESTS),
    ]
    words += arguments.get("options", "").split()
    resources = {
        "num_cpus": float(arguments.get("cpus", 1)),
        "num_gpus": float(arguments.get("gpus", 0)),
    }
    replicas = int(arguments.get("replicas", 2))
    model = Model.options(num_replicas=replicas, ray_actor_options=resources)
    return Front.bind(model.bind(words))
