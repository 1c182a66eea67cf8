"""Used by test_cuda_device: plans whose tasks and device functions are written by hand, run on a
GPU, and their results by NumPy.
"""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest
from ark_cuda import backend

from ark.backend.codegen import layout
from ark.backend.codegen.writer import write
from ark.backend.devices import Grid
from ark.backend.protocol import Target
from ark.plan import kind as kinds
from ark.plan.types import Phase, Plan, PlanOp

TYPES = {
    "float": np.float32,
    "ark_f16": np.float16,
    "ark_bf16": ml_dtypes.bfloat16,
}

# Each stage of the ring that weights are streamed through holds whole rows of w, and a warp writes
# the products of its rows with x. Then the processor publishes a packet.
STREAM = """
ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{
  const float* x = reinterpret_cast<const float*>(t.operand[0]);
  float* out = reinterpret_cast<float*>(t.operand[1]) + c.iteration * t.coord[0];
  float* xs = reinterpret_cast<float*>(c.scratch);
  for (int i = ark_tid(); i < {k}; i += ARK_THREADS) xs[i] = x[i];
  ark_sync();
  int row = 0;
  for (ark_u32 j = t.fetch_begin; j < t.fetch_end; ++j) {{
    const int rows = c.fetches[j].bytes / ({k} * sizeof({ctype}));
    if (ark_stage_mine(c, j)) {{
      const {ctype}* w = reinterpret_cast<const {ctype}*>(ark_stage(c, j));
      for (int r = 0; r < rows; ++r) {{
        float sum;
        ark_dots<1>(w + r * {k}, {k}, xs, {k}, &sum);
        if (ark_lane() == 0) out[row + r] = sum;
      }}
      ark_stage_done(c, j);
    }}
    row += rows;
  }}
  if (ark_tid() == 0) {{
    ark_u64* packets = reinterpret_cast<ark_u64*>(t.operand[2]);
    ark_publish_packet(c, packets + c.processor, 1.5f * c.processor + c.iteration, false);
  }}
}}
"""

# Waits for the packet of every processor, and copies the rows that the neighbouring processor
# wrote. A counter guarantees that these rows are complete.
GATHER = """
ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{
  const ark_u64* packets = reinterpret_cast<const ark_u64*>(t.operand[0]);
  const float* from = reinterpret_cast<const float*>(t.operand[1]) + c.iteration * t.coord[0];
  float* to = reinterpret_cast<float*>(t.operand[2]) + c.iteration * t.coord[0];
  float* sums = reinterpret_cast<float*>(t.operand[3]);
  float* red = reinterpret_cast<float*>(c.scratch);
  float sum = 0.0f;
  for (ark_u32 i = ark_tid(); i < c.p->processors; i += ARK_THREADS) {{
    sum += ark_wait_packet(c, packets + i, false);
  }}
  sum = ark_block_sum(sum, red);
  if (ark_tid() == 0) sums[c.iteration * c.p->processors + c.processor] = sum;
  for (int i = ark_tid(); i < t.coord[1]; i += ARK_THREADS) to[i] = from[i];
}}
"""

END = """
ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{
  if (ark_tid() == 0 && static_cast<int>(c.iteration) == t.coord[0]) {{
    ark_lower_limit(c, c.iteration + 1u);
  }}
}}
"""

CONVERT = """
ARK_BODY void {name}(ArkCtx& c, const ArkTask& t) {{
  const float* x = reinterpret_cast<const float*>(t.operand[0]);
  ark_f16* half = reinterpret_cast<ark_f16*>(t.operand[1]);
  ark_bf16* bfloat = reinterpret_cast<ark_bf16*>(t.operand[2]);
  float* back = reinterpret_cast<float*>(t.operand[3]);
  for (int i = ark_tid(); i < t.coord[0]; i += ARK_THREADS) {{
    half[i] = ark_half(x[i]);
    bfloat[i] = ark_bfloat(x[i]);
    back[2 * i] = ark_float(half[i]);
    back[2 * i + 1] = ark_float(bfloat[i]);
  }}
}}
"""

BODIES = {
    "probe_stream": STREAM,
    "probe_gather": GATHER,
    "probe_end": END,
    "probe_convert": CONVERT,
}


class Probe(kinds.TaskKind):
    """A task kind that only this harness uses: it has a body, and no planner creates it."""

    def __init__(self, name):
        self.name = name

    def check(self, sig):
        pass

    def places(self, sig):
        raise NotImplementedError("the tasks of this harness are written by hand")

    def accesses(self, sig, coord):
        raise NotImplementedError("the tasks of this harness are written by hand")

    def scratch(self, sig, machine):
        return 16384  # the largest row of the bodies above, as floats

    def source(self, name, sig, machine):
        return BODIES[self.name].format(name=name, **sig.params)


