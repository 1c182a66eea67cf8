"""Machines with 16-bit packets send results in them if the linear layer of one row that reads the
results rounds them to 16 bits anyway. Rows that change in every iteration are compared with NumPy,
which rounds the same intermediate results; also after the packets' 16-bit epochs have wrapped.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp16
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.verify import verify
from ark.runtime.executor import Executor


def gated(columns: int, inner: int, dtype: DataType) -> Model:
    """Builds a gated block on one row; the next row is the mean of the row and the block's
    result.
    """
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([1, columns], name="x")
        norm = ark.parameter([columns], name="norm")
        gate, up = (ark.parameter([inner, columns], dtype, name=n) for n in ("gate", "up"))
        down = ark.parameter([columns, inner], dtype, name="down")
        normed = ark.rmsnorm(x, norm, 1e-5)
        activated = ark.swiglu(ark.linear(normed, gate), ark.linear(normed, up))
        ark.mul(ark.add(x, ark.linear(activated, down)), 0.5, output=x)
    return model


def short(machine: Machine) -> Machine:
    """Returns the machine description with the capability of 16-bit packets added."""
    return machine.with_capabilities(Capability.PACKETS, Capability.SHORT_PACKETS)


@pytest.mark.parametrize(("dtype", "iterations"), [(bf16, 66_000), (fp16, 3)], ids=str)
def test_gated_block_with_short_packets_equals_numpy(
    backend: str, dtype: DataType, iterations: int
) -> None:
    columns, inner = 24, 40
    rng = np.random.default_rng(3)
    arrays = {
        "x": rng.standard_normal((1, columns)),
        "norm": rng.uniform(0.5, 1.5, columns),
        "gate": rng.standard_normal((inner, columns)) / 5,
        "up": rng.standard_normal((inner, columns)) / 5,
        "down": rng.standard_normal((columns, inner)) / 5,
    }
    for name in ("gate", "up", "down"):
        arrays[name] = arrays[name].astype(dtype.numpy).astype(np.float64)
    want = [arrays["x"]]
    for _ in range(200):
        x = want[-1]
        normed = x / np.sqrt((x**2).mean() + 1e-5) * arrays["norm"]
        a, b = normed @ arrays["gate"].T, normed @ arrays["up"].T
        activated = (a / (1 + np.exp(-a)) * b).astype(dtype.numpy).astype(np.float64)
        want.append((x + activated @ arrays["down"].T) / 2)
    with contextlib.closing(registry.get(backend).open(0)) as device:
        machine = short(dataclasses.replace(device.machine, processors=2))
        result = plan(gated(columns, inner, dtype).graph, machine)
        verify([result])
        packets = [t for t in result.tensors if t.packet and t.dtype == dtype.name]
        assert [t.shape for t in packets] == [(1, inner)]
        assert [result.buffers[t.buffer].nbytes for t in packets] == [4 * inner]
        with Executor(result, registry.get(backend), device) as executor:
            assert "ArkShort<" in executor.program.emitted.source.text
            # The fused layer stores the rows of the weights gate and up alternately.
            names = {t.name.split(".")[0].split("+")[0]: t.name for t in result.tensors}
            gate_and_up = np.stack([arrays.pop("gate"), arrays.pop("up")], 1).reshape(-1, columns)
            for name, array in {**arrays, "gate": gate_and_up}.items():
                executor.write(names[name], array)
            for run in (5, iterations if backend == "cpu" else 5):
                executor.write("x", arrays["x"])
                executor.start(run).wait(120)
                # A value near a tie may be rounded the other way.
                step = 2.0 ** (-8 if dtype is bf16 else -11) * np.abs(want[-1]).max()
                got = executor.read("x")
                np.testing.assert_allclose(got, want[min(run, 200)], rtol=1e-3, atol=4 * step)
