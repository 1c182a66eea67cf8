"""The attributes of ops: a frozen struct for each kind of node that has attributes.

A node holds its attributes as plain values, which can be printed and compared. `Node.read` returns
them as the op's struct, so that mypy reports a misspelt name. The user's function makes the struct
and gives its `to_node()` to the graph. ark.ir.attribute_table maps each op to its struct.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import structs

from ark.ir.attribute_forms import Attributes, PartialAttributes
from ark.ir.epilogues import Epilogue

MaskForm = Literal["", "seen", "hidden", "added"]


class AlongAttributes(PartialAttributes, frozen=True):
    """The axis of any op along one dimension, for code that serves several such ops."""

    axis: int


class MessageAttributes(Attributes, frozen=True):
    """Messages between two ranks. tag: sends and receives of one tag are paired, in
    program order.
    """

    remote_rank: int
    tag: int


class ChannelAttributes(Attributes, frozen=True):
    """Ops on a channel between two ranks. engine: the way in which bytes are transferred. op: the
    function that combines them with the values at the target.
    """

    peer: int
    tag: int
    engine: str
    op: str = ""


class CustomAttributes(Attributes, frozen=True):
    """Custom ops. name, digest: of the user's declaration (form). op: its number in this process.
    waits, signals: channels as (peer, tag); None if the op accesses only this rank's memory.
    """

    name: str
    digest: str
    constants: dict[str, Any]
    op: int
    waits: list[tuple[int, int]] | None = None
    signals: list[tuple[int, int]] | None = None


class FusionAttributes(Attributes, frozen=True):
    """Fused regions of elementwise ops and sums. The fields are those of ark.tasks.fusion."""

    first: list[Any]
    each: list[Any]
    sums: list[Any]
    last: list[Any]
    axis: int
    count: int
    stores: list[int]


class GroupAttributes(Attributes, frozen=True):
    """Quantised linear layers. group: the number of columns of a weight that share a scale."""

    group: int


class ShapeAttributes(Attributes, frozen=True):
    """Reshapes. shape: the shape of the result."""

    shape: list[int]


class AppendAttributes(Attributes, frozen=True):
    """Appends to caches. codes: the element type of a quantised cache; "" for a cache of floats."""

    codes: str = ""


class PagedAppendAttributes(AppendAttributes, frozen=True, kw_only=True):
    """Appends to caches in pages. apart: True if no row of an iteration reads a position that
    another row of the same iteration appends.
    """

    apart: bool


class AxisAttributes(Attributes, frozen=True):
    """Ops along one dimension, such as gather and concat. axis: the dimension."""

    axis: int


class ScatterAttributes(AxisAttributes, frozen=True):
    """Scatters. function: how an update is combined with the old element."""

    function: Literal["set", "add", "mul", "maximum", "minimum"]


class ScanAttributes(AxisAttributes, frozen=True):
    """Running sums and products, and linear recurrences (see ark.ops.scans.recurrence). exclusive:
    an element is not part of its own sum. reverse: sums run from the end.
    """

    function: Literal["add", "mul", "linear"]
    exclusive: bool
    reverse: bool


class RotaryAttributes(Attributes, frozen=True):
    """Rotary embeddings. interleaved: True if a pair is two neighbours; False if it is an element
    of a head's first half and the corresponding one of its second half.
    """

    head_dim: int
    interleaved: bool


class ProjectionAttributes(Attributes, frozen=True):
    """The columns of a projection: `heads` heads of queries, then kv_heads heads of keys and
    kv_heads heads of values.
    """

    heads: int
    kv_heads: int
    head_dim: int


class AttentionAttributes(Attributes, frozen=True):
    """Attention. placed: an input is the position. sinks: an input has one sink score per head.
    by_rows: keys and values have one row per position, with all heads side by side. paged: keys and
    values are in pages. mask: the meaning of the last input: true for visible keys, true for hidden
    keys, or numbers that are added to the scores; "" if there is no mask. fill: the score of a
    hidden key. strict: a row that sees no key gives NaN, as softmax does, instead of zeros. The
    other attributes are described at ark.attention.
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
        """True if mask, scores and layout are those of an ordinary decoder, whose attention is
        decoded in splits.
        """
        usual = AttentionAttributes(heads=self.heads, head_dim=self.head_dim, scale=self.scale)
        return self == usual

    @property
    def split(self) -> bool:
        """True if attention of a single row over a cache in rows can be decoded in splits, which
        also serve sinks.
        """
        return structs.replace(self, sinks=False).plain


class MatmulAttributes(Attributes, frozen=True):
    """Matrix products. finish: the expression whose value is stored (the epilogue), in terms of the
    sum and of the inputs after both operands. gated: neighbouring columns are a gate and the value
    that it scales. rope_kv: neighbouring columns are rotated as pairs. rotary: the width of heads
    whose halves are rotated, by the cosines and sines that are the last two inputs. windows:
    describes windows of an image (ark.tasks.matmul_params.WindowParams) whose matrix is one
    operand. cut: rows and columns of tiles, and the number of parts of k.
    """

    transpose_a: bool
    transpose_b: bool
    tf32: bool = False
    finish: list[Any] | None = None
    gated: bool = False
    rope_kv: ProjectionAttributes | None = None
    rotary: int = 0
    windows: dict[str, Any] | None = None
    cut: tuple[int, int, int] | None = None

    @property
    def transposes(self) -> tuple[bool, bool]:
        """(transpose_a, transpose_b)."""
        return self.transpose_a, self.transpose_b


