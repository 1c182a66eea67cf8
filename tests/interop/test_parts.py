"""Large torch graphs are divided into parts, whose kernels compile side by side."""

from __future__ import annotations

from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch import fx  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.backend import registry  # noqa: E402
from ark.backend.codegen.writer import write  # noqa: E402
from ark.cli.measure.networks import network  # noqa: E402
from ark.interop.torch import backend, compile, program  # noqa: E402
from ark.interop.torch.concats import nest_concats  # noqa: E402
from ark.interop.torch.export import decompositions  # noqa: E402
from ark.interop.torch.graph import build  # noqa: E402
from ark.interop.torch.parts import divided, joint_products, part_starts  # noqa: E402
from ark.interop.torch.planning import Planning  # noqa: E402
from ark.interop.torch.values import Value  # noqa: E402
from ark.machine.variant import LOAD  # noqa: E402
from ark.plan.cost import predict  # noqa: E402
from ark.plan.serialize import from_json, machine_of, to_json  # noqa: E402
from tests.cases.torch_plans import planned  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()


def _layers(x: Any, weights: Any, wide: Any) -> Any:
    """Computes a chain of products of four widths. The result of the second one is small, so the
    graph is best divided after it; the result of the first one is read again at the end.
    """
    first = x @ weights[0]
    small = torch.relu(first @ weights[1])
    big = torch.exp(torch.tanh(small @ weights[2]))
    return big @ weights[3] + first.sum() + wide


def _graph() -> fx.GraphModule:
    sizes = [(8, 16), (16, 2), (2, 64), (64, 4)]
    weights = [torch.randn(*size) for size in sizes]
    constant = torch.randn(4)
    graph: fx.GraphModule = make_fx(
        lambda *g: _layers(g[0], g[1:], constant),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(torch.randn(8, 8), *weights)
    return graph


def test_graph_is_divided_where_few_bytes_are_read_later() -> None:
    graph = _graph()
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    (start,) = part_starts(graph, 3)
    names = [str(n.target) for n in calls[:start]]
    assert names.count("aten.mm.default") == 2 and names[-1] == "aten.relu.default"
    assert not part_starts(graph, 4) and not part_starts(graph, 0)


def test_equal_products_count_once() -> None:
    def function(x: Any, w: Any) -> Any:
        for _ in range(6):
            x = torch.relu(x @ w)
        return x

    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))
    assert not part_starts(graph, 1)


def test_graph_that_writes_to_its_inputs_stays_whole() -> None:
    def function(x: Any, w: Any) -> Any:
        x.copy_(x @ w)
        return x @ w[:, :2]

    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))
    assert not part_starts(graph, 1)


def test_parts_and_the_whole_graph_give_equal_results() -> None:
    graph = _graph()
    starts = part_starts(graph, 2)
    x = torch.randn(8, 8)
    weights = [
        torch.randn(n.meta["val"].shape) for n in list(graph.graph.find_nodes(op="placeholder"))[1:]
    ]
    want = graph(x, *weights)
    parts = divided(graph, starts)
    assert len([n for n in parts.graph.nodes if n.op == "call_module"]) == len(starts) + 1
    assert not [n for n in parts.graph.nodes if n.op == "get_attr"]  # constants are in the parts
    torch.testing.assert_close(parts(x, *weights), want)


def _growing(x: Any, *weights: Any) -> Any:
    """A block of DenseNet: each convolution reads the channels of all earlier ones."""
    images = [x]
    for weight in weights:
        images.append(torch.relu(torch.conv2d(torch.cat(images, 1), weight, padding=1)))
    return torch.cat(images, 1)


def _growing_graph() -> tuple[fx.GraphModule, list[Any]]:
    shapes = [(2, 8, 5, 4), *((8, 8 * i, 3, 3) for i in range(1, 5))]
    given = [torch.randn(*shape).bfloat16() for shape in shapes]
    return make_fx(_growing, decompositions(), tracing_mode="fake")(*given), given


def test_growing_concatenations_begin_with_the_previous_one() -> None:
    graph, given = _growing_graph()
    nest_concats(graph)
    graph.recompile()
    joined = list(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default))
    assert [len(n.args[0]) for n in joined] == [1, 2, 2, 2, 2]
    assert [n.args[0][0] for n in joined[2:]] == joined[1:-1]
    torch.testing.assert_close(graph(*given), _growing(*given))


def test_images_pass_from_part_to_part_with_channels_last() -> None:
    graph, given = _growing_graph()
    nest_concats(graph)
    starts = part_starts(graph, 2)
    parts = divided(graph, starts)
    first, *_, last = (m for name, m in parts.named_children() if name.startswith("fused"))
    (image,) = next(n for n in first.graph.nodes if n.op == "output").args
    assert image.meta["val"].shape == (2, 5, 4, 16) and image.meta["val"].is_contiguous()
    permutes = [n for n in last.graph.nodes if n.target == torch.ops.aten.permute.default]
    assert [n.args[1] for n in permutes] == [[0, 3, 1, 2]]
    torch.testing.assert_close(parts(*given), _growing(*given))


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_divided_model_equals_torch(name: str, monkeypatch: Any) -> None:
    """A model that is divided into parts gives torch's results. Each part's kernel begins to
    compile as soon as the part is planned.
    """
    begun: list[Any] = []
    begin = program.begin
    monkeypatch.setattr(compile, "joint_products", lambda: 4)
    monkeypatch.setattr(program, "begin", lambda *given: (begun.append(given), begin(*given)))
    before = set(program.PROGRAMS)
    module, examples = network(name)
    with torch.no_grad():
        got = torch.compile(module, backend=backend)(*examples)
        torch.testing.assert_close(got, module(*examples), rtol=1e-4, atol=1e-4)
    assert len(set(program.PROGRAMS) - before) == len(begun) > 1


