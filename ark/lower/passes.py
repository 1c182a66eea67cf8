"""The compiler's passes: every rewrite of a graph between its front end and lowering, in the order
in which they run. ark.lower.prepare runs the list; `ark plan --passes` shows the graph after each
pass that changed it. To add a pass, write a function `(Graph, Context) -> Graph` in a new module
under ark/lower/rewrite and add its entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ark.ir.epilogues import GATED_PAIRS
from ark.ir.graph import Graph
from ark.lower.rewrite.align_operands import align_operands
from ark.lower.rewrite.cancel_transposes import cancel_transposes
from ark.lower.rewrite.compose_remaps import compose_remaps
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.cut_products import cut_products
from ark.lower.rewrite.fold_transposes import fold_transposes
from ark.lower.rewrite.fuse_all_reduce_norm import fuse_all_reduce_norm
from ark.lower.rewrite.fuse_chains import fuse_chains
from ark.lower.rewrite.fuse_epilogues import ENDED, fuse_epilogues
from ark.lower.rewrite.fuse_experts import fuse_experts
from ark.lower.rewrite.fuse_linear import fuse_linear
from ark.lower.rewrite.fuse_log_softmax import fuse_log_softmax
from ark.lower.rewrite.fuse_norm_scales import fuse_norm_scales
from ark.lower.rewrite.fuse_parts_norm import fuse_parts_norm
from ark.lower.rewrite.fuse_reduction_terms import REDUCTIONS, fuse_reduction_terms
from ark.lower.rewrite.fuse_regions import fuse_regions
from ark.lower.rewrite.fuse_rmsnorm import fuse_rmsnorm
from ark.lower.rewrite.fuse_rotary import fuse_rotary
from ark.lower.rewrite.fuse_rows import fuse_rows
from ark.lower.rewrite.fuse_sampling import CHOOSE, fuse_sampling
from ark.lower.rewrite.fuse_updates import fuse_updates
from ark.lower.rewrite.fuse_windows import fuse_windows
from ark.lower.rewrite.group_products import group_products
from ark.lower.rewrite.hoist_factors import hoist_factors
from ark.lower.rewrite.hoist_gathers import hoist_gathers
from ark.lower.rewrite.inline_all_reduce import inline_all_reduce
from ark.lower.rewrite.keep_row_order import keep_row_order
from ark.lower.rewrite.merge_equal import merge_equal
from ark.lower.rewrite.narrow_inputs import narrow_inputs
from ark.lower.rewrite.overlap_collectives import overlap_collectives
from ark.lower.rewrite.pack_weights import pack_weights
from ark.lower.rewrite.pad_rows import pad_rows
from ark.lower.rewrite.recompute import recompute
from ark.lower.rewrite.reorder_small_ops import reorder_small_ops
from ark.lower.rewrite.rotate_logits import rotate_logits
from ark.lower.rewrite.rotate_products import rotate_products
from ark.lower.rewrite.round_norm_inputs import round_norm_inputs
from ark.lower.rewrite.split_elementwise import split_elementwise
from ark.lower.rewrite.split_norms import split_norms
from ark.lower.rewrite.unpack_rows import unpack_rows
from ark.lower.rewrite.update_in_place import update_in_place
from ark.lower.rewrite.weights_first import weights_first
from ark.lower.variant_passes import channels_last, fuse_unit_attention


class Stage(Enum):
    """When a pass runs, and on which graph. Kernel variants divide work among warps differently."""

    GRAPH = "graph"
    """The pass runs on the whole graph, before the kernel variants are chosen."""
    KERNEL = "kernel"
    """The pass runs on the phases of one kernel, after its variant has been chosen."""
    ORDER = "order"
    """The pass runs on the whole graph and changes only the order of nodes."""
    CUT = "cut"
    """The pass runs on the whole graph after all others and sets or uses the tiles of ops."""


@dataclass(frozen=True)
class Pass:
    """One rewrite of the graph. why: the benefit of the pass. over: sets of node types; the pass
    runs only if the graph has a node of each set. gives: node types that only this pass creates.
    needs: passes that must run before. option: the planner's option that turns the pass off.
    """

    run: Callable[[Graph, Context], Graph]
    stage: Stage
    why: str
    over: tuple[tuple[str, ...], ...] = ()
    gives: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    option: str = "fuse"

    @property
    def name(self) -> str:
        return self.run.__name__

    def applies(self, graph: Graph) -> bool:
        """True if the graph has a node of each set of types in `over`."""
        return all(not graph.view.types.isdisjoint(types) for types in self.over)


PASSES: tuple[Pass, ...] = (
    Pass(
        fold_transposes,
        Stage.GRAPH,
        "Products and reductions read what was transposed; the transposed copy is not made.",
        over=(("transpose",),),
        option="",
    ),
    Pass(
        cancel_transposes,
        Stage.GRAPH,
        "Rows that are transposed before a linear layer and back behind it stay where they are.",
        over=(("transpose",),),
        needs=("fold_transposes",),
    ),
    Pass(
        fuse_rmsnorm,
        Stage.GRAPH,
        "An rmsnorm that is written op by op becomes one node, which reads each row once.",
        gives=("rounded_rmsnorm",),
    ),
    Pass(
        fuse_log_softmax,
        Stage.GRAPH,
        "A log-softmax whose rows are read for one element each is not stored.",
        over=(("log_softmax",), ("gather_elements",)),
        gives=("reduce_logsumexp",),
    ),
    Pass(
        fuse_rotary,
        Stage.GRAPH,
        "Rotary embeddings that are written op by op read both halves of a head in place.",
    ),
    Pass(
        channels_last,
        Stage.GRAPH,
        "Convolutions on matrix units read neighbouring channels, so channels come last.",
    ),
    Pass(
        pack_weights,
        Stage.GRAPH,
        "Products of one input with several weights become one product.",
        over=((*GATED_PAIRS, "attention", "paged_attention"), ("matmul",)),
        gives=("rope_kv", *GATED_PAIRS.values()),
        needs=("fold_transposes",),
        option="pack",
    ),
    Pass(
        fuse_unit_attention,
        Stage.GRAPH,
        "softmax(q k^T) v becomes one node, whose scores never reach memory.",
        over=(("softmax", "safe_softmax"), ("matmul",)),
        gives=("attention_gradient",),
        needs=("pack_weights",),
    ),
    Pass(
        keep_row_order,
        Stage.GRAPH,
        "Rows that a block permutes to windows stay in this order up to the next block.",
        needs=("fuse_unit_attention",),
    ),
    Pass(
        compose_remaps,
        Stage.GRAPH,
        "Shifts, slices and transposes of an image that follow each other become one copy.",
        over=(("remap", "transpose", "concat"),),
        needs=("keep_row_order",),
    ),
    Pass(
        unpack_rows,
        Stage.GRAPH,
        "Products of many rows read the values of quantised weights, which are made once.",
        over=(("matmul",),),
        needs=("pack_weights",),
        option="",
    ),
    Pass(
        align_operands,
        Stage.KERNEL,
        "Operands of matrix units are copied to aligned rows.",
        over=(("matmul",),),
        option="",
    ),
    Pass(
        fuse_linear,
        Stage.KERNEL,
        "A product of few rows takes in the norm before it and its epilogue.",
        over=(("matmul", "all_reduce"),),
        gives=("linear",),
        needs=("pack_weights",),
    ),
    Pass(
        split_norms,
        Stage.KERNEL,
        "Few long rows of a norm are divided among all processors.",
        over=(("layernorm", "reduce_squares"),),
        needs=("fuse_linear",),
    ),
    Pass(
        split_elementwise,
        Stage.KERNEL,
        "An elementwise result that is read in parts is computed in these parts.",
        needs=("fuse_linear",),
    ),
    Pass(
        fuse_regions,
        Stage.KERNEL,
        "Elementwise nodes with shared results and sums over one dimension become one node.",
        needs=("split_elementwise",),
    ),
    Pass(
        fuse_chains,
        Stage.KERNEL,
        "Elementwise nodes that follow each other become one expression.",
        gives=("elementwise",),
        needs=("fuse_regions",),
    ),
    Pass(
        fuse_rows,
        Stage.KERNEL,
        "Sums over rows are one node with the elementwise nodes between them.",
        over=(("reduce_sum", "reduce_mean", "layernorm"),),
        gives=("row_fusion",),
        needs=("fuse_chains",),
    ),
    Pass(
        fuse_updates,
        Stage.KERNEL,
        "A parameter and its moments are updated by one node, which reads each tensor once.",
        needs=("fuse_chains",),
    ),
    Pass(
        fuse_experts,
        Stage.KERNEL,
        "Products of chosen experts apply biases and gates, and add up the slots of a row.",
        over=(("expert_linear", "gather", "topk"),),
        needs=("fuse_chains",),
    ),
    Pass(
        narrow_inputs,
        Stage.KERNEL,
        "fp32 inputs of 16-bit products are rounded where they are made.",
        over=(("matmul", "linear", "attention"),),
        needs=("fuse_chains",),
    ),
    Pass(
        round_norm_inputs,
        Stage.KERNEL,
        "Rows that norms of several sequences read are also written in 16 bits.",
        over=(("linear",),),
        needs=("fuse_linear",),
    ),
    Pass(
        hoist_gathers,
        Stage.KERNEL,
        "Rows that no gather takes are not computed.",
        over=(("gather",),),
        needs=("narrow_inputs",),
    ),
    Pass(
        fuse_norm_scales,
        Stage.KERNEL,
        "The weight and the bias of a layer norm are applied in the norm.",
        over=(("layernorm",),),
        needs=("fuse_chains",),
    ),
    Pass(
        fuse_epilogues,
        Stage.KERNEL,
        "Elementwise work on a product's result is done where its sums end.",
        over=(ENDED,),
        needs=("fuse_norm_scales",),
    ),
    Pass(
        rotate_products,
        Stage.KERNEL,
        "Queries and keys are rotated where the sums of their products end.",
        over=(("matmul",), ("elementwise",)),
        needs=("fuse_rotary", "fuse_epilogues"),
    ),
    Pass(
        hoist_factors,
        Stage.KERNEL,
        "What depends on small tensors alone is computed once, not for each element.",
        needs=("fuse_epilogues",),
    ),
    Pass(
        fuse_reduction_terms,
        Stage.KERNEL,
        "What is reduced is computed where it is reduced.",
        over=(REDUCTIONS,),
        gives=("reduce_moments", "reduce_sums"),
        needs=("hoist_factors",),
    ),
    Pass(
        merge_equal,
        Stage.KERNEL,
        "What several layers compute from the same inputs, such as masks, is computed once.",
        needs=("fuse_reduction_terms",),
    ),
    Pass(
        update_in_place,
        Stage.KERNEL,
        "Rows are added to the zeros of a gradient in place.",
        over=(("scatter_elements",),),
        needs=("merge_equal",),
    ),
    Pass(
        rotate_logits,
        Stage.KERNEL,
        "Gathered logits lie with each rank's own share first, so that ranks share one plan.",
        over=(("sample",),),
        gives=("all_gather_rotated",),
    ),
    Pass(
        fuse_windows,
        Stage.KERNEL,
        "Convolutions read their windows in the image instead of a matrix of windows.",
        over=(("matmul",), ("remap",)),
        needs=("channels_last", "fuse_epilogues"),
    ),
    Pass(
        overlap_collectives,
        Stage.KERNEL,
        "A product and the collective that it meets become one node: tiles leave when done.",
        gives=("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"),
        needs=("fuse_epilogues",),
    ),
    Pass(
        fuse_all_reduce_norm,
        Stage.KERNEL,
        "A sum over ranks and the norm that reads it become one node.",
        over=(("all_reduce",), ("rmsnorm",)),
        gives=("all_reduce_norm",),
        needs=("overlap_collectives",),
    ),
    Pass(
        inline_all_reduce,
        Stage.KERNEL,
        "The layer that makes a share of a sum over ranks sends it to all readers itself.",
        over=(("all_reduce",), ("linear",)),
        needs=("fuse_linear", "fuse_all_reduce_norm"),
        option="",
    ),
    Pass(
        pad_rows,
        Stage.KERNEL,
        "Rows of odd length that products access begin at multiples of 16 bytes.",
        over=(("matmul",),),
        needs=("align_operands", "fuse_windows"),
        option="",
    ),
    Pass(
        reorder_small_ops,
        Stage.ORDER,
        "Small independent nodes run side by side, longest remaining path first.",
    ),
    Pass(
        group_products,
        Stage.ORDER,
        "Products that read the same input follow each other: their tiles run side by side.",
        needs=("reorder_small_ops",),
    ),
    Pass(
        weights_first,
        Stage.ORDER,
        "Small ops on weights alone run side by side at the beginning, where they wait for none.",
        needs=("group_products",),
    ),
    Pass(
        recompute,
        Stage.ORDER,
        "Activations that are read much later are computed again, until all fit.",
        needs=("group_products",),
        option="",
    ),
    Pass(
        cut_products,
        Stage.CUT,
        "Each product has the tiles and parts of k that are predicted to end first.",
        gives=("add_parts",),
        needs=("group_products",),
        option="",
    ),
    Pass(
        fuse_parts_norm,
        Stage.CUT,
        "The task that adds up the parts of a row also normalises the row.",
        over=(("add_parts",), ("rmsnorm",)),
        gives=("add_parts_norm",),
        needs=("cut_products",),
        option="",
    ),
    Pass(
        fuse_sampling,
        Stage.CUT,
        "The layer that computes logits also finds the largest of them, on all ranks.",
        over=(tuple(CHOOSE), ("linear",)),
        gives=("choose", "choose_each"),
        needs=("fuse_linear", "rotate_logits", "reorder_small_ops"),
        option="",
    ),
)