class OverlappedAttributes(Attributes, frozen=True):
    """A product fused with a collective. rows: the product's number of rows."""

    transpose_a: bool
    transpose_b: bool
    rows: int


class WindowAttributes(Attributes, frozen=True):
    """Windows, with one number for each spatial dimension. size: of a window. sizes: the number of
    windows. stride: from one window to the next. dilation: from one element of a window to the
    next. before: padding before the first element of the input.
    """

    size: list[int]
    sizes: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]


class ConvolutionAttributes(WindowAttributes, frozen=True):
    """Convolutions. finish: the expression whose value is stored, as in MatmulAttributes."""

    finish: list[Any] | None = None


class GroupedAttributes(ConvolutionAttributes, frozen=True):
    """Convolutions in groups. channels_first: True if the input is (n, channels, height, width)
    instead of (n, height, width, channels).
    """

    channels_first: bool = False


class PoolAttributes(WindowAttributes, frozen=True, kw_only=True):
    """Pools. counted: True if padding counts in a mean."""

    function: Literal["max", "mean", "sum"]
    counted: bool


class RemapAttributes(Attributes, frozen=True):
    """Copies by index arithmetic. rules: how the index in each dimension of the source is computed
    (ark.tasks.remap). fill: the value of elements outside of the source. shape: of the result.
    """

    rules: list[Any]
    fill: float
    shape: list[int]


class TransposeAttributes(Attributes, frozen=True):
    """Transposes. perm: for each dimension of the result, the number of the source's dimension."""

    perm: list[int]


class AddPartsAttributes(Attributes, frozen=True):
    """Sums of a product's parts of k. expr: the stored value in terms of the parts, in order, and
    of the other inputs. tile: the tile size of the product that computed the parts.
    """

    expr: list[Any]
    tile: tuple[int, int]


class LinearAttributes(Attributes, frozen=True):
    """Linear layers of few rows. prologue: the operation on the input. epilogue: the operation on
    the sums. With "sample" each tile finds one candidate token, among share number `share` of
    `shares` of the logits; `counter` is the name of the counters with which tasks tell peers that
    the candidates have arrived. ranks: the number of ranks whose partial results are added to give
    the input; rank 0's comes at position `first`. bias: an input has one number for each row of the
    weight, which is added to the sums before the epilogue.
    """

    prologue: Literal["none", "rmsnorm"]
    epilogue: Epilogue
    eps: float | None = None
    bias: bool = False
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
    """Norms. eps: the number added to the mean of squares; 0.0 for other ops on rows. type: the
    type to which rows are rounded before they are multiplied by the weight; "" if they are not
    rounded.
    """

    eps: float = 0.0
    type: str = ""


class SumNormAttributes(NormAttributes, frozen=True, kw_only=True):
    """All-reduces with a norm. columns: the number of columns of a normalised row."""

    columns: int


class ReduceAttributes(AxisAttributes, frozen=True, kw_only=True):
    """Reductions. term: the expression of the inputs whose values are reduced; None if the elements
    of the input are.
    """

    function: Literal["sum", "mean", "max", "min", "prod", "squares"]
    keepdims: bool
    term: list[Any] | None = None


class TopKAttributes(Attributes, frozen=True):
    """Top-k. least: True if the smallest elements are chosen. softmax: True if the softmax of the
    chosen elements is stored in place of them.
    """

    k: int
    least: bool = False
    softmax: bool = False


class ExpertLinearAttributes(Attributes, frozen=True):
    """Linear layers of experts. first: the number of the first expert in the weight. of: the total
    number of experts; 0 if the weight contains all of them. The others describe an epilogue
    (ark.tasks.experts): the numbers of weights, tables and scores, the stored expression, whether
    the slots of a row are added up, and whether a residual is added to that.
    """

    first: int = 0
    of: int = 0
    weights: int = 1
    tables: int = 0
    scores: int = 0
    expr: list[Any] | None = None
    total: bool = False
    residual: bool = False


class RowsAttributes(Attributes, frozen=True):
    """Ops on the tokens of an iteration. rows: their number."""

    rows: int


class SampleAttributes(Attributes, frozen=True):
    """Sampling. shares: the number of ranks that each compute an equal part of the logits."""

    shares: int = 1


class ChooseAttributes(SampleAttributes, frozen=True, kw_only=True):
    """The choice among candidate tokens. tiles: the number of tiles, each of which has found one
    candidate. counter: the name of the counters that count the arrival of peers' candidates, with
    `signals` signals per peer; "" if each rank has all logits.
    """

    tiles: int
    counter: str = ""
    signals: int = 0


class ChooseEachAttributes(Attributes, frozen=True):
    """The choice for several sequences. tiles: each tile has found one candidate per sequence."""

    tiles: int
