"""Functions that the benches of several ranks share."""

from __future__ import annotations

import json

from ark.cli.measure.comm_peer import join_torch
from ark.runtime.session import ranks

JOIN_TIMEOUT_S = 120


def slowest(number: float) -> float:
    """The largest of all ranks' numbers."""
    job = ranks()
    if job is None:
        return number
    return float(max(map(json.loads, job.all_gather(json.dumps(float(number)).encode()))))


def join(backend: str) -> None:
    """Makes the job's ranks a process group of torch.distributed: of NCCL beside the backend cuda,
    otherwise of Gloo.
    """
    job = ranks()
    assert job is not None, "the launcher starts several ranks"
    join_torch("nccl" if backend == "cuda" else "gloo", job, JOIN_TIMEOUT_S)
