"""The optimizer's moments in host memory that the device can access (offload): every plan trains as
with moments on the device, and needs less device memory by the size of the moments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import ark
from ark.backend import registry
from ark.errors import ModelError
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize
from ark.parallel.transform import parts_of
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.training_models import Step, step_of, values
from tests.ranks import run_ranks

RANKS_OF_A_JOB = 2
FP32_BYTES = 4
PLANS = ("data", "zero1", "zero3", "megatron", "1f1b")


def _split(plan: str, offload: bool) -> tuple[Step, Any, list[Any]]:
    """Returns the training step of one device, the ranks' graphs, and their plans."""
    step = step_of("Llama", 2, gathered=plan == "zero3")
    cuts = None if plan == "megatron" else step.cuts
    result = parallelize(step.graph, RANKS_OF_A_JOB, plan, cuts=cuts, offload=offload).ranks
    plans = plan_ranks(result.graphs, registry.machine("cpu-1"))
    verify(plans)
    return step, result, plans


def _trained(step: Step, result: Any, plans: list[Any]) -> list[dict[str, np.ndarray]]:
    """Runs two steps on CPU ranks. Returns each rank's parameters and moments."""
    given, (backend, _) = values("Llama", 2), registry.choose("cpu")

    def work(own: Any) -> dict[str, np.ndarray]:
        with Executor(
            plans[own.rank], backend, backend.open(0), ranks=own, budget_s=60.0
        ) as executor:
            for buffer, part in parts_of(result.held[own.rank], step.names, given).items():
                executor.write(buffer, part)
            executor.start(2).wait(600.0)
            kept = [b for b in result.held[own.rank] if step.names.get(b) in step.results]
            arrays = {b: executor.read(b).copy() for b in kept}
            own.barrier()
            return arrays

    return run_ranks(RANKS_OF_A_JOB, work)


@pytest.mark.parametrize("plan", PLANS)
def test_step_is_the_same_without_moments_on_the_device(plan: str) -> None:
    """Parameters and moments after the steps equal, bit for bit, those of plans with moments on the
    device. With `offload`, device memory holds no moments.
    """
    step, result, plans = _split(plan, offload=False)
    _, offloaded, host_plans = _split(plan, offload=True)
    assert result.held == offloaded.held
    for rank, (before, after) in enumerate(zip(plans, host_plans, strict=True)):
        moments = {b.name for b in before.buffers if _is_moment(step, b.name)}
        views = {n: v for n, v in result.held[rank].items() if n in moments}
        nbytes = FP32_BYTES * sum(math.prod(v.shape) for v in views.values())
        assert nbytes > 0
        assert {b.arena for b in after.buffers if b.name in moments} == {"host"}
        assert sum(b.nbytes for b in after.buffers if b.arena == "host") == nbytes
        on_device, left = (
            sum(b.nbytes for b in p.buffers if b.arena == "state") for p in (before, after)
        )
        assert on_device - left == nbytes
    for one, other in zip(
        _trained(step, result, plans), _trained(step, offloaded, host_plans), strict=True
    ):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name], name)


def _is_moment(step: Step, buffer: str) -> bool:
    return step.names.get(buffer, "").startswith(("mean.", "square."))


def test_graph_without_moments_is_refused() -> None:
    with ark.use_model(ark.Model(0, 1)) as model:
        ark.linear(ark.tensor([8, 16]), ark.parameter([32, 16]))
    with pytest.raises(ModelError, match="no optimizer whose moments"):
        parallelize(model, 2, "data", offload=True)


if __name__ == "__main__":
    for name in PLANS:
        for offload in (False, True):
            print(name, offload, dict(_split(name, offload)[2][0].arenas))
