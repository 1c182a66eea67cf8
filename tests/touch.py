"""Records which bytes task bodies actually read and write, on the CPU.

`Bench` compiles a plan's loop kernel with a call before every memory access (the calls that
-fsanitize=thread inserts; touch_recorder.cpp implements them). It places every buffer separately
with space around it, and runs the plan's tasks one at a time. It does not use the declarations of
task kinds; the caller compares the records with these.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from ark_cpu import backend

from ark.backend.codegen import layout
from ark.backend.codegen.dialect import Dialect
from ark.backend.codegen.writer import write
from ark.backend.native import find_compiler
from ark.ir.dtype import by_name
from ark.plan.serialize import machine_of
from ark.plan.types import Phase, Plan, Task
from ark.runtime import cache, tables

READ, WRITTEN = 1, 2
MARGIN_BYTES = 1 << 10  # bytes between buffers
BYTES_BEHIND = 1 << 20  # bytes after the last buffer, for undeclared scratch memory
RECORDER = Path(__file__).parent / "touch_recorder.cpp"
ENTRY = """
extern "C" void ark_touch(const ArkParams* params, char* scratch) { ark_run(params, 0u, scratch); }
"""


@dataclass(frozen=True)
class Touched:
    """The accesses of one task.

    marks: by buffer id, flags READ and WRITTEN for each byte. scratch: the same flags for the
    task's scratch memory and the space after it. outside: accessed bytes that are in no buffer.
    """

    task: Task
    marks: dict[int, np.ndarray]
    scratch: np.ndarray
    outside: int


def _compile(arguments: list[str]) -> None:
    command = find_compiler()
    assert command is not None, "no C++ compiler"
    words = [*command, "-std=c++17", "-fPIC", "-w", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@functools.cache
def _recorder() -> tuple[TemporaryDirectory[str], str]:
    folder = TemporaryDirectory(prefix="ark-touch-")
    path = f"{folder.name}/recorder.o"
    _compile(["-O2", "-c", str(RECORDER), "-o", path])
    return folder, path


def _library(text: str) -> ctypes.CDLL:
    """Compiles the recorder once for all tests and workers: the result is in ark's cache."""
    name = cache.key("touch", text, RECORDER.read_text(), *(find_compiler() or ()))
    data = cache.load(cache.PROGRAMS, name)
    with TemporaryDirectory(prefix="ark-touch-") as folder:
        source, part, whole = (Path(folder, f"loop.{end}") for end in ("cpp", "o", "so"))
        if data is None:
            source.write_text(text)
            # -O1 without further optimisation, so that the program makes every read of the source.
            _compile(["-O1", "-fsanitize=thread", "-c", str(source), "-o", str(part)])
            _compile(["-shared", "-pthread", str(part), _recorder()[1], "-o", str(whole)])
            cache.store(cache.PROGRAMS, name, whole.read_bytes())
        else:
            whole.write_bytes(data)
        return ctypes.CDLL(str(whole))


