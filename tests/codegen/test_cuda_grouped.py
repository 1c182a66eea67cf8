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
from tests.cases.channels_last import keep_channels_last, scaled
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
        one.groups[2] % 8 == 0
        and (one.groups[1] % 8 == 0 or (one.channels_first and one.groups[0] == 1))
        and not (one.channels_first and one.groups[0] > 1)
        for one in CASES
    ]
    assert bodies == [Groups if eights else type(None) for eights in of_eights]
    assert sum(one.channels_first and eights for one, eights in zip(CASES, of_eights, strict=True))
    for one, arrays, result in zip(CASES, given, results, strict=True):
        wanted = one.expected(*arrays)
        np.testing.assert_allclose(
            result,
            wanted,
            atol=TOLERANCE[dtype.name] / 4,
            rtol=TOLERANCE[dtype.name],
            err_msg=f"{one}",
        )


def test_first_convolution_reads_the_image_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ops into which a convolution of 3 channels and 16 outputs is rewritten give torch's
    result with channels last.
    """
    keep_channels_last(monkeypatch)
    rng, dtype = np.random.default_rng(3), ark.bf16
    arrays = [rounded(a, dtype) for a in scaled(rng, [(2, 3, 11, 14), (16, 3, 3, 3)])]
    model = Model()
    with use_model(model):
        x, w = (ark.tensor(list(a.shape), dtype, name=n) for n, a in zip("xw", arrays, strict=True))
        y = ark.relu(ark.conv(x, w, stride=2, padding=1))
        ark.conv(y, ark.tensor((32, 16, 1, 1), dtype), name="out")
    planned = plan(model.graph, MODELS["h200"], {"variant": "block"})
    block = Block(planned, tmp_path)
    first = [op.kind for op in planned.ops].index("grouped_convolution")
    assert [op.kind for op in planned.ops[:first]] == ["transpose"]
    for operand, array in ((planned.ops[0].operands[0], 1), (planned.ops[first].operands[1], 0)):
        place = block.tensors[operand]
        place[...] = arrays[array].reshape(place.shape).astype(place.dtype)
    for op in planned.ops[: first + 1]:
        block.run(op)
    torch = pytest.importorskip("torch")
    image, weight = map(torch.tensor, arrays)
    want = torch.relu(torch.nn.functional.conv2d(image, weight, stride=2, padding=1))
    got = block.operand(planned.ops[first], 2).astype(np.float64)
    np.testing.assert_allclose(got, want.permute(0, 2, 3, 1), atol=0.01, rtol=0.01)
