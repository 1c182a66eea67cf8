"""Text generation: reads a checkpoint directory and yields tokens while the loop kernel computes
them.

`Generator` holds a loaded model on one device. `stream` launches the kernel once for a whole
answer, and yields tokens as they appear in host-mapped memory. Called by the command line and by
ark's users.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Made
from contextlib import closing

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.ir.values import whole
from ark.machine import Machine
from ark.models.build import FULL, Shape
from ark.models.checkpoint import Checkpoint
from ark.models.load import check_plan, weights
from ark.models.plans import (
    choose_chunk,
    choose_context,
    digest,
    plan_batch,
    plan_chunk,
    plan_context,
    plan_sampling,
    plans,
    usual_chunk,
)
from ark.models.request import check_arguments, check_prompt_tokens, check_stops, no_room
from ark.models.same import check_same_model
from ark.models.sampling import BASIC, GREEDY, SamplingParams, seeded_alike
from ark.models.sequences import read_logprobs, read_tokens, write_sequences
from ark.ops.tokens import MAX_STOPS
from ark.plan.rotated import on_rank
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime import tuned_collectives
from ark.runtime.admission import admit_rank, check_asked
from ark.runtime.executor import BUDGET_S
from ark.runtime.program import begin
from ark.runtime.run import Ranks
from ark.runtime.runner import load


def _short(tokens: Sequence[int]) -> str:
    """Token ids as short text for messages: the ids if they are few, otherwise their number and a
    hash.
    """
    if len(tokens) <= 16:
        return str(list(tokens))
    name = hashlib.sha256(np.array(tokens, np.int64).tobytes()).hexdigest()[:16]
    return f"{len(tokens)} tokens of hash {name}"


class Generator:
    """A checkpoint on a device, ready to generate. A context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        device: Device,
        *,
        context: int | None = None,
        chunk: int | None = None,
        batch: int = 1,
        split: str = "",
        sampling: str = "",
        max_logprobs: int = 0,
        ranks: Ranks | None = None,
        rank: int = 0,
        world_size: int = 1,
        machine: Machine | None = None,
        plan: Plan | None = None,
        trace_records: int = 0,
        budget_s: float = BUDGET_S,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """chunk: prompt tokens per iteration, by default the result of usual_chunk. batch:
        sequences decoded together, for `stream_batch`; their prompts are read one token per
        iteration, without chunks. split, sampling, max_logprobs: the fields `split`, `sampling` and
        `logprobs` of ark.models.build.Shape.

        progress(step, done, total) is called while weights are loaded (with bytes) and once for
        each step of unknown length (with total 0).

        Raises an error of ark.errors, with a cause and a remedy, before anything runs.
        """
        batch, rank, world_size, trace_records = check_arguments(
            batch,
            rank,
            world_size,
            budget_s,
            trace_records,
            checkpoint=checkpoint,
            backend=backend,
            device=device,
            split=split,
            sampling=sampling,
            ranks=ranks,
            machine=machine,
            plan=plan,
            progress=progress,
        )
        if plan is not None:
            admit_rank(plan, device, ranks)
            machine = machine_of(plan)
        elif machine is not None:
            check_asked(machine, device.machine)
        tell = progress or (lambda step, done, total: None)
        self.checkpoint = checkpoint
        self._streaming = threading.Lock()
        self._closed = False
        self._reported: int | None = None
        self._ranks = ranks
        if plan is not None:
            limit = checkpoint.config.max_position_embeddings
            batch, (sampling, max_logprobs) = plan_batch(plan), plan_sampling(plan)
            context, chunk = context or min(plan_context(plan), limit), plan_chunk(plan)
        target = machine or device.machine
        dtype = DataType.from_numpy(checkpoint.dtype)
        usual = usual_chunk(target, dtype) if batch == 1 else 0
        self.context = choose_context(checkpoint, context)
        self.shape = Shape(
            checkpoint.config,
            dtype,
            self.context,
            choose_chunk(chunk, self.context, usual),
            rank,
            world_size,
            batch,
            split,
            sampling=sampling,
            logprobs=whole("the number of log probabilities", max_logprobs),
        )
        tell("planning", 0, 0)
        if plan is None:
            plan = self._plan(target, backend, device.arch)
        else:
            options = {"engines": plan.meta.get("engines", {})} if world_size > 1 else None
            self._agree({"the table of collectives": json.dumps(options)})
            check_plan(plan, plans(self.shape, target, options)[rank], self.shape)
        if ranks is not None and world_size > 1:
            check_same_model(ranks, checkpoint)
        tell("compiling", 0, 0)
        self.executor = load(
            plan, backend, device, ranks=ranks, trace_records=trace_records, budget_s=budget_s
        )
        try:
            self._load_weights(plan, tell)
        except BaseException:
            self.executor.close(collective=False)
            raise

    def _plan(self, machine: Machine, backend: Backend, arch: str) -> Plan:
        """The plan of this rank. All ranks check that their plans are equal. The kernels are
        compiled while the plan is scheduled and verified.
        """
        rank = self.shape.rank

        def drafted(number: int, draft: Plan) -> None:
            if number == rank:
                begin(on_rank(draft, rank), backend, arch)

        options = tuned_collectives.options(machine, self.shape.world_size, self._ranks)
        everyone = plans(self.shape, machine, options or None, drafted)
        self._agree(
            {
                "the context": str(self.context),
                "the chunk": str(self.shape.chunk),
                "the plan": digest(everyone),
            }
        )
        return everyone[rank]

    def _load_weights(self, plan: Plan, tell: Callable[[str, int, int], None]) -> None:
        total = plan.arenas["parameter"]
        done = 0
        for name, array in weights(self.checkpoint, self.shape, plan):
            self.executor.write(name, array)
            done += array.nbytes
            tell("loading", min(done, total), total)

    def _agree(self, values: Mapping[str, str]) -> None:
        """Raises SystemError with the differences, on every rank, unless all ranks pass the same
        values.
        """
        if self._ranks is not None and self.shape.world_size > 1:
            for name, value in values.items():
                self._ranks.check_same(name, value)

    def check_prompt(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raises an error for prompts that cannot be served, before anything runs."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
            raise InvalidUsageError(
                f"the prompt is {prompt!r:.60}; give a list of token ids from the checkpoint's "
                "tokenizer"
            )
        check_prompt_tokens(prompt, self.checkpoint.config.vocab_size)
        if whole("the number of new tokens", max_new_tokens) < 1:
            raise InvalidUsageError(f"max_new_tokens={max_new_tokens} must be at least 1")
        if len(prompt) > 1 and not self.shape.chunk and self.shape.batch == 1:
            raise InvalidUsageError(
                "the plan has no prompt phase (it was made with --chunk 0), so a prompt must "
                f"have one token, not {len(prompt)}; plan again with --chunk 1 or more"
            )
        if len(prompt) >= self.context:
            most = self.checkpoint.config.max_position_embeddings
            raise no_room(f"the prompt has {len(prompt):,}", self.context, most)

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Made[int, None, None]:
        """Yields new tokens as the device computes them, in one launch that ends after a stop
        token.

        Closing the iterator, or leaving the loop that reads it, stops the device. A generator has
        one cache, so it serves one stream at a time, and all ranks must request the same stream.
        sampling: greedy by default; its n, its stop strings and its numbers of tokens have no
        effect. stop_tokens: by default the checkpoint's end tokens. Raises GpuError if the kernel
        fails or ends too early, and InvalidUsageError while another stream is open.
        """
        with closing(self.stream_batch([prompt], max_new_tokens, sampling, stop_tokens)) as stream:
            for _, token in stream:
                yield token

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Made[tuple[int, int], None, None]:
        """Yields (number of the prompt, new token) as the device computes them, for several prompts
        in one launch. There may be up to `batch` prompts (an argument of the Generator). Each
        sequence ends independently.

        The tokens of a sequence are yielded in order. They equal those of `stream` for the same
        prompt, except for rounding. Each sequence has its own noise, which depends on the seed and
        the sequence's number; the first one has the noise of `stream`. For the arguments and errors
        see `stream`.
        """
        how = self._sampling(GREEDY if sampling is None else sampling)
        if not 1 <= len(prompts) <= self.shape.batch:
            raise InvalidUsageError(
                f"{len(prompts)} prompts were given to a Generator with batch={self.shape.batch}; "
                f"give 1 to {self.shape.batch}, or create a Generator with a larger batch"
            )
        for prompt in prompts:
            self.check_prompt(prompt, max_new_tokens)
        stops = check_stops(
            self.checkpoint.config.eos_token_ids if stop_tokens is None else stop_tokens
        )
        if how.min_tokens and len(stops) > MAX_STOPS:
            raise InvalidUsageError(
                f"min_tokens is {how.min_tokens} and there are {len(stops)} stop tokens, but the "
                f"device holds back at most {MAX_STOPS}; give fewer, or leave min_tokens at 0"
            )
        if self._closed:
            raise InvalidUsageError("this Generator was closed; create another one")
        if not self._streaming.acquire(blocking=False):
            raise InvalidUsageError(
                "this Generator is already streaming, and a second stream would overwrite its "
                "cache; read the first to its end or close() it, or create a second Generator"
            )
        try:
            yield from self._stream(prompts, max_new_tokens, how, stops)
        finally:
            self._streaming.release()

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters with a seed. Raises an error if this generator's plan does not
        support them.
        """
        if not isinstance(sampling, SamplingParams):
            raise InvalidUsageError(f"sampling={sampling!r:.60}; expected an ark.SamplingParams")
        if sampling.structured_outputs is not None:
            raise InvalidUsageError(
                "a Generator does not support structured_outputs; use ark.LLM or `ark serve`"
            )
        others = () if self.shape.sampling else sampling.beyond(BASIC)
        if others:
            raise InvalidUsageError(
                f"this Generator does not support {', '.join(others)} of the sampling; create "
                f"it with sampling={FULL!r}"
            )
        if (sampling.logprobs or 0) > self.shape.logprobs:
            raise InvalidUsageError(
                f"{sampling.logprobs} log probabilities exceed the limit: this Generator reports "
                f"at most {self.shape.logprobs}; make it with max_logprobs={sampling.logprobs}"
            )
        return seeded_alike(sampling, self._ranks if self.shape.world_size > 1 else None)

    def _stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        how: SamplingParams,
        stops: Sequence[int],
    ) -> Iterator[tuple[int, int]]:
        self._agree(
            {
                "the prompt's tokens": _short([t for prompt in prompts for t in prompt]),
                "the number of new tokens": str(max_new_tokens),
                "the sampling": str(how),
                "the stop tokens": _short(stops),
            }
        )
        totals = [min(len(prompt) + max_new_tokens, self.context) for prompt in prompts]
        write_sequences(self.executor, self.shape, prompts, totals, how, stops)
        output = self.executor.host_view("output")
        output[:] = -1
        if self.shape.sampling:
            self.executor.host_view("logprobs")[:] = -1
        self._reported = how.logprobs
        starts = [len(prompt) for prompt in prompts]
        total, start = max(zip(totals, starts, strict=True))
        run = self.executor.start(self.shape.iterations(start, total - start))
        try:
            last = [-1] * len(prompts)
            for sequence, token in read_tokens(run, output, starts, totals, stops, self.context):
                last[sequence] = token
                yield sequence, token
            if set(last) & set(stops[MAX_STOPS:]):
                run.stop()  # the device's list lacks this stop token
            run.wait()
            if not set(last) & set(stops):
                run.check_complete()
        finally:
            run.stop()

    def logprobs(self, place: int, sequence: int = 0) -> tuple[float, dict[int, float]]:
        """Returns the log probability of the token at an index of the text, and the highest log
        probabilities at this index by token id. The prompt's first token has index 0. The number of
        highest log probabilities is the one that the last stream's sampling requested.
        """
        if self._reported is None:
            raise InvalidUsageError(
                "no log probabilities were requested; set logprobs of the SamplingParams"
            )
        each = 1 + 2 * self.shape.logprobs
        first = (sequence * self.context + place) * each
        words = self.executor.host_view("logprobs")[first : first + each]
        return read_logprobs(words, self._reported)

    def finish_reason(self, prompt: int, tokens: Sequence[int]) -> str:
        """The reason why a stream ended: "stop" (an end token), "context" (the context is full) or
        "length".
        """
        if tokens and tokens[-1] in self.checkpoint.config.eos_token_ids:
            return "stop"
        return "context" if prompt + len(tokens) >= self.context else "length"

    def close(self, collective: bool = True) -> None:
        """Stops the device and frees everything. collective: see Executor.close."""
        self._closed = True
        self.executor.close(collective)

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(collective=kind is None)
