"""The attributes of ops: a frozen struct for each kind of node that has attributes.

A node holds its attributes as plain values, which can be printed and compared. `Node.read` returns
them as the op's struct, so that mypy reports a misspelt name. The user's function makes the struct
and gives its `to_node()` to the graph. ark.ir.attribute_table maps each op to its struct.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import structs

from ark.ir.attribute_forms import Attributes, PartialAttributes, ReduceFunction
from ark.ir.epilogues import Epilogue

MaskForm = Literal["", "seen", "hidden", "added"]


class AlongAttributes(PartialAttributes, frozen=True):
    """The attribute `axis`, for code that handles several ops that work along one dimension."""

    axis: int


class MessageAttributes(Attributes, frozen=True):
    """Messages between two ranks. A send and a receive belong together if their tags are equal."""

    remote_rank: int
    tag: int


class ChannelAttributes(Attributes, frozen=True):
    """The attributes of ops on a channel between two ranks. engine: how bytes are transferred
    (stores by threads, copy engine, ...). op: how the values that arrive are combined with the
    values at the target.
    """

    peer: int
    tag: int
    engine: str
    op: str = ""


class CustomAttributes(Attributes, frozen=True):
    """The attributes of custom ops. name, digest: the name and the hash of the user's declaration.
    op: the declaration's number in this process. waits, signals: channels as (peer, tag); None if
    the op accesses only this rank's memory.
    """

    name: str
    digest: str
    constants: dict[str, Any]
    op: int
    waits: list[tuple[int, int]] | None = None
    signals: list[tuple[int, int]] | None = None


class FusionAttributes(Attributes, frozen=True):
    """The attributes of `fusion` nodes. The fields are those of ark.tasks.fusion."""

    first: list[Any]
    each: list[Any]
    sums: list[Any]
    last: list[Any]
    axis: int
    count: int
    stores: list[int]


class RowFusionAttributes(Attributes, frozen=True):
    """The attributes of `row_fusion` nodes. The fields are those of ark.tasks.row_fusion."""

    columns: int
    stages: list[Any]
    stores: list[int]


class GroupAttributes(Attributes, frozen=True):
    """Attributes of quantised linear layers. group: how many columns of a weight share a scale."""

    group: int


class ShapeAttributes(Attributes, frozen=True):
    """The attributes of reshapes. shape: the shape of the result."""

    shape: list[int]


class AppendAttributes(Attributes, frozen=True):
    """Appends of rows to a KV cache. codes: its element type if it is quantised, otherwise ""."""

    codes: str = ""


class PagedAppendAttributes(AppendAttributes, frozen=True, kw_only=True):
    """The attributes of ops that append rows to a KV cache in pages. apart: True if no row of an
    iteration reads a position that another row of the same iteration appends.
    """

    apart: bool


class AxisAttributes(Attributes, frozen=True):
    """The attributes of ops along one dimension, such as gather and concat. axis: the dimension."""

    axis: int


class ScatterAttributes(AxisAttributes, frozen=True):
    """The attributes of scatters. function: how an update is combined with the old element."""

    function: Literal["set", "add", "mul", "maximum", "minimum"]


class ScanAttributes(AxisAttributes, frozen=True):
    """Running sums and products, and linear recurrences (see ark.ops.scans.recurrence). exclusive:
    an element is not part of its own sum. reverse: sums run from the end.
    """

    function: Literal["add", "mul", "linear"]
    exclusive: bool
    reverse: bool


class RotaryAttributes(Attributes, frozen=True):
    """The attributes of rotary embeddings. interleaved: True if two neighbouring elements are
    rotated as a pair; False if an element of a head's first half and the corresponding element of
    its second half are.
    """

    head_dim: int
    interleaved: bool


class ProjectionAttributes(Attributes, frozen=True):
    """The columns of a projection: heads of queries, then kv_heads heads of keys and of values.
    head_eps: above 0 if heads of queries and keys are normalised, with the last input as weights.
    """

    heads: int
    kv_heads: int
    head_dim: int
    head_eps: float = 0.0


class AttentionAttributes(Attributes, frozen=True):
    """The attributes of attention. placed: True if one of the inputs is the position, which is the
    number of preceding tokens. sinks: True if one of the inputs has a sink score for each head.
    by_rows: True if keys and values have one row per position, with all heads side by side. paged:
    True if keys and values are in pages. mask: whether the last input is true for visible keys, is
    true for hidden keys, or is added to the scores; "" if there is no mask. fill: the score of a
    hidden key. strict: True if the result of a row that sees no key is NaN; otherwise it is 0.
    logarithms: True if a second result has the logarithm of each row's sum of exponentials.
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
    logarithms: bool = False

    @property
    def plain(self) -> bool:
        """True if all attributes except the number and size of the heads and the scale have their
        defaults. Such attention of a single row over a cache can be divided into splits (parts of
        the positions) that processors compute separately.
        """
        usual = AttentionAttributes(heads=self.heads, head_dim=self.head_dim, scale=self.scale)
        return self == usual

    @property
    def split(self) -> bool:
        """Like `plain`, but True for attention with sinks or a window, too."""
        return structs.replace(self, sinks=False, window=0).plain


