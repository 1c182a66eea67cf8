"""Growing fetches of paged caches: copies to shared memory of all rows up to the current position,
found by a page table. Tests the plans of an engine, and forged plans that are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ark.errors import PlanError
from ark.ir.dtype import bf16
from ark.models.build import Pages, Shape
from ark.models.plans import make_plans
from ark.plan.serialize import from_json, to_json
from ark.plan.types import FetchPages, Plan
from ark.plan.verify import verify
from ark.runtime import tables
from tests.unit.plan.growths import ROOM_POSITIONS, WIDE, growing, offers_roles
from tests.unit.plan.shapes import replace_task


def served(page: int = 16, apart: bool = True, stage: int = 4096) -> Plan:
    """Returns a plan with a paged cache for one row and for two rows. stage: bytes of a stage."""
    pages = Pages(ROOM_POSITIONS // page * 2 + 3, page, (1, 2), apart)
    shape = Shape(WIDE, bf16, ROOM_POSITIONS, 0, batch=2, pages=pages)
    *others, roles = offers_roles().variants
    roles = dataclasses.replace(roles, stage_bytes=stage)
    target = dataclasses.replace(offers_roles(), variants=(*others, roles))
    (plan,) = make_plans(shape, target, {"variant": "roles"})
    return plan


def test_engine_streams_its_pages_and_the_file_says_so() -> None:
    """An engine's plan streams paged caches, and is equal after writing and reading its file. The
    records contain the first page's address, the page table, the row and the part.
    """
    plan = served()
    verify([from_json(to_json(plan))])
    assert from_json(to_json(plan)) == plan
    tasks = growing(plan)
    assert {plan.ops[t.op].kind for _, t in tasks} == {"paged_attention"}
    assert {phase for (phase, *_), _ in tasks} == {0, 1}
    built = tables.build(plan, [0] * len(plan.ops), lambda b: b << 32, lambda c: 64 * c)
    rows = dict(enumerate(built.growths, 1))
    every = [t for p in plan.phases for own in p.processors for t in own]
    for record, task in zip(built.tasks, every, strict=True):
        if plan.ops[task.op].kind != "paged_attention":
            continue
        row = rows[int(record["growth"])]
        keys, values, table, position = (plan.tensors[i] for i in plan.ops[task.op].operands[1:5])
        kv_heads, page = keys.shape[1:3]
        head, split = task.coord[1:3]
        offset = head * page * 64
        assert row["address"] == (keys.buffer << 32) + offset
        assert row["beside"] == (values.buffer << 32) + offset
        assert row["table"] == (table.buffer << 32) + table.first_byte
        assert row["length"] == (position.buffer << 32) + position.first_byte
        assert (row["row"], row["rows"]) == (64, ROOM_POSITIONS)
        assert (row["page"], row["pitch"], row["pages"]) == (
            page,
            kv_heads * page * 64,
            keys.shape[0],
        )
        assert row["part"] == split < row["parts"]


def test_stages_of_many_pages_are_read_in_place() -> None:
    """Each lane of the loading warp copies one page of a stage: so caches whose stages have 32
    pages are streamed, and caches whose stages have 64 pages are read in place.
    """
    assert growing(served(page=1)) and not growing(served(page=1, stage=8192))


def test_rows_that_another_row_appends_are_read_in_place() -> None:
    """With `apart=False`, two rows may belong to one sequence, as when drafts are verified. Caches
    are then not streamed.
    """
    assert not growing(served(apart=False))


CHANGES: dict[str, Callable[[FetchPages], FetchPages]] = {
    "table": lambda p: dataclasses.replace(p, table=4),
    "rows": lambda p: dataclasses.replace(p, rows=p.rows // 2),
    "pitch": lambda p: dataclasses.replace(p, pitch=p.pitch // 2),
    "count": lambda p: dataclasses.replace(p, count=p.count + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_pages_are_refused(change: str) -> None:
    plan = served()
    place, task = growing(plan)[0]
    (fetch,) = task.fetches
    assert fetch.growth is not None and fetch.growth.pages is not None
    growth = dataclasses.replace(fetch.growth, pages=CHANGES[change](fetch.growth.pages))
    other = dataclasses.replace(fetch, growth=growth)
    with pytest.raises(PlanError, match="differ from those that tasks of kind"):
        verify([replace_task(plan, place, fetches=(other,))])
