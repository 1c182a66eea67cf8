"""The parameters of a task kind are passed by name: the lowering writes them to the plan, and the
task kind reads them from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import ark
from ark import tasks
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan import kind
from ark.plan.params import Params, PartialParams
from ark.plan.types import Plan, PlanOp
from ark.tasks.experts import TopKParams
from tests.signatures import plans

ROOT = Path(__file__).parents[3]
BY_KEY = re.compile(r"\bparams(\[[\"']|\.get\()")  # access by a dictionary's key
OTHERS = (
    "ark/runtime/",
    "ark/cli/doctor/",
    "backends/mesh/",
)  # where params are a kernel's arguments


def test_plan_holds_parameters_without_defaults() -> None:
    assert list(TopKParams(k=3, rows=1).to_plan().items()) == [("k", 3), ("rows", 1)]
    params = TopKParams(k=3, least=True, rows=2).to_plan()
    assert list(params.items()) == [("k", 3), ("least", True), ("rows", 2)]


def test_kind_reads_them_back() -> None:
    model = Model()
    with use_model(model):
        x = ark.tensor([8, 64], ark.fp32)
        ark.topk(x, 3)
        ark.topk(x, 5, largest=False)
    planned = plan(model.graph, registry.machine("cpu-2"))
    signatures = [kind.signature(planned, op) for op in planned.ops if op.kind == "topk"]
    expected = [TopKParams(k=3, rows=4), TopKParams(k=5, least=True, rows=4)]
    assert [sig.read(TopKParams) for sig in signatures] == expected
    assert signatures[0].read(TopKParams) is signatures[0].read(TopKParams)


@pytest.fixture(scope="module")
def ops() -> list[tuple[Plan, PlanOp]]:
    """Returns ops of every kind, each with its plan."""
    every = [p for _, p in plans(registry.machine("cpu-2"), (ark.fp32,))]
    return [(p, op) for p in every for op in p.ops]


def test_lowering_emits_the_text_of_the_kinds_struct(
    ops: list[tuple[Plan, PlanOp]],
) -> None:
    for _, op in ops:
        schema = kind.get(op.kind).params
        assert schema.from_plan(op.params).to_plan() == op.params, op


def test_every_kind_refuses_parameters_that_its_struct_does_not_have(
    ops: list[tuple[Plan, PlanOp]],
) -> None:
    first = {op.kind: (planned, op) for planned, op in ops}
    for name, (planned, op) in first.items():
        odd = replace(op, params={**op.params, "no_such": 1})
        with pytest.raises(PlanError, match="no_such"):
            kind.get(name).check(kind.signature(planned, odd))


def test_nothing_reads_a_tasks_parameters_by_key() -> None:
    reads = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("ark", "backends")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(OTHERS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BY_KEY.search(line)
    ]
    assert not reads, "read them by name, with Signature.read"


def _subclasses(of: type[Params]) -> Iterator[type[Params]]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def test_partial_structs_match_a_kind() -> None:
    """A subclass of PartialParams declares some of the parameters of a task kind. At least one task
    kind has all of them, with the same defaults.
    """
    schemas = [kind.get(name).params for name in kind.names()]
    assert tasks and len(schemas) > 30
    for partial in _subclasses(PartialParams):
        names = {f.name for f in msgspec.structs.fields(partial)}
        whole = [s for s in schemas if names <= {f.name for f in msgspec.structs.fields(s)}]
        assert whole, f"no kind has the parameters of {partial.__name__}"
