"""The CUDA bodies: every task kind compiles for every architecture, and on a GPU this backend's
specialised bodies agree with NumPy and with the CPU backend.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Backend
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.plans import plans as llama_plans
from ark.ops.tokens import MAX_STOPS
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.runtime.program import build
from tests import llama_reference, signatures
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

GPU = bool(backend.probe().devices)
needs_gpu = pytest.mark.skipif(
    not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)


def model_of(arch: str) -> Machine:
    return next(m for m in machines.MODELS.values() if m.arch == arch)


# `nox` compiles for one architecture; features that only other architectures have are
# tested separately.
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[slow] * (a != "sm_90a")) for a in backend.archs()]
)
def test_every_kind_compiles(arch):
    machine, types = model_of(arch), signatures.types_for(arch, backend.archs())
    for name, task_plan in signatures.plans(machine, types):
        for phases in task_plan.kernels:
            planned = machine_of(task_plan, phases[0])
            emitted = write(task_plan, planned, backend.dialect(arch), phases)
            shared = emitted.scratch_bytes + planned.ring_bytes
            assert shared <= machine.shared_bytes + machines.RESERVED, name
    own = {body.kind for body in backend.dialect(arch).bodies}
    which = backend.archs().index(arch)
    for task_plan in signatures.united(machine, types, own, which):
        program = build(task_plan, machine, backend, arch)
        assert b"ark_loop\0" in program.binary.data, program.emitted.bodies


def test_plans_contain_every_task_kind():
    machine = model_of("sm_90a")
    kinds_planned = {op.kind for _, task_plan in signatures.plans(machine) for op in task_plan.ops}
    # Transfers have no body, because the host performs them. The body of `switch` is compiled by
    # tests/multi/test_switch.py.
    assert kinds_planned == set(kinds.names()) - {"transfer", "switch"}


# The products: (shape of a, shape of b, transposes, types of a and b).
MATMULS = [
    ((16, 2048), (512, 2048), (False, True), (fp32, bf16)),
    ((64, 512), (192, 512), (False, True), (fp32, bf16)),
    ((37, 100), (45, 100), (False, True), (fp32, bf16)),
    ((13, 96), (96, 77), (False, False), (bf16, bf16)),
    ((51, 37), (45, 51), (True, True), (fp16, fp16)),
    ((260, 137), (260, 45), (True, False), (fp16, fp16)),
    ((3, 70, 33), (3, 33, 130), (False, False), (bf16, bf16)),
    ((2, 1, 40, 64), (1, 3, 64, 64), (False, False), (fp16, fp16)),
]
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}


@needs_gpu
@pytest.mark.parametrize(("left", "right", "transposes", "types"), MATMULS)
def test_matmul_on_tensor_cores(left, right, transposes, types):
    rng = np.random.default_rng(5)
    x = rng.standard_normal(left).astype(types[0].numpy)
    y = rng.standard_normal(right).astype(types[1].numpy)
    a, b = x.astype(np.float64), y.astype(np.float64)
    a = a.swapaxes(-1, -2) if transposes[0] else a
    b = b.swapaxes(-1, -2) if transposes[1] else b
    want, size = a @ b, np.abs(a) @ np.abs(b)
    graph = Graph()
    inputs = [
        graph.tensor(shape, dtype, arena="state", name=name)
        for shape, dtype, name in ((left, types[0], "a"), (right, types[1], "b"))
    ]
    out = graph.tensor(want.shape, types[0], name="c")
    attrs = {"transpose_a": transposes[0], "transpose_b": transposes[1]}
    graph.add("matmul", inputs, [out], attrs, "c")
    with contextlib.closing(backend.open(0)) as device:
        task_plan = plan(graph, device.machine)
        verify([task_plan])
        with Executor(task_plan, backend, device) as executor:
            assert "ark_matrix_tile<" in executor.program.emitted.source.text
            executor.write("a", x)
            executor.write("b", y)
            executor.start(1).wait(60)
            got = executor.read("c").astype(np.float64)
    # fp32 inputs are split into two bf16 parts, which keep 16 bits.
    split = 2.0**-16 if types[0] is fp32 else 0.0
    bound = ROUNDING[types[0].name] * np.abs(want) + (split + 4e-7) * size
    assert (np.abs(got - want) <= bound).all(), np.abs(got - want).max()


# The most by which a chosen token's score may be below the highest score. Both runs have the same
# weights, but activations and caches are rounded differently (8 bits for bf16, 11 for fp16). Scores
# have a standard deviation of 1. With (bf16, 2048, 1024, 8, 8, 64), the two best scores at token
# 174 differ by 0.0040, and the CPU chooses the second.
TIE = {"fp32": 1e-3, "fp16": 4e-3, "bf16": 2e-2}
CACHES = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 5e-3}  # relative errors, over a whole cache


@dataclass(frozen=True)
class Decoded:
    """A run's tokens, the part of the KV caches that was written, in float64, and the plan's
    weights.
    """

    tokens: np.ndarray
    caches: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def _decoder(
    which: Backend,
    config: LlamaConfig,
    dtype: DataType,
    prompt: np.ndarray,
    new: int,
    chunk: int = 16,
) -> Decoded:
    """Runs a model with random weights on a backend: first the prompt, then it generates `new`
    tokens greedily.
    """
    weights = {}
    rng = np.random.default_rng(11)
    with contextlib.closing(which.open(0)) as device:
        shape = Shape(config, dtype, 320, chunk)
        task_plan = llama_plans(shape, device.machine)[0]
        with Executor(task_plan, which, device) as executor:
            names = {t.name: t for t in task_plan.tensors}
            for tensor in sorted(names.values(), key=lambda t: t.name):
                if task_plan.buffers[tensor.buffer].arena != "parameter":
                    continue
                values = rng.standard_normal(tensor.shape) * tensor.shape[-1] ** -0.5
                if len(tensor.shape) == 1:
                    values = 1.0 + 0.1 * values
                if tensor.name == "frequencies":
                    values = 10000.0 ** -np.linspace(0.0, 1.0, tensor.shape[0])
                executor.write(tensor.name, values)
                weights[tensor.name] = values
            total = len(prompt) + new
            executor.write("tokens", prompt)
            executor.write("position", np.zeros(1))
            executor.write("settings", np.array([0, 0, 0, len(prompt) - 1, total, 0, 0]))
            executor.write("stops", np.full(MAX_STOPS, -1))
            executor.start(shape.iterations(len(prompt), new)).wait(120)
            caches = {
                f"{i}.{kind}": executor.read(f"layers.{i}.attention.{kind}")[:, : total - 1].astype(
                    np.float64
                )
                for i in range(config.num_hidden_layers)
                for kind in ("keys", "values")
            }
            return Decoded(executor.read("tokens")[:total], caches, weights)


def check_decoded(
    got: Decoded, config: LlamaConfig, dtype: DataType, new: int, caches: dict[str, np.ndarray]
) -> None:
    """Checks that every chosen token has the highest score given the tokens before it, or a score
    that is lower by at most TIE. caches: the caches of another run, which may have chosen other
    tokens where two scores are nearly equal.
    """
    scores = llama_reference.logits(config, dtype, got.weights, got.tokens)[-new - 1 : -1]
    drawn = scores[np.arange(new), got.tokens[-new:]]
    behind = scores.max(axis=1) - drawn
    assert (behind <= TIE[dtype.name]).all(), behind.max()
    for name, values in caches.items():
        mine = got.caches[name][:, : values.shape[1]]
        error = np.linalg.norm(mine - values) / np.linalg.norm(values)
        assert error < CACHES[dtype.name], name


def agreed(got: Decoded, want: Decoded) -> dict[str, np.ndarray]:
    """Returns the KV caches of the run `want`, up to the first position at which the tokens of the
    two runs differ.
    """
    same = int(np.append(got.tokens == want.tokens, False).argmin())
    return {name: values[:, :same] for name, values in want.caches.items()}


@pytest.mark.parametrize(("dtype", "width"), [(bf16, 24), (fp32, 32)])
def test_decoder_on_the_cpu_equals_transformers_greedily(dtype, width):
    """The reference run that the tests below compare GPUs with."""
    from ark_cpu import backend as cpu

    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=width,
        vocab_size=777,
        max_position_embeddings=512,
    )
    prompt = np.random.default_rng(2).integers(0, 777, 37)
    got = _decoder(cpu, config, dtype, prompt, 40)
    check_decoded(got, config, dtype, 40, {})
    got.tokens[-1] = (got.tokens[-1] + 1) % 777
    with pytest.raises(AssertionError):
        check_decoded(got, config, dtype, 40, {})


@needs_gpu
@pytest.mark.parametrize(("dtype", "width", "chunk"), [(bf16, 64, 128), (fp16, 128, 256)])
def test_prompt_in_a_kernel_of_its_own_agrees_with_the_cpu(dtype, width, chunk):
    """A prompt whose kernel rounds activations to 16 bits before each product gives the CPU's KV
    caches within rounding.
    """
    from ark_cpu import backend as cpu

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=width,
        vocab_size=777,
        max_position_embeddings=512,
    )
    prompt = np.random.default_rng(2).integers(0, 777, 290)
    got = _decoder(backend, config, dtype, prompt, 1, chunk)
    want = _decoder(cpu, config, dtype, prompt, 1)
    check_decoded(got, config, dtype, 1, {})
    for name, values in agreed(got, want).items():
        error = np.linalg.norm(got.caches[name][:, : values.shape[1]] - values)
        assert error < {"fp16": 3e-3, "bf16": 2e-2}[dtype.name] * np.linalg.norm(values), name


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "heads", "kv_heads", "width"),
    [
        (bf16, 1024, 4096, 8, 2, 128),
        (bf16, 2048, 1024, 8, 8, 64),
        (fp16, 1024, 2048, 16, 2, 64),
        (fp32, 1024, 512, 4, 4, 32),
        (bf16, 96, 200, 6, 2, 24),
        # Rows of weights that are wider than a stage: one layer after swiglu, one after a norm.
        (bf16, 1024, 14336, 8, 2, 128),
        (fp32, 512, 14336, 4, 4, 32),
        (fp16, 10240, 1024, 4, 4, 32),
    ],
)
def test_decoder_agrees_with_the_cpu(dtype, hidden, inner, heads, kv_heads, width):
    from ark_cpu import backend as cpu

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        vocab_size=777,
        max_position_embeddings=512,
    )
    prompt = np.random.default_rng(2).integers(0, 777, 150)
    got = _decoder(backend, config, dtype, prompt, 40)
    want = _decoder(cpu, config, dtype, prompt, 40)
    check_decoded(got, config, dtype, 40, agreed(got, want))
