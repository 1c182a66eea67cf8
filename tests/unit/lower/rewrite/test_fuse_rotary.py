"""Rotary embeddings that are written with plain ops become one op that reads both halves of a head
in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ark
from ark.backend import registry
from ark.frontend.tensor import Tensor
from ark.ir.graph import Graph
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_rotary import fuse_rotary
from tests.slow import examples
from tests.unit.lower.computed import computed

ROWS = (2, 5, 3, 8)  # batch, rows, heads, width


def half_turned(x: np.ndarray) -> np.ndarray:
    return np.concatenate([-x[..., 4:], x[..., :4]], -1)


class Rotated:
    """A rotary embedding of heads, after a transpose or not. factors: the shape of cosines and
    sines. swapped: operands of sums and products are in the other order. wrong: the first half is
    negated.
    """

    def __init__(
        self,
        factors: tuple[int, ...],
        transposed: bool = True,
        swapped: bool = False,
        wrong: bool = False,
    ) -> None:
        rng = np.random.default_rng(0)
        values = [rng.normal(size=s).astype(np.float32) for s in (ROWS, factors, factors)]
        model = ark.Model()
        with ark.use_model(model):
            x, cosines, sines = (ark.tensor(list(v.shape), ark.fp32) for v in values)
            heads = ark.transpose(x, [0, 2, 1, 3]) if transposed else x
            low, high = heads[:, :, :, :4], heads[:, :, :, 4:]
            halves = [high, ark.neg(low)] if wrong else [ark.neg(high), low]

            def of(op: Any, a: Tensor, b: Tensor) -> Tensor:
                return op(b, a) if swapped else op(a, b)

            far = of(ark.mul, ark.concat(halves, 3), sines)
            self.result = of(ark.add, of(ark.mul, heads, cosines), far).ir
        self.graph = model.graph
        tensors = (x, cosines, sines)
        self.inputs = {t.ir.buffer.id: v for t, v in zip(tensors, values, strict=True)}
        y = values[0].transpose(0, 2, 1, 3) if transposed else values[0]
        turned = -half_turned(y) if wrong else half_turned(y)
        self.wanted = y * values[1] + turned * values[2]

    def rewritten(self) -> Graph:
        return fuse_rotary(self.graph, Context(registry.machine("h200"), {}, frozenset()))


def types(graph: Graph) -> list[str]:
    return [n.type for n in graph.nodes if not n.virtual]


def test_heads_are_rotated_before_they_are_transposed() -> None:
    program = Rotated((1, 1, 5, 8))
    assert types(program.rewritten()) == ["elementwise", "elementwise", "transpose"]


def test_factors_of_heads_and_rows_are_not_transposed_themselves() -> None:
    program = Rotated((1, 3, 5, 8))
    assert types(program.rewritten()) == ["transpose", "elementwise", "elementwise"]


def test_other_combinations_of_halves_are_not_fused() -> None:
    assert "concat" in types(Rotated((5, 8), wrong=True).rewritten())


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_results_are_those_of_the_ops(data: Any) -> None:
    transposed, swapped, wrong = (data.draw(st.booleans()) for _ in range(3))
    sizes = (2, 3, 5, 8) if transposed else ROWS
    shape = tuple(data.draw(st.sampled_from([1, n])) for n in sizes)
    program = Rotated(shape[data.draw(st.integers(0, 2)) :], transposed, swapped, wrong)
    for graph in (program.graph, program.rewritten()):
        result = computed(graph, program.inputs, program.result)
        np.testing.assert_allclose(result, program.wanted, rtol=1e-5, atol=1e-5)


def test_llama_of_transformers_is_products_norms_and_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is planned for matrix units and run on the CPU, and compared with torch."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ark.cli.measure.model_parts import FirstTensor
    from tests.cases.torch_plans import planned_as

    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = FirstTensor(transformers.LlamaForCausalLM(config).to(torch.bfloat16)).eval()
    tokens = torch.randint(0, 256, (2, 128))
    (plan,) = planned_as(model, tokens, "h200", monkeypatch)
    kinds = [op.kind for op in plan.ops]
    names = [op.name for op in plan.ops]
    assert plan.variant == "matrix" and "transpose" not in kinds and "reduce" not in kinds
    assert kinds.count("attention_tiles") == 1 and kinds.count("row_norm") == 3
    rotating = [op for op in plan.ops if op.params.get("rotary") == 64]
    assert kinds.count("matmul") == 8 and len(rotating) == 2 and "rotary" not in names
