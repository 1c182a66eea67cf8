"""A backend whose cores share no memory runs the other backends' plans: results are compared with
NumPy and torch, tokens with the CPU's, and the messages between cores are checked one by one. With
ARK_REQUIRE=mesh all of tests/backend runs on it.
"""

from __future__ import annotations

import dataclasses

import ark_mesh
import numpy as np
import pytest
import torch
from ark_mesh.exchange import Exchange
from ark_mesh.executor import MeshExecutor
from torch.nn.functional import gelu

import ark
from ark.backend import registry
from ark.backend.protocol import KernelBackend
from ark.errors import SystemError, UnsupportedError
from ark.lower.pipeline import plan as make_plan
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.runtime.executor import Executor
from ark.runtime.runner import PlanBackend

pytestmark = pytest.mark.emulated("slow")

MACHINE = ark_mesh.machines.by_name("mesh-4")


def _chain() -> tuple[ark.Tensor, list[ark.Tensor]]:
    """Builds a softmax of a product plus a sum, and a sum over its rows: these contain every kind
    of task that this backend serves.
    """
    a, b, x = ark.tensor((70, 48)), ark.tensor((48, 40)), ark.tensor((70, 40))
    rows = ark.softmax(ark.matmul(a, b) + ark.gelu(x))
    return ark.reduce_sum(rows * x, axis=0), [a, b, x]


def test_mesh_is_a_plan_backend() -> None:
    assert isinstance(ark_mesh.backend, PlanBackend)
    assert not isinstance(ark_mesh.backend, KernelBackend)
    with pytest.raises(UnsupportedError, match="'mesh' has no loop kernels"):
        registry.with_kernels(ark_mesh.backend)
    seen = ark_mesh.backend.probe()
    assert seen.devices and seen.simulated  # so that it is never chosen by default


def test_mesh_is_used_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("cpu", "mesh"))
    backends = {"cpu": registry.get("cpu"), "mesh": ark_mesh.backend}
    monkeypatch.setattr(registry, "get", backends.__getitem__)
    assert registry.choose()[0].name == "cpu"
    assert registry.choose("mesh")[0].name == "mesh"


def test_products_softmax_and_sums_equal_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "get", lambda name: ark_mesh.backend)
    ark.init(backend="mesh")
    result, inputs = _chain()
    random = np.random.default_rng(0)
    with ark.Runtime() as runtime:
        runtime.launch()
        for scale in (1.0, 3.0):  # the host's writes in between must reach the cores
            given = [random.standard_normal(t.shape(), np.float32) * scale for t in inputs]
            for tensor, values in zip(inputs, given, strict=True):
                tensor.from_numpy(values)
            runtime.run(2)
            a, b, x = (torch.from_numpy(v) for v in given)
            want = ((a @ b + gelu(x, approximate="tanh")).softmax(-1) * x).sum(0)
            got = np.ravel(result.to_numpy())
            assert np.allclose(got, want.numpy(), atol=2e-4 * scale), np.abs(got - want.numpy())
        assert isinstance(runtime.executor, MeshExecutor)
        assert runtime.executor.supersteps == 4 * len(runtime.executor.exchange.phases[0].exchanges)
        assert runtime.executor.exchanged > 0
    ark.init(backend="cpu")


def test_plan_made_for_the_cpu_gives_the_same_bits_on_the_mesh() -> None:
    """A plan that was made for the CPU gives the same bits on the mesh. Its counters are then
    replaced by messages.
    """
    ark.init()
    result, inputs = _chain()
    cpu = registry.get("cpu")
    machine = registry.machine("cpu-4")
    graph = ark.Model.get_model().graph
    plan = make_plan(graph, machine, {})
    random = np.random.default_rng(1)
    given = {t.ir.buffer.name: random.standard_normal(t.shape(), np.float32) for t in inputs}
    names = {t.buffer: t.name for t in plan.tensors}
    results = []
    with (
        Executor(plan, cpu, cpu.open(0)) as kernel,
        MeshExecutor(plan, ark_mesh.backend.open(0)) as cores,
    ):
        for runner in (kernel, cores):
            for buffer in plan.buffers:
                if buffer.name in given:
                    place = runner.buffer_address(buffer.id)
                    runner.device.write(place, given[buffer.name])
            runner.start(3).wait()
            last = next(t for t in plan.tensors if t.id == plan.ops[-2].operands[-1])
            assert names[last.buffer]
            place = runner.tensor_address(last)
            results.append(runner.device.read(place, plan.buffers[last.buffer].nbytes))
        assert results[0].view(np.float32).any()
    assert (results[0] == results[1]).all()
    assert result.shape() == [1, 40] or list(result.shape()) == [1, 40]


