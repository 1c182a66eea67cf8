"""Bytes on a rank under ZeRO 1, 2 and 3: parameters, moments and gradients, compared with torch on
CPU ranks.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from ark.backend import registry
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize
from tests.cases.training_blocks import BLOCKS
from tests.cases.training_models import step_of
from tests.slow import slow

RANKS_OF_A_JOB = 2
COPIES = ("data", "zero1", "zero2", "zero3")
FP32_BYTES = 4


def _by_plan(name: str) -> dict[str, int]:
    """Returns rank 0's bytes of parameters and moments, of the sum of its gradients, and of its
    arenas.
    """
    step = step_of("Llama", 1, gathered=name == "zero3")
    ranks = parallelize(step.graph, RANKS_OF_A_JOB, name, cuts=step.cuts).ranks
    held: dict[str, int] = {"parameters": 0, "moments": 0}
    for buffer, view in ranks.held[0].items():
        called = step.names.get(buffer)
        if called in step.results:
            kind = "moments" if called.startswith(("mean.", "square.")) else "parameters"
            held[kind] += FP32_BYTES * math.prod(view.shape)
    plan = plan_ranks(ranks.graphs, registry.machine("cpu-1"))[0]
    return {**held, **plan.arenas}


def _in_torch(rank: int, meeting: str, name: str) -> dict[str, int]:
    """Returns a rank's bytes after a step of torch's AdamW."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS_OF_A_JOB)
    shapes = BLOCKS["Llama"].parameters(1)
    module = torch.nn.Module()
    for key, size in shapes.items():
        module.register_parameter(key.replace(".", "_"), torch.nn.Parameter(torch.ones(size)))
    module.forward = lambda: sum((p * p).sum() for p in module.parameters())
    if name == "zero3":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS_OF_A_JOB,)))
        optimizer: Any = torch.optim.AdamW(module.parameters())
    elif name == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(module.parameters())
    module().backward()
    optimizer.step()
    inner = getattr(optimizer, "optim", optimizer)

    def local(t: Any) -> int:
        own = t.to_local() if hasattr(t, "to_local") else t
        return own.numel() * own.element_size()

    moments = [t for state in inner.state.values() for k, t in state.items() if k != "step"]
    result = {
        "parameters": sum(map(local, module.parameters())),
        "gradients": sum(local(p.grad) for p in module.parameters()),
        "moments": sum(map(local, moments)),
    }
    dist.destroy_process_group()
    return result


def _ranks_of_torch(folder: Path, name: str) -> list[dict[str, int]]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(RANKS_OF_A_JOB) as pool:
        meeting = str(folder / name)
        return pool.starmap(_in_torch, [(r, meeting, name) for r in range(RANKS_OF_A_JOB)])


def test_bytes_of_parameters_and_moments() -> None:
    """On two ranks ZeRO 1 and 2 halve the moments; ZeRO 3 also halves the parameters."""
    plans = {name: _by_plan(name) for name in COPIES}
    whole = plans["data"]
    assert whole["moments"] == 2 * whole["parameters"]
    for name in ("zero1", "zero2"):
        assert plans[name]["moments"] == whole["moments"] // 2
        assert plans[name]["parameters"] == whole["parameters"]
    assert plans["zero3"]["moments"] == whole["moments"] // 2
    assert plans["zero3"]["parameters"] == whole["parameters"] // 2


@slow
@pytest.mark.parametrize("name", ["data", "zero1", "zero3"])
def test_as_many_bytes_as_torch(name: str, tmp_path: Path) -> None:
    """Ranks under ZeRO hold as many bytes as in torch: compared with DDP and AdamW, with
    ZeroRedundancyOptimizer (which assigns whole parameters to ranks), and with fully_shard.
    """
    want, actual = _ranks_of_torch(tmp_path, name), _by_plan(name)
    assert actual["parameters"] == want[0]["parameters"]
    assert actual["moments"] <= max(rank["moments"] for rank in want)
    if name != "zero1":
        assert actual["moments"] == want[0]["moments"]


if __name__ == "__main__":
    import sys
    import tempfile

    for plan in sys.argv[1:] or COPIES:
        with tempfile.TemporaryDirectory() as at:
            print(plan, _by_plan(plan), _ranks_of_torch(Path(at), plan))
