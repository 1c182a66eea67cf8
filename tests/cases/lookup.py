"""Cases and helpers of tests/interop/test_lookup.py, which other tests use too."""

from __future__ import annotations

from typing import Any

import pytest

import ark
from ark.interop.torch import backend

torch = pytest.importorskip("torch")


def same(function: Any, inputs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that torch.compile by ark gives torch's values and leaves no op in torch."""
    ark.init(backend="cpu")
    torch._dynamo.reset()
    want = function(*[x.clone() for x in inputs])
    got = torch.compile(function, backend=backend)(*[x.clone() for x in inputs])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert "stay in torch" not in capsys.readouterr().err
