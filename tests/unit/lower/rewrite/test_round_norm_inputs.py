"""The pass round_norm_inputs: which ops write rows in fp32 and also in 16 bits for the layers after
a norm, and under which conditions.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp16
from ark.lower.pipeline import plan
from ark.models.build import Shape, build
from ark.models.config import LLAMA_3_2_1B
from ark.plan.types import Plan
from ark.plan.verify import verify

pytest.importorskip("ark_cuda")

from ark_cuda import backend

H100 = backend.machine("h100")


def layers(rows: int, dtype: DataType, norm: DataType, written: bool = False) -> Plan:
    """Returns a plan of a residual and of the layer after its norm. written: True to write a row of
    the residual between them.
    """
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([rows, 2048], name="x")
        first, last = (ark.parameter([2048, 2048], dtype, name=n) for n in ("first", "last"))
        weight = ark.parameter([2048], norm, name="norm")
        hidden = ark.add(x, ark.linear(x, first))
        if written:
            ark.copy(0.5, output=hidden[:1])
        ark.linear(ark.rmsnorm(hidden, weight, 1e-5), last, name="result")
    planned = plan(model.graph, H100)
    verify([planned])
    return planned


def types(planned: Plan) -> list[list[tuple[str, bool]]]:
    """Returns, for each linear layer, the type of each operand and True if it travels as
    packets.
    """
    return [
        [(planned.tensors[t].dtype, planned.tensors[t].packet) for t in op.operands]
        for op in planned.ops
        if op.kind == "linear"
    ]


def test_many_rows_are_written_in_both_types_and_gathered_in_the_small_one() -> None:
    first, last = types(layers(8, bf16, bf16))
    assert [first[i][0] for i in (2, 4)] == ["fp32", "bf16"] and len(first) == 5
    assert last[0] == ("bf16", False)


@pytest.mark.parametrize(
    ("rows", "dtype", "norm"),
    [(4, bf16, bf16), (8, fp16, fp16), (8, bf16, ark.fp32)],
    ids=["few-packets", "small-range", "norm-in-fp32"],
)
def test_other_rows_stay_in_fp32(rows: int, dtype: DataType, norm: DataType) -> None:
    first, last = types(layers(rows, dtype, norm))
    assert len(first) == 4 and last[0][0] == "fp32"


def test_rows_that_are_written_again_stay_in_fp32() -> None:
    first, last = types(layers(8, bf16, bf16, written=True))
    assert len(first) == 4 and last[0][0] == "fp32"


def test_decoder_embeds_in_both_types() -> None:
    shape = Shape(LLAMA_3_2_1B, bf16, 640, 0, batch=8)
    planned = plan(build(shape).graph, H100)
    embedding = next(op for op in planned.ops if op.kind == "embedding")
    kinds = [planned.tensors[t].dtype for t in embedding.operands]
    assert kinds == ["int32", "bf16", "fp32", "int32", "bf16"]
    gathered = [t[0][0] for t in types(planned)]
    assert set(gathered) == {"bf16"}
    assert np.prod(planned.tensors[embedding.operands[4]].shape) == 2048
