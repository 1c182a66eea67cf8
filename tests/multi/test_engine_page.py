"""docs/new-engine.md followed literally: its engine moves arrays between two ranks."""

from __future__ import annotations

from pathlib import Path

from tests import edited, pages

PAGE = "new-engine.md"
PROGRAM = """
import numpy as np
import ark
from ark.backend import registry
from ark.lower.engines import MESSAGES, TRANSFERS
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.collectives import build, devices, keep
from tests.ranks import run_ranks

assert "memcpy" in MESSAGES and "memcpy" in TRANSFERS
COUNTS = (3, 70001)

def body(rank):
    for count in COUNTS:
        x = ark.mul(ark.tensor([count], name=f"x{count}"), 1.0)
        keep(ark.all_gather(x, rank, 2, engine="memcpy"), f"gather{count}")

with devices("cpu", 2) as (opened, machine):
    plans = build(2, body, machine)
    verify(plans)
    assert "memcpy" in {op.kind for op in plans[0].ops}

    def run(ranks):
        device, plan = opened[ranks.rank], plans[ranks.rank]
        own = {b.name.rpartition(".")[0]: b for b in plan.buffers if b.rank == ranks.rank}
        backend = registry.get("cpu")
        with Executor(plan, backend, device, ranks=ranks, budget_s=60.0) as executor:
            for n in COUNTS:
                values = np.arange(n, dtype=np.float32) % 251 + ranks.rank
                device.write(executor.buffer_address(own[f"x{n}"].id), values.view(np.uint8))
            executor.start(2).wait(60.0)
            return [
                device.read(
                    executor.buffer_address(own[f"gather{n}"].id), own[f"gather{n}"].nbytes
                ).view(np.float32)
                for n in COUNTS
            ]

    for gathered in run_ranks(2, run):
        for n, values in zip(COUNTS, gathered, strict=True):
            x = np.arange(n, dtype=np.float32) % 251
            np.testing.assert_array_equal(values, np.concatenate([x, x + 1]))
print("followed")
"""


def test_engine_of_the_page_moves_arrays(tmp_path: Path) -> None:
    shown, kind = pages.python_blocks(PAGE)
    begin, entry = shown.split("        ...\n")
    name, _, text = kind.partition("\n")
    engines = "ark/lower/engines.py"
    assert begin in (edited.ROOT / engines).read_text()
    modules = {
        "ark.lower.engines": edited.before(
            engines, "        # switch: the switch between devices computes sums.", entry
        ),
        "ark.tasks.memcpy": text,
    }
    assert edited.run(tmp_path, modules, PROGRAM) == "followed\n"
    first = (pages.DOCS / PAGE).read_text().split("\n\n")[1].replace("\n", " ")
    files = ", ".join(f"`{file}`" for file in (engines, name.removeprefix("# ")))
    assert f"2 files: {files}." in first
