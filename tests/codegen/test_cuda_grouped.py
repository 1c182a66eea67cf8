"""Convolutions in groups of images with channels last: CUDA's device code runs on the host and is
compared with torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.kind import signature
from ark.plan.serialize import machine_of
from ark.plan.verify import verify

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("torch")

from ark_cuda import backend
from ark_cuda.machines import MODELS
from ark_cuda.tasks.grouped import Groups

from tests.block_on_host import Block
from tests.grouped import CASES
from tests.opcheck import TOLERANCE, rounded

FP32_OPERAND = 2  # the number of the bias, which has fp32 elements beside others of 16 bits


@pytest.mark.parametrize("variant", ["block", "matrix"])
@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp16], ids=str)
def test_bodies_on_the_host(tmp_path: Path, variant: str, dtype: Any) -> None:
    model = Model()
    given = [[rounded(a, dtype) for a in one.arrays(n)] for n, one in enumerate(CASES)]
    with use_model(model):
        for number, (one, arrays) in enumerate(zip(CASES, given, strict=True)):
            tensors = [
                ark.tensor(
                    list(a.shape), ark.fp32 if i == FP32_OPERAND else dtype, name=f"{number}.{i}"
                )
                for i, a in enumerate(arrays)
            ]
            one.build(*tensors)
    planned = plan(model.graph, MODELS["h200"], {"variant": variant})
    verify([planned])
    block = Block(planned, tmp_path)
    for tensor in planned.tensors:
        case, _, index = tensor.name.partition(".")
        if case.isdigit() and index.isdigit():
            place = block.tensors[tensor.id]
            place[...] = given[int(case)][int(index)].astype(place.dtype)
    results, bodies = [], []
    machine = machine_of(planned)
    for op in planned.ops:
        block.run(op)
        if op.kind == "grouped_convolution":
            results.append(block.operand(op, 2).astype(np.float64))
            body = backend.dialect(machine.arch).body(signature(planned, op), machine)
            bodies.append(type(body))
    of_eights = [
        one.groups[1] % 8 == one.groups[2] % 8 == 0 and not one.channels_first for one in CASES
    ]
    assert bodies == [Groups if eights else type(None) for eights in of_eights]
    for one, arrays, result in zip(CASES, given, results, strict=True):
        wanted = one.expected(*arrays)
        np.testing.assert_allclose(
            result,
            wanted,
            atol=TOLERANCE[dtype.name] / 4,
            rtol=TOLERANCE[dtype.name],
            err_msg=f"{one}",
        )
