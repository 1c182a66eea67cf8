"""The attributes of ops by name: a frozen struct for each kind of node that has one.

A node holds its attributes as plain values, which print and compare; `Node.read` gives them as the
op's struct, so that a misspelt name fails in mypy. The user's function makes the struct and hands
its `to_node()` to the graph. ATTRIBUTES lists which op has which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from ark.ir.attribute_forms import Attributes, PartialAttributes

MaskForm = Literal["", "seen", "hidden", "added"]


class AlongAttributes(PartialAttributes, frozen=True):
    """axis: the dimension along which an op works."""

    axis: int


class MessageAttributes(Attributes, frozen=True):
    """tag: which pairs a send with its recv, in program order."""

    remote_rank: int
    tag: int


class ChannelAttributes(Attributes, frozen=True):
    """engine: by which bytes travel. op: the function that combines them with the values there."""

    peer: int
    tag: int
    engine: str
    op: str = ""


class CustomAttributes(Attributes, frozen=True):
    """name, digest: of the op's form. op: its number in this process. waits, signals: (peer, tag)
    of channels; None where the op touches this rank's memory alone.
    """

    name: str
    digest: str
    constants: dict[str, Any]
    op: int
    waits: list[tuple[int, int]] | None = None
    signals: list[tuple[int, int]] | None = None


class FusionAttributes(Attributes, frozen=True):
    """The fields of ark.tasks.fusion.FusionParams that do not follow from operands."""

    first: list[Any]
    each: list[Any]
    sums: list[Any]
    last: list[Any]
    axis: int
    count: int
    stores: list[int]


class GroupAttributes(Attributes, frozen=True):
    """group: columns of a weight that have one scale."""

    group: int


class ShapeAttributes(Attributes, frozen=True):
    """shape: of the result."""

    shape: list[int]


class AppendAttributes(Attributes, frozen=True):
    """codes: the name of the type of codes that a cache has; "" for floats."""

    codes: str = ""


class PagedAppendAttributes(AppendAttributes, frozen=True, kw_only=True):
    """apart: no row of an iteration reads what another one appends."""

    apart: bool


class AxisAttributes(Attributes, frozen=True):
    """axis: the dimension along which indices point."""

    axis: int


class ScatterAttributes(AxisAttributes, frozen=True):
    """function: how an update joins the element that is there."""

    function: Literal["set", "add", "mul", "maximum", "minimum"]


class ScanAttributes(AxisAttributes, frozen=True):
    """exclusive: an element is not in its own sum. reverse: sums begin at the end."""

    function: Literal["add", "mul"]
    exclusive: bool
    reverse: bool


class RotaryAttributes(Attributes, frozen=True):
    """interleaved: pairs are neighbours, else the halves of a head."""

    head_dim: int
    interleaved: bool


class ProjectionAttributes(Attributes, frozen=True):
    """Columns of a projection: heads of queries, then kv_heads of keys and as many of values."""

    heads: int
    kv_heads: int
    head_dim: int


class AttentionAttributes(Attributes, frozen=True):
    """placed: an input is the position. sinks: an input holds a score a head. by_rows: keys and
    values have a row for each position, with all heads. paged: they lie in pages. mask: the last
    input is true for keys that are seen, or for those that are hidden, or is added to scores. fill:
    the score of a hidden key. strict: a row that sees no key is NaN, as softmax has it, not 0. The
    others are described at ark.attention.
    """

    heads: int
    head_dim: int
    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    placed: bool = True
    sinks: bool = False
    by_rows: bool = False
    paged: bool = False
    mask: MaskForm = ""
    fill: float = -math.inf
    strict: bool = False

    @property
    def plain(self) -> bool:
        """True where mask, scores and layout are a decoder's; such attention decodes by splits."""
        usual = AttentionAttributes(heads=self.heads, head_dim=self.head_dim, scale=self.scale)
        return self == usual


