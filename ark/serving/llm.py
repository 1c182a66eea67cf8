"""`ark.LLM` loads a checkpoint directory and continues texts. Its names are vLLM's where they mean
the same. It runs the engine (ark.serving.engine); docs/generate.md shows its use.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ark import log
from ark.backend import registry
from ark.errors import InvalidUsageError, UnsupportedError
from ark.models.build import FULL
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.generation import default_sampling
from ark.models.hub import local_directory
from ark.models.plans import choose_context
from ark.models.sampling import MAX_LOGPROBS, SamplingParams
from ark.models.tokenizer import Tokenizer
from ark.serving.answers import Answer
from ark.serving.engine import Engine
from ark.serving.grammar import Grammars
from ark.serving.memory import MEMORY_SHARE, beside_nbytes, checked_share, choose_pages
from ark.serving.outputs import Chunk, RequestOutput
from ark.serving.types import Event

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
MAX_IDS = 1 << 31


class LLM:
    """A loaded checkpoint. A context manager; its methods may be called from any thread.

    Examples:
        >>> with ark.LLM("examples/noah", max_model_len=32) as llm:
        ...     answers = llm.generate("The king said", ark.SamplingParams(max_tokens=2))
        >>> len(answers[0].outputs[0].token_ids)
        2
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | None = None,
        device: int = 0,
        ranks: int = 1,
        quantize: str | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        memory_share: float = MEMORY_SHARE,
        chunk: int | None = None,
        draft: str | Path | None = None,
        draft_tokens: int = 0,
        adapters: Mapping[str, str | Path] | None = None,
        sampling: str = FULL,
        max_logprobs: int = MAX_LOGPROBS,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """model: a Hugging Face directory, or a name on the hub (ark.models.hub). backend, device:
        by default the first backend that has a device, and its first device. quantize: "fp8",
        "int8" or "int4" converts the weights of linear layers to that format while they are loaded;
        by default weights keep their stored format. kv_cache_dtype: "fp8" or "int8" stores keys and
        values as 8-bit codes with a scale for each head and position; "auto" stores them in the
        weights' float type. max_model_len: positions of a prompt and its answer; by default the
        model's own limit, at most 4096. max_num_seqs: requests that run at once. memory_share: the
        part of the device's free memory for weights, keys and values. If the keys and values of all
        requests at full length do not fit in it, the cache has fewer pages. chunk: prompt tokens
        per iteration. draft: a smaller model with the same vocabulary that proposes the next
        draft_tokens (default 3) tokens of a text, which free rows of the batch verify in one
        iteration. draft_tokens without draft: the proposals are taken from earlier repetitions in
        the text. If two tokens are about equally likely, drafts may change which is sampled
        (docs/serving.md). adapters: directories of LoRA adapters by name (ark.models.adapters).
        sampling: "full", or "" for plans that support temperature and top-k only and are slightly
        faster. progress: see ark.models.generate.Generator. ranks: must be 1.

        Raises an error of ark.errors, with a cause and a remedy, before anything is loaded.
        """
        if ranks != 1:
            raise UnsupportedError(
                f"ranks={ranks!r:.20} is not supported: the engine runs on one device; "
                "leave ranks at 1, or use `ark generate --ranks` for a single text"
            )
        share = checked_share(memory_share)
        checkpoint = Checkpoint.open(_directory("model", model), quantize, kv_cache_dtype)
        drafts = None if draft is None else Checkpoint.open(_directory("draft model", draft))
        self._checkpoint = checkpoint
        vocabulary = checkpoint.config.vocab_size
        self._tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=vocabulary)
        self._templates = ChatTemplates.open(checkpoint.directory, self._tokenizer.special_tokens)
        self._default = default_sampling(checkpoint.directory)
        ends = checkpoint.config.eos_token_ids
        self._grammars = Grammars(self._tokenizer, vocabulary, ends)
        self._names = itertools.count()
        chosen, probe = registry.choose(backend)
        for note in probe.notes:
            log.warn(note)
        self._device = chosen.open(device)
        try:
            context = choose_context(checkpoint, max_model_len)
            free = self._device.free_bytes()
            beside = beside_nbytes(checkpoint, max_num_seqs, context, drafts, adapters)
            pages, verdict = choose_pages(
                checkpoint, free, context, max_num_seqs, share, None, beside=beside
            )
            log.info(verdict)
            self._engine = Engine.open(
                checkpoint,
                chosen,
                self._device,
                slots=max_num_seqs,
                context=context,
                chunk=chunk,
                pages=pages,
                draft=draft_tokens,
                draft_model=drafts,
                adapters=adapters,
                sampling=sampling,
                max_logprobs=max_logprobs if sampling else 0,
                progress=progress,
            )
        except BaseException:
            self._device.close()
            raise

    @property
    def max_model_len(self) -> int:
        """The most positions of a prompt with its answer."""
        return self._engine.context

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of generation_config.json, which are the default of all
        methods.
        """
        return self._default

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Continues prompts (texts or lists of token ids) and returns when all answers are
        complete, in the order of the prompts. sampling_params: one for all prompts, or a list with
        one for each. adapter: the name of an adapter, or "" for none.
        """
        return self._run(self._answers(_several(prompts), sampling_params, adapter=adapter))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: object,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, by the checkpoint's chat template. template:
        tools, add_generation_prompt and other arguments of ark.models.chat.ChatTemplates.render.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidUsageError(
                f"the messages are {messages!r:.60}; give a list of objects with role and content, "
                "or a list of such lists"
            )
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        texts = [self._rendered(chat, template) for chat in conversations]
        return self._run(self._answers(texts, sampling_params, framed=False))

    def _rendered(self, messages: Messages, template: dict[str, Any]) -> str:
        return self._templates.render(messages, **template)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[Chunk]:
        """Continues one prompt and yields its text as it is generated. Closing the iterator cancels
        the request. adapter: see `generate`.
        """
        return self._chunks(self._answers([prompt], sampling_params, adapter=adapter)[0])

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template: object
    ) -> Iterator[Chunk]:
        """Answers one conversation as `chat` does, and yields the text as it is generated."""
        text = self._rendered(messages, template)
        return self._chunks(self._answers([text], sampling_params, framed=False)[0])

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """Like `stream`, for `async for`."""
        return self._chunks_async(self._answers([prompt], sampling_params)[0])

    def stream_chat_async(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template: object
    ) -> AsyncIterator[Chunk]:
        """Like `stream_chat`, for `async for`."""
        text = self._rendered(messages, template)
        return self._chunks_async(self._answers([text], sampling_params, framed=False)[0])

    async def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continues one prompt. Several of these calls may run concurrently."""
        answer = self._answers([prompt], sampling_params)[0]
        async for _ in self._chunks_async(answer):
            pass
        return answer.output()

    def close(self) -> None:
        """Cancels all running requests and frees the device. Safe to call twice."""
        self._engine.close()
        self._device.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        framed: bool = True,
        adapter: str = "",
    ) -> list[Answer]:
        """An answer for each prompt, which is not submitted yet. All prompts and sampling
        parameters are checked first.
        """
        each = [self._default] * len(prompts) if sampling is None else sampling
        if isinstance(each, SamplingParams):
            each = [each] * len(prompts)
        wrong = not isinstance(each, Sequence) or not all(
            isinstance(params, SamplingParams) for params in each
        )
        if wrong or len(each) != len(prompts):
            raise InvalidUsageError(
                f"sampling_params is {sampling!r:.60}; give one ark.SamplingParams, or a list of "
                f"one for each of the {len(prompts)} prompts"
            )
        ends = self._checkpoint.config.eos_token_ids
        forms = [params.structured_outputs for params in each]
        grammars = {id(form): self._grammars.grammar(form) for form in forms if form is not None}
        answers = []
        for prompt, params in zip(prompts, each, strict=True):
            text = prompt if isinstance(prompt, str) else None
            _check_prompt(prompt)
            ids = self._tokenizer.encode(prompt, framed) if isinstance(prompt, str) else prompt
            name = f"llm.{next(self._names)}"
            grammar = grammars.get(id(params.structured_outputs))
            answers.append(Answer(name, self._tokenizer, text, ids, params, ends, grammar, adapter))
        return answers

    def _run(self, answers: Sequence[Answer]) -> list[RequestOutput]:
        by_request = {name: answer for answer in answers for name in answer.samples}
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            for answer in answers:
                answer.submit(self._engine, events.put)
            while not all(answer.ended for answer in answers):
                event = events.get()
                by_request[event.id].take(self._engine, event)
        finally:
            for answer in answers:
                answer.cancel(self._engine)
        return [answer.output() for answer in answers]

    def _chunks(self, answer: Answer) -> Iterator[Chunk]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            answer.submit(self._engine, events.put)
            while not answer.ended:
                chunk = answer.take(self._engine, events.get())
                if chunk is not None:
                    yield chunk
        finally:
            answer.cancel(self._engine)

    async def _chunks_async(self, answer: Answer) -> AsyncIterator[Chunk]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            answer.submit(self._engine, hear)
            while not answer.ended:
                chunk = answer.take(self._engine, await events.get())
                if chunk is not None:
                    yield chunk
        finally:
            answer.cancel(self._engine)


def _directory(subject: str, where: Any) -> Path:
    """The local directory of a checkpoint. Raises InvalidUsageError unless `where` is a path or a
    name.
    """
    if not isinstance(where, str | os.PathLike) or not str(where):
        raise InvalidUsageError(
            f"the {subject} is {where!r:.60}; give the path of a checkpoint's directory"
        )
    return local_directory(where)


def _check_prompt(prompt: Any) -> None:
    """Raises InvalidUsageError unless the prompt is a text or a list of token ids."""
    if isinstance(prompt, str):
        return
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not listed or not all(type(t) is int and 0 <= t < MAX_IDS for t in prompt):
        raise InvalidUsageError(
            f"the prompt is {prompt!r:.60}; give a text, or a list of token ids from 0 on"
        )


def _several(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts, also if a single prompt is given."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        if prompts and all(isinstance(token, int) for token in prompts):
            return [prompts]
        if all(isinstance(p, Sequence) and not isinstance(p, bytes) for p in prompts):
            return list(prompts)
    raise InvalidUsageError(
        f"the prompts are {prompts!r:.60}; give a text, a list of token ids, or a list of these"
    )
