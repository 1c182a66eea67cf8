"""Measures single ops in ark's loop kernel (a persistent kernel) and, in the same process, in
torch. A launch of the loop kernel repeats an op many times. Each iteration ends with the iteration
barrier, whose time is included. On a GPU torch replays a captured graph with the same number of
calls; on a CPU torch is called in a loop. The median of several launches is reported. Inputs are
random, never zero. Called by `ark bench ops`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ark.backend.codegen.writer import write
from ark.backend.devices import Device
from ark.backend.protocol import Backend, InspectedBackend, LoopFigures
from ark.backend.registry import FALLBACK
from ark.cli.measure.case import OpCase
from ark.cli.measure.ceiling import copy_seconds
from ark.cli.measure.peer import import_torch, repeated, torch_device
from ark.cli.measure.turn import Turn
from ark.errors import BaseError, InvalidUsageError
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir import values as ir
from ark.ir.attributes import AttentionAttributes
from ark.ir.dtype import INTEGERS, DataType, by_name
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import tuned
from ark.runtime.executor import Executor
from ark.tasks.attention_tiles import AttentionTilesParams
from ark.tasks.matmul_params import MatmulParams

POOL_ELEMENTS = 1 << 22
LAUNCH_S = 0.05  # about how long one launch of many iterations takes
MIN_COPY_BYTES = 1 << 20  # the least bytes of an op whose time is compared with a copy's


@dataclass(frozen=True)
class OpFigures:
    """One row of the table: ark's seconds per call, the seconds of planning and of building, the
    peer's seconds per call, and the largest difference between the two results.

    flops, nbytes: the least arithmetic and memory traffic of a call. copy_seconds: for ops that
    only move data, the peer's time to copy the same number of bytes. error: the reason if there are
    no figures. others: seconds and distances of further peers, by name. peer_errors: the reason why
    a peer has no figures, by the peer's name; the first peer's name is "".
    """

    name: str
    seconds: float = 0.0
    plan_s: float = 0.0
    build_s: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0
    variant: str = ""
    peer_seconds: float | None = None
    distance: float | None = None
    copy_seconds: float | None = None
    error: str = ""
    others: dict[str, tuple[float, float]] = field(default_factory=dict)
    peer_errors: dict[str, str] = field(default_factory=dict)


def planned(case: OpCase, machine: Machine) -> tuple[Plan, str]:
    """The case's verified plan, and the name of the tensor that holds its result. If several ops
    write parts of the result, it is the name of the whole tensor. The plan's inputs are named in0,
    in1, ...
    """
    model = Model()
    with use_model(model):
        inputs = [
            Tensor(model.graph.tensor(s, input_type(case, i), arena="state", name=f"in{i}"), model)
            for i, s in enumerate(case.shapes)
        ]
        out = case.build(*inputs)
    plan = make_plan(model.graph, machine, tuned.options(machine) | {"fuse": case.fuse})
    verify([plan])
    del out
    tasks = [t for p in plan.phases[-1].processors for t in p if plan.ops[t.op].operands]
    last = max(tasks, key=lambda t: t.op)
    op = plan.ops[last.op]
    touched = kinds.get(op.kind).accesses(kinds.signature(plan, op), last.coord)
    written = plan.tensors[op.operands[next(a.operand for a in touched if a.write)]]
    whole = written.shape == written.extents
    return plan, written.name if whole else plan.buffers[written.buffer].name


def inspected(case: OpCase, backend: InspectedBackend, arch: str) -> LoopFigures:
    """Compiles the case's kernel for an architecture and returns statistics of its matrix loop. No
    device is needed.

    Raises InvalidUsageError if the backend has no machine model of the architecture, or if the
    kernel has no such loop.
    """
    models = (backend.machine(name) for name in backend.machine_names())
    machine = next((m for m in models if m is not None and m.arch == arch), None)
    if machine is None:
        raise InvalidUsageError(
            f"the backend {backend.name!r} has no machine model of the architecture {arch!r}; "
            f"it has {', '.join(backend.archs())}"
        )
    plan, _ = planned(case, machine)
    figures = backend.inspect(write(plan, machine, backend.dialect(arch)).source, arch)
    return dataclasses.replace(figures, bank_conflicts=_bank_conflicts(plan, backend, arch))


DEPTHS_ELEMENTS = (128, 256)  # two depths of a tile; the difference of their times is the loop's


def _bank_conflicts(plan: Plan, backend: InspectedBackend, arch: str) -> float | None:
    """The fraction of shared-memory cycles that the loop of a matmul or of attention spends in bank
    conflicts. One tile like the plan's runs on a simulated device that counts these cycles for
    `arch`. None if the plan has no such op or the device cannot count.
    """
    runs = {"matmul": _run_tile, "attention_tiles": _run_rows}
    op = next((op for op in plan.ops if op.kind in runs), None)
    if op is None:
        return None
    sig = kinds.signature(plan, op)
    with backend.counting(arch) as used:
        if used is None:
            return None
        with contextlib.closing(backend.open(0)) as device:
            counted = []
            for depth in DEPTHS_ELEMENTS:
                runs[op.kind](sig, depth, backend, device)
                counted.append(used())
    (few, few_lost), (more, more_lost) = counted
    return (more_lost - few_lost) / (more - few) if more > few else 0.0


def _run_rows(sig: kinds.Signature, depth: int, backend: Backend, device: Device) -> None:
    """Runs attention with that signature on one processor: one tile of queries over `depth`
    keys.
    """
    params = sig.read(AttentionTilesParams)
    width, kind = params.head_dim, by_name(sig.operands[0].dtype)
    graph = Graph()
    shapes = {"q": (params.rows, width), "k": (1, depth, width), "v": (1, depth, width)}
    q, k, v = (graph.tensor(s, kind, arena="state", name=name) for name, s in shapes.items())
    out = graph.tensor(q.shape, kind, arena="state", name="out")
    attrs = AttentionAttributes(heads=1, head_dim=width, scale=1.0, causal=False, placed=False)
    graph.add("attention", [q, k, v], [out], attrs.to_node(), "attention")
    _run_once(graph, device.machine.with_processors(1), (q, k, v), backend, device)


def _run_tile(sig: kinds.Signature, depth: int, backend: Backend, device: Device) -> None:
    """Runs a matmul with that signature on one processor: one tile, with k = `depth`."""
    params = sig.read(MatmulParams)
    m, n = params.tile
    turned = {"transpose_a": params.transpose_a, "transpose_b": params.transpose_b}
    left = (depth, m) if turned["transpose_a"] else (m, depth)
    right = (n, depth) if turned["transpose_b"] else (depth, n)
    shapes = (left, right, (m, n))
    graph = Graph()
    a, b, c = (
        graph.tensor(shape, by_name(operand.dtype), arena="state", name=name)
        for shape, operand, name in zip(shapes, sig.operands[:3], "abc", strict=True)
    )
    graph.add("matmul", [a, b], [c], turned, "product")
    one = device.machine.with_processors(1)
    machine = dataclasses.replace(one, tile=(m, n), large_tiles=((m, n, 1.0),))
    _run_once(graph, machine, (a, b), backend, device)


def _run_once(
    graph: Graph, machine: Machine, given: Sequence[ir.Tensor], backend: Backend, device: Device
) -> None:
    """Runs a graph on inputs that are all ones."""
    plan = make_plan(graph, machine, {"fuse": False})
    verify([plan])
    with Executor(plan, backend, device) as executor:
        for tensor in given:
            executor.write(tensor.name, np.ones(tensor.shape, tensor.dtype.to_numpy()))
        executor.start(1).wait()


def measure(
    case: OpCase,
    backend: Backend,
    device: Device,
    machine: Machine,
    *,
    repeats: int = 5,
    peer: bool = False,
    turn: Turn | None = None,
) -> OpFigures:
    """Measures one case. If ark raises an error, the row has the error instead of figures. turn: a
    lock that is held while the device is used.
    """
    try:
        return _measure(case, backend, device, machine, repeats, peer, turn or Turn())
    except BaseError as error:
        return OpFigures(case.name, error=str(error))


def _measure(
    case: OpCase,
    backend: Backend,
    device: Device,
    machine: Machine,
    repeats: int,
    peer: bool,
    turn: Turn,
) -> OpFigures:
    start = time.perf_counter()
    plan, result = planned(case, machine)
    plan_s = time.perf_counter() - start
    arrays = _inputs(case)
    start = time.perf_counter()
    turn.compile(plan, backend, device)
    build_s = time.perf_counter() - start
    with turn:
        measured = _run(case, plan, result, arrays, backend, device, repeats, peer)
    return dataclasses.replace(measured, plan_s=plan_s, build_s=build_s + measured.build_s)


def _run(
    case: OpCase,
    plan: Plan,
    result: str,
    arrays: list[np.ndarray],
    backend: Backend,
    device: Device,
    repeats: int,
    peer: bool,
) -> OpFigures:
    """Measures the plan of a case, and the peers. result: the name of the plan's result. arrays:
    the case's inputs.
    """
    start = time.perf_counter()
    with Executor(plan, backend, device) as executor:
        build_s = time.perf_counter() - start
        for i, array in enumerate(arrays):
            executor.write(f"in{i}", array)

        def launch(iterations: int) -> float:
            run = executor.start(iterations)
            run.wait()
            return run.elapsed_ms() / 1e3 / iterations

        seconds = median(launch, repeats)
        ours = executor.read(result).astype(np.float32)
    theirs, distance = None, None
    others: dict[str, tuple[float, float]] = {}
    peer_errors: dict[str, str] = {}
    for name, call in (("", case.peer), *case.others) if peer else ():
        try:
            peer_seconds, answer = _torch(
                case, call, arrays, executor.machine, repeats, backend.name != FALLBACK
            )
        except BaseError:
            raise
        except Exception as error:  # a peer may raise any error for a case
            first = str(error).strip().partition("\n")[0]
            peer_errors[name] = ": ".join(filter(None, (type(error).__name__, first)))
            continue
        want = answer.reshape(ours.shape)
        apart = _norm(ours - want) / max(1e-30, _norm(want))
        if name:
            others[name] = peer_seconds, apart
        else:
            theirs, distance = peer_seconds, apart
    moves = peer and not case.flops and case.nbytes >= MIN_COPY_BYTES
    return OpFigures(
        case.name,
        seconds,
        build_s=build_s,
        flops=case.flops,
        nbytes=case.nbytes,
        variant=plan.variant,
        peer_seconds=theirs,
        distance=distance,
        copy_seconds=copy_seconds(int(case.nbytes), backend.name != FALLBACK) if moves else None,
        others=others,
        peer_errors=peer_errors,
    )


def _norm(values: np.ndarray) -> float:
    """The norm of an array, also where squares of its numbers exceed fp32."""
    most = float(np.abs(values).max(initial=0.0))
    return most * float(np.linalg.norm(values / most)) if 0 < most < np.inf else most


def input_type(case: OpCase, index: int) -> DataType:
    """The type of the case's input number `index`."""
    return case.index_type if index in case.indices else case.dtype


