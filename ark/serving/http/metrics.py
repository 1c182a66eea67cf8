"""Counts requests and tokens and measures times: for Prometheus, and as recent rates for the
server's web page.

A metric that vLLM also has gets vLLM's name, so that dashboards for vLLM work. Names of other
metrics begin with `ark`. Used by ark.serving.http.app.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ark.serving.types import EngineLike, Event, FinishReason, LaunchRecord

WINDOW_S = 5.0  # the period over which recent rates are computed
RECENT_REQUESTS = 64  # the number of latest requests in the median time to the first token
MAX_TIMELINE_REQUESTS, MAX_TIMELINE_TOKENS = 16, 200  # limits of the timeline
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
SECOND_BUCKETS = (*LATENCY_S, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclass
class _Open:
    """A choice that has not ended. begin: the time of its request. last: the time of its latest
    token. prompt, tokens: the numbers of prompt tokens and of new tokens.
    """

    begin: float
    prompt: int
    last: float = 0.0
    tokens: int = 0


class Metrics:
    """Collects metrics from the events of all choices. Used on the event loop only."""

    def __init__(self, engine: EngineLike, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(engine, model))
        self._engine = engine
        self._open: dict[str, _Open] = {}
        self._recent: deque[tuple[float, str, int]] = deque()
        self._first: deque[float] = deque(maxlen=RECENT_REQUESTS)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Any:
            family = Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return family.labels(model)

        self._to_first = histogram(
            "time_to_first_token_seconds", "Time to the first token.", SECOND_BUCKETS
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a choice.", SECOND_BUCKETS
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "Time from a request to its last token.", SECOND_BUCKETS
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self._generated = histogram(
            "request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS
        )
        finished = Counter(
            "vllm:request_success",
            "Choices that have ended, by the reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model, reason.value) for reason in FinishReason}
        self._responses = Counter(
            "ark:http_responses",
            "HTTP responses by path and status.",
            ["path", "status"],
            registry=self.registry,
        )

    def response(self, path: str, status: int) -> None:
        """Counts an HTTP response by its path and status."""
        self._responses.labels(path, status).inc()

    def begin(self, ids: Sequence[str], prompts: Sequence[int]) -> None:
        """Records that new choices (answers) were requested. prompts: the number of prompt tokens
        of each.
        """
        now = time.monotonic()
        for name, prompt in zip(ids, prompts, strict=True):
            self._open[name] = _Open(now, prompt)

    def event(self, event: Event, now: float) -> None:
        """Records an event of a choice. now: time.monotonic()."""
        choice = self._open.get(event.id)
        if choice is None:
            return
        count = len(event.tokens)
        if count:
            if choice.tokens:
                for _ in range(count):
                    self._between.observe((now - choice.last) / count)
            else:
                self._to_first.observe(now - choice.begin)
                self._first.append(now - choice.begin)
            choice.tokens += count
            choice.last = now
            self._recent.append((now, event.id, count))
            self._forget(now)
        if event.finish is not None:
            del self._open[event.id]
            self._finished[event.finish].inc()
            self._whole.observe(now - choice.begin)
            self._prompt.observe(choice.prompt)
            self._generated.observe(choice.tokens)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self.registry)

    def recent(self) -> dict[str, Any]:
        """Recent figures for the server's status page: tokens per second in the last WINDOW_S
        seconds, the median time to the first token, a timeline, and the engine's latest launches.
        The timeline has a list for each generated text. It has, for each token, how many seconds
        ago the token was generated.
        """
        now = time.monotonic()
        self._forget(now)
        rows: dict[str, list[float]] = {}
        for at, name, count in self._recent:
            rows.setdefault(name, []).extend([round(now - at, 4)] * count)
        newest = list(rows.values())[-MAX_TIMELINE_REQUESTS:]
        return {
            "tokens_per_s": sum(count for *_, count in self._recent) / WINDOW_S,
            "time_to_first_token_s": statistics.median(self._first) if self._first else None,
            "window_s": WINDOW_S,
            "timeline": [row[-MAX_TIMELINE_TOKENS:] for row in newest],
            "launches": [_aged(launch, now) for launch in self._engine.stats().launches],
        }

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()


def _aged(launch: LaunchRecord, now: float) -> dict[str, Any]:
    """A launch record as JSON. The time at which the launch began is replaced by the number of
    seconds since then.
    """
    fields = msgspec.to_builtins(launch)
    return {"age_s": round(now - fields.pop("begin_s"), 4), **fields}


class _EngineState:
    """A Prometheus collector of the engine's own counts. It reads them each time Prometheus
    asks.
    """

    def __init__(self, engine: EngineLike, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, so that the registry does not query the engine at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics, as prometheus_client's registry asks for them."""
        now = self._engine.stats()
        used = 1 - now.free_pages / now.pages if now.pages else 0.0
        gauges = {
            "vllm:num_requests_running": ("Choices that have a slot.", now.running),
            "vllm:num_requests_waiting": ("Choices that wait for a slot.", now.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the pages in use, 0 to 1.", used),
            "ark:slots": ("Slots of the engine.", now.slots),
            "ark:pages": ("Pages of keys and values.", now.pages),
        }
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens.", now.prompt_tokens),
            "vllm:generation_tokens": ("Generated tokens.", now.generated_tokens),
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                now.prompt_tokens,
            ),
            "vllm:prefix_cache_hits": (
                "Prompt tokens found in the prefix cache.",
                now.cached_prompt_tokens,
            ),
            "vllm:num_preemptions": ("Choices that were preempted.", now.preemptions),
            "ark:iterations": ("Iterations of the loop kernel.", now.iterations),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
