"""Three of onnx's backend node tests on every backend, in one kernel; `nox -s onnx` runs more."""

from __future__ import annotations

import pytest

from tests.interop.node_suite import Suite, selected

NAMES = ("test_gemm_transposeA", "test_softmax_axis_0", "test_top_k")


@pytest.mark.emulated("slow")
def test_three_nodes(backend: str) -> None:
    suite = Suite()
    suite.run(selected(NAMES))
    assert suite.counts == {"passed": len(NAMES)}
