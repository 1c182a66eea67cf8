"""Measures the error of the cost model: the predicted times of forty programs are compared with
measured ones. Called by `ark bench fidelity`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.case import OpCase
from ark.cli.measure.cases import cases
from ark.cli.measure.ops import measure, planned
from ark.cli.measure.turn import Turn
from ark.plan.cost import iteration_us

MEAN_GOAL, WORST_GOAL = 0.15, 0.35  # goals of the mean and the largest relative error
PROGRAMS = (
    *("add-64m-fp32", "add-64m-bf16", "bias-16384x4096-bf16", "chain-64m-bf16"),
    *("softmax-8192x4096-fp32", "softmax-8192x4096-bf16", "layernorm-8192x4096-bf16"),
    *("rmsnorm-8192x4096-fp32", "sum-rows-8192x8192-fp32", "sum-columns-8192x8192-bf16"),
    *("sum-all-64m-bf16", "transpose-8192x8192-fp32", "transpose-8192x8192-bf16"),
    *("adds-64x4096-fp32", "adds-64x4096-apart-fp32", "adds-64x4096-apart-bf16"),
    *("concat-8192x4096-bf16", "cumsum-rows-8192x4096-fp32", "max-rows-8192x8192-bf16"),
    *("matmul-8192x8192x8192-nt-bf16", "matmul-4096x4096x4096-nt-bf16"),
    *("matmul-4096x4096x4096-tn-bf16", "matmul-2048x2048x2048-nt-bf16"),
    *("linear-gelu-4096x4096x4096-bf16", "matmul-128x4096x4096-nt-bf16"),
    *("matmul-512x4096x4096-nt-bf16", "matmul-16x4096x4096-nt-bf16"),
    *("matmul-512x512x512-nt-bf16", "attention-16x128-8192-causal-bf16"),
    *("matmul-16x4096x4096-nt-fp32", "matmul-1024x1024x1024-nt-fp32", "lstm-10x100-h256-bf16"),
    *("sweep-sum-1-64x257x1000-fp32", "sweep-softmax-65536x8-fp32"),
    *("sweep-embedding-50257x768-fp32", "sweep-matrix-vector-4096x4096-fp32"),
    *("sweep-linear-10-512x512-fp32", "sweep-batch-norm-16x64x56x56-fp32"),
    *("sweep-exp-32x32-fp32", "sweep-turn-tiny-32x32-fp32"),
)

# The programs to which the cost model was fitted. The other programs test the model.
FITTED = (
    *("transpose-8192x8192-fp32", "transpose-8192x8192-bf16"),
    *("adds-64x4096-apart-fp32", "adds-64x4096-apart-bf16", "sweep-linear-10-512x512-fp32"),
    *("add-64m-fp32", "sum-rows-8192x8192-fp32", "matmul-128x4096x4096-nt-bf16"),
)


@dataclass(frozen=True)
class Fidelity:
    """The predicted and the measured microseconds per iteration of one program, or the reason why
    they are missing.
    """

    name: str
    predicted_us: float = 0.0
    measured_us: float = 0.0
    error: str = ""

    @property
    def off(self) -> float:
        """The relative error of the prediction: (predicted - measured) / measured."""
        return self.predicted_us / self.measured_us - 1.0


def chosen(names: Sequence[str], cpu: bool) -> list[OpCase]:
    """The cases of the named programs. On a CPU only those that are short enough are returned."""
    known = {case.name: case for case in cases()}
    listed = [known[name] for name in names]
    return [c for c in listed if c.on_cpu or not cpu]


def compare(
    listed: Sequence[OpCase], backend: Backend, device: Device, repeats: int, turn: Turn
) -> Iterator[Fidelity]:
    """Plans, predicts and measures each program. turn: a lock that is held while a program is
    measured, so that no other bench uses the device.
    """
    machine = device.machine
    for case in listed:
        figures = measure(case, backend, device, machine, repeats=repeats, turn=turn)
        if figures.error:
            yield Fidelity(case.name, error=figures.error)
            continue
        plan, _ = planned(case, machine)
        yield Fidelity(case.name, iteration_us(plan), figures.seconds * 1e6)
