"""The first use of a compiler on a device: a compiler that generates wrong code is refused with an
error that names it, a correct one is examined only once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ark_cpu import backend as cpu

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import CheckedBackend, Target, Toolchain
from ark.cli.doctor import checks
from ark.cli.doctor.bench import Bench
from ark.errors import SystemError
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.runtime import known, toolchain
from ark.runtime.executor import Executor


@dataclasses.dataclass
class Miscompiler:
    """A compiler with a fault: the CPU's compiler applied to a changed source. texts: the number of
    sources compiled.
    """

    change: Any
    texts: int = 0

    def key(self, target: Target) -> str:
        return f"{cpu.compiler().key(target)} changed by {self.change}"

    def compile(self, source: Source, target: Target) -> Binary:
        self.texts += 1
        text = self.change(source.text) if self.change else source.text
        return cpu.compiler().compile(dataclasses.replace(source, text=text), target)


class StandIn:
    """The CPU backend with a compiler that is not part of ark."""

    def __init__(self, change: Any = None, version: str = "1.2") -> None:
        self.miscompiler, self.version = Miscompiler(change), version

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def compiler(self) -> Miscompiler:
        return self.miscompiler

    def toolchain(self, arch: str) -> Toolchain | None:
        name = f"compiler {self.version}"
        return Toolchain(name, f"{name} {self.miscompiler.change}", "run `install-another`")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the models by which compilers are examined by one model of two ops."""

    def build(target_graph: Any) -> None:
        target_graph.product(4, 6, 8, fp32)
        target_graph.attention(5, 2, 1, 4, fp32)

    monkeypatch.setattr(known, "MODELS", (build,))
    monkeypatch.setattr(toolchain, "_admitted", set())
    yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))


def ones(backend: Any) -> np.ndarray:
    """Runs relu of ones on the backend."""
    graph = Graph()
    a, b = (graph.tensor((8, 16), fp32, arena="state", name=n) for n in "ab")
    graph.add("relu", [a], [b], {}, "relu")
    device = cpu.open(0)
    try:
        with Executor(plan(graph, device.machine), backend, device) as executor:
            executor.write("a", np.ones((8, 16)))
            executor.start(1).wait()
            return executor.read("b")
    finally:
        device.close()


def test_stand_in_is_a_checked_backend() -> None:
    assert isinstance(StandIn(), CheckedBackend) and not isinstance(cpu, CheckedBackend)


def test_known_results_are_right_on_the_cpu() -> None:
    device = cpu.open(0)
    try:
        assert toolchain.examine(StandIn(), device) == ""
    finally:
        device.close()


def test_compiler_is_examined_once(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StandIn()
    assert (ones(backend) == 1.0).all() and backend.miscompiler.texts == 2
    ones(backend)
    assert backend.miscompiler.texts == 2
    # If the list in memory is empty, as in a new process, the earlier result is read from disk.
    monkeypatch.setattr(toolchain, "_admitted", set())
    monkeypatch.setattr(toolchain, "examine", lambda *_: pytest.fail("examined again"))
    ones(backend)
    # With another version of the compiler or of ark's device code, the compiler is examined again.
    with pytest.raises(pytest.fail.Exception, match="examined again"):
        ones(StandIn(version="1.3"))
    monkeypatch.setattr(toolchain, "_texts", lambda root: "other text")
    with pytest.raises(pytest.fail.Exception, match="examined again"):
        ones(backend)


def wrong_attention(text: str) -> str:
    assert "ark_exp(" in text
    return text.replace("ark_exp(float v) {", "ark_exp(float v) { v *= 0.5f;")


def crash(text: str) -> str:
    raise SystemError("no memory for the compiler")


def test_miscompiler_is_refused_by_name(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = StandIn(wrong_attention)
    with pytest.raises(SystemError) as raised:
        ones(backend)
    message = str(raised.value)
    assert "compiler 1.2 generates wrong code" in message and "attention" in message
    assert "install-another" in message and "ark doctor" in message
    # The result of the examination is stored, so the compiler is refused again without an
    # examination.
    monkeypatch.setattr(toolchain, "examine", lambda *_: pytest.fail("examined again"))
    with pytest.raises(SystemError, match=r"compiler 1\.2 generates wrong code"):
        ones(backend)
    assert (ones(cpu) == 1.0).all()


def test_check_that_cannot_be_made_is_no_verdict(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = StandIn(crash)
    for _ in range(2):
        with pytest.raises(SystemError, match="no memory for the compiler"):
            ones(backend)
    assert backend.miscompiler.texts == 2
    backend.miscompiler.change = None
    assert (ones(backend) == 1.0).all()


@pytest.mark.parametrize("change, verdict", [(None, "pass"), (wrong_attention, "fail")])
def test_doctor_examines_it(small: None, change: Any, verdict: str) -> None:
    with Bench(cpu, 0) as bench:
        bench.backend = StandIn(change)  # type: ignore[assignment]
        actual = checks.compiler(bench)
    assert actual.verdict == verdict and "compiler 1.2" in actual.text
