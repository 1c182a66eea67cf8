"""ci/reading.py counts the source of a program, and the number of files of `ark` does not grow
again.
"""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.lower.ranks import plan_ranks
from tests.cases.ci import load

reading = load("reading")


def test_lines_of_the_plain_program_are_not_a_programs_own() -> None:
    lines = {"a.py": [1, 2, 5], "b.py": [3], "c.h": [0, 1]}
    assert reading.own(lines, {"a.py": [1, 2], "b.py": [3, 4]}) == {"a.py": 1, "c.h": 2}


def test_softmax_is_followed_through_its_op_task_and_bodies() -> None:
    lines = reading.traced("softmax")
    own = reading.own(lines, reading.traced("add"))
    assert {"ark/ops/norms.py", "ark/tasks/row_norm.py", "ark/tasks/row_norm.h"} <= own.keys()
    assert "ark/plan/schedule.py" in lines and "ark/plan/schedule.py" not in own
    assert len(own) <= 13 and sum(own.values()) <= 1000


def test_gated_layer_is_one_op() -> None:
    model = ark.Model()
    with ark.use_model(model):
        reading.PROGRAMS["fused linear"][1](0, 1)
    plan = plan_ranks([model.graph], registry.machine(reading.MACHINE), {})[0]
    assert [op.kind for op in plan.ops] == ["linear"]


def test_gated_layer_includes_only_the_headers_of_its_form() -> None:
    own = reading.own(reading.traced("fused linear"), reading.traced("add"))
    tasks = ("sampling.h", "rotary.h", "tasks/linear.h", "linear_tiles.h", "linear_batch.h")
    assert not [path for path in own if path.endswith((*tasks, "growth.h"))]
    assert len(own) <= 41 and sum(own.values()) <= 2600


def test_terms_and_public_modules_stay_few() -> None:
    sizes = reading.sizes()
    assert 3 <= sizes["files that name swiglu"] <= 4
    assert 2 <= sizes["files that name a copy engine"] <= 4
    assert 4 <= sizes["files that name fp8_e4m3"] <= 5
    assert 15 <= sizes["public folders and modules directly under ark/"] <= 20