@contextlib.contextmanager
def probes_known():
    """A context manager that registers the kinds of this harness while it emits code."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in BODIES:
            patch.setitem(kinds._KINDS, kind, Probe(kind))
        yield


class Job:
    """Runs hand-written tasks on a device: tables, counters, control words, one launch."""

    def __init__(self, device, ops, phases, machine=None, **control):
        self.device = device
        self.machine = machine or device.machine
        self.phases = phases  # phase -> processor -> list of tasks (dicts)
        plan = Plan(
            0, 1, {}, (), (), tuple(PlanOp(i, k, k, p, ()) for i, (k, p) in enumerate(ops)), (),
            tuple(Phase(str(i), ()) for i in range(len(phases))), {},
        )  # fmt: skip
        with probes_known():
            self.emitted = write(plan, self.machine, backend.dialect(self.machine.arch))
        self.binary = backend.compiler().compile(
            self.emitted.source, Target(self.machine.arch, self.machine.threads)
        )
        self.program = device.load(self.binary)
        self.counters = device.alloc(64 * 64, "device")
        self.control = device.alloc(layout.control(0, [0] * (len(phases) - 1)).nbytes, "device")
        self.host = device.alloc(layout.dtype("ArkHost").itemsize, "host")
        self.mail = self.host.host.view(layout.dtype("ArkHost"))[0]
        self.settings = {"limit": 1, "phase0": 0, "persistent": 0, **control}
        self._tables()

    def counter(self, index):
        return self.counters.address + 64 * index

    def _table(self, name, rows):
        table = np.zeros(max(1, len(rows)), layout.dtype(name))
        for i, row in enumerate(rows):
            for key, value in row.items():
                table[i][key] = value
        memory = self.device.alloc(table.nbytes, "device")
        self.device.write(memory.address, table)
        return memory.address

    def _tables(self):
        tasks, counter_ops, fetches, ranges = [], [], [], []
        for phase in self.phases:
            for processor in phase:
                begin, first = len(tasks), len(fetches)
                for task in processor:
                    wait = len(counter_ops)
                    for counter, value, step in task.get("waits", ()):
                        counter_ops.append(
                            {
                                "address": self.counter(counter),
                                "value": value,
                                "step": step,
                                "counter": counter,
                            }
                        )
                    signal = len(counter_ops)
                    for counter, flags in task.get("signals", ()):
                        counter_ops.append(
                            {"address": self.counter(counter), "value": 1, "flags": flags}
                        )
                    start = len(fetches) - first
                    fetches += [{"address": a, "bytes": n} for a, n in task.get("fetches", ())]
                    operand = np.zeros(layout.RECORD_OPERANDS, np.uint64)
                    operand[: len(task["operands"])] = task["operands"]
                    coord = np.zeros(layout.MAX_COORDS, np.int32)
                    coord[: len(task["coord"])] = task["coord"]
                    tasks.append(
                        {
                            "kind": self.emitted.opcode[task["op"]], "op": task["op"],
                            "index": len(tasks),
                            "wait_begin": wait, "wait_end": signal,
                            "signal_end": len(counter_ops), "fetch_begin": start,
                            "fetch_end": len(fetches) - first, "coord": coord, "operand": operand,
                        }
                    )  # fmt: skip
                ranges.append(
                    {
                        "task_begin": begin, "task_end": len(tasks), "fetch_begin": first,
                        "fetch_end": len(fetches),
                    }
                )  # fmt: skip
        self.tables = [
            self._table(name, rows)
            for name, rows in (
                ("ArkTask", tasks), ("ArkCounterOp", counter_ops),
                ("ArkFetch", fetches), ("ArkRange", ranges),
            )
        ]  # fmt: skip

    def start(self, budget_s=5.0, idle_s=20.0):
        self.device.zero(self.counters.address, self.counters.nbytes)
        ends = [self.settings["phase0"]] * (len(self.phases) - 1)
        control = layout.control(self.settings["limit"], ends)
        self.device.write(self.control.address, control.view(np.uint8))
        self.host.host[:] = 0
        params = np.zeros(1, layout.dtype("ArkParams"))
        for name, address in zip(
            ("tasks", "counter_ops", "fetches", "ranges"), self.tables, strict=True
        ):
            params[name] = address
        params["barrier"], params["control"] = self.counter(0), self.control.address
        params["host"], params["processors"] = self.host.address, len(self.phases[0])
        params["barrier_step"], params["persistent"] = 1, self.settings["persistent"]
        params["budget_ns"], params["idle_ns"] = int(budget_s * 1e9), int(idle_s * 1e9)
        shared = self.machine.ring_bytes + self.emitted.scratch_bytes
        grid = Grid(len(self.phases[0]), self.machine.threads, shared)
        return self.device.launch(self.program, params.tobytes(), grid)

    def run(self, **budgets):
        launch = self.start(**budgets)
        assert launch.wait(30.0), "the loop kernel did not leave"
        return launch


def upload(device, array):
    memory = device.alloc(array.nbytes, "device")
    device.write(memory.address, np.ascontiguousarray(array).view(np.uint8))
    return memory.address


def download(device, address, shape):
    return device.read(address, 4 * int(np.prod(shape))).view(np.float32).reshape(shape)


class Streams:
    """A job in which every processor streams its own weights, in two phases with different types.

    Phase 0: fp32 rows of 1023 elements, three in a stage, so that a stage is not a multiple of 16
    bytes. Phase 1: bf16 rows of 2048, then fp16 rows of 520.
    """

    CASES = (("float", 1023, 3, 9), ("ark_bf16", 2048, 4, 41), ("ark_f16", 520, 8, 30))

    def __init__(
        self, device, processors, machine=None, end=99, extra_wait=0, skip=False, **control
    ):
        rng = np.random.default_rng(7)
        self.processors, self.iterations = processors, control.get("limit", 1)
        self.width = max(rows * stages for _, _, rows, stages in self.CASES)
        self.x = [rng.standard_normal(k).astype(np.float32) for _, k, _, _ in self.CASES]
        # Every third processor has fewer stages of weights to read, and one processor has none.
        self.stages = [
            [0 if p == 1 else stages - p % 3 for p in range(processors)]
            for _, _, _, stages in self.CASES
        ]
        self.w = [
            rng.standard_normal((processors, stages * rows, k)).astype(TYPES[ctype])
            for ctype, k, rows, stages in self.CASES
        ]
        shape = (3, self.iterations, processors, self.width)
        self.shape = shape
        poison = np.full(shape, np.nan, np.float32)
        self.out, self.copied = upload(device, poison), upload(device, poison)
        self.sums = upload(device, np.zeros((self.iterations, processors), np.float32))
        self.packets = upload(device, np.zeros(processors, np.uint64))
        x_at = [upload(device, x) for x in self.x]
        w_at = [upload(device, w) for w in self.w]
        ops = [("probe_stream", {"ctype": c, "k": k}) for c, k, _, _ in self.CASES]
        ops += [("probe_gather", {}), ("probe_end", {})]
        row_bytes = 4 * self.width

        def at(base, case, processor):
            return base + ((case * self.iterations) * processors + processor) * row_bytes

        def stream(case, p):
            ctype, k, rows, stages = self.CASES[case]
            size = rows * k * np.dtype(TYPES[ctype]).itemsize
            begin = w_at[case] + p * stages * size
            count = self.stages[case][p]
            packets = self.packets
            return {
                "op": case, "operands": [x_at[case], at(self.out, case, p), packets],
                "coord": [processors * self.width],
                "fetches": [(begin + i * size, size) for i in range(count)],
            }  # fmt: skip

        def tail(case, p):
            neighbour = (p + 1) % processors
            rows = self.stages[case][neighbour] * self.CASES[case][2]
            counter = 1 if case == 0 else 3
            gather = {
                "op": 3,
                "operands": [
                    self.packets, at(self.out, case, neighbour), at(self.copied, case, p), self.sums
                ],
                "coord": [processors * self.width, rows],
                "waits": [(counter, processors + (extra_wait if p == 2 else 0), processors)],
                "signals": [(counter + 1, 0)],
            }  # fmt: skip
            last = {
                "op": 4, "operands": [], "coord": [end],
                "waits": [(counter + 1, processors, processors)],
                "signals": [(0, 0)],
            }  # fmt: skip
            return [gather] + ([last] if p == 0 else [])

        phases = [[], []]
        for p in range(processors):
            phases[0].append([stream(0, p) | {"signals": [(1, 0)]}, *tail(0, p)])
            second = stream(2, p) | {"signals": [(3, 0)]}
            phases[1].append([stream(1, p), second, *tail(2, p)])
        if skip:  # stages that no task takes
            phases[0][3][1]["fetches"] = phases[0][3][0]["fetches"] * 3
        self.job = Job(device, ops, phases, machine, **control)
        self.device = device

    def check(self, ran, phase0):
        out = download(self.device, self.out, self.shape)
        copied = download(self.device, self.copied, self.shape)
        for i in range(ran):
            for case in (0,) if i < phase0 else (1, 2):
                rows = self.CASES[case][2]
                wide = self.w[case].astype(np.float64)
                for p in range(self.processors):
                    n = self.stages[case][p] * rows
                    expected = wide[p, :n] @ self.x[case].astype(np.float64)
                    np.testing.assert_allclose(out[case, i, p, :n], expected, rtol=1e-4, atol=1e-3)
                    if case != 1:
                        before = (p - 1) % self.processors
                        np.testing.assert_array_equal(
                            copied[case, i, before, :n], out[case, i, p, :n]
                        )
        sums = download(self.device, self.sums, (self.iterations, self.processors))
        expected = 1.5 * np.arange(self.processors).sum() + np.arange(ran) * self.processors
        np.testing.assert_allclose(sums[:ran], np.repeat(expected[:, None], self.processors, 1))
        assert np.isnan(out[:, ran:]).all()
        assert self.job.mail["error"] == 0 and self.job.mail["done"] == ran
