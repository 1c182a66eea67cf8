"""Every op and every function states its gradient or the absence of one."""

from __future__ import annotations

from ark.lower import registry
from ark.ops.gradients.derivatives import DERIVATIVES, STEPS
from ark.ops.gradients.table import RULES
from ark.tasks.functions import FUNCTIONS


def test_every_op_has_a_rule_or_is_a_constant() -> None:
    """Every op has a gradient rule or is listed without one. Every function has a derivative or is
    a step function.
    """
    assert set(FUNCTIONS) == {*DERIVATIVES, *STEPS, "where"}
    elementwise = registry.get("add").lower
    left = {n for n, d in registry._OPS.items() if d.lower is not elementwise} - set(RULES)
    assert {name for name in left if not name.startswith("channel_")} == NO_RULE


# Ops that only the compiler creates, messages between ranks, and ops without a gradient.
NO_RULE = {
    "add_parts",
    "add_parts_norm",
    "all_gather_matmul",
    "all_reduce_norm",
    "all_reduce_switch",
    "attention_gradient",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "choose",
    "choose_each",
    "convolution",
    "depthwise",
    "expert_linear",
    "fusion",
    "grouped_convolution",
    "all_gather_rotated",
    "linear",
    "paged_append",
    "paged_attention",
    "quantized_linear",
    "recv",
    "reduce_logsumexp",
    "reduce_moments",
    "reduce_sums",
    "rope_kv",
    "row_fusion",
    "row_values",
    "rounded_rmsnorm",
    "send",
    "swiglu_pairs",
}
