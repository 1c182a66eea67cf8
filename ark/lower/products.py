"""Properties of a matrix product's node: its operands, shape and parameters, and whether warpgroups
(warps that issue one matrix instruction together) can compute it. Called by
ark.lower.rewrite.cut_products and by the lowering of matmul.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.ir.attributes import MatmulAttributes
from ark.ir.dtype import fp32
from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.boxed import SIDES, aligned, depth_of, lies_along, wants_along
from ark.lower.codes import multiplies_codes
from ark.lower.cuts import Cut, candidates
from ark.lower.merge import merge
from ark.lower.registry import get
from ark.machine import Machine
from ark.tasks.matmul_params import MatmulParams, PixelParams, WindowParams
from ark.tasks.matmul_windows import in_parts

# Types of nodes that fuse a product with a collective before or after it.
SUM, SHARE, GATHER = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
JOINED = (SUM, SHARE, GATHER)


def stores_singly(given: MatmulAttributes) -> bool:
    """True if each element of the result is computed from one column of the product, not from a
    pair of columns as a gated activation or a rotary embedding is.
    """
    return not (given.gated or given.rotary) and given.rope_kv is None


@dataclass(frozen=True)
class Product:
    """A matrix product as lowering sees it. tensors: the two operands, addends, and the result.
    shape: the result's two batch dimensions, rows and columns. depth: the number of elements of k.
    cut: the tile size and the number of parts of k, or None if they are not chosen yet.
    """

    node: Node
    attributes: MatmulAttributes
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]
    depth: int
    cut: Cut | None

    @property
    def plain(self) -> bool:
        """True if both operands are matrices in memory (not images), and each element
        of the result is computed from one column of the product.
        """
        given = self.attributes
        return stores_singly(given) and given.windows is None and given.pixels is None

    @property
    def asks_tile(self) -> bool:
        """True if the user's hints determine the tile size or the number of parts of k."""
        hints = self.node.hints
        return hints is not None and any(
            asked is not None for asked in (hints.tile, hints.tasks, hints.product)
        )

    @property
    def dtypes(self) -> list[str]:
        """The names of both operands' element types."""
        return [t.dtype.name for t in self.node.inputs[:2]]

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The tensors, without an image whose windows are the left operand and of which box copies
        can load parts of k.
        """
        windows, image = self.params.windows, self.node.inputs[0]
        left = windows is not None and in_parts(windows, image.shape, image.dtype.itemsize)
        return self.tensors[1:] if left else self.tensors

    @property
    def params(self) -> MatmulParams:
        """The parameters of the product's task kind if the whole result is a single tile."""
        given = self.attributes
        return MatmulParams(
            transpose_a=given.transpose_a,
            transpose_b=given.transpose_b,
            tile=(self.shape[2], self.shape[3]),
            tf32=given.tf32,
            windows=None if given.windows is None else WindowParams.from_plan(given.windows),
            pixels=None if given.pixels is None else PixelParams.from_plan(given.pixels),
        )

    def loads_boxes(self, machine: Machine) -> bool:
        """True if warpgroups compute the product. This requires that the kernel variant has
        warpgroups, that the result is at least as wide as their tiles, that they support the types,
        and that the rows of both operands are aligned for box copies. Other products use device
        functions without warpgroups.
        """
        node, given = self.node, self.attributes
        if machine.variant.name != "matrix":
            return False
        if multiplies_codes(node, machine) or not self.plain:
            return True
        left, right, *_, out = self.tensors
        narrow, size = given.transpose_b, left.dtype.itemsize
        return (
            len(out.shape) <= MAX_FOLDED_DIMS
            and bool(candidates(self.shape, self.depth, size, machine, False, narrow, plain=True))
            and (left.dtype != fp32 or given.tf32)
            and (not wants_along(node) or all(lies_along(node, side) for side in SIDES))
            and left.dtype.bits == right.dtype.bits
            and aligned(left)
            and aligned(right)
        )


def product_of(node: Node) -> Product:
    """Describes the product that a matmul node computes: its operands, sizes, parameters and
    cut.
    """
    tensors, given = [*node.inputs, *node.outputs], node.read(MatmulAttributes)
    cut = None if given.cut is None else Cut(*given.cut)
    if len(node.outputs[0].shape) > MAX_FOLDED_DIMS:
        tensors = merge(tensors, kept=2)
    if given.rope_kv is not None:  # a copy of the newest keys and values follows the inputs
        tensors = [*node.inputs, *node.outputs[1:], node.outputs[0]]
    shape = fold(tensors[-1].shape)
    if cut is not None and cut.parts > 1:
        shape = (1, 1, *shape[2:])
    elif given.gated:
        shape = (*shape[:3], 2 * shape[3])
    elif given.rope_kv is not None:
        shape = (*shape[:3], node.inputs[1].shape[-2 if given.transpose_b else -1])
    depth = depth_of(node)
    if given.windows is not None:
        depth = node.inputs[1 - WindowParams.from_plan(given.windows).side].shape[-1]
    return Product(node, given, tuple(tensors), tuple(shape), depth, cut)


def travels(graph: Graph, node: Node) -> bool:
    """True if a collective reads the node's result, or if the node reads the result of a
    collective. Each tile of such a product is a separate task. So a tile can be sent as soon as it
    is complete, or computed as soon as its inputs have arrived.
    """
    if graph.world_size == 1:
        return False
    written = {t.buffer.id for t in node.outputs}
    read = {t.buffer.id for t in node.inputs}
    return any(
        (entry.all_ranks or entry.names_ranks)
        and (
            (other.type not in (SUM, SHARE) and any(t.buffer.id in written for t in other.inputs))
            or any(t.buffer.id in read for t in other.outputs)
        )
        for other in graph.nodes
        if not other.virtual
        for entry in (get(other.type),)
    )
