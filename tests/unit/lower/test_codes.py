"""Products of a few rows with quantised weights in the kernel variant `matrix` (warpgroups): which
of them read the codes directly, and into which tiles and parts of k they are cut.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from ark.backend import registry
from ark.errors import PlanError
from ark.ir.dtype import DataType, RowType, bf16, fp8_e4m3, fp16, fp32, int4, row_type, uint4
from ark.ir.graph import Graph
from ark.lower.codes import code_cut_us, code_cuts, multiplies_codes
from ark.lower.pipeline import plan
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.unpack_rows import unpack_rows
from ark.models.build import Shape, build
from ark.models.config import builtin_config
from ark.models.holding import quantised_config
from ark.plan import kind as kinds
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.tasks.matmul_codes import part_fits, scales_bytes, served, stage_bytes
from ark.tasks.matmul_codes import row_type as row_type_of

H200 = registry.machine("h200")


def decoder(
    sequences: int,
    quantize: str = "fp8",
    chunk: int = 0,
    variant: str | None = None,
) -> Plan:
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    config = quantised_config(config, quantize, "config.json")
    graph = build(Shape(config, bf16, 1024, chunk, batch=sequences)).graph
    result = plan(graph, H200, {"variant": variant} if variant else None)
    verify([result])
    return result


def ops(result: Plan) -> Counter[str]:
    return Counter(op.kind for op in result.ops)


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("sequences", [9, 16, 64])
def test_many_sequences_decode_from_codes(sequences: int, quantize: str) -> None:
    result = decoder(sequences, quantize)
    assert (result.variant, ops(result)["row_values"]) == ("matrix", 0)
    assert len(of_codes(result)) == 4  # projection, its output, gate and up, down


def of_codes(result: Plan) -> list[kinds.Signature]:
    """Returns the signatures of products whose weights are quantised."""
    given = (kinds.signature(result, op) for op in result.ops if op.kind == "matmul")
    return [sig for sig in given if row_type_of(sig.operands[1]) is not None]


@pytest.mark.parametrize(
    ("sequences", "chunk", "variant", "weights"),
    [(16, 0, "block", 4), (1, 512, None, 8)],  # a chunk of a prompt has two phases
)
def test_weights_are_dequantised_for_other_variants_and_prompts(
    sequences: int, chunk: int, variant: str | None, weights: int
) -> None:
    result = decoder(sequences, chunk=chunk, variant=variant)
    assert ops(result)["row_values"] == weights and not of_codes(result)


def test_weights_are_dequantised_before_collectives_among_ranks() -> None:
    graph = product(16, row_type(fp8_e4m3, 2048, 2048, fp32, False, bf16))
    context = Context(H200, {})
    assert unpack_rows(graph, context) is graph
    graph.world_size = 2
    assert [n.type for n in unpack_rows(graph, context).nodes] == ["row_values", "matmul"]


def product(rows: int, dtype: RowType, x: DataType = fp32, outputs: int = 512) -> Graph:
    graph = Graph(0, 1)
    left = graph.tensor((rows, dtype.columns), x)
    right = graph.tensor((outputs, dtype.columns), dtype, arena="parameter")
    out = graph.tensor((rows, outputs), fp32)
    attributes = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [left, right], [out], attributes, "product")
    return graph


@pytest.mark.parametrize(
    ("rows", "dtype", "x", "able"),
    [
        (16, row_type(fp8_e4m3, 2048, 2048, fp32, False, bf16), fp32, True),
        (16, row_type(int4, 2048, 32, fp16, False, fp16), fp16, True),
        (16, row_type(uint4, 2048, 16, fp32, True, bf16), bf16, True),
        (8, row_type(fp8_e4m3, 2048, 2048, fp32, False, bf16), fp32, False),  # few rows
        (65, row_type(fp8_e4m3, 2048, 2048, fp32, False, bf16), fp32, False),  # a prompt
        (16, row_type(int4, 2048, 8, fp16, False, fp16), fp16, False),  # a lane has two scales
        (16, row_type(fp8_e4m3, 2080, 2080, fp32, False, bf16), fp32, False),  # parts of lines
        (16, row_type(fp8_e4m3, 2048, 2048, fp32, False, fp32), fp32, False),  # no fp32 units
        (16, row_type(fp8_e4m3, 2048, 2048, fp32, False, bf16), fp16, False),
    ],
)
def test_products_that_multiply_codes(rows: int, dtype: RowType, x: DataType, able: bool) -> None:
    (node,) = product(rows, dtype, x).nodes
    assert multiplies_codes(node, H200) is able
    assert not multiplies_codes(node, registry.machine("mi300x"))


@pytest.mark.parametrize(("outputs", "parts"), [(128256, 1), (512, 8)])
def test_few_tiles_have_parts_of_k(outputs: int, parts: int) -> None:
    dtype = row_type(fp8_e4m3, 8192, 8192, fp32, False, bf16)
    (node,) = product(16, dtype, outputs=outputs).nodes
    machine = H200.using("matrix")
    cuts = code_cuts(node, machine, parts=True)
    assert {c.parts for c in cuts} == {1, 2, 4, 8} and {c.columns for c in cuts} == {32, 64}
    assert min(cuts, key=lambda cut: code_cut_us(cut, node, machine)).parts == parts
    assert {c.parts for c in code_cuts(node, machine, parts=False)} == {1}


def test_stage_has_room_for_all_scales_that_it_meets() -> None:
    """A stage (the part of shared memory for one step of a product) has room for the scales of all
    groups of codes that it holds. A box copy must begin at a multiple of 16 bytes in a row, so it
    also loads some scales in front of these, for which there must be room, too.
    """
    for group, scales, zeros in itertools.product(
        (16, 32, 48, 64, 96, 128, 192, 256, 512), (fp32, bf16), (False, True)
    ):
        dtype = row_type(uint4, 3 * 64 * group, group, scales, zeros, bf16)
        assert served(dtype)
        size, room = dtype.scales.itemsize, scales_bytes(dtype)
        assert room % 16 == 0
        for begin in (dtype.scales_at, dtype.zeros_at) if zeros else (dtype.scales_at,):
            for k in range(0, dtype.columns - 255, 256):
                first, last = begin + k // group * size, begin + (k + 255) // group * size + size
                assert last - first // 16 * 16 <= room
        scale_bytes = (2 if zeros else 1) * room
        assert stage_bytes(dtype, 16, 32) == 16 * 512 + 32 * (128 + scale_bytes)


def test_parts_of_k_begin_at_stages() -> None:
    assert [part_fits(8192, n) for n in (1, 2, 3, 4, 8)] == [True, True, False, True, True]
    assert [part_fits(2304, n) for n in (1, 2, 3, 4)] == [True, False, True, False]


def test_machine_without_such_a_function_refuses_the_plan() -> None:
    sig = of_codes(decoder(16))[0]
    with pytest.raises(PlanError, match="no device function for products with weights of fp8"):
        kinds.get("matmul").source("f", sig, registry.machine("mi300x"))