def test_noah_gives_the_tokens_of_the_cpu() -> None:
    noah, prompt = Checkpoint.open("examples/noah"), [0, 48, 79, 361, 1083, 260, 754]
    tokens = []
    for backend in (registry.get("cpu"), ark_mesh.backend):
        with Generator(noah, backend, backend.open(0), context=32, chunk=4) as generator:
            tokens.append([list(generator.stream(prompt, 12)) for _ in range(2)])
    assert tokens[0] == tokens[1]
    assert len(tokens[0][0]) == 12


def _scaled(rows: int) -> tuple[Exchange, ark.Tensor]:
    """Returns a plan of two elementwise ops that cannot be fused, because the second reads the
    transpose of the first.
    """
    ark.init()
    x = ark.tensor((rows, rows))
    y = ark.transpose(x * 2.0, [1, 0]) + 1.0
    return Exchange(make_plan(ark.Model.get_model().graph, MACHINE, {"fuse": False})), y


def test_remote_operands_are_sent_before_they_are_read() -> None:
    exchange, _ = _scaled(256)
    (steps,) = exchange.phases
    held: dict[tuple[int, int], np.ndarray] = {}

    def bytes_of(core: int, buffer: int) -> np.ndarray:
        size = exchange.plan.buffers[buffer].nbytes
        initial = exchange.plan.buffers[buffer].initial
        return held.setdefault((core, buffer), np.full(size, initial))

    for step, messages in enumerate(steps.exchanges):
        for core, tasks in enumerate(steps.tasks):
            for _, task in (t for t in tasks if t[0] == step):
                touched = exchange._touched(task.op, (task.coord,))[task.coord]
                for buffer, items, write, _ in touched:
                    size = exchange._sizes[buffer]
                    at = (items[:, None] * size + np.arange(size)).ravel()
                    if write:
                        bytes_of(core, buffer)[at] = True
                    else:
                        assert bytes_of(core, buffer)[at].all(), (core, task, step)
        for message in messages:
            piece = message.piece
            for low, high in zip(piece.begin, piece.end, strict=True):
                assert bytes_of(piece.core, piece.buffer)[low:high].all()
                bytes_of(message.target, piece.buffer)[low:high] = True
    assert len(steps.exchanges) > 1 and any(steps.exchanges)


def test_ranks_traces_and_too_large_plans_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = _scaled(16)[0].plan
    device = ark_mesh.backend.open(0)
    with pytest.raises(UnsupportedError, match="2 ranks; the backend 'mesh' runs one"):
        MeshExecutor(dataclasses.replace(plan, world_size=2), device)
    with pytest.raises(UnsupportedError, match="keeps no trace"):
        MeshExecutor(plan, device, trace_records=1)
    monkeypatch.setattr("ark_mesh.private.CORE_BYTES", 64)
    with pytest.raises(SystemError, match="core 0 of the mesh would hold"):
        MeshExecutor(plan, device)


def test_index_out_of_range_is_named() -> None:
    noah = Checkpoint.open("examples/noah")
    backend = ark_mesh.backend
    with Generator(noah, backend, backend.open(0), context=16, chunk=0) as generator:
        generator.check_prompt = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(ark.errors.GpuError, match="read the index 70000, which is out"):
            list(generator.stream([70000], 2))
