"""Kernels of a CPU share the machine code of equal loops."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ark_cpu.compiler import CpuCompiler

import ark
from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import Target
from ark.runtime import program
from tests.opcheck import Case, check

Asked = list[tuple[str, Source]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Records the sources that the CPU's compiler receives. The cache of binaries is empty."""
    calls: Asked = []

    def counted(name: str, call: Callable[..., Binary]) -> Callable[..., Binary]:
        def counting(self: CpuCompiler, source: Source, *rest: object) -> Binary:
            calls.append((name, source))
            return call(self, source, *rest)

        return counting

    for name in ("compile", "compile_loop", "link"):
        monkeypatch.setattr(CpuCompiler, name, counted(name, getattr(CpuCompiler, name)))
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(program, "_loops", {})
    ark.init(backend="cpu")
    return calls


def test_kernels_of_other_ops_and_scratch_have_one_loop(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 96, 96)).astype(np.float32)
    one, two = (a, ark.fp32), (b, ark.fp32)
    check([Case("relu", [one], ark.relu, lambda x: np.maximum(x, 0.0))])
    check([Case("matmul", [one, two], ark.matmul, np.matmul, 1e-4)])
    monkeypatch.setattr(program, "_loops", {})  # as in another process
    check([Case("add", [one, two], ark.add, np.add)])
    assert [name for name, _ in asked] == ["compile_loop", "link", "link", "link"]
    sources = [source for name, source in asked if name == "link"]
    assert len({source.loop for source in sources}) == 1
    assert len({re.search(r"ark_scratch_bytes = \d+", s.text)[0] for s in sources}) > 1


def test_source_also_compiles_as_one_program(asked: Asked) -> None:
    """The source with loop and bodies, as `ark emit` and `ark export` write it, compiles as one
    program, although execution compiles the loop separately.
    """
    ones = np.ones((4,), np.float32)
    check([Case("relu", [(ones, ark.fp32)], ark.relu, lambda x: x)])
    (source,) = (source for name, source in asked if name == "link")
    assert b"ark_loop" in CpuCompiler().compile(source, Target("x86_64", 1)).data
    assert source.text.count('extern "C" int ark_loop(') == 1
