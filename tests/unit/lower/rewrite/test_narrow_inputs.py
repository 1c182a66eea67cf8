"""The pass narrow_inputs: products of 16-bit weights that read one fp32 tensor share its rounded
copy only while the tensor is unchanged.
"""

from __future__ import annotations

import pytest

import ark
from ark.backend import registry
from ark.lower.prepare import prepare


@pytest.mark.parametrize(("written", "casts"), [("", 1), ("part", 2), ("all", 2)])
@pytest.mark.parametrize("given", [True, False])
def test_rounded_copy_is_renewed_after_a_write(written: str, casts: int, given: bool) -> None:
    """given: True if the tensor is an input, False if an op computes it."""
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor([128, 64])
        if not given:
            x = ark.softmax(x)
        weights = [ark.parameter([256, 64], ark.bf16) for _ in range(2)]
        ark.linear(x, weights[0])
        if written:
            ark.copy(0.5, output=x[:64] if written == "part" else x)
        ark.linear(x, weights[1])
    nodes = prepare(model.graph, registry.machine("h200")).graph.nodes
    reads = [n.inputs[0] for n in nodes if n.type == "matmul"]
    assert [t.dtype for t in reads] == [ark.bf16, ark.bf16]
    assert len({t.buffer.id for t in reads}) == casts
