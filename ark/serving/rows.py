"""The rows of an engine on its device: the state of requests that is written before a step, the
launch, the tokens that it makes while it runs, and the word that makes it leave. Called by
ark.serving.engine.

The host knows the positions at which a launch leaves its rows, so that it writes only those that
change.
"""

from __future__ import annotations

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
from ark.serving.progress import Chunks, Progress, Step
from ark.serving.ranks import Memory
from ark.serving.types import Request
from ark.tasks.tokens import SETTINGS, key_halves, noise_key

NO_TOKEN = -1


def settings_of(sampling: SamplingParams, last: int, options: bool = False) -> list[int]:
    """A row's settings (ark.tasks.tokens), whose limit is set step by step: those by which a
    Generator draws for one sequence of that seed. last: the place of the last known token. options:
    top-k is among the row's options (ark.tasks.adjusted) instead.
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
    """Rows that read drafts, behind those of requests: of which row, place and token of each."""
    return [
        (row, step.rows[row].last + number, token)
        for row, draft in enumerate(step.drafts)
        for number, token in enumerate(draft, 1)
    ]


class Launched:
    """A step on the device, from its launch until `end`."""

    def __init__(self, rows: DeviceRows, step: Step, run: Run) -> None:
        size = rows.pages.size
        self._rows, self._step, self._run = rows, step, run
        self._texts = [len(p.tokens) for p in step.rows]
        self._most = [p.end(size) - len(p.tokens) for p in step.rows]
        self._reads = [p.last - p.computed for p in step.rows]
        self._starts = [p.computed for p in step.rows]
        self._next = [*self._texts]  # of each row the place of its next token to be read
        new = [p.new_tokens(step.iterations, size) for p in step.rows]
        self._ends = [text + count for text, count in zip(self._texts, new, strict=True)]
        self._left = sum(new)
        self._whole = any(step.drafts)  # tokens are read when the launch has ended

    def running(self) -> bool:
        """True while the kernel is on the device. Raises GpuError if a wait gave up there."""
        self._run.check()
        return self._run.running()

    @property
    def complete(self) -> bool:
        """True where all tokens of a full launch were read."""
        return not self._whole and not self._left

    def read(self) -> list[tuple[int, list[int]]]:
        """Rows with the tokens that they have made since the last call; none beside drafts."""
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
        return fresh_tokens

    def end(self) -> tuple[int, list[tuple[int, list[int]]]]:
        """Waits for the kernel. How many iterations of the rows it has done, and the tokens that
        `read` has not given.
        """
        self._run.wait()
        step, rows = self._step, self._rows
        if not step.rows:
            return 0, []
        chunks = 0 if step.chunks is None else step.chunks.count
        done = self._run.iterations_done - chunks if rows.leaving else step.iterations
        new = [min(max(0, done - r), m) for r, m in zip(self._reads, self._most, strict=True)]
        ends = [text + count for text, count in zip(self._texts, new, strict=True)]
        tokens = [self._read(r, r, self._next[r], ends[r]) for r in range(len(step.rows))]
        for row, (of, place, _) in enumerate(_drafted(step), len(step.rows)):
            tokens[of] += self._read(row, of, place + 1, place + 2)
        moved = [
            start + min(done, reads + count)
            for start, reads, count in zip(self._starts, self._reads, new, strict=True)
        ]
        rows.left(moved, ends, done)
        return done, [(row, each) for row, each in enumerate(tokens) if each]

    def stop(self) -> None:
        """Aborts the kernel, if it still runs."""
        self._run.stop()

    def _read(self, row: int, of: int, begin: int, end: int) -> list[int]:
        """The tokens of a row from place `begin` to `end`, for the request of the row `of`."""
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
    """The memory of a loaded plan of pages (ark.models.build.Shape.pages) that requests fill.

    The first `batch` pages belong to a row each, which uses its own where it has no request or no
    page yet. The page behind them belongs to the prompt likewise. So no row reads what another one
    writes.
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
        self._known = [0] * shape.batch  # tokens of the row's text that the device has
        self._drafted = 0  # rows of the last step that read drafts
        self._used = shape.batch  # rows, from the first on, that may not be idle
        self.output = executor.host_view("output").reshape(shape.batch, shape.context)
        self.words = (
            memoryview(self.output.data).cast("B").cast("i")
        )  # reading one takes little time
        self._leave = executor.host_view("leave")
        self._top = shape.logprobs
        # Of each row what its bias follows from; the rows whose bias on the device may not be 0.
        self._bias_of: list[tuple[Request, bool] | None] = [None] * shape.batch
        self._biased = set(range(shape.batch))
        if shape.sampling:
            words = executor.host_view("logprobs")
            self._logprobs = words.reshape(shape.batch, shape.context, 1 + 2 * self._top)
        self._phases = [phase.name for phase in executor.plan.phases]

    @property
    def reserved(self) -> int:
        """Pages from 0 on that belong to rows and to the prompt."""
        return self.shape.batch + 1

    def leave(self) -> None:
        """Makes the running launch leave at the end of an iteration: the one that runs, or the next
        one if that has passed the point where it looks. Any thread may call it. Several ranks do
        not leave: each would have to in the same iteration.
        """
        if self.shape.world_size == 1:
            self._leave[0] = 1

    def stay(self) -> None:
        """Takes `leave` back, before the next launch."""
        self._leave[0] = 0

    def close(self) -> None:
        """The executor is about to free the word, which other threads may still set."""
        self._leave = np.zeros(1, np.int32)
        self._memory.close()

    @property
    def leaving(self) -> bool:
        """True where `leave` was called since `stay`."""
        return bool(self._leave[0])

    def start(self, step: Step) -> Launched:
        """Launches a step."""
        iterations = [0] * len(self._phases)
        drafted = _drafted(step)
        if step.chunks is not None:
            self._write_chunks(step.chunks)
            iterations[self._phases.index("chunk")] = step.chunks.count
        if step.rows:
            self._write_rows(step)
            form = next(n for n in self.pages.forms if n >= len(step.rows) + len(drafted))
            iterations[self._phases.index(f"decode{form}")] = step.iterations
        return Launched(self, step, self._memory.start(iterations))

    def left(self, positions: list[int], known: list[int], iterations: int) -> None:
        """A launch has left its first rows at these positions, with so many known tokens each; rows
        of drafts have moved on by its iterations.
        """
        count = len(positions)
        self._known[:count] = known
        self._written["position"][:count] = positions
        self._written["position"][count : count + self._drafted] += iterations

    def _write(self, name: str, values: np.ndarray) -> None:
        """Writes a tensor of the plan, unless the device holds these values."""
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
        for row in range(max(used, self._used)):  # those behind them are idle already
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
                elif self._known[row] < len(progress.tokens):  # made by rows of its draft
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
        """Tokens of a row's text, from place `begin` on."""
        context, words = self.shape.context, np.array(tokens, np.int32)
        elements, offset = self.shape.batch * context, 4 * (row * context + begin)
        self._memory.write("tokens", elements, offset, words)

    def logprobs(
        self, row: int, first: int, count: int, asked: int
    ) -> list[tuple[float, dict[int, float]]]:
        """Of `count` tokens from place `first` on, which the last step made in this row: each one's
        log probability, and the `asked` highest by id.
        """
        return [read_logprobs(w, asked) for w in self._logprobs[row, first : first + count]]

    def _write_part(self, name: str, row: int, values: np.ndarray) -> None:
        """Writes a row's part of a tensor, which has such a part for each row."""
        self._memory.write(name, self.shape.batch * values.size, row * values.nbytes, values)

    def _write_sampling(self, row: int, progress: Progress) -> None:
        """A row gets another request: its options, and how often its text has each token."""
        request = progress.request
        self._write_options(row, progress)
        prompt = len(request.prompt)
        text = progress.tokens[prompt:]
        counts = counts_of(request.sampling, self.shape.config.vocab_size, request.prompt, text)
        if counts is not None:
            self._write_part("counts", row, counts)
        self._logprobs[row, len(progress.tokens) :] = -1

    def _write_options(self, row: int, progress: Progress) -> None:
        # The host holds back stop tokens, of which the device's rows have no lists of their own.
        sampling = replace(progress.request.sampling, min_tokens=0)
        options = option_words(sampling, masked=progress.mask is not None)
        self._write_part("options", row, options)

    def _write_bias(self, row: int, progress: Progress) -> None:
        """Writes the row's mask, and its bias where the device holds another one."""
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
        """A row gets another request: its tokens, and no output yet."""
        self._write_tokens(row, 0, progress.tokens)
        self.output[row] = NO_TOKEN
