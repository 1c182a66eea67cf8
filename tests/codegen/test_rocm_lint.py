"""The ISA lint on ark's own loop kernels, for faults that running them on the emulator cannot show.

The kernels are compiled and not run. The lint checks the cache control of every release and acquire
between processors, that there is no scratch memory, that LDS and registers are within the limits of
one resident workgroup, and that a prompt's products use matrix instructions.
"""

from __future__ import annotations

import pytest
from ark_rocm import backend, compiler

from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.ir.dtype import bf16
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Plan
from tests import signatures
from tests.cases.collectives import build
from tests.cases.proxy import put_and_send
from tests.cases.rocm_compile import ARCHS, assembly, machine_for
from tests.slow import slow

pytest.importorskip("ark_rocm_emulator")
from ark_rocm_emulator.lint import TARGETS, Expectations, Finding, lint

# The scopes of releases and acquires: processors of a device ("agent"), and the host or peers
# ("system"). The loop kernel marks each release and each acquire with its scope, by a comment in
# the assembly.
SCOPES = ("agent", "system")

# The plans whose kernels are checked: a decoder on one rank, unfused so that matrix units compute
# its prompt; and plans of ranks with peers: an all-reduce, all channel ops, and with
# `nox -s slow` a decoder.
PLANS = (
    "llama-bf16-unfused",
    "sums-bf16",
    "channel0-bf16",
    pytest.param("llama-bf16-rank0", marks=slow),
)


@pytest.fixture(autouse=True)
def _plain_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_hiprtc_version", lambda: "")


def findings(
    arch: str, name: str, source: Source | None = None, *links: Capability
) -> list[Finding]:
    """Returns the lint's findings in the kernel of a named plan. links: further capabilities of the
    machine.
    """
    machine = machine_for(arch)
    machine = machine.with_capabilities(*links)
    plan = dict(signatures.plans(machine, (bf16,)))[name]
    return findings_of(plan, machine, arch, source, name.endswith("unfused"))


def findings_of(
    plan: Plan, machine: Machine, arch: str, source: Source | None = None, matrix: bool = False
) -> list[Finding]:
    emitted = write(plan, machine, backend.dialect(arch))
    expected = Expectations(
        threads=machine.threads,
        dynamic_lds=emitted.scratch_bytes,
        matrix=matrix,
        marked=SCOPES,
        completed_barriers=True,
        kernels=("ark_loop",),
    )
    text = assembly(source or emitted.source, arch)
    return lint(text, TARGETS[arch], expected)


# `nox` checks gfx942 only; `nox -s slow` checks the other architectures.
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("arch", [pytest.param(a, marks=[slow] * (a != "gfx942")) for a in ARCHS])
def test_loop_kernels_are_clean(arch: str, name: str) -> None:
    assert [str(f) for f in findings(arch, name)] == []


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[slow] * (a != "gfx942")) for a in ARCHS])
def test_requests_to_copy_engines_are_clean(arch: str) -> None:
    """The lint reports nothing for a plan that writes requests to a copy engine's queue: packets,
    write pointer and doorbell.
    """
    machine = machine_for(arch)
    plan = build(2, put_and_send, machine)[0]
    assert [str(f) for f in findings_of(plan, machine, arch)] == []


@slow
@pytest.mark.parametrize("arch", ARCHS)
def test_signals_by_stores_are_clean(arch: str) -> None:
    assert [str(f) for f in findings(arch, "llama-bf16-rank0", None, Capability.PEER_STORES)] == []


def test_lint_sees_a_product_without_matrix_instructions() -> None:
    """The lint reports a kernel that must contain matrix instructions and has none: one whose ops
    work on rows.
    """
    machine = machine_for("gfx942")
    plan = dict(signatures.plans(machine, (bf16,)))["rows-bf16"]
    emitted = write(plan, machine, backend.dialect("gfx942"))
    text = assembly(emitted.source, "gfx942")
    expected = Expectations(threads=machine.threads, matrix=True, kernels=("ark_loop",))
    findings = lint(text, TARGETS["gfx942"], expected)
    assert any("matrix" in f.rule or "matrix" in f.message.lower() for f in findings)