class MatmulAttributes(Attributes, frozen=True):
    """finish: the expression that ends sums, of the sum and the inputs behind both sides. gated,
    rope_kv: neighbouring columns are a gate and its row, or are rotated. windows: what one side is
    of an image (ark.tasks.matmul_params.WindowParams). cut: rows and columns of tiles, parts of k.
    """

    transpose_a: bool
    transpose_b: bool
    tf32: bool = False
    finish: list[Any] | None = None
    gated: bool = False
    rope_kv: ProjectionAttributes | None = None
    windows: dict[str, Any] | None = None
    cut: tuple[int, int, int] | None = None

    @property
    def transposes(self) -> tuple[bool, bool]:
        """Of both sides."""
        return self.transpose_a, self.transpose_b


class OverlappedAttributes(Attributes, frozen=True):
    """A product and the collective that it meets. rows: of the product."""

    transpose_a: bool
    transpose_b: bool
    rows: int


class WindowAttributes(Attributes, frozen=True):
    """Windows of each spatial dimension. size: of a window. sizes: how many there are. stride: from
    one to the next. dilation: from one element to the next. before: padding before the first.
    """

    size: list[int]
    sizes: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]


class ConvolutionAttributes(WindowAttributes, frozen=True):
    """finish: as of MatmulAttributes."""

    finish: list[Any] | None = None


class PoolAttributes(WindowAttributes, frozen=True, kw_only=True):
    """counted: a mean counts padding, too."""

    function: Literal["max", "mean", "sum"]
    counted: bool


class RemapAttributes(Attributes, frozen=True):
    """rules: of each dimension of the source (ark.tasks.remap). fill: outside of it. shape: of the
    result.
    """

    rules: list[Any]
    fill: float
    shape: list[int]


class TransposeAttributes(Attributes, frozen=True):
    """perm: the source's dimension of each of the result."""

    perm: list[int]


class AddPartsAttributes(Attributes, frozen=True):
    """expr: of the parts of a sum, in order, and the other inputs. tile: of what made the parts."""

    expr: list[Any]
    tile: tuple[int, int]


class LinearAttributes(Attributes, frozen=True):
    """prologue: done to rows before. epilogue: done where sums end; with "sample" tiles have a
    candidate each, of one share of the logits, and counter names what tells peers that they have
    theirs. ranks: whose shares the input is, the sum's first one at `first`.
    """

    prologue: Literal["none", "rmsnorm"]
    epilogue: Literal["store", "add", "swiglu", "rope_kv", "sample"]
    eps: float | None = None
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    tiles: int = 0
    shares: int = 1
    share: int = 0
    ranks: int = 1
    first: int = 0
    counter: str = ""


class NormAttributes(Attributes, frozen=True):
    """eps: added to the mean of squares; 0.0 for ops over rows that are no norms. type: to which
    rows are rounded before they are multiplied by the weight; empty where they are not.
    """

    eps: float = 0.0
    type: str = ""


class SumNormAttributes(NormAttributes, frozen=True, kw_only=True):
    """columns: of a row that is normed."""

    columns: int


class ReduceAttributes(AxisAttributes, frozen=True, kw_only=True):
    """term: the expression of the inputs whose values are reduced; None: those of the input."""

    function: Literal["sum", "mean", "max", "min", "prod"]
    keepdims: bool
    term: list[Any] | None = None


class TopKAttributes(Attributes, frozen=True):
    """least: the smallest are chosen."""

    k: int
    least: bool = False


class ExpertLinearAttributes(Attributes, frozen=True):
    """The weight has the experts from `first` on, of `of`; 0: all there are."""

    first: int = 0
    of: int = 0


class RowsAttributes(Attributes, frozen=True):
    """rows: tokens of an iteration."""

    rows: int


class SampleAttributes(Attributes, frozen=True):
    """shares: equal parts of the logits that ranks make."""

    shares: int = 1


class ChooseAttributes(SampleAttributes, frozen=True, kw_only=True):
    """tiles: of which each has a candidate. counter: the name of the peers' counters that say when
    their candidates are there, which count `signals` of each; "" where there are none.
    """

    tiles: int
    counter: str = ""
    signals: int = 0


class ChooseEachAttributes(Attributes, frozen=True):
    """tiles: of which each has a candidate of each sequence."""

    tiles: int


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
    "convolution": ConvolutionAttributes,
    "pool": PoolAttributes,
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