def _fill(plan: Plan, buffer: int, values: np.ndarray, rng: np.random.Generator) -> None:
    """Fills a buffer with random numbers of the type of its tensors."""
    held = [t for t in plan.tensors if t.buffer == buffer]
    if not held:
        return
    if held[0].packet:
        words = values[: len(values) // 8 * 8].view(np.uint64)
        floats = rng.uniform(-1, 1, len(words)).astype(np.float32)
        words[:] = (np.uint64(1) << np.uint64(32)) | floats.view(np.uint32)  # epoch 1
        return
    kind = by_name(held[0].dtype)
    if kind.packed:
        values[:] = rng.integers(0, 256, values.shape)
        return
    view = values[: len(values) // kind.itemsize * kind.itemsize].view(kind.numpy)
    if np.issubdtype(view.dtype, np.integer):
        view[:] = rng.integers(0, 8, view.shape)
    else:
        view[:] = rng.uniform(-1, 1, view.shape).astype(view.dtype)


class Bench:
    """A plan in memory whose tasks can be run one at a time.

    dialect: generates the source, by default that of the CPU with the entry point `ark_touch`,
    which runs the first task in the task lists. host: a function that transforms the source before
    it is compiled.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        dialect: Dialect | None = None,
        host: Callable[[str], str] = str,
    ) -> None:
        self.plan = plan
        self.rng = np.random.default_rng(seed)
        self.tasks = [t for phase in plan.phases for tasks in phase.processors for t in tasks]
        alone = tuple(dataclasses.replace(t, waits=(), signals=()) for t in self.tasks)
        machine = dataclasses.replace(machine_of(plan), processors=1)
        entry = {**plan.machine, "processors": 1}
        flat = dataclasses.replace(plan, phases=(Phase("all", (alone,)),), machine=entry)
        if dialect is None:
            dialect = dataclasses.replace(backend.dialect(machine.arch), entry=ENTRY)
        self.emitted = write(flat, machine, dialect)
        self._lay_out()
        self.library = _library(host(self.emitted.source.text))
        counters = np.zeros(len(plan.counters) + 1, np.uint32)
        self.lists = np.zeros(max(1, tables.listed(flat)), np.uint64)
        self.tables = tables.build(
            flat,
            self.emitted.opcode,
            lambda b: self.base + self.places[b],
            lambda c: counters.ctypes.data,
            list_address=self.lists.ctypes.data,
        )
        self.lists[: len(self.tables.lists)] = self.tables.lists

    def _lay_out(self) -> None:
        at = MARGIN_BYTES
        self.places: dict[int, int] = {}
        for buffer in self.plan.buffers:
            self.places[buffer.id] = at
            at += -(-buffer.nbytes // 64) * 64 + MARGIN_BYTES
        self.scratch_at = at
        total = at + self.emitted.scratch_bytes + BYTES_BEHIND
        self._memory = np.zeros(total + 64, np.uint8)
        skip = -self._memory.ctypes.data % 64
        self.memory = self._memory[skip : skip + total]
        self.base = self.memory.ctypes.data
        self.marks = np.zeros(total, np.uint8)
        for buffer in self.plan.buffers:
            _fill(self.plan, buffer.id, self.buffer(buffer.id), self.rng)

    def buffer(self, number: int) -> np.ndarray:
        """The bytes of a buffer. Tasks see writes to them."""
        return self._part(self.memory, number)

    def _part(self, array: np.ndarray, number: int) -> np.ndarray:
        at = self.places[number]
        return array[at : at + self.plan.buffers[number].nbytes]

    def operand(self, op: int, index: int) -> np.ndarray:
        """The buffer of an op's operand as an array of elements."""
        tensor = self.plan.tensors[self.plan.ops[op].operands[index]]
        return self.buffer(tensor.buffer).view(by_name(tensor.dtype).numpy)

    def run(self, number: int) -> Touched:
        """Runs one task on the current contents of the buffers, and restores them afterwards."""
        before = self.memory.copy()
        self.marks[:] = 0
        control = np.zeros(1, layout.dtype("ArkControl"))
        host = np.zeros(1, layout.dtype("ArkHost"))
        barrier = np.full(64, 1 << 20, np.uint32)  # open
        stage = int(self.tables.tasks["fetch_begin"][number])
        ranges = np.array([(number, number + 1, 0, stage)], layout.dtype("ArkRange"))
        params = np.zeros(1, layout.dtype("ArkParams"))
        control["limit"] = 1
        for name, array in (
            ("tasks", self.tables.tasks),
            ("counter_ops", self.tables.counter_ops),
            ("fetches", self.tables.fetches),
            ("growths", self.tables.growths),
            ("ranges", ranges),
            ("barrier", barrier),
            ("control", control),
            ("host", host),
        ):
            params[name] = array.ctypes.data
        params["processors"] = params["barrier_step"] = 1
        params["budget_ns"] = params["idle_ns"] = 10**9
        record = self.library.touch_record
        marks = ctypes.c_void_p(self.marks.ctypes.data)
        record(ctypes.c_void_p(self.base), ctypes.c_size_t(len(self.memory)), marks)
        scratch = ctypes.c_void_p(self.base + self.scratch_at)
        self.library.ark_touch(params.ctypes.data_as(ctypes.c_void_p), scratch)
        record(None, ctypes.c_size_t(0), None)
        assert host["error"][0] == 0, f"the task failed: {host}"
        actual = self._gather(number)
        self.memory[:] = before
        return actual

    def _gather(self, number: int) -> Touched:
        marks = {b.id: self._part(self.marks, b.id).copy() for b in self.plan.buffers}
        scratch = self.marks[self.scratch_at :].copy()
        inside = sum(int(np.count_nonzero(m)) for m in marks.values())
        outside = int(np.count_nonzero(self.marks)) - inside - int(np.count_nonzero(scratch))
        return Touched(self.tasks[number], marks, scratch[layout.LOOP_BYTES :], outside)
