"""Packing and fusion keep a graph's results, and do not change tensors that have other readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ark
from ark.backend import registry as backends
from ark.frontend.model import Model, use_model
from ark.ir.dtype import fp32, int32
from ark.ir.graph import Graph
from ark.ir.packing import Packing, Part
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_linear import fuse_linear
from ark.lower.rewrite.pack_weights import pack_weights
from ark.models.build import Built, Pages, Shape, build
from ark.models.checkpoint import Checkpoint
from ark.plan.packing import from_meta, to_meta
from tests.cases import decoders
from tests.checkpoints import make_checkpoint, reference
from tests.interpreter import Interpreter

PROMPT, CHUNK, NEW = 11, 4, 3


def lowered(built: Built, form: str) -> tuple[Graph, list[Packing]]:
    """Returns a model's graph and its packings (weights stored as one). form: whether the graph is
    as built, has packed weights, or is also fused.
    """
    if form == "as built":
        return built.graph, []
    context = Context(backends.machine("cpu-2"))
    graph = pack_weights(built.graph, context)
    if form == "fused":
        graph = fuse_linear(graph, context)
    return graph, list(graph.packings)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("form", ["as built", "packed", "fused"])
def test_every_form_computes_transformers_logits(kind: str, form: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / kind, kind=kind)
    checkpoint = Checkpoint.open(directory)
    built = build(Shape(checkpoint.config, fp32, 32, CHUNK))
    graph, packings = lowered(built, form)
    by_name = {p.name: p for p in packings}

    def read(name: str) -> np.ndarray:
        array = built.constants[name]() if name in built.constants else checkpoint.read(name)
        return np.asarray(array, np.float64)

    memory = Interpreter()
    state = {t.name: t for n in graph.nodes for t in n.inputs if t.buffer.arena == "state"}
    for tensor in {t.name: t for n in graph.nodes for t in n.inputs}.values():
        if tensor.buffer.arena == "parameter":
            packing = by_name.get(tensor.name)
            memory.view(tensor)[...] = packing.apply(read) if packing else read(tensor.name)
    prompt = np.random.default_rng(3).integers(0, 320, PROMPT)
    memory.view(state["tokens"])[:PROMPT] = prompt
    memory.view(state["settings"])[:] = [0, 0, 0, PROMPT - 1, 32, 0, 0]
    for _ in range(-(-(PROMPT - 1) // CHUNK)):
        memory.run(graph, 0)
    rows = []
    logits = next(n.outputs[0] for n in graph.nodes if n.name == "decode.head.logits")
    for _ in range(NEW):
        memory.run(graph, 1)
        rows.append(memory.view(logits)[0].copy())
    tokens = memory.view(state["tokens"])[: PROMPT + NEW]
    model = reference(directory, torch.float64)
    with torch.inference_mode():
        theirs = model(torch.tensor(tokens[None, :-1])).logits[0, PROMPT - 1 :].numpy()
    # transformers' rotary angles and norms are in fp32 for every type of the model.
    np.testing.assert_allclose(np.array(rows), theirs, rtol=2e-5, atol=2e-5)
    assert tokens[PROMPT:].tolist() == theirs.argmax(-1).tolist()


def test_llama_layer_becomes_five_ops(tmp_path: Path) -> None:
    """The decode phase of a Llama layer becomes five ops. One more would take a tenth of a token's
    time longer.
    """
    directory = make_checkpoint(tmp_path / "llama")
    shape = Shape(Checkpoint.open(directory).config, fp32, 32, CHUNK)
    graph, packings = lowered(build(shape), "fused")
    assert packings[:2] == [
        Packing(
            "layers.0.attention.query+key+value",
            (
                Part("layers.0.attention.query", 16),
                Part("layers.0.attention.key", 16),
                Part("layers.0.attention.value"),
            ),
        ),
        Packing("layers.0.mlp.gate+up", (Part("layers.0.mlp.gate"), Part("layers.0.mlp.up")), True),
    ]
    layer = [n for n in graph.nodes if n.name.startswith("decode.layers.0.")]
    assert [(n.type, n.attrs.get("prologue"), n.attrs.get("epilogue")) for n in layer] == [
        ("linear", "rmsnorm", "rope_kv"),
        ("attention", None, None),
        ("linear", "none", "add"),
        ("linear", "rmsnorm", "swiglu"),
        ("linear", "none", "add"),
    ]


def test_biases_become_one_epilogue(tmp_path: Path) -> None:
    """The biases of queries, keys and values are packed in the order of their weights."""
    directory = make_checkpoint(tmp_path / "qwen2", kind="qwen2")
    shape = Shape(Checkpoint.open(directory).config, fp32, 32, CHUNK)
    graph, packings = lowered(build(shape), "fused")
    parts = (
        Part("layers.0.attention.query_bias", 16),
        Part("layers.0.attention.key_bias", 16),
        Part("layers.0.attention.value_bias"),
    )
    assert Packing("layers.0.attention.query_bias+key_bias+value_bias", parts) in packings
    layer = [n for n in graph.nodes if n.name.startswith("decode.layers.0.")]
    assert [(n.type, n.attrs.get("bias"), n.attrs.get("epilogue")) for n in layer[:3]] == [
        ("linear", True, "rope_kv"),
        ("attention", None, None),
        ("linear", None, "add"),
    ]


@pytest.mark.parametrize("apart", [True, False])
def test_decoding_over_pages_is_packed_too(apart: bool, tmp_path: Path) -> None:
    """With a paged cache, the packed projection stores keys and values to pages. If no row reads
    what another row appends in the iteration, attention gets the newest key and value as an
    operand.
    """
    config = Checkpoint.open(make_checkpoint(tmp_path / "llama")).config
    pages = Pages(7, 16, (1, 2), apart=apart)
    shape = Shape(config, fp32, 32, CHUNK, batch=2, pages=pages)
    graph, _ = lowered(build(shape), "fused")
    for rows in (1, 2):
        layer = [n for n in graph.nodes if n.name.startswith(f"decode{rows}.layers.0.")]
        assert [(n.type, n.attrs.get("epilogue")) for n in layer] == [
            ("linear", "rope_kv"),
            ("paged_attention", None),
            ("linear", "add"),
            ("linear", "swiglu"),
            ("linear", "add"),
        ]
        assert len(layer[0].outputs) == len(layer[1].inputs) - 4 == (2 if apart else 1)
    chunk = {n.type for n in graph.nodes if n.name.startswith("chunk.layers.0.")}
    assert not {"paged_append", "rotary_embedding"} & chunk


@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", "as built"), ("llama", "packed"), ("llama", "fused"), ("gpt-oss", "fused")],
)
def test_every_form_over_pages_computes_transformers_logits(
    kind: str, form: str, tmp_path: Path
) -> None:
    """A model with a paged cache, in each form, gives transformers' logits for two sequences, which
    read their prompts token by token. gpt-oss has biases and sinks.
    """
    directory = make_checkpoint(tmp_path / kind, **decoders.CASES.get(kind, {}))
    checkpoint = Checkpoint.open(directory)
    pages = Pages(16, 4, (2,))
    built = build(Shape(checkpoint.config, fp32, 32, 0, batch=2, pages=pages))
    graph, packings = lowered(built, form)
    by_name = {p.name: p for p in packings}

    def read(name: str) -> np.ndarray:
        constant = built.constants.get(name)
        return np.asarray(constant() if constant else checkpoint.read(name), np.float64)

    memory = Interpreter()
    state = {t.name: t for n in graph.nodes for t in n.inputs if t.buffer.arena == "state"}
    for tensor in {t.name: t for n in graph.nodes for t in n.inputs}.values():
        if tensor.buffer.arena == "parameter":
            packing = by_name.get(tensor.name)
            memory.view(tensor)[...] = packing.apply(read) if packing else read(tensor.name)
    prompts = np.random.default_rng(3).integers(0, 320, (2, PROMPT))
    texts = memory.view(state["tokens"]).reshape(2, 32)
    texts[:, :PROMPT] = prompts
    memory.view(state["settings"])[:] = [0, 0, 0, PROMPT - 1, 32, 0, 0] * 2
    memory.view(state["pages"])[...] = np.random.default_rng(4).permutation(16).reshape(2, 8)
    logits = next(n.outputs[0] for n in graph.nodes if n.name == "decode2.head.logits")
    rows = []
    for _ in range(PROMPT - 1 + NEW):
        memory.run(graph, 0)
        rows.append(memory.view(logits).copy())
    texts = memory.view(state["tokens"]).reshape(2, 32)[:, : PROMPT + NEW]
    model = reference(directory, torch.float64)
    with torch.inference_mode():
        theirs = model(torch.tensor(texts[:, :-1].astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(np.stack(rows, axis=1), theirs, rtol=2e-5, atol=2e-5)
    assert (texts[:, PROMPT:] == theirs[:, PROMPT - 1 :].argmax(-1)).all()


HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 8, 24


class Parts:
    """A model of one layer, whose parts (norm, projection, gate and so on) a test case can
    replace.
    """

    def __init__(self) -> None:
        sizes = {"query": HEADS * WIDTH, "key": KV_HEADS * WIDTH, "value": KV_HEADS * WIDTH}
        sizes |= {"gate": 16, "up": 16}
        self.x = ark.mul(ark.tensor((1, HIDDEN)), 2.0)
        self.position = ark.tensor((1,), int32)
        self.other = ark.tensor((1,), int32)
        self.frequencies = ark.tensor((WIDTH // 2,))
        self.weights = {name: ark.parameter((n, HIDDEN)) for name, n in sizes.items()}
        self.caches = [ark.tensor((KV_HEADS, 32, WIDTH)) for _ in range(2)]
        self.between: Callable[[Parts], Any] = lambda parts: None
        self.behind: Callable[[Parts], Any] = lambda parts: None
        self.value_position = self.position

        self.project: Callable[[Parts, str], Any] = lambda p, n: ark.linear(p.x, p.weights[n])
        self.gated: Callable[[ark.Tensor], ark.Tensor] = lambda product: product

    def build(self) -> None:
        outputs = {name: self.project(self, name) for name in self.weights}
        self.outputs = outputs
        self.query = ark.rotary_embedding(outputs["query"], self.position, self.frequencies)
        key = ark.rotary_embedding(outputs["key"], self.position, self.frequencies)
        self.between(self)
        keys = ark.kv_append(self.caches[0], key, self.position)
        values = ark.kv_append(self.caches[1], outputs["value"], self.value_position)
        ark.attention(self.query, keys, values, self.position)
        ark.swiglu(self.gated(outputs["gate"]), self.gated(outputs["up"]))
        self.behind(self)


def _read_query(p: Parts) -> None:
    p.between = lambda p: ark.mul(p.query, 2.0)


def _read_gate(p: Parts) -> None:
    p.between = lambda p: ark.mul(p.outputs["gate"], 2.0)


def _read_part_of_gate(p: Parts) -> None:
    p.behind = lambda p: ark.mul(p.outputs["gate"][:, :4], 2.0)


def _view_gate_and_key(p: Parts) -> None:
    p.behind = lambda p: [ark.mul(ark.reshape(p.outputs[n], [4, -1]), 2) for n in ("gate", "key")]


def _gate_in_another_shape(p: Parts) -> None:
    p.gated = lambda product: ark.reshape(product, (2, 8))


def _query_in_parts(p: Parts) -> None:
    weight = ark.parameter((8, HIDDEN))

    def project(p: Parts, name: str) -> ark.Tensor:
        if name != "query":
            return ark.linear(p.x, p.weights[name])
        rows = ark.mul(ark.linear(p.x, p.weights[name]), 0.5)
        ark.linear(p.x, weight, output=rows[:, :8])
        return rows

    p.project = project


def _write_input(p: Parts) -> None:
    p.between = lambda p: ark.copy(0.5, output=p.x)


def _read_cache(p: Parts) -> None:
    p.between = lambda p: ark.mul(p.caches[0], 2.0)


def _weight_elsewhere(p: Parts) -> None:
    p.between = lambda p: ark.linear(p.x, p.weights["key"])


def _weights_shared(p: Parts) -> None:
    p.weights["up"] = p.weights["gate"]


def _other_position(p: Parts) -> None:
    p.value_position = p.other


def _written_weight(p: Parts) -> None:
    p.between = lambda p: ark.copy(0.5, output=p.weights["up"])


CASES: list[tuple[Callable[[Parts], None], set[str]]] = [
    (lambda p: None, {"rope_kv", "swiglu_pairs"}),
    (_read_query, {"swiglu_pairs"}),
    (_read_gate, {"rope_kv"}),
    (_read_part_of_gate, {"rope_kv"}),
    (_view_gate_and_key, set()),
    (_gate_in_another_shape, {"rope_kv"}),
    (_query_in_parts, {"swiglu_pairs"}),
    (_write_input, set()),
    (_read_cache, {"swiglu_pairs"}),
    (_weight_elsewhere, {"swiglu_pairs"}),
    (_weights_shared, {"rope_kv"}),
    (_other_position, {"swiglu_pairs"}),
    (_written_weight, {"rope_kv"}),
]


@pytest.mark.parametrize(("disturb", "wanted"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_outputs_with_another_reader_are_not_packed(
    disturb: Callable[[Parts], None], wanted: set[str]
) -> None:
    with use_model(Model()) as model:
        parts = Parts()
        disturb(parts)
        parts.build()
    graph = pack_weights(model.graph, Context(backends.machine("cpu-2")))
    types = Counter(n.type for n in graph.nodes)
    assert {t for t in ("rope_kv", "swiglu_pairs") if types[t]} == wanted
    assert len(graph.packings) == len(wanted)
    rest = Counter(n.type for n in model.graph.nodes)
    assert types["mul"] == rest["mul"]
    lost = {"rope_kv": 3, "swiglu_pairs": 2}
    kept = rest["matmul"] - sum(lost[name] - 1 for name in wanted)
    assert types["matmul"] == kept


def test_weights_that_the_caller_holds_stay_as_they_are() -> None:
    with use_model(Model()) as model:
        parts = Parts()
        parts.build()
    held = frozenset({parts.weights["gate"].ir.buffer.id, parts.weights["query"].ir.buffer.id})
    graph = pack_weights(model.graph, Context(backends.machine("cpu-2"), kept=held))
    assert not graph.packings and graph.nodes == model.graph.nodes


def test_packings_go_through_a_plans_meta() -> None:
    packings = [Packing("a+b", (Part("a", 4), Part("b")), False), Packing("c", (Part("c"),), True)]
    assert list(from_meta(to_meta(packings)).values()) == packings
    assert to_meta([]) == {} and from_meta({}) == {}


BROKEN: list[Any] = [
    "text",
    7,
    [3],
    [{"name": "a"}],
    [{"name": "a", "parts": [], "interleave": False}],
    [{"name": "a", "parts": [["b", 3]], "interleave": False}],
    [{"name": "a", "parts": [["b", -2]], "interleave": False}],
    [{"name": "a", "parts": [["b", True]], "interleave": False}],
    [{"name": "a", "parts": [["b", 0]], "interleave": 1}],
    [{"name": 1, "parts": [["b", 0]], "interleave": True}],
    [{"name": "a", "parts": [["b"]], "interleave": True}],
]


@pytest.mark.parametrize("entry", BROKEN, ids=repr)
def test_broken_entry_is_refused(entry: Any) -> None:
    with pytest.raises(ark.PlanError, match="plan again"):
        from_meta({"packing": entry})
