"""Products whose results are rotated by halves of heads, on every backend, compared with NumPy; and
decoders of transformers that torch.compile runs, compared with torch in fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ark.ir.dtype import fp16, fp32
from tests.cases.rotary_products import Projection
from tests.opcheck import Case, check
from tests.slow import slow

# The cases differ in: whether all sequences have the same positions, a bias, head widths that are
# no multiple of a vector, row counts that are no multiple of a tile, and the floating-point type.
PROJECTIONS = [
    Projection(rows=40, depth=200, dtype=fp32),
    Projection(rows=40, depth=200, bias=True, positions=2),
    Projection(batch=1, rows=75, depth=96, heads=3, width=128),
    Projection(batch=3, rows=21, depth=64, heads=5, width=20, bias=True, dtype=fp16),
    Projection(rows=130, depth=512, heads=4, dtype=fp16),
]


def case(projection: Projection) -> Case:
    values = projection.values(np.random.default_rng(projection.rows))
    inputs = [(a, projection.dtype) for a in values]
    return Case(str(projection), inputs, projection.build, projection.expected)


def test_rotated_products_equal_numpys(backend: str) -> None:
    check([case(p) for p in PROJECTIONS])


DECODERS = {
    "Llama": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "Qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},  # biases
    "Mistral": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[slow] * (n != "Llama")) for n in DECODERS])
def test_decoder_is_as_near_to_fp64_as_torchs(name: str, backend: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from ark.cli.measure.model_parts import FirstTensor

    torch._dynamo.reset()
    torch.manual_seed(0)
    heads: dict[str, Any] = DECODERS[name]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128,
        hidden_size=heads["num_attention_heads"] * heads.get("head_dim", 64),
        intermediate_size=256,
        num_hidden_layers=2,
        use_cache=False,
        **heads,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    module = FirstTensor(model)
    tokens = torch.randint(0, 128, (2, 24))
    with torch.no_grad():
        got = torch.compile(module, backend="ark")(tokens).double()
        eager = module(tokens).double()
        exact = module.double()(tokens)
    far = (eager - exact).abs()
    assert (got - exact).abs().mean() <= 1.02 * far.mean()
    assert (got - exact).abs().max() <= 1.5 * far.max()
