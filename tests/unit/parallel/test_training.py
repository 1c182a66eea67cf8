"""Training over ranks: every plan of the example gives torch's loss curve.

In NumPy, rank by rank, for all plans; on CPU ranks for one that sends. `nox -s training_ranks` runs
100 steps of all on processes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ark.backend import registry
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.parallel import ParallelGraph, materialise, parallelize, spread
from ark.parallel.transform import annotate, part_of
from ark.plan.verify import verify
from tests.ranks import run_ranks
from tests.unit.parallel.ranks_in_numpy import Ranks

pytest.importorskip("torch")
pytest.importorskip("transformers")

import ark

STEPS = 2


def _example() -> Any:
    path = Path(__file__).parents[3] / "examples" / "train" / "ranks.py"
    spec = importlib.util.spec_from_file_location("examples_train_ranks", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


example = _example()
CONFIG = example.Config(vocab=24, hidden=16, inner=32, layers=2, heads=4, kv_heads=4, rows=3)
PIPELINES = ("1f1b", "tessel")


@pytest.fixture(scope="module")
def want() -> np.ndarray:
    given, tokens = example.arrays(CONFIG, 3, 1)
    return np.array(example.torch_losses(CONFIG, given, tokens, STEPS))


def in_numpy(plan: str, ranks: int) -> np.ndarray:
    step, made = example.make(CONFIG, plan, ranks, STEPS)
    given, _ = example.arrays(CONFIG, 3, 4 if plan in PIPELINES else 1)
    memory = Ranks(made.graphs)
    for rank, held in enumerate(made.held):
        for name, buffer in step.names.items():
            if name in given and buffer in held:
                memory.fill(rank, buffer, part_of(given[name], held[buffer]))
    for _ in range(STEPS):
        memory.run()
    curve = step.names["losses"]
    losses = [memory.read(r, curve) for r, held in enumerate(made.held) if curve in held]
    for other in losses:
        np.testing.assert_array_equal(other, losses[0])
    return np.asarray(losses[0])


def kinds(graph: Any) -> list[str]:
    return [n.type for n in graph.nodes if n.type in ("all_reduce", "send", "recv")]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("one", 1), *((plan, 2) for plan in example.PLANS[1:]), ("tensor", 4), ("zero1", 4)],
)
def test_every_plan_learns_as_torch_does(plan: str, ranks: int, want: np.ndarray) -> None:
    got = in_numpy(plan, ranks)
    np.testing.assert_allclose(got, want, rtol=2e-6)
    assert want[-1] < want[0] - 0.05


def test_what_ranks_hold_and_send() -> None:
    """By the plan: whole or parts of parameters and of the optimizer's moments."""

    def share(made: Any, buffer: str) -> float:
        view = made.held[0][buffer]
        whole = next(t for t in made.graphs[0].tensors if t.buffer.name == buffer)
        assert whole.elements == np.prod(view.shape)
        return float(np.prod(view.shape))

    size = CONFIG.hidden * CONFIG.hidden
    parts = {"data": (1, 1), "tensor": (4, 4), "zero1": (1, 4), "zero3": (4, 4)}
    for plan, (parameter, moment) in parts.items():
        step, made = example.make(CONFIG, plan, 4, STEPS)
        assert share(made, step.names["layers.1.query"]) == size / parameter
        assert share(made, step.names["layers.1.query.mean"]) == size / moment
    step, made = example.make(CONFIG, "data", 4, STEPS)
    assert set(kinds(made.graphs[0])) == {"all_reduce"}
    step, made = example.make(CONFIG, "1f1b", 2, STEPS)
    assert all("all_reduce" not in kinds(graph) for graph in made.graphs)
    for rank in range(2):
        own = [i for i in range(2) if step.names[f"layers.{i}.query"] in made.held[rank]]
        assert own == [rank]


def test_on_cpu_ranks(want: np.ndarray) -> None:
    step, made = example.make(CONFIG, "1f1b", 2, STEPS)
    plans = plan_ranks(made.graphs, registry.machine("cpu-1"))
    verify(plans)
    given, _ = example.arrays(CONFIG, 3, 4)
    found = run_ranks(2, lambda own: example.train_rank(step, made, plans, given, STEPS, own))
    (losses,) = [x for x in found if x is not None]
    np.testing.assert_allclose(losses, want, rtol=1e-4)


def test_cuts_that_are_none_are_refused() -> None:
    step = example.Builder(CONFIG, 1, 1, STEPS, False).build()
    for cuts, says in (
        ({"nobody": 0}, "nothing that the graph is given"),
        ({step.names["layers.0.query"]: 2}, "cannot be cut along dimension 2"),
        ({step.names["tokens0"]: 1}, "over 2 ranks"),
    ):
        with pytest.raises(InvalidUsageError, match=says):
            parallelize(step.graph, 2, spread(cuts))


def test_views_of_another_shape_split_by_their_first_dimensions() -> None:
    """Beside NumPy: parts of the reshaped are the reshaped parts."""
    random = np.random.default_rng(0)
    for before, after, says in (
        ((4, 8, 12), (4, 8, 3, 4), "a b c -> a b c d^"),
        ((4, 6), (24,), "a b^ -> a"),
        ((6,), (1, 6), "a -> 1 a"),
        ((2, 3, 4), (6, 4), "a b^ c -> a c"),
    ):
        model = Model(0, 1)
        with use_model(model):
            tensor = ark.tensor(before, name="x")
            ark.add(ark.reduce_sum(tensor, 0), 0.0)
            ark.relu(ark.reshape(tensor, after))
        plan = ParallelGraph(model.graph, 2)
        node = next(n for n in plan.nodes if n.type == "reshape")
        letters = annotate(node).operands
        assert str(annotate(node)) == says
        x = random.normal(size=before)
        letter = letters[0][0]
        for index in range(2):
            cut = np.split(x, 2, axis=letters[0].index(letter))[index]
            want = np.split(x.reshape(after), 2, axis=letters[1].index(letter))[index]
            np.testing.assert_array_equal(cut.reshape(want.shape), want)


def test_memory_that_is_written_in_parts_is_refused() -> None:
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor((4, 4), name="x")
        y = ark.relu(x)
        ark.copy(y[0:2], output=x[0:2])
    with pytest.raises(UnsupportedError, match="later written in parts"):
        materialise(ParallelGraph(model.graph, 1))