def test_all_parts_begin_to_compile_before_the_first_is_scheduled(monkeypatch: Any) -> None:
    steps: list[str] = []

    class Noted(Planning):
        def drafted(self) -> Any:
            steps.append("drafted")
            return super().drafted()

        def finish(self) -> Any:
            steps.append("finished")
            return super().finish()

    monkeypatch.setattr(compile, "joint_products", lambda: 4)
    monkeypatch.setattr(program, "Planning", Noted)
    module, examples = network("resnet")
    with torch.no_grad():
        torch.compile(module, backend=backend)(*examples)
    parts = steps.count("finished")
    assert steps == ["drafted"] * parts + ["finished"] * parts and parts > 1


def _product() -> tuple[ark.Model, list[Value]]:
    def function(x: Any, w: Any, bias: Any) -> Any:
        return torch.exp(x) @ w + bias

    shapes = [(512, 256), (256, 512), (512,)]
    examples = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    built = build(make_fx(function, tracing_mode="fake")(*examples), examples)
    return built.model, [v for v in (*built.inputs, *built.outputs) if isinstance(v, Value)]


def _source(plan: Any) -> str:
    used = registry.with_kernels(registry.get("cuda"))
    machine = machine_of(plan, 0)
    return write(plan, machine, used.dialect(machine.arch)).source.text


def test_draft_has_the_source_of_the_plan() -> None:
    pytest.importorskip("ark_cuda")
    planning = Planning(*_product(), registry.machine("h200"))
    draft = planning.drafted()
    assert draft is not None and machine_of(draft).variant.role(LOAD)
    assert _source(draft) == _source(planning.finish())


def test_plan_that_may_change_has_no_draft() -> None:
    """No draft of a plan is compiled early if the final plan may differ. On a CPU the number of
    processors is not known yet, and with `compare` another kernel variant may be faster.
    """
    assert Planning(*_product(), registry.machine("cpu-4")).drafted() is None
    h200 = registry.machine("h200")
    assert Planning(*_product(), h200, boxes=False, compare=True).drafted() is None
    assert Planning(*_product(), h200, boxes=False).drafted() is not None


def test_kernels_rely_on_the_alignment_of_tensors() -> None:
    """A kernel whose loading warps require aligned tensors contains no code for unaligned ones,
    because ark copies unaligned tensors to aligned memory first. loose: tensors may later be
    replaced by unaligned ones, so the kernel contains that code.
    """
    pytest.importorskip("ark_cuda")
    h200 = registry.machine("h200")
    placed, loose = (_source(planned(*_product(), h200, loose=f)) for f in (False, True))
    assert "ark_aligned(t.operand" in loose and "ark_aligned(t.operand" not in placed
    assert len(placed) < len(loose)
    plan = planned(*_product(), h200)
    assert _source(from_json(to_json(plan))) == placed


def test_gradients_of_a_divided_model_equal_torch(monkeypatch: Any) -> None:
    monkeypatch.setattr(compile, "joint_products", lambda: 2)
    module = torch.nn.Sequential(*(torch.nn.Linear(4 + i, 5 + i) for i in range(6)))
    x, same = (torch.ones(3, 4).requires_grad_() for _ in range(2))
    torch.compile(module, backend=backend)(x).sin().sum().backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(same).sin().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(got, [p.grad for p in module.parameters()])


def test_kernels_without_loading_warps_have_no_limit() -> None:
    assert joint_products() == 0


def test_part_has_the_variant_that_is_predicted_as_faster() -> None:
    """Each part of a graph gets the kernel variant with the smaller predicted time. For a layer of
    a DenseNet on an H200 it is not the one that the planner chooses, which compares the times of
    products only.
    """

    def layer(x: Any, narrow: Any, wide: Any) -> Any:
        y = torch.conv2d(torch.relu(x), narrow)
        return torch.cat([x, torch.conv2d(torch.relu(y), wide, padding=1)], 1)

    shapes = [(2, 512, 14, 14), (128, 512, 1, 1), (32, 128, 3, 3)]
    examples = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    built = build(make_fx(layer, tracing_mode="fake")(*examples), examples)
    places = [v for v in (*built.inputs, *built.outputs) if isinstance(v, Value)]
    machine = registry.machine("h200")
    alone, compared = (planned(built.model, places, machine, compare=c) for c in (False, True))
    assert machine_of(alone).variant.name == "block"
    assert machine_of(compared).variant.name == "matrix"
    ends = [max(s.end for s in predict(plan, 0)) for plan in (alone, compared)]
    assert ends[1] < ends[0]
