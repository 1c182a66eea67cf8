"""Generates load for a server with OpenAI's routes: sends requests at random times and measures
latencies.

Every request has its own thread and connection, so the client needs no package and works with any
such server. Used by `ark bench serve`.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ark.errors import InvalidUsageError, SystemError

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LENGTH_SPREAD = 0.7  # standard deviation of the logarithm of lengths, about as in public chats
PROMPT_TEXT = (
    "the king said to his servants that they shall go up from city and take bread water gold with "
    "them for a journey of seven days through hills where people live"
)


@dataclass(frozen=True)
class Target:
    """A server to measure. key: its API key, or empty. chat: use /v1/chat/completions."""

    url: str
    model: str
    key: str = ""
    chat: bool = False
    timeout_s: float = 600.0

    def connect(self) -> http.client.HTTPConnection:
        """A new connection."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidUsageError(
                f"{self.url!r} is not the URL of a server; write http://127.0.0.1:8000"
            )
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=self.timeout_s)

    def path(self, route: str) -> str:
        """The path of a route of OpenAI's interface; the URL may end with /v1."""
        base = urlsplit(self.url).path.rstrip("/")
        return (base if base.endswith("/v1") else base + "/v1") + route

    def headers(self) -> dict[str, str]:
        """The headers of a request."""
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {"content-type": "application/json", **key}


@dataclass(frozen=True)
class Ask:
    """A request to send. Its time is in seconds from the start of the run."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass
class Outcome:
    """The outcome of a request. Times are in seconds; first_s and whole_s are counted from the time
    at which the request was due. gaps_s: the times between pieces of text. error: the reason of a
    failure, or empty.
    """

    first_s: float = 0.0
    whole_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def per_token_s(self) -> float:
        """The mean time of each token after the first."""
        return (self.whole_s - self.first_s) / max(1, self.tokens - 1)


def asks(number: int, rate: float, words: int, tokens: int, seed: int) -> list[Ask]:
    """Creates requests at random times, `rate` per second on average; if `rate` is infinite, all at
    once. On average a prompt has `words` words and an answer `tokens` tokens; their lengths vary as
    in conversations.
    """
    draw = random.Random(seed)
    vocabulary = PROMPT_TEXT.split()
    at, listed = 0.0, []
    for _ in range(number):
        prompt = " ".join(draw.choice(vocabulary) for _ in range(_length(draw, words)))
        listed.append(Ask(at, prompt, _length(draw, tokens)))
        at += draw.expovariate(rate) if math.isfinite(rate) else 0.0
    return listed


def _length(draw: random.Random, mean: int) -> int:
    middle = math.log(mean) - LENGTH_SPREAD**2 / 2
    return max(1, min(4 * mean, round(draw.lognormvariate(middle, LENGTH_SPREAD))))


def first_model(target: Target) -> str:
    """The name of the server's first model. Raises SystemError if the server does not answer."""
    connection = target.connect()
    try:
        connection.request("GET", target.path("/models"), headers=target.headers())
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise SystemError(f"{target.url} answers {answer.status}: {_message(text)}")
        return str(json.loads(text)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise SystemError(
            f"{target.url} does not answer ({error}); start a server there first"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise SystemError(f"{target.url} does not list models as OpenAI's servers do") from None


def load(target: Target, listed: Sequence[Ask], extra: dict[str, Any]) -> list[Outcome]:
    """Sends each request when it is due, and waits for all answers. extra: further fields of the
    requests.
    """
    outcomes = [Outcome() for _ in listed]
    begin = time.monotonic() + 0.1
    threads = [
        threading.Thread(target=_run, args=(target, ask, extra, begin + ask.at_s, outcome))
        for ask, outcome in zip(listed, outcomes, strict=True)
    ]
    for ask, thread in zip(listed, threads, strict=True):
        time.sleep(max(0.0, begin + ask.at_s - time.monotonic()))
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _run(target: Target, ask: Ask, extra: dict[str, Any], due: float, outcome: Outcome) -> None:
    try:
        _stream(target, ask, extra, due, outcome)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    outcome.whole_s = time.monotonic() - due


def _stream(target: Target, ask: Ask, extra: dict[str, Any], due: float, outcome: Outcome) -> None:
    body = {"messages": [{"role": "user", "content": ask.prompt}]}
    content = {
        "model": target.model,
        **(body if target.chat else {"prompt": ask.prompt}),
        "max_tokens": ask.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    connection = target.connect()
    try:
        path = target.path("/chat/completions" if target.chat else "/completions")
        connection.request("POST", path, json.dumps(content), target.headers())
        answer = connection.getresponse()
        if answer.status != 200:
            outcome.error = f"{answer.status}: {_message(answer.read())}"
            return
        pieces, last = 0, 0.0
        while line := answer.readline():
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            now = time.monotonic()
            event = json.loads(line[5:])
            if "error" in event:
                outcome.error = str(event["error"].get("message"))[:300]
                return
            if event.get("usage"):
                outcome.prompt_tokens = int(event["usage"]["prompt_tokens"])
                outcome.tokens = int(event["usage"]["completion_tokens"])
            if not any(_text(choice) for choice in event["choices"]):
                continue
            if pieces:
                outcome.gaps_s.append(now - last)
            else:
                outcome.first_s = now - due
            pieces, last = pieces + 1, now
        outcome.tokens = outcome.tokens or pieces
        if not pieces:
            outcome.first_s = time.monotonic() - due
    finally:
        connection.close()


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return text[:300].decode(errors="replace")


@dataclass(frozen=True)
class Summary:
    """Statistics of the requests at one rate of requests. Times are in seconds, as the percentiles
    p50, p90 and p99. goodput: requests per second that met the goals for latency, or None without
    goals.
    """

    rate: float
    requests: int
    failed: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    tokens: int
    first_s: dict[str, float]
    between_s: dict[str, float]
    per_token_s: dict[str, float]
    whole_s: dict[str, float]
    goodput: float | None
    errors: tuple[str, ...]


def summary(
    rate: float,
    listed: Sequence[Ask],
    outcomes: Sequence[Outcome],
    first_goal_s: float | None = None,
    token_goal_s: float | None = None,
) -> Summary:
    """Percentiles and rates of the outcomes. A request meets the goals if its time to the first
    token and its mean time of a further token are within them.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    ends = [ask.at_s + one.whole_s for ask, one in zip(listed, outcomes, strict=True)]
    seconds = max(ends, default=0.0)
    kept = [
        one
        for one in good
        if (first_goal_s is None or one.first_s <= first_goal_s)
        and (token_goal_s is None or one.per_token_s <= token_goal_s)
    ]
    goals = first_goal_s is not None or token_goal_s is not None
    return Summary(
        rate=rate,
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        seconds=seconds,
        requests_per_s=len(good) / seconds if seconds else 0.0,
        tokens_per_s=sum(one.tokens for one in good) / seconds if seconds else 0.0,
        prompt_tokens=sum(one.prompt_tokens for one in good),
        tokens=sum(one.tokens for one in good),
        first_s=percentiles([one.first_s for one in good]),
        between_s=percentiles([gap for one in good for gap in one.gaps_s]),
        per_token_s=percentiles([one.per_token_s for one in good if one.tokens > 1]),
        whole_s=percentiles([one.whole_s for one in good]),
        goodput=len(kept) / seconds if goals and seconds else None,
        errors=tuple(sorted({one.error for one in outcomes if one.error})),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The percentiles p50, p90 and p99. The p-th percentile is the smallest value that is at least
    as large as p% of the values. Empty if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return {}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in SHARES.items()}
