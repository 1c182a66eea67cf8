"""The attribute struct of each type of op (ark.ir.attributes). Called by ark.ops.linear_algebra."""

from __future__ import annotations

from collections.abc import Mapping

from ark.ir.attribute_forms import Attributes
from ark.ir.attributes import (
    AddPartsAttributes,
    AppendAttributes,
    AttentionAttributes,
    AxisAttributes,
    ChannelAttributes,
    ChooseAttributes,
    ChooseEachAttributes,
    ConvolutionAttributes,
    CustomAttributes,
    ExpertLinearAttributes,
    FusionAttributes,
    GroupAttributes,
    GroupedAttributes,
    LinearAttributes,
    MatmulAttributes,
    MessageAttributes,
    NormAttributes,
    OverlappedAttributes,
    PagedAppendAttributes,
    PoolAttributes,
    ProjectionAttributes,
    ReduceAttributes,
    RemapAttributes,
    RotaryAttributes,
    RowsAttributes,
    SampleAttributes,
    ScanAttributes,
    ScatterAttributes,
    ShapeAttributes,
    SumNormAttributes,
    TopKAttributes,
    TransposeAttributes,
)
from ark.ir.pool_attributes import UnpoolAttributes

ATTRIBUTES: Mapping[str, type[Attributes]] = {
    "send": MessageAttributes,
    "recv": MessageAttributes,
    **dict.fromkeys(
        (
            f"channel_{word}"
            for word in ["put", "get", "reduce", "signal", "wait", "flush", "send", "recv"]
        ),
        ChannelAttributes,
    ),
    "custom": CustomAttributes,
    "channel_custom": CustomAttributes,
    "fusion": FusionAttributes,
    "quantized_linear": GroupAttributes,
    "reshape": ShapeAttributes,
    "kv_append": AppendAttributes,
    "paged_append": PagedAppendAttributes,
    "gather": AxisAttributes,
    "gather_elements": AxisAttributes,
    "scatter_elements": ScatterAttributes,
    "scan": ScanAttributes,
    "rotary_embedding": RotaryAttributes,
    "rope_kv": ProjectionAttributes,
    "attention": AttentionAttributes,
    "attention_gradient": AttentionAttributes,
    "paged_attention": AttentionAttributes,
    "matmul": MatmulAttributes,
    "matmul_all_reduce": OverlappedAttributes,
    "matmul_reduce_scatter": OverlappedAttributes,
    "all_gather_matmul": OverlappedAttributes,
    "add_parts": AddPartsAttributes,
    "add_parts_norm": NormAttributes,
    "linear": LinearAttributes,
    "layernorm": NormAttributes,
    "rmsnorm": NormAttributes,
    "rounded_rmsnorm": NormAttributes,
    "all_reduce_norm": SumNormAttributes,
    **dict.fromkeys(
        ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod"), ReduceAttributes
    ),
    "concat": AxisAttributes,
    **dict.fromkeys(("convolution", "depthwise"), ConvolutionAttributes),
    "grouped_convolution": GroupedAttributes,
    "pool": PoolAttributes,
    "unpool": UnpoolAttributes,
    "remap": RemapAttributes,
    "transpose": TransposeAttributes,
    "topk": TopKAttributes,
    "expert_linear": ExpertLinearAttributes,
    "embed": RowsAttributes,
    "advance": RowsAttributes,
    "sample": SampleAttributes,
    "choose": ChooseAttributes,
    "choose_each": ChooseEachAttributes,
}
