"""The key of the plan cache is a digest of the traced graph: if a model, an op or a lowering was
edited, the plan is computed again.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.errors import InternalError
from ark.frontend.model import Model, use_model
from ark.ir.digest import digest
from ark.ir.dtype import by_name
from ark.ir.graph import Graph
from ark.lower import registry as ops
from ark.models import plans
from ark.models.build import Shape, build
from ark.models.config import builtin_config
from ark.models.llama import FeedForward, Llama
from tests import programs
from tests.custom import SCALE

CONFIG = dataclasses.replace(
    builtin_config("llama-3.2-1b"), hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=300,
    bos_token_id=None, eos_token_ids=(),
)  # fmt: skip
SHAPE = Shape(CONFIG, by_name("fp32"), 32, 4)


@pytest.fixture
def planned_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets one entry each time a plan is computed instead of read from the
    cache. The cache is empty at first.
    """
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))
    calls: list[int] = []
    make = plans.make_plans

    def counted(*given: Any) -> Any:
        calls.append(1)
        return make(*given)

    monkeypatch.setattr(plans, "make_plans", counted)
    return calls


def kinds(shape: Shape = SHAPE) -> list[str]:
    (plan,) = plans.plans(shape, registry.machine("cpu-2"))
    return [op.kind for op in plan.ops]


def test_model_whose_forward_was_edited_is_planned_again(
    planned_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kinds()
    assert kinds() == before and len(planned_calls) == 1

    def forward(self: FeedForward, x: ark.Tensor) -> ark.Tensor:
        gated = ark.tanh(ark.linear(x, self.gate)) * ark.linear(x, self.up)
        return ark.linear(gated, self.down)

    monkeypatch.setattr(FeedForward, "forward", forward)
    edited = kinds()
    assert edited != before and len(planned_calls) == 2
    monkeypatch.undo()


def test_registered_lowering_that_was_edited_plans_again(
    planned_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "added_op.py"

    def load(text: str) -> None:
        path.write_text(f"def lower(lowering, node):\n    {text}\n")
        spec = importlib.util.spec_from_file_location("added_op", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(plans.sys.modules, "added_op", module)  # type: ignore[attr-defined]
        monkeypatch.setitem(ops._OPS, "added", ops.OpDef("added", None, module.lower))

    load("pass")
    kinds()
    kinds()
    assert len(planned_calls) == 1
    load("return None")
    kinds()
    assert len(planned_calls) == 2


def traced(fill: Callable[[], object]) -> Graph:
    model = Model(0, 1)
    with use_model(model):
        fill()
    return model.graph


def scaled(text: str = SCALE, by: float = 2.0) -> Graph:
    op = ark.custom_op(
        "scale", text, "x[m, k], w[k] -> y[m, k]", tile={"m": 4}, constants={"by": 2.0}
    )
    return traced(lambda: op(ark.tensor((8, 4)), ark.tensor((4,)), by=by))


def test_text_and_constants_of_a_custom_op_are_in_the_hash() -> None:
    assert digest(scaled()) == digest(scaled())
    texts = {digest(scaled()), digest(scaled(SCALE.replace("* Task", "/ Task")))}
    assert len(texts | {digest(scaled(by=3.0))}) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda: ark.relu(ark.tensor((4, 9))),
        lambda: ark.sigmoid(ark.tensor((4, 8))),
        lambda: ark.relu(ark.tensor((4, 8), ark.fp16)),
        lambda: ark.relu(ark.tensor((4, 8), strides=(4, 16))),
        lambda: ark.relu(ark.relu(ark.tensor((4, 8)))),
        lambda: ark.mul(ark.tensor((4, 8)), 2.0),
        lambda: ark.mul(ark.tensor((4, 8)), 2),
    ],
)
def test_graphs_that_differ_have_other_hashes(other: Callable[[], object]) -> None:
    graphs = [traced(lambda: ark.relu(ark.tensor((4, 8)))), traced(other)]
    assert digest(graphs[0]) != digest(graphs[1])
    assert digest(graphs[1]) == digest(traced(other))


def test_every_random_program_has_a_hash_of_its_own() -> None:
    def graph(seed: int) -> Graph:
        return traced(lambda: programs.build(seed, 12))

    actual = [digest(graph(seed)) for seed in range(40)]
    assert len(set(actual)) == 40
    assert actual[:5] == [digest(graph(seed)) for seed in range(5)]


def test_attribute_without_an_encoding_is_named() -> None:
    graph = traced(lambda: ark.relu(ark.tensor((4, 8))))
    graph.nodes[-1] = dataclasses.replace(graph.nodes[-1], attrs={"f": object()})
    with pytest.raises(InternalError, match="object"):
        digest(graph)


def test_tracing_a_decoder_twice_gives_one_hash() -> None:
    assert digest(build(SHAPE).graph) == digest(build(SHAPE).graph)
    assert issubclass(Llama, ark.Module)
