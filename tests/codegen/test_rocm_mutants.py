"""Plants faults in the AMD prelude, one at a time. The lint of the machine code must find each.

The emulator's interpretation is sequentially consistent, and no AMD hardware is available here, so
the lint is the only check that the loop's releases and acquires are right on such hardware. The
tests use gfx942, which has every rule; ARK_EMULATOR_SWEEP=1 uses all architectures.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
from ark_rocm import backend, compiler

import ark
from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, int32
from ark.lower.pipeline import plan
from tests.cases.rocm_compile import ARCHS, assembly, machine_for

pytest.importorskip("ark_rocm_emulator")
from ark_rocm_emulator.lint import TARGETS, Expectations, lint

from tests.slow import few

SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
CDNA3 = ("gfx942", "gfx950")  # scopes are bits of an access; elsewhere only caches have them
CDNA = ("gfx90a", *CDNA3)

ACQUIRE, ADD, CAS = "ark_u32 ark_load_acquire(", "void ark_add_release(", "ark_u32 ark_cas("
POLL, POLLED = "ark_u32 ark_poll(", "void ark_polled("
DEVICE, SYSTEM = "void ark_release_to_device(", "void ark_release_to_system("
FENCE = '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "{}");'
AGENT, ALL = "__HIP_MEMORY_SCOPE_AGENT", "__HIP_MEMORY_SCOPE_SYSTEM"
BLOCK = "__HIP_MEMORY_SCOPE_WORKGROUP"

# Name: the function of the prelude ("": the whole source), the text to replace, its replacement,
# the architectures on which the change matters, and the rule that is broken. Without the fence, the
# wait for stores still suffices on architectures whose stores write through.
MUTANTS: dict[str, tuple[str, str, str, tuple[str, ...], str]] = {
    "an acquire in the device is relaxed": (
        ACQUIRE, f"__ATOMIC_ACQUIRE, {AGENT}", f"__ATOMIC_RELAXED, {AGENT}", ARCHS,
        "acquire-invalidate",
    ),
    "an acquire from peers is relaxed": (
        ACQUIRE, f"__ATOMIC_ACQUIRE, {ALL}", f"__ATOMIC_RELAXED, {ALL}", ARCHS,
        "acquire-invalidate",
    ),
    "an acquire from peers has the device's scope": (
        ACQUIRE, ALL, AGENT, CDNA, "acquire-invalidate",
    ),
    "an acquire in the device has a block's scope": (
        ACQUIRE, AGENT, BLOCK, ARCHS, "acquire-invalidate",
    ),
    "an acquire from peers has a block's scope": (
        ACQUIRE, ALL, BLOCK, ARCHS, "acquire-invalidate",
    ),
    "a wait in the device acquires from the block": (
        POLLED, '(__ATOMIC_ACQUIRE, "agent")', '(__ATOMIC_ACQUIRE, "workgroup")', ARCHS,
        "acquire-invalidate",
    ),
    "a wait for peers acquires from the block": (
        POLLED, '(__ATOMIC_ACQUIRE, "")', '(__ATOMIC_ACQUIRE, "workgroup")', ARCHS,
        "acquire-invalidate",
    ),
    "an exchange acquires from the block": (CAS, AGENT, BLOCK, ARCHS, "acquire-invalidate"),
    "an addition in the device does not release": (
        ADD, "ark_release_to_device();", "", ARCHS, "release-missing",
    ),
    "an addition for peers does not release": (
        ADD, "ark_release_to_system();", "", ARCHS, "release-missing",
    ),
    "an exchange does not release": (
        CAS, "ark_release_to_device();", "", ARCHS, "release-missing",
    ),
    "a wait in the device does not acquire": (
        POLLED, '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");', "", ARCHS,
        "acquire-invalidate",
    ),
    "a wait for peers does not acquire": (
        POLLED, '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");', "", ARCHS, "acquire-invalidate",
    ),
    "a wait for peers acquires from the device": (
        POLLED, '(__ATOMIC_ACQUIRE, "")', '(__ATOMIC_ACQUIRE, "agent")', CDNA,
        "acquire-invalidate",
    ),
    "a wait for peers polls the device's cache": (POLL, ALL, AGENT, CDNA3, "acquire-scope"),
    "an exchange does not acquire": (
        CAS, "__ATOMIC_ACQUIRE", "__ATOMIC_RELAXED", ARCHS, "acquire-invalidate",
    ),
    "a release in the device has no fence": (
        DEVICE, FENCE.format("agent"), "", CDNA3, "release-write-back",
    ),
    "a release in the device has a block's fence": (
        DEVICE, FENCE.format("agent"), FENCE.format("workgroup"), CDNA3, "release-write-back",
    ),
    "a release to peers has no fence": (SYSTEM, FENCE.format(""), "", CDNA, "release-write-back"),
    "a release to peers has the device's fence": (
        SYSTEM, FENCE.format(""), FENCE.format("agent"), CDNA, "release-write-back",
    ),
    "a release in the device does not wait for its write-back": (
        DEVICE, "ark_drain();", "", CDNA3, "release-write-back-wait",
    ),
    "a release to peers does not wait for its write-back": (
        SYSTEM, "ark_drain();", "", CDNA, "release-write-back-wait",
    ),
    # The fault also removes the wait for stores, but only the missing write-back is reported,
    # because no store can be in flight at this place: a signal follows ark_all, and a failure
    # report follows a call, which waits for all stores.
    "a release in the device is none": (
        DEVICE, FENCE.format("agent") + "\n  ark_drain();", "", CDNA3, "release-write-back",
    ),
    "a release to peers is none": (
        SYSTEM, FENCE.format("") + "\n  ark_drain();", "", ARCHS, "release-wait",
    ),
    "the barrier after a task does not drain": (
        "bool ark_all_next(", "ark_drain();", "", CDNA, "release-barrier-wait",
    ),
    "a counter of peers is added to in the device's scope": (
        ADD, ALL, AGENT, CDNA3, "release-scope",
    ),
    "the host is told in the device's scope": (
        "void ark_store_host(", ALL, AGENT, CDNA3, "release-scope",
    ),
    "nobody marks an acquire": ("", "; ark.acquire ", "; ", ARCHS, "marker"),
}  # fmt: skip

CASES = [
    (arch, name)
    for arch in (ARCHS if SWEEP else ("gfx942",))
    for name, (*_, archs, _) in MUTANTS.items()
    if arch in archs
]


@pytest.fixture(autouse=True)
def _plain_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_hiprtc_version", lambda: "")


@cache
def source(arch: str) -> str:
    """A loop kernel whose bodies store in several ways. It is small, because it is compiled
    often.
    """
    machine, model = machine_for(arch), Model()
    with use_model(model):
        ark.transpose(ark.tensor((2, 3, 40), bf16), (2, 0, 1))
        ark.embedding(ark.tensor((3, 2), int32), ark.tensor((9, 40), bf16))
        cache, rows = ark.tensor((2, 192, 16), bf16), ark.tensor((3, 32), bf16)
        ark.kv_append(cache, rows, ark.tensor((1,), int32))
    return write(plan(model.graph, machine), machine, backend.dialect(arch)).source.text


def broken(arch: str, text: str) -> set[str]:
    expected = Expectations(
        threads=machine_for(arch).threads,
        marked=("agent", "system"),
        completed_barriers=True,
        kernels=("ark_loop",),
    )
    return {f.rule for f in lint(assembly(Source(text), arch), TARGETS[arch], expected)}


@pytest.mark.parametrize(("arch", "name"), CASES if SWEEP else few(8, CASES))
def test_lint_finds_each_planted_fault(arch: str, name: str) -> None:
    function, old, new, _, rule = MUTANTS[name]
    text = source(arch)
    begin = text.index(f"ARK_DEVICE {function}") if function else 0
    end = text.index("\n}\n", begin) if function else len(text)
    body = text[begin:end]
    assert old in body
    assert rule in broken(arch, text[:begin] + body.replace(old, new) + text[end:])


@pytest.mark.parametrize("arch", ARCHS if SWEEP else ("gfx942",))
def test_lint_reports_nothing_without_a_fault(arch: str) -> None:
    assert not broken(arch, source(arch))