def _inputs(case: OpCase) -> list[np.ndarray]:
    """The random inputs of the case, the same in every run."""
    pool = np.random.default_rng(0).uniform(-1.0, 1.0, POOL_ELEMENTS).astype(np.float32)
    pool *= 127.0 if case.dtype in INTEGERS else case.scale
    return [
        np.random.default_rng(i).integers(0, case.indices[i], s, case.index_type.numpy)
        if i in case.indices
        else np.resize(np.roll(pool, 977 * i), s).astype(case.dtype.numpy)
        for i, s in enumerate(case.shapes)
    ]


def median(launch: Callable[[int], float], repeats: int) -> float:
    """Seconds per iteration, the median of several launches after a warm-up. launch: a function
    that runs a number of iterations and returns seconds per iteration.
    """
    launch(1)
    once = launch(2)
    iterations = max(1, min(2000, int(LAUNCH_S / max(once, 1e-7))))
    runs = sorted(launch(iterations) for _ in range(repeats))
    return runs[len(runs) // 2]


def _torch(
    case: OpCase,
    call: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    machine: Machine,
    repeats: int,
    accelerated: bool,
) -> tuple[float, np.ndarray]:
    """The seconds per call and the result of `call`, a peer's function of torch tensors, for the
    inputs `arrays`.
    """
    torch = import_torch()
    place = torch_device(accelerated)
    if not accelerated:
        torch.set_num_threads(machine.processors)
    kind = case.dtype.to_torch()
    inputs = [
        torch.from_numpy(a.astype(np.int64)).to(place)
        if i in case.indices
        else torch.from_numpy(a.astype(np.float32)).to(place).to(kind)
        for i, a in enumerate(arrays)
    ]
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        launch = repeated(lambda: call(*inputs), accelerated, stack, case.calls)
        seconds = median(launch, repeats)
        return seconds, call(*inputs).float().cpu().numpy()