class MatmulAttributes(Attributes, frozen=True):
    """The attributes of matrix products. finish: the epilogue, an expression of the sum and of the
    inputs after the two operands; its value is stored. gated: True if each pair of neighbouring
    columns is a gate and the value that the gate scales. rope_kv: the attributes of a rotary
    embedding that rotates neighbouring columns as pairs; None without it. rotary: the width of a
    head, if a rotary embedding rotates each element of a head's first half with the corresponding
    element of its second half; 0 without it. The cosines and sines are the last two inputs.
    windows, pixels: the convolution windows of an image, if one operand is the matrix of these
    windows, and those of a convolution whose weights' gradient the product is
    (ark.tasks.matmul_params). cut: (rows, columns, parts): a tile's size, and the parts of k.
    """

    transpose_a: bool
    transpose_b: bool
    tf32: bool = False
    finish: list[Any] | None = None
    gated: bool = False
    rope_kv: ProjectionAttributes | None = None
    rotary: int = 0
    windows: dict[str, Any] | None = None
    pixels: dict[str, Any] | None = None
    cut: tuple[int, int, int] | None = None

    @property
    def transposes(self) -> tuple[bool, bool]:
        """(transpose_a, transpose_b)."""
        return self.transpose_a, self.transpose_b


class OverlappedAttributes(Attributes, frozen=True):
    """Attributes of a product fused with a collective. rows: the number of rows of the product."""

    transpose_a: bool
    transpose_b: bool
    rows: int


class WindowAttributes(Attributes, frozen=True):
    """The attributes of ops over windows, with one number for each spatial dimension. size: the
    size of a window. sizes: the number of windows. stride: the distance from one window to the
    next. dilation: the distance from one element of a window to the next. before: the padding
    before the first element of the input.
    """

    size: list[int]
    sizes: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]


class ConvolutionAttributes(WindowAttributes, frozen=True):
    """Attributes of convolutions. finish: the stored expression, as in MatmulAttributes."""

    finish: list[Any] | None = None


class GroupedAttributes(ConvolutionAttributes, frozen=True):
    """The attributes of convolutions in groups. channels_first: True if the input is (n, channels,
    height, width) instead of (n, height, width, channels).
    """

    channels_first: bool = False


class PoolAttributes(WindowAttributes, frozen=True, kw_only=True):
    """The attributes of pools. counted: True if padding counts in a mean."""

    function: Literal["max", "argmax", "mean", "sum"]
    counted: bool


class RemapAttributes(Attributes, frozen=True):
    """The attributes of copies by index arithmetic, such as padding and flips. rules: how the index
    in each dimension of the source is computed (ark.tasks.remap). fill: the value of elements
    outside of the source. shape: the shape of the result.
    """

    rules: list[Any]
    fill: float
    shape: list[int]


class TransposeAttributes(Attributes, frozen=True):
    """Attributes of transposes. perm: by dimension of the result, the dimension of the source."""

    perm: list[int]


class AddPartsAttributes(Attributes, frozen=True):
    """The attributes of an op that adds up the partial results of a product whose inner dimension k
    was divided into parts. expr: the expression of the stored value; its variables are the partial
    results, in order, and then the other inputs. tile: the tile size of the product.
    """

    expr: list[Any]
    tile: tuple[int, int]


class LinearAttributes(Attributes, frozen=True):
    """The attributes of linear layers of few rows. prologue: the operation on the input. epilogue:
    the operation on the sums. bias: True if one of the inputs is a bias, which is added to the sums
    before the epilogue. ranks: the number of ranks whose partial results are added up to give the
    layer's input; the partial result of rank 0 is input number `first`.

    The other attributes are for the epilogue "sample", which finds candidates for the next token.
    The logits are divided into `shares` parts; this node computes part number `share`. Each of its
    `tiles` tiles finds one candidate. The counters named `counter` count the candidates that peers
    have sent.
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
    """The attributes of norms. eps: the number added to the mean of squares; 0.0 for other ops on
    rows. type: the type to which rows are rounded before they are multiplied by the weight; "" if
    they are not rounded.
    """

    eps: float = 0.0
    type: str = ""


class SumNormAttributes(NormAttributes, frozen=True, kw_only=True):
    """Attributes of all-reduces fused with a norm. columns: the length of a normalised row."""

    columns: int


class ReduceAttributes(AxisAttributes, frozen=True, kw_only=True):
    """Reductions. term: an expression of the inputs that is reduced; None for their elements."""

    function: ReduceFunction
    keepdims: bool
    term: list[Any] | None = None


class TopKAttributes(Attributes, frozen=True):
    """Top-k. least: True to choose the k smallest values, not the largest. softmax: True to store
    the chosen values' softmax. row_softmax: True to choose from the softmax of the row.
    """

    k: int
    least: bool = False
    softmax: bool = False
    row_softmax: bool = False


class ExpertLinearAttributes(Attributes, frozen=True):
    """The attributes of linear layers of a mixture of experts, in which each row uses some of the
    experts. first: the number of the first expert in this rank's weight. of: the total number of
    experts; 0 if the weight contains all of them. The other attributes describe an epilogue
    (ark.tasks.experts). weights, tables, scores: how many inputs there are of each of these kinds.
    expr: the expression whose value is stored. total: True if the results of a row's experts are
    added up. residual: True if a residual is added to this sum.
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
    """The attributes of ops on the tokens of an iteration. rows: the number of tokens."""

    rows: int


class SampleAttributes(Attributes, frozen=True):
    """The attributes of sampling a token. shares: the number of ranks, each of which computes an
    equal part of the logits.
    """

    shares: int = 1


class ChooseAttributes(SampleAttributes, frozen=True, kw_only=True):
    """The attributes of the op that chooses the next token among candidates. tiles: the number of
    tiles of the logits; each tile has found one candidate. counter: the name of the counters of
    candidates that have arrived from peers; "" if each rank has all logits. signals: how often each
    peer signals such a counter.
    """

    tiles: int
    counter: str = ""
    signals: int = 0


class ChooseEachAttributes(Attributes, frozen=True):
    """The attributes of the choice of the next token of several sequences. tiles: the number of
    tiles of the logits, each of which has found one candidate per sequence.
    """

    tiles: int
