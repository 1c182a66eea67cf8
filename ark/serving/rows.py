"""The rows of the engine's batch, each of which decodes one request. This module writes the state
of requests to the device before a step (a launch), launches the step, reads its tokens while it
runs, and sets the flag that makes it end early. Called by ark.serving.engine.

The host knows the position that each row has after a launch, so it writes only positions that
differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ark.errors import GpuError
from ark.models.build import Shape
from ark.models.options import bias_of, counts_of, option_words
from ark.models.sampling import SamplingParams
from ark.models.sequences import read_logprobs
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor
from ark.runtime.run import Run
from ark.serving.progress import Chunks, Done, Progress, Step
from ark.serving.ranks import Memory
from ark.serving.types import LaunchRecord, Request
from ark.tasks.tokens import SETTINGS, key_halves, noise_key

NO_TOKEN = -1
RECENT_LAUNCHES = 64  # the number of launches of which records are kept


def settings_of(sampling: SamplingParams, last: int, options: bool = False) -> list[int]:
    """The sampling settings of a row of the batch (ark.tasks.tokens), without the limit of
    positions, which is set for each step. With these settings a row samples the same tokens as a
    Generator with this seed. last: the index of the last known token. options: True if top-k is in
    the row's options (ark.tasks.adjusted) instead of its settings.
    """
    assert sampling.seed is not None
    low, high = key_halves(noise_key(sampling.seed))
    values = {
        "temperature": int(np.float32(sampling.temperature).view(np.int32)),
        "top_k": 0 if options else sampling.top_k,
        "key_low": low,
        "key_high": high,
        "last": last,
    }
    return [values.get(name, 0) for name in SETTINGS]


IDLE_SETTINGS = [-1 if name == "last" else 0 for name in SETTINGS]


def _drafted(step: Step) -> list[tuple[int, int, int]]:
    """The draft tokens of a step, each of which is read by a separate row of the batch, as (the
    request's row, the token's index in the text, the token).
    """
    return [
        (row, step.rows[row].last + number, token)
        for row, draft in enumerate(step.drafts)
        for number, token in enumerate(draft, 1)
    ]


class Launched:
    """A step (one launch) that runs on the device, from its launch until `end`."""

    def __init__(self, rows: DeviceRows, step: Step, run: Run) -> None:
        size = rows.pages.size
        self._rows, self._step, self._run = rows, step, run
        self._texts = [len(p.tokens) for p in step.rows]
        self._most = [p.end(size) - len(p.tokens) for p in step.rows]
        self._reads = [p.last - p.computed for p in step.rows]
        self._starts = [p.computed for p in step.rows]
        self._next = [*self._texts]  # by row: the index of the next token to read
        new = [p.new_tokens(step.iterations, size) for p in step.rows]
        self._ends = [text + count for text, count in zip(self._texts, new, strict=True)]
        self._left = sum(new)
        self._whole = any(step.drafts)  # drafts: read tokens only after the launch
        self._first: tuple[float, int] | None = None  # when the first tokens were read, how many

    def running(self) -> bool:
        """True while the kernel runs. Raises GpuError if a wait on the device has timed out."""
        self._run.check()
        return self._run.running()

    @property
    def complete(self) -> bool:
        """True if all tokens that the launch can sample have been read. Always False for a step
        with draft tokens, which are read at its end.
        """
        return not self._whole and not self._left

    def read(self) -> list[tuple[int, list[int]]]:
        """Returns (row, tokens) for each row of the batch that has new tokens since the last call.
        For a step with drafts the list is empty; `end` returns the tokens.
        """
        fresh_tokens: list[tuple[int, list[int]]] = []
        if self.complete or self._whole:
            return fresh_tokens
        words, context = self._rows.words, self._rows.shape.context
        for row, (begin, end) in enumerate(zip(self._next, self._ends, strict=True)):
            place, last = row * context + begin, row * context + end
            tokens = []
            while place < last and (token := words[place]) != NO_TOKEN:
                tokens.append(token)
                place += 1
            if tokens:
                self._next[row] += len(tokens)
                self._left -= len(tokens)
                fresh_tokens.append((row, tokens))
        if fresh_tokens and self._first is None:
            self._first = time.monotonic(), max(len(tokens) for _, tokens in fresh_tokens)
        return fresh_tokens

    def end(self) -> tuple[Done, list[tuple[int, list[int]]]]:
        """Waits for the kernel to end. Returns what it has done, and the tokens that `read` has not
        returned.
        """
        self._run.wait()
        step, rows = self._step, self._rows
        chunks, done = step.chunk_count, step.iterations
        if rows.leaving:
            total = self._run.iterations_done
            chunks, done = min(chunks, total), max(0, total - chunks)
        ended = Done(chunks, done)
        rows.record(ended, 1e3 * self._run.elapsed_ms(), self._first)
        if not step.rows:
            return ended, []
        new = [min(max(0, done - r), m) for r, m in zip(self._reads, self._most, strict=True)]
        ends = [text + count for text, count in zip(self._texts, new, strict=True)]
        tokens = [self._read(r, r, self._next[r], ends[r]) for r in range(len(step.rows))]
        for row, (of, place, _) in enumerate(_drafted(step) if done else (), len(step.rows)):
            tokens[of] += self._read(row, of, place + 1, place + 2)
        moved = [
            start + min(done, reads + count)
            for start, reads, count in zip(self._starts, self._reads, new, strict=True)
        ]
        rows.left(moved, ends, done)
        return ended, [(row, each) for row, each in enumerate(tokens) if each]

    def stop(self) -> None:
        """Aborts the kernel, if it still runs."""
        self._run.stop()

    def _read(self, row: int, of: int, begin: int, end: int) -> list[int]:
        """The tokens from index `begin` to `end` that `row` has sampled. of: the row whose request
        gets the tokens, for errors. Raises GpuError if a token is missing.
        """
        first = row * self._rows.shape.context
        tokens = self._rows.words[first + begin : first + end].tolist()
        if NO_TOKEN in tokens:
            request_id = self._step.rows[of].request.id
            raise GpuError(
                f"the kernel ended without the token at position {begin + tokens.index(NO_TOKEN)} "
                f"of request {request_id!r} and gave no reason; open the engine anew, and report "
                "it if it happens again"
            )
        return tokens


class DeviceRows:
    """Writes the state of requests to the device, for a loaded plan with a paged KV cache
    (ark.models.build.Shape.pages). A row is one entry of the batch, which decodes one request.

    Each row owns one of the first `batch` pages. It uses this page while it has no request, and for
    positions for which the request has no page. The next page is owned by the prompt phase in the
    same way. So no row reads memory that another row writes.
    """

    def __init__(self, executor: Executor, shape: Shape, ranks: Bootstrap | None = None) -> None:
        assert shape.pages is not None
        self.executor, self.shape, self.pages = executor, shape, shape.pages
        self._memory = Memory(executor, ranks)
        most = shape.pages.most(shape.context)
        self._tables = np.repeat(np.arange(shape.batch, dtype=np.int32)[:, None], most, axis=1)
        self._settings = np.array([IDLE_SETTINGS] * shape.batch, np.int32)
        self._positions = np.zeros(shape.batch, np.int32)
        self._adapters = np.zeros((shape.batch, 1), np.int32)
        self._written: dict[str, np.ndarray] = {}
        self._rows: list[tuple[Progress, int] | None] = [None] * shape.batch
        self._known = [0] * shape.batch  # by row: how many tokens of its text the device has
        self._drafted = 0  # how many rows of the last step read drafts
        self._used = shape.batch  # rows from this number on are idle
        self.output = executor.host_view("output").reshape(shape.batch, shape.context)
        self.words = (
            memoryview(self.output.data).cast("B").cast("i")
        )  # faster to index than the array
        self._leave = executor.host_view("leave")
        self._top = shape.logprobs
        # For each row, the request for which the logit bias in device memory was written. _biased:
        # the rows whose bias in device memory may be nonzero.
        self._bias_of: list[tuple[Request, bool] | None] = [None] * shape.batch
        self._biased = set(range(shape.batch))
        if shape.sampling:
            words = executor.host_view("logprobs")
            self._logprobs = words.reshape(shape.batch, shape.context, 1 + 2 * self._top)
        self._phases = [phase.name for phase in executor.plan.phases]
        self.launches: tuple[LaunchRecord, ...] = ()

    @property
    def reserved(self) -> int:
        """The number of pages that the pool reserves at its beginning: one for each row and one for
        prompts.
        """
        return self.shape.batch + 1

    def leave(self) -> None:
        """Makes the running launch end after the current iteration. On devices on which reading
        host memory is slow, one more iteration runs if the last task of the current iteration has
        begun. Any thread may call it. It has no effect on several ranks, because all ranks would
        have to end in the same iteration.
        """
        if self.shape.world_size == 1:
            self._leave[0] = 1

    def stay(self) -> None:
        """Clears the flag that `leave` sets. Called before the next launch."""
        self._leave[0] = 0

    def close(self) -> None:
        """Replaces the flag's memory by ordinary host memory. Other threads may still set the flag
        after the executor has freed its memory.
        """
        self._leave = np.zeros(1, np.int32)
        self._memory.close()

    @property
    def leaving(self) -> bool:
        """True if `leave` was called after the last `stay`."""
        return bool(self._leave[0])

    def start(self, step: Step) -> Launched:
        """Launches a step."""
        iterations = [0] * len(self._phases)
        drafted, form = _drafted(step), 0
        if step.chunks is not None:
            self._write_chunks(step.chunks)
            iterations[self._phases.index("chunk")] = step.chunks.count
        if step.rows:
            self._write_rows(step)
            form = next(n for n in self.pages.forms if n >= len(step.rows) + len(drafted))
            iterations[self._phases.index(f"decode{form}")] = step.iterations
        run = self._memory.start(iterations)
        chunks, used = step.chunk_count, len(step.rows) + len(drafted)
        begun = (time.monotonic(), chunks, self.shape.chunk, step.iterations, form, used)
        self.launches = (*self.launches[1 - RECENT_LAUNCHES :], LaunchRecord(*begun))
        return Launched(self, step, run)

    def record(self, done: Done, time_us: float, first: tuple[float, int] | None) -> None:
        """Completes the record of the last launch, when it has ended. time_us: by the device's
        clock. first: the time at which the rows' first tokens were read, and their number per row.
        """
        *before, last = self.launches
        chunk_us = None if done.iterations else time_us
        if not done.chunks:
            chunk_us = 0.0
        elif first is not None and first[1] < done.iterations:
            now, (seen_s, count) = time.monotonic(), first
            share = (now - seen_s) / (now - last.begin_s) * done.iterations
            chunk_us = time_us * max(0.0, 1.0 - share / (done.iterations - count))
        counts = {"chunks": done.chunks, "iterations": done.iterations}
        self.launches = (*before, replace(last, **counts, time_us=time_us, chunk_us=chunk_us))

    def left(self, positions: list[int], known: list[int], iterations: int) -> None:
        """Records the state of the device after a launch: for the row of each request, the position
        and the number of known tokens. Rows that have verified draft tokens have advanced by
        `iterations` positions.
        """
        count = len(positions)
        self._known[:count] = known
        self._written["position"][:count] = positions
        self._written["position"][count : count + self._drafted] += iterations

    def _write(self, name: str, values: np.ndarray) -> None:
        """Writes a tensor of the plan, unless the device already holds these values."""
        before = self._written.get(name)
        if before is None or before.tobytes() != values.tobytes():
            self._written[name] = kept = values.copy()
            self._memory.write(name, kept.size, 0, kept)

    def _write_chunks(self, chunks: Chunks) -> None:
        progress, shape = chunks.progress, self.shape
        end = min(chunks.start + chunks.count * shape.chunk, progress.last)
        tokens = np.zeros(shape.context, np.int32)
        tokens[chunks.start : end] = progress.tokens[chunks.start : end]
        settings = np.zeros(len(SETTINGS), np.int32)
        settings[SETTINGS.index("last")] = progress.last
        table = np.full(self._tables.shape[1], shape.batch, np.int32)
        table[: len(progress.pages)] = progress.pages
        self._memory.write("prompt_tokens", tokens.size, 0, tokens)
        self._memory.write("prompt_position", 1, 0, np.array([chunks.start], np.int32))
        self._write("prompt_settings", settings)
        if shape.adapters is not None:
            chosen = np.full((shape.chunk, 1), progress.adapter, np.int32)
            self._write("prompt_adapters", chosen)
        self._write("prompt_pages", table)

    def _write_rows(self, step: Step) -> None:
        rows, drafted = step.rows, _drafted(step)
        positions, settings, limit = self._positions, self._settings, SETTINGS.index("limit")
        used = len(rows) + len(drafted)
        for row in range(max(used, self._used)):  # rows after these are already idle
            progress = rows[row] if row < len(rows) else None
            own = None if progress is None else (progress, progress.admissions)
            if progress is None:
                self._tables[row], positions[row], settings[row] = row, 0, IDLE_SETTINGS
            else:
                if own != self._rows[row]:
                    sampling = progress.request.sampling
                    settings[row] = settings_of(sampling, progress.last, bool(self.shape.sampling))
                    self._write_text(row, progress)
                    if self.shape.sampling:
                        self._write_sampling(row, progress)
                # Only tokens that the device does not have are written. It has all tokens that it
                # sampled itself, in this row or in rows that verified its draft.
                elif self._known[row] < len(progress.tokens):
                    self._write_tokens(row, self._known[row], progress.tokens[self._known[row] :])
                if self.shape.sampling:
                    self._write_bias(row, progress)
                settings[row, limit] = progress.end(self.pages.size)
                self._tables[row] = row
                self._tables[row, : len(progress.pages)] = progress.pages
                positions[row] = progress.computed
            self._rows[row] = own
            self._adapters[row] = 0 if progress is None else progress.adapter
        for row, (of, place, token) in enumerate(drafted, len(rows)):
            self._tables[row], settings[row] = self._tables[of], settings[of]
            self._adapters[row] = self._adapters[of]
            settings[row, SETTINGS.index("last")] = positions[row] = place
            self._write_tokens(row, place, [token])
            if self.shape.sampling:
                self._write_options(row, rows[of])
                self._write_bias(row, rows[of])
            self.output[row, place + 1] = NO_TOKEN
        if self.shape.adapters is not None:
            self._write("adapters", self._adapters)
        self._write("pages", self._tables)
        self._write("settings", settings)
        self._write("position", positions)
        self._drafted, self._used = len(drafted), used

    def _write_tokens(self, row: int, begin: int, tokens: Sequence[int]) -> None:
        """Writes tokens of a row's text to the device, from index `begin` on."""
        context, words = self.shape.context, np.array(tokens, np.int32)
        elements, offset = self.shape.batch * context, 4 * (row * context + begin)
        self._memory.write("tokens", elements, offset, words)

    def logprobs(
        self, row: int, first: int, count: int, asked: int
    ) -> list[tuple[float, dict[int, float]]]:
        """For `count` tokens from index `first` on, which the last step sampled in this row: the
        log probability of the token, and the `asked` highest log probabilities by token id.
        """
        return [read_logprobs(w, asked) for w in self._logprobs[row, first : first + count]]

    def _write_part(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes one row's part of a tensor that has equal parts for all rows."""
        self._memory.write(name, self.shape.batch * values.size, row * values.nbytes, values)

    def _write_sampling(self, row: int, progress: Progress) -> None:
        """Writes a new request's options, and the counts of the tokens in its text, for a row."""
        request = progress.request
        self._write_options(row, progress)
        prompt = len(request.prompt)
        text = progress.tokens[prompt:]
        counts = counts_of(request.sampling, self.shape.config.vocab_size, request.prompt, text)
        if counts is not None:
            self._write_part("counts", row, counts)
        self._logprobs[row, len(progress.tokens) :] = -1

    def _write_options(self, row: int, progress: Progress) -> None:
        # min_tokens forbids stop tokens. The host implements this by the logit bias, because the
        # device has no separate list of stop tokens for each row.
        sampling = replace(progress.request.sampling, min_tokens=0)
        options = option_words(sampling, masked=progress.mask is not None)
        self._write_part("options", row, options)

    def _write_bias(self, row: int, progress: Progress) -> None:
        """Writes the row's mask of allowed tokens, and its logit bias if it has changed."""
        request, vocabulary = progress.request, self.shape.config.vocab_size
        if progress.mask is not None:
            self._write_part("allowed", row, progress.mask)
        early = progress.guide is None and progress.new < request.sampling.min_tokens
        if self._bias_of[row] == (request, early):
            return
        self._bias_of[row] = (request, early)
        bias = bias_of(request.sampling, vocabulary, request.stop_token_ids if early else ())
        if bias is not None:
            self._write_part("bias", row, bias)
            self._biased.add(row)
        elif row in self._biased:
            self._write_part("bias", row, np.zeros(vocabulary, np.float32))
            self._biased.discard(row)

    def _write_text(self, row: int, progress: Progress) -> None:
        """Writes a new request's tokens for a row, and clears the row's output."""
        self._write_tokens(row, 0, progress.tokens)
        self.output[row] = NO_TOKEN
