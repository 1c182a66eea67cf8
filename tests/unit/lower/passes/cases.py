"""Small programs, each of which one pass changes, and the pass's graph before and after as text.

`python -m tests.unit.lower.passes.cases` writes the texts to files in this folder; review the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp32, int4, int32, row_type
from ark.ir.graph import Graph
from ark.ir.text import to_text
from ark.lower.observe import observed
from ark.lower.passes import PASSES
from ark.lower.prepare import prepare
from ark.lower.rewrite.context import Context
from ark.ops.indexing import remap
from tests.cases.rotary_products import Projection

FOLDER = Path(__file__).parent
RUNS = {step.name: step.run for step in PASSES}


@dataclass(frozen=True)
class Case:
    """A pass and a program that it changes. machine, ranks, options: what the program is planned
    for. label: distinguishes a second program of the same pass.
    """

    name: str
    build: Callable[[], None]
    machine: str = "h200"
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}_{self.label}" if self.label else self.name

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.title}.txt"


def _experts() -> None:
    x, residual = ark.tensor([1, 64], fp32), ark.tensor([1, 64], fp32)
    scores, chosen = ark.topk(ark.tensor([1, 16], fp32), 4)
    scores = ark.softmax(scores)
    gate, up = (ark.parameter([16, 96, 64], fp32, name=n) for n in ("gate", "up"))
    down = ark.parameter([16, 64, 96], fp32, name="down")
    bias = ark.gather(ark.parameter([16, 96], fp32, name="bias"), chosen, axis=0)
    gated = (ark.expert_linear(x, gate, chosen) + bias) * ark.expert_linear(x, up, chosen)
    outputs = ark.expert_linear(gated, down, chosen) * ark.reshape(scores, (1, 4, 1))
    residual + ark.reduce_sum(outputs, axis=1, keepdims=False)


def _transposed() -> None:
    x, w = ark.tensor([64, 32], fp32), ark.tensor([48, 32], fp32)
    ark.matmul(x, ark.transpose(w, [1, 0]))


def _sigmoid_of_weights() -> None:
    y = ark.softmax(ark.tensor([64, 64], fp32))
    ark.rmsnorm(y, ark.sigmoid(ark.parameter([64], fp32, name="w")))


def _read_much_later() -> None:
    x, w = ark.tensor([1024, 1024], fp32), ark.parameter([1024, 4096], fp32)
    early = ark.softmax(x)
    wide = ark.softmax(ark.matmul(early, w))
    ark.matmul(ark.matmul(wide, w, transpose_other=True), early)


def _quantised(rows: int) -> None:
    dtype = row_type(int4, 64, 32, bf16, False, bf16)
    ark.linear(ark.tensor([rows, 64], fp32), ark.parameter([48, 64], dtype, name="w"))


def _turned_rows() -> None:
    x, w = ark.tensor([8, 64, 32], fp32), ark.parameter([48, 32], fp32, name="w")
    rows = ark.reshape(ark.transpose(x, [1, 0, 2]), [512, 32])
    y = ark.add(ark.linear(rows, w), ark.parameter([48], fp32, name="bias"))
    ark.relu(ark.transpose(ark.reshape(y, [64, 8, 48]), [1, 0, 2]))


def _turned_rows_trained() -> None:
    x, w = ark.tensor([8, 64, 32], fp32), ark.parameter([48, 32], fp32, name="w")
    y = ark.linear(ark.reshape(ark.transpose(x, [1, 0, 2]), [512, 32]), w)
    result = ark.relu(ark.transpose(ark.reshape(y, [64, 8, 48]), [1, 0, 2]))
    for gradient in ark.grad([result], [x, w], [ark.tensor([8, 64, 48], fp32)]):
        ark.exp(gradient)


def _norm_by_ops() -> None:
    x, w = ark.tensor([64, 256], bf16), ark.parameter([256], bf16, name="w")
    wide = ark.cast(x, fp32)
    factor = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(wide, wide), 1), 1e-5))
    ark.mul(w, ark.cast(ark.mul(wide, factor), bf16))


def _rotary_by_ops() -> None:
    x, factors = ark.tensor([2, 64, 4, 32], bf16), [ark.tensor([1, 1, 64, 32], bf16)] * 2
    heads = ark.transpose(x, [0, 2, 1, 3])
    turned = ark.concat([ark.neg(heads[:, :, :, 16:]), heads[:, :, :, :16]], 3)
    ark.relu(ark.add(ark.mul(heads, factors[0]), ark.mul(turned, factors[1])))


def _long_rows() -> None:
    ark.relu(ark.layernorm(ark.tensor([4, 65536], bf16), 1e-5))


def _convolution() -> None:
    x = ark.tensor([8, 64, 32, 32], bf16)
    ark.conv(ark.relu(x), ark.parameter([64, 64, 3, 3], bf16, name="w"), padding=1)


def _gated() -> None:
    x = ark.tensor([1, 256], fp32)
    gate, up = (ark.parameter([512, 256], bf16, name=name) for name in ("gate", "up"))
    ark.swiglu(ark.linear(x, gate), ark.linear(x, up))


def _attention() -> None:
    q, k, v = (ark.tensor([2, 256, 64], bf16) for _ in range(3))
    scores = ark.mul(ark.matmul(q, ark.transpose(k, [0, 2, 1])), 0.125)
    ark.matmul(ark.softmax(scores), v)


def _attention_trained() -> None:
    given = [ark.tensor([2, 256, 64], bf16) for _ in range(4)]
    q, k, v, back = (ark.transpose(ark.reshape(t, [2, 256, 2, 32]), [0, 2, 1, 3]) for t in given)
    scores = ark.mul(ark.matmul(q, k, transpose_other=True, dtype=fp32), 0.125)
    result = ark.matmul(ark.cast(ark.softmax(scores), bf16), v)
    ark.grad(result, given[:3], back)


def _normed_row() -> None:
    x = ark.tensor([1, 256], fp32)
    rows = ark.rmsnorm(x, ark.parameter([256], fp32, name="norm"))
    ark.add(ark.linear(rows, ark.parameter([256, 256], bf16, name="w")), x)


def _read_twice() -> None:
    y = ark.exp(ark.tensor([1, 128], fp32))
    ark.add(y, 1.0)
    ark.mul(y, 2.0)


def _chain() -> None:
    ark.add(ark.exp(ark.tensor([64, 128], fp32)), 1.0)


def _rounded() -> None:
    x, w = ark.tensor([512, 1024], fp32), ark.parameter([1024, 1024], bf16, name="w")
    ark.linear(ark.relu(x), w)


def _rows_of() -> None:
    x, w = ark.tensor([512, 1024], bf16), ark.parameter([1024, 1024], bf16, name="w")
    ark.gather(ark.linear(x, w), ark.tensor([4], int32), 0)


def _scaled_norm() -> None:
    x = ark.tensor([64, 256], fp32)
    weight, bias = (ark.parameter([256], fp32, name=name) for name in ("weight", "bias"))
    ark.add(ark.mul(ark.layernorm(x), weight), bias)


def _ended() -> None:
    x, w = ark.tensor([512, 1024], bf16), ark.parameter([1024, 1024], bf16, name="w")
    ark.relu(ark.linear(x, w))


def _rotated_queries() -> None:
    queries = Projection(rows=128, depth=256, heads=2, bias=True)
    queries.build(*(ark.tensor(s, bf16) for s in queries.shapes))


def _factor() -> None:
    x, column = ark.tensor([1024, 1024], fp32), ark.tensor([1024, 1], fp32)
    ark.mul(x, ark.exp(ark.expand(column, [1024, 1024])))


def _squares() -> None:
    x = ark.tensor([64, 256], fp32)
    ark.reduce_sum(ark.mul(x, x), 1)


def _moments_of_columns() -> None:
    x = ark.tensor([4096, 64], fp32)
    apart = ark.sub(x, ark.reduce_mean(x, 0))
    ark.reduce_sum(ark.mul(apart, apart), 0)


def _sums_of_columns() -> None:
    x, y = ark.tensor([4096, 64], fp32), ark.tensor([4096, 64], fp32)
    ark.reduce_sum(y, 0)
    ark.reduce_sum(ark.mul(x, y), 0)


def _side_by_side() -> None:
    x = ark.tensor([1, 64], fp32)
    for number in range(2):
        w = ark.parameter([64, 64], fp32, name=f"w{number}")
        ark.matmul(ark.matmul(ark.matmul(x, w), w), w)


def _three_of_one() -> None:
    x = ark.tensor([4096, 768], bf16)
    for name in ("q", "k", "v"):
        w = ark.tensor([768, 768], bf16, name=name)
        ark.transpose(ark.reshape(ark.linear(x, w), (32, 128, 12, 64)), (0, 2, 1, 3))


def _odd_rows() -> None:
    x, w = ark.tensor([512, 1020], bf16), ark.parameter([1024, 1020], bf16, name="w")
    ark.linear(x, w)


def _shifted_windows() -> None:
    rules = [[[[d, 1]], 3 * (d == 1), 1, "wrap"] for d in range(3)]
    shifted = remap("roll", ark.tensor([2, 56, 96], bf16), [2, 56, 96], rules)
    windows = ark.transpose(ark.reshape(shifted, [2, 8, 7, 96]), [0, 2, 1, 3])
    rows = ark.relu(windows)
    back = ark.reshape(ark.transpose(rows, [0, 2, 1, 3]), [2, 56, 96])
    remap("roll", back, [2, 56, 96], rules)


def _windowed_block() -> None:
    x = ark.relu(ark.tensor([2, 8, 7, 96], bf16))
    windows = ark.transpose(ark.layernorm(x), [0, 2, 1, 3])
    mixed = ark.reshape(ark.softmax(ark.reshape(windows, [2, 7, 768])), [2, 7, 8, 96])
    y = ark.add(x, ark.transpose(mixed, [0, 2, 1, 3]))
    ark.reduce_sum(ark.add(y, ark.layernorm(y)), 1)


def _parts() -> None:
    y = ark.exp(ark.tensor([1, 256], fp32))
    ark.mul(ark.sigmoid(y[:, :128]), ark.tanh(y[:, 128:]))


def _summed_product() -> None:
    x, w = ark.tensor([4096, 4096], bf16), ark.parameter([4096, 4096], bf16, name="w")
    ark.all_reduce(ark.linear(x, w), 0, 2)


def _summed_norm() -> None:
    total = ark.all_reduce(ark.tensor([16, 1024], fp32), 0, 2)
    ark.rmsnorm(total, ark.parameter([1024], fp32, name="norm"))


def _summed_row() -> None:
    x = ark.tensor([1, 512], fp32)
    w, v = (ark.parameter([512, 512], bf16, name=name) for name in ("w", "v"))
    norm = ark.parameter([512], fp32, name="norm")
    ark.linear(ark.rmsnorm(ark.all_reduce(ark.linear(x, w), 0, 2), norm), v)


def _few_tiles() -> None:
    x, bias = ark.tensor([128, 4096], bf16), ark.tensor([128, 512], bf16)
    ark.add(ark.linear(x, ark.parameter([512, 4096], bf16, name="w")), bias)


def _normed_product() -> None:
    x, residual = ark.tensor([128, 8192], fp32), ark.tensor([128, 512], fp32)
    w, norm = ark.parameter([512, 8192], bf16, name="w"), ark.parameter([512], fp32, name="norm")
    total = ark.add(ark.linear(ark.relu(x), w), residual)
    ark.mul(ark.rmsnorm(total, norm), total)


def _sampled_row() -> None:
    x, w = ark.tensor([1, 512], fp32), ark.parameter([1024, 512], bf16, name="w")
    ark.sample(ark.linear(x, w), ark.TokenState.make(8))


def _sampled_rows() -> None:
    x, w = ark.tensor([4, 512], fp32), ark.parameter([1024, 512], bf16, name="w")
    ark.sample(ark.linear(x, w), ark.TokenState.make(8, 4))


def _sampled_shares() -> None:
    x, w = ark.tensor([1, 512], fp32), ark.parameter([512, 512], bf16, name="w")
    logits = ark.all_gather(ark.linear(x, w), 0, 2)
    ark.sample(ark.reshape(logits, [1, 1024]), ark.TokenState.make(8))


def _embedded_rows() -> None:
    state = ark.TokenState.make(8, 4)
    table, w = (ark.parameter([4096, 4096], bf16, name=name) for name in ("table", "w"))
    x = ark.embed(state.tokens, table, state.position)
    ark.linear(ark.rmsnorm(x, ark.parameter([4096], bf16, name="norm")), w)


def _masks_of_layers() -> None:
    seen, bias = ark.tensor([64, 64], fp32), ark.parameter([64, 64], fp32, name="bias")
    x = ark.tensor([64, 64], fp32)
    for _ in range(2):
        x = ark.matmul(x, ark.add(ark.mul(seen, 4.0), bias))


def _loss() -> None:
    x, ids = ark.tensor([64, 50], bf16), ark.tensor([64], int32)
    ark.grad(ark.cross_entropy(x, ids), [x])


def _scores() -> None:
    q, k, v = (ark.tensor([2, n, 64], bf16) for n in (256, 197, 197))
    scores = ark.softmax(ark.matmul(q, k, transpose_other=True))
    ark.matmul(ark.cast(ark.mul(ark.cast(scores, fp32), 2.0), bf16), v)


def _adam() -> None:
    weight = ark.parameter([256, 64], bf16, name="w")
    ark.optim.AdamW([weight]).step([ark.sigmoid(ark.tensor([256, 64], bf16))])


def _rows_added() -> None:
    table, ids = ark.parameter([4096, 64], bf16, name="table"), ark.tensor([100], int32)
    ark.grad(ark.embedding(ids, table), table, ark.tensor([100, 64], bf16))


def _norm_gradient() -> None:
    x, given = ark.tensor([256, 768], bf16), ark.tensor([256, 768], bf16)
    back = ark.grad(ark.layernorm(x), x, given)
    ark.add(back, given, output=ark.tensor([256, 768], bf16))


CASES = (
    Case("pad_rows", _scores),
    Case("fuse_log_softmax", _loss),
    Case("cut_products", _few_tiles),
    Case("fuse_parts_norm", _normed_product),
    Case("fuse_sampling", _sampled_row),
    Case("fuse_sampling", _sampled_rows, label="of_sequences"),
    Case("fuse_sampling", _sampled_shares, ranks=2, options={"lockstep": True}, label="of_ranks"),
    Case("rotate_logits", _sampled_shares, ranks=2),
    Case("round_norm_inputs", _embedded_rows),
    Case("align_operands", _odd_rows),
    Case("split_norms", _long_rows),
    Case("split_elementwise", _parts),
    Case("overlap_collectives", _summed_product, ranks=2, options={"overlap": True}),
    Case("fuse_all_reduce_norm", _summed_norm, ranks=2),
    Case("inline_all_reduce", _summed_row, ranks=2),
    Case("fold_transposes", _transposed),
    Case("cancel_transposes", _turned_rows),
    Case("cancel_transposes", _turned_rows_trained, label="with_gradients"),
    Case("fuse_rmsnorm", _norm_by_ops),
    Case("fuse_rotary", _rotary_by_ops),
    Case("channels_last", _convolution),
    Case("pack_weights", _gated),
    Case("fuse_unit_attention", _attention),
    Case("fuse_unit_attention", _attention_trained, label="with_gradients"),
    Case("keep_row_order", _windowed_block),
    Case("compose_remaps", _shifted_windows),
    Case("fuse_linear", _normed_row),
    Case("fuse_linear", lambda: _quantised(1), label="of_codes"),
    Case("unpack_rows", lambda: _quantised(80)),
    Case("fuse_regions", _read_twice),
    Case("fuse_chains", _chain),
    Case("fuse_rows", _norm_gradient),
    Case("fuse_updates", _adam),
    Case("fuse_experts", _experts),
    Case("narrow_inputs", _rounded),
    Case("hoist_gathers", _rows_of),
    Case("fuse_norm_scales", _scaled_norm),
    Case("fuse_epilogues", _ended),
    Case("rotate_products", _rotated_queries),
    Case("hoist_factors", _factor),
    Case("fuse_reduction_terms", _squares),
    Case("fuse_reduction_terms", _moments_of_columns, label="of_moments"),
    Case("fuse_reduction_terms", _sums_of_columns, label="of_two_sums"),
    Case("merge_equal", _masks_of_layers),
    Case("update_in_place", _rows_added),
    Case("fuse_windows", _convolution),
    Case("reorder_small_ops", _side_by_side),
    Case("group_products", _three_of_one),
    Case("weights_first", _sigmoid_of_weights),
    Case("recompute", _read_much_later, options={"activation_bytes": 32 << 20}),
)


def graph_of(case: Case) -> Graph:
    """Returns the program's graph."""
    model = Model(rank=0, world_size=case.ranks)
    with use_model(model):
        case.build()
    return model.graph


def step_of(case: Case) -> tuple[Graph, Context]:
    """Returns the graph that the case's pass receives while the program is prepared, and its
    context.
    """
    steps: dict[str, tuple[Graph, Context]] = {}

    def keep(name: str, before: Graph, after: Graph, context: Context) -> None:
        steps.setdefault(name, (before, context))

    with observed(keep):
        prepare(graph_of(case), registry.machine(case.machine), case.options)
    return steps[case.name]


def text_of(case: Case) -> str:
    """Returns the text of the graph before and after this pass alone."""
    before, context = step_of(case)
    after = RUNS[case.name](before, context)
    return f"before\n{to_text(before)}after\n{to_text(after)}"


def main() -> None:
    for case in CASES:
        case.path.write_text(text_of(case))


if __name__ == "__main__":
    main()
