"""Collects the events of an engine into the texts of one prompt's samples. Called by
ark.serving.llm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ark.errors import GpuError, InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.models.stops import StoppedText
from ark.models.tokenizer import Tokenizer
from ark.serving.outputs import Chunk, CompletionOutput, Logprob, RequestOutput, Timings
from ark.serving.types import EngineLike, Event, FinishReason, Grammar, Request

LAST_PROMPT_TOKENS = 64
"""The number of the prompt's last tokens on which the text of the first new tokens may depend."""


@dataclass
class Sample:
    """One sample (a text that continues the prompt), with its text so far."""

    request: Request
    text: StoppedText
    chunks: list[Chunk] = field(default_factory=list)
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def ended(self) -> bool:
        """True once the last part of the sample's text has been returned."""
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None


class Answer:
    """The samples of a prompt. Call `submit` once, then `take` with each event that the engine
    passes to the listener.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        prompt: str | None,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        end_token_ids: Sequence[int],
        grammar: Grammar | None = None,
        adapter: str = "",
    ) -> None:
        self.prompt, self.token_ids, self._sampling = prompt, tuple(token_ids), sampling
        self._tokenizer, self._ends = tokenizer, frozenset(end_token_ids)
        stops = frozenset(sampling.stop_token_ids)
        stops |= frozenset() if sampling.ignore_eos else self._ends
        self._begin_s = time.monotonic()
        self.samples = {}
        for number in range(sampling.n):
            own = sampling.sample(number)
            request = Request(f"{name}.{number}", self.token_ids, own, stops, grammar, adapter)
            stream = tokenizer.stream(self.token_ids[-LAST_PROMPT_TOKENS:])
            self.samples[request.id] = Sample(request, StoppedText.sampled(stream, sampling))

    @property
    def ended(self) -> bool:
        """True when every sample has ended."""
        return all(sample.ended for sample in self.samples.values())

    def submit(self, engine: EngineLike, listener: Callable[[Event], None]) -> None:
        """Queues all samples."""
        for sample in self.samples.values():
            engine.submit(sample.request, listener)

    def cancel(self, engine: EngineLike) -> None:
        """Ends the samples that have not ended."""
        for sample in self.samples.values():
            if not sample.ended:
                engine.cancel(sample.request.id)

    def take(self, engine: EngineLike, event: Event) -> Chunk | None:
        """The chunk of text that an event completes; None if the sample has already ended. Raises
        GpuError if the engine has failed, and InvalidUsageError if it was closed meanwhile.
        """
        sample = self.samples[event.id]
        if sample.ended:
            return None
        if event.finish is FinishReason.ERROR:
            raise GpuError(event.error)
        if event.finish is FinishReason.CANCELLED:
            raise InvalidUsageError(
                event.error
                or "this LLM was closed while it generated; close it when its answers have ended"
            )
        now = time.monotonic()
        sample.first_s = sample.first_s or now
        text, used = "", 0
        for token in event.tokens:
            text += sample.text.push(token)
            used += 1
            if sample.text.stopped is not None:
                break
        if event.finish is not None:
            text += sample.text.finish()
        reason, stop = self._end(sample, event, used)
        if reason is not None:
            sample.end_s = now
            if event.finish is None:
                engine.cancel(event.id)
        index = list(self.samples).index(event.id)
        tokens = event.tokens[:used]
        chunk = Chunk(index, text, tokens, self._logprobs(event, used), reason, stop)
        sample.chunks.append(chunk)
        return chunk

    def _end(self, sample: Sample, event: Event, used: int) -> tuple[str | None, str | int | None]:
        """The reason why the sample ends with this event, and the stop string or token that ended
        it. The reason is None if the sample goes on.
        """
        if sample.text.stopped is not None:
            return "stop", sample.text.stopped
        if event.finish is None:
            return None, None
        if event.finish is not FinishReason.STOP or not used:
            return event.finish.value, None
        last = event.tokens[used - 1]
        return "stop", None if last in self._ends else last

    def _logprobs(self, event: Event, used: int) -> tuple[dict[int, Logprob], ...] | None:
        if self._sampling.logprobs is None:
            return None
        by_token = []
        for n in range(used):
            best = {event.tokens[n]: event.logprobs[n], **event.top_logprobs[n]}
            by_token.append({t: Logprob(v, self._tokenizer.token_text(t)) for t, v in best.items()})
        return tuple(by_token)

    def output(self) -> RequestOutput:
        """The whole answer. Called after all samples have ended."""
        samples = enumerate(self.samples.values())
        outputs = tuple(self._completion(number, sample) for number, sample in samples)
        return RequestOutput(self.prompt, self.token_ids, outputs)

    def _completion(self, number: int, sample: Sample) -> CompletionOutput:
        chunks = sample.chunks
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = tuple(best for chunk in chunks for best in chunk.logprobs or ())
        return CompletionOutput(
            number,
            "".join(chunk.text for chunk in chunks),
            tuple(token for chunk in chunks for token in chunk.token_ids),
            logprobs,
            chunks[-1].finish_reason or "",
            chunks[-1].stop_reason,
            Timings(sample.first_s - self._begin_s, sample.end_s - self._begin_s),
        )
