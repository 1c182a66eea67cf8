"""torch's own tests of a distributed backend, run on the backend "ark" (torch_own.py runs them).

Left out are the tests that torch runs on GPUs only (reduce_scatter's among them:
test_distributed.py compares it with Gloo), and sparse tensors, which the backend refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

ROOT = Path(__file__).parents[2]

OPS = ("sum", "product", "min", "max")
SPLITS = ("all_to_all_single_equal_split", "all_to_all_single_unequal_split", "all_to_all")
FEW = [
    "all_reduce_sum",
    "all_reduce_group_max",
    "all_gather_coalesced_simple",
    "all_to_all_single_unequal_split",
    "broadcast",
    "scatter",
    "send_recv",
    "send_recv_with_tag",
    "send_recv_any_source",
    "barrier",
    "destroy_group",
]
AS_MPI = [
    *(f"{call}{group}_{op}" for call in ("all_reduce", "reduce")
      for group in ("", "_group", "_full_group") for op in OPS),
    *(f"{call}{group}" for call in ("all_gather", "all_gather_coalesced", "broadcast", "scatter",
                                    "gather", "barrier", *SPLITS)
      for group in ("_group", "_full_group")),
    *("all_gather", "all_gather_complex", "all_gather_coalesced_simple",
      "all_gather_coalesced_complex", "all_gather_coalesced_with_empty"),
    *("all_reduce_sum_async", "all_reduce_sum_complex", "all_reduce_complex_unsupported_ops",
      "all_reduce_coalesced_max_complex_unsupported", "reduce_sum_twice"),
    *SPLITS, *(f"{split}_complex" for split in SPLITS),
    *("broadcast", "scatter", "scatter_checks", "scatter_complex", "gather", "gather_checks"),
    *("send_recv", "send_recv_autograd_profiler", "send_recv_torch_profiler", "irecv"),
    *("isend", "isend_autograd_profiler", "isend_torch_profiler", "barrier"),
    *("destroy_group", "destroy_full_group", "get_backend", "get_rank", "get_rank_size_group",
      "get_rank_size_full_group"),
]  # fmt: skip
AS_GLOO = [
    *(f"all_reduce_coalesced{g}_{op}" for g in ("", "_group", "_full_group") for op in OPS),
    *("all_gather_object_default_pg", "gather_object", "scatter_object_list"),
    *("batch_isend_irecv_gloo", "batch_isend_irecv_gloo_tags", "send_recv_with_tag"),
    *("send_recv_any_source", "send_recv_any_source_autograd_profiler"),
    *("send_recv_any_source_torch_profiler",),
    *("send_recv_with_tag_autograd_profiler", "send_recv_with_tag_torch_profiler"),
]


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stands_for", "names"),
    [
        ("mpi", FEW),
        ("mpi", AS_MPI),
        ("gloo", AS_GLOO),
    ],
    ids=["few", "as mpi", "as gloo"],
)
def test_torchs_own_tests_pass(stands_for: str, names: list[str]) -> None:
    pytest.importorskip("expecttest")  # torch's tests import it
    command = [sys.executable, "-m", "tests.multi.torch_own", stands_for]
    done = subprocess.run(
        [*command, *(f"test_{name}" for name in names)],
        cwd=ROOT,
        env={**os.environ, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "600"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
