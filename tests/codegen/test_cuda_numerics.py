"""The bodies of ops that order NaN, mask rows or use the largest and smallest numbers of a type
compile with NVRTC.
"""

from __future__ import annotations

import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.program import build

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines


def test_ordering_and_masking_bodies_compile() -> None:
    machine, model = machines.MODELS["h100"], Model()
    with use_model(model):
        rows, long = ark.tensor([300, 130], ark.fp16), ark.tensor([5, 4999])
        pool, pages = ark.tensor([5, 1, 8, 16]), ark.tensor([2, 3], ark.int32)
        at = ark.tensor([2], ark.int32)
        kept = [
            *(ark.topk(rows, 8, largest=largest) for largest in (True, False)),
            *(ark.topk(long, k) for k in (4, 80)),
            *(ark.argmax(rows), ark.argmin(rows), ark.safe_softmax(rows), ark.logsumexp(rows, -1)),
            *(ark.hypot(long, 2.0), ark.cosh(long), ark.sinh(long)),
            *(ark.paged_append(pool, ark.tensor([2, 16]), pages, at),),
            ark.paged_attention(ark.tensor([2, 32]), pool, pool, pages, at),
        ]
    planned = plan(model.graph, machine)
    verify([planned])
    assert kept and build(planned, machine, backend, machine.arch).binary.data[:4] == b"\x7fELF"
