"""The kernel is compiled while the scheduler and the verifier run. For this, the draft plan must
give the compiler the same source as the finished plan.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from ark.backend import registry
from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.backend.devices import Binary
from ark.backend.protocol import Target
from ark.errors import SystemError
from ark.ir.dtype import by_name
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.lower.ranks import plan_ranks
from ark.models.build import Shape
from ark.models.plans import make_plans
from ark.plan.collector import paused
from ark.plan.rotated import on_rank
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime import program
from tests.unit.plan.shapes import CONFIG, decoder_graphs, machine


@pytest.mark.parametrize("name", ["h100", "mi300x", "cpu-2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_draft_has_the_source_of_the_plan(name: str, ranks: int) -> None:
    made_for = registry.machine(name)
    drafts: dict[int, Plan] = {}
    plans = plan_ranks(decoder_graphs(ranks), made_for, drafted=drafts.__setitem__)
    dialect = registry.get(made_for.backend).dialect(made_for.arch)
    for rank, plan in enumerate(plans):
        draft = on_rank(drafts[rank], rank)
        assert write(draft, machine_of(draft), dialect) == write(plan, machine_of(plan), dialect)
        assert draft.phases != plan.phases


def test_limit_is_loaded_late_if_a_task_may_lower_it() -> None:
    """If a task may lower the iteration limit (by a stop token), the kernel reads the limit after
    the iteration barrier; otherwise it reads it early, while it waits for the barrier.
    """
    target = registry.machine("h100")
    dialect = registry.get(target.backend).dialect(target.arch)
    (decoder,) = plan_ranks(decoder_graphs(1), target)
    graph = Graph()
    a, b = (graph.tensor((64,), by_name("fp32"), arena="state") for _ in range(2))
    graph.add("relu", [a], [b], {}, "relu")
    late_plan = make_plan(graph, target)
    sources = [write(p, machine_of(p), dialect).source.text for p in (decoder, late_plan)]
    assert ["#define ARK_LIMIT_FALLS" in text for text in sources] == [True, False]


class Compiler:
    """The CPU's compiler with a count of its calls."""

    def __init__(self, fault: str = "") -> None:
        self.inner, self.fault, self.calls = registry.get("cpu").compiler(), fault, 0

    def key(self, target: Target) -> str:
        return self.inner.key(target) + self.fault

    def compile(self, source: Source, target: Target) -> Binary:
        self.calls += 1
        if self.fault:
            raise SystemError(self.fault)
        return self.inner.compile(source, target)


class Backend:
    def __init__(self, compiler: Compiler) -> None:
        self.name, self.dialect = "cpu", registry.get("cpu").dialect
        self.compiler = lambda: compiler


@pytest.mark.parametrize("fault", ["", "no compiler today"])
def test_begun_compilation_is_not_repeated(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))
    compiler = Compiler(fault)
    backend = Backend(compiler)
    target = machine(2)
    shape = Shape(CONFIG, by_name("fp32"), 64, 4, 0, 1)

    def drafted(rank: int, draft: Plan) -> None:
        for _ in range(2):
            program.begin(draft, backend, target.arch)

    (plan,) = make_plans(shape, target, None, drafted)
    if fault:
        with pytest.raises(SystemError, match=fault):
            program.build(plan, target, backend, target.arch)
        return
    first_build = program.build(plan, target, backend, target.arch)
    second_build = program.build(plan, target, backend, target.arch)
    assert (first_build.cached, second_build.cached, compiler.calls) == (False, True, 1)
    assert first_build.binary.data == second_build.binary.data


def test_collector_runs_again_after_a_pause() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
