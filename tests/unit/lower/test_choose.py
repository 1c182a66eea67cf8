"""The choice of a plan's kernel variant (what each warp of a block does): `block`, in which all
computing warps share each task, `roles`, in which other warps load and wait for counters, or
`matrix`, which multiplies by warpgroups. Also tests that the plan records its variant.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from ark.backend import registry
from ark.errors import PlanError
from ark.ir.dtype import DataType, by_name
from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower.choose import ROUNDED, choices, choose
from ark.lower.explain_variants import show_variants
from ark.lower.pipeline import plan
from ark.lower.rewrite.context import Context
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE, COMPUTE, LOAD, Role, Variant, block
from ark.models.build import Pages, Shape, build
from ark.models.config import builtin_config
from ark.models.plans import make_plans
from ark.plan import kind as kinds
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.verify import verify
from tests.unit.plan.shapes import CONFIG, decoder_plans, machine

ROLES = Variant("roles", (Role(COMPUTE, 6), Role(COMMUNICATE, 1), Role(LOAD, 1)), 6, 1024, 2)


def offers_roles() -> Machine:
    plain = machine(4, Capability.PACKETS, warps=8)
    return dataclasses.replace(plain, variants=(block(8, 1, stages=6, stage_bytes=1024), ROLES))


def test_decoding_runs_under_roles_and_the_plan_carries_its_shape() -> None:
    (planned,) = decoder_plans(offers_roles(), chunk=0)
    assert planned.variant == "roles"
    reread = from_json(to_json(planned))
    assert reread == planned
    assert machine_of(reread).variants == (ROLES,)
    assert (machine_of(reread).warps, machine_of(reread).threads) == (6, 8 * 32)


def test_wide_rows_travel_as_packets_only_behind_a_poll() -> None:
    wide = dataclasses.replace(CONFIG, intermediate_size=5000)
    for variant, packet in (("roles", True), ("block", False)):
        target = offers_roles().shaped(stage_bytes=16384).using(variant)
        shape = Shape(wide, by_name("fp32"), 64, 0)
        (planned,) = make_plans(shape, target, {"variant": variant})
        down = next(op for op in planned.ops if op.name.endswith("down"))
        assert planned.tensors[down.operands[0]].packet is packet


def test_everything_else_runs_under_the_first_variant() -> None:
    target = offers_roles()
    (plain,) = decoder_plans(target, chunk=0, packets=False)
    graph = Graph(0, 1)
    a, b = graph.tensor((16, 16), by_name("fp32")), graph.tensor((16, 16), by_name("fp32"))
    graph.add("add", [a, b], [graph.tensor((16, 16), by_name("fp32"))], {}, "add")
    names = [p.variant for p in (plain, plan(graph, target))]
    assert names == ["block"] * 2
    assert decoder_plans(machine(4, Capability.PACKETS, warps=8), chunk=0)[0].variant == "block"


def test_variant_can_be_asked_for_and_must_exist() -> None:
    assert decoder_plans(offers_roles(), chunk=0, variant="block")[0].variant == "block"
    with pytest.raises(PlanError, match="no kernel variant 'matrix'; it has block, roles"):
        decoder_plans(offers_roles(), chunk=0, variant="matrix")


def with_a_computed(operand: str) -> Graph:
    """Returns a graph in which an operand is computed by the kernel itself in the same iteration:
    the norm's weight before a linear layer of one row, or attention's position.
    """
    fp32, int32 = by_name("fp32"), by_name("int32")
    graph = Graph(0, 1)

    def tensor(shape: tuple[int, ...], arena: str = "parameter", dtype: DataType = fp32) -> Tensor:
        return graph.tensor(shape, dtype, arena=arena)

    x, scale, w = tensor((1, 64), "state"), tensor((64,)), tensor((64, 64))
    position = tensor((1,), "state", int32)
    if operand == "weight":
        scale = graph.tensor((64,), fp32)
        graph.add("add", [tensor((64,)), tensor((64,))], [scale], {}, "made")
    if operand == "position":
        now = graph.tensor((1,), int32)
        graph.add("add", [position, tensor((1,), "state", int32)], [now], {}, "made")
        position = now
    normed, product, out = (graph.tensor((1, 64), fp32) for _ in range(3))
    graph.add("rmsnorm", [x, scale], [normed], {"eps": 1e-5}, "norm")
    transposed = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [normed, w], [product], transposed, "layer")
    caches = [tensor((2, 32, 16), "state") for _ in range(2)]
    shape = {"heads": 4, "head_dim": 16, "scale": 0.25}
    graph.add("attention", [product, *caches, position], [out], shape, "attention")
    return graph


def test_early_reads_of_the_iterations_results_are_refused() -> None:
    target = offers_roles()
    (fine,) = [plan(with_a_computed("nothing"), target)]
    assert fine.variant == "roles"
    verify([fine])
    for operand in ("weight", "position"):
        assert plan(with_a_computed(operand), target).variant == "block"
        (planned,) = [plan(with_a_computed(operand), target, {"variant": "roles"})]
        with pytest.raises(PlanError, match="before they wait, but op 'made' writes it"):
            verify([planned])


def test_prompt_takes_no_more_shared_memory_than_the_ring_leaves() -> None:
    """A plan of Llama 3.1 8B for two H100 in the variant `roles`: shared memory has room for the
    ring (the stages into which a warp prefetches weights) and beside it for what the prompt's tasks
    need.
    """
    config = dataclasses.replace(builtin_config("llama-3.1-8b"), num_hidden_layers=1)
    planned = make_plans(Shape(config, by_name("bf16"), 64, 16, 0, 2), registry.machine("h100"))
    target = machine_of(planned[0], 0)
    signatures = [kinds.signature(planned[0], op) for op in planned[0].ops]
    needed = max(kinds.get(sig.kind).scratch(sig, target) for sig in signatures)
    assert target.variant.name == "roles"
    assert 0 < needed <= target.shared_bytes - target.ring_bytes


def test_prompts_products_take_no_residual_under_roles() -> None:
    """In fp32, products of a prompt add the residual themselves in the variant `block`. In the
    variant `roles` a separate op adds it, because there the vendor-independent body computes
    products.
    """
    taken = {}
    for name in ("roles", "block"):
        shape = Shape(CONFIG, by_name("fp32"), 300, 128)
        (planned,) = make_plans(shape, registry.machine("h100"), {"variant": name})
        assert [p.name for p in planned.phases] == ["prompt", "begin", "decode"]
        assert {machine_of(planned, number).variant.name for number in range(3)} == {name}
        products = [op for op in planned.ops if op.kind == "matmul"]
        assert products
        taken[name] = any("expr" in op.params for op in products)
    assert taken == {"roles": False, "block": True}


@pytest.mark.parametrize(("sequences", "variant"), [(8, "roles"), (9, "matrix"), (64, "matrix")])
def test_many_sequences_decode_on_warpgroups(sequences: int, variant: str) -> None:
    """With up to 8 sequences, decoding uses linear layers of few rows. With more it runs in the
    kernel variant for prompts, whose products round their inputs to the weights' type.
    """
    few = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    graph = build(Shape(few, by_name("bf16"), 64, 0, batch=sequences)).graph
    (machine,) = choose(graph, Context(registry.machine("h200"), {}))
    assert machine.variant.name == variant


@pytest.mark.parametrize("size", [0, 16])
def test_batch_on_warpgroups_has_no_ops_between_products_and_attention(size: int) -> None:
    """Queries and keys are rotated and appended where their product ends, and attention streams the
    cache and rounds its result, whether the cache is contiguous or in pages.
    """
    few = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    pages = Pages(4 * 16 + 1, size, (16,)) if size else None
    shape = Shape(few, by_name("bf16"), 64, 0, batch=16, pages=pages)
    (planned,) = make_plans(shape, registry.machine("h200"))
    taken = {op.kind for op in planned.ops}
    assert not taken & {"rope_kv", "paged_append", "elementwise", "attention_merge"}
    attention = [op for op in planned.ops if op.kind in ("attention", "paged_attention")]
    assert len(attention) == 16 and all(op.params["streamed"] == 64 for op in attention)


def test_reason_for_warpgroups_gives_the_time_of_the_first_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    graph = build(Shape(few, by_name("bf16"), 64, 0, batch=16)).graph
    context = Context(registry.machine("h200"), {})
    monkeypatch.setenv("ARK_DEBUG", "lower")
    show_variants(graph, context, choices(graph, context))
    printed = capsys.readouterr().err
    assert f"phase decode: variant matrix: {ROUNDED}" in printed
    assert re.search(r"phase decode: not block: predicted [\d.]+ us", printed)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_inputs_of_a_product_alone_are_not_rounded(rows: int) -> None:
    """In a graph without attention over a cache, a product of fp32 rows with 16-bit weights keeps
    the rows in fp32.
    """
    graph = Graph(0, 1)
    x = graph.tensor((rows, 2048), by_name("fp32"))
    w = graph.tensor((512, 2048), by_name("bf16"), arena="parameter")
    out = graph.tensor((rows, 512), by_name("fp32"))
    attributes = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [x, w], [out], attributes, "product")
    (machine,) = choose(graph, Context(registry.machine("h200"), {"packets": False}))
    assert machine.variant.name == "block"


@pytest.mark.parametrize(("experts", "variant"), [(8, "matrix"), (2048, "block")])
def test_many_rows_with_little_work_of_experts_decode_on_warpgroups(
    experts: int, variant: str
) -> None:
    """Many rows are decoded in the variant for warpgroups, also if some weights are chosen by row
    and small, as those of LoRA adapters, which are planned as experts. With larger layers of
    experts, the machine's first variant is used.
    """
    few = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    graph = build(Shape(few, by_name("bf16"), 64, 0, batch=16)).graph
    x = graph.tensor((16, 2048), by_name("fp32"), name="x")
    w = graph.tensor((experts, 1024, 2048), by_name("bf16"), arena="parameter", name="experts")
    chosen = graph.tensor((16, experts // 4), by_name("int32"), name="chosen")
    out = graph.tensor((16, experts // 4, 1024), by_name("fp32"), name="out")
    graph.add("expert_linear", [x, w, chosen], [out], {}, "experts")
    (machine,) = choose(graph, Context(registry.machine("h200"), {}))
    assert machine.variant.name == variant
