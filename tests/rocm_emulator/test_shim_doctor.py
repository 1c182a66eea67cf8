"""`ark doctor` with AMD device code on an NVIDIA GPU: the functions that pass data between
processors are compiled through the shim (test_shim.py).

It is compiled everywhere, and its PTX is checked for the orders and scopes that the prelude
requests. It runs where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from ark_rocm_emulator.shim import compile_ptx
from ark_rocm_emulator.shim.backend import ShimBackend, prelude

from ark.backend.codegen import layout
from ark.backend.codegen.dialect import Source
from ark.backend.protocol import KernelBackend, Target
from ark.cli.doctor.bench import source
from ark.machine.variant import COMPUTE, block
from tests.cases.shim import fences

pytest.importorskip("cuda.bindings.nvrtc")


def doctor(backend: KernelBackend) -> tuple[Source, int]:
    """The doctor's source for an H100, and the number of threads of a block."""
    machine = backend.machine("h100")
    assert machine is not None
    machine = dataclasses.replace(machine, variants=(block(machine.variant.role(COMPUTE)),))
    return source(machine, backend), machine.threads


def ordering(statement: str) -> list[str]:
    """The memory-model instructions in the PTX of a kernel with one statement of the prelude."""
    text = f"""constexpr int ARK_LANES = 32, ARK_WARPS = 4, ARK_LOOP_BYTES = {layout.LOOP_BYTES};
    struct ArkParams {{}};
    {prelude()}
    extern "C" __global__ void k(ark_u32* p, ark_u64* w, bool system, ark_u64* out) {{
      {statement}
    }}"""
    ptx = compile_ptx(text)
    matches = re.findall(r"\b(?:(?:ld|st|atom|red)\.\S*(?:sys|gpu)\S*|fence\.\S+)", ptx)
    plain = [re.sub(r"\.(?:global|u32|b32|u64|b64)|;", "", word) for word in matches]
    # The compiler emits `red` for an atomic addition whose result is unused; it counts as the same
    # instruction.
    return [word.replace("red.add", "atom.add") for word in plain]


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("out[0] = ark_poll(p, true); ark_polled(true);", ["ld.relaxed.sys", "fence.acquire.sys"]),
        (
            "out[0] = ark_poll(p, false); ark_polled(false);",
            ["ld.relaxed.gpu", "fence.acquire.gpu"],
        ),
        ("ark_add_release(p, 1u, false);", ["fence.release.gpu", "atom.add.relaxed.gpu"]),
        ("ark_add_release(p, 1u, true);", ["fence.release.sys", "atom.add.relaxed.sys"]),
        ("ark_store_host(p, 1u);", ["fence.release.sys", "st.relaxed.sys"]),
        ("out[0] = ark_load_host(p);", ["ld.acquire.sys"]),
        ("ark_packet_store(w, 1u, true);", ["st.relaxed.sys"]),
        ("out[0] = ark_packet_load(w, false);", ["ld.relaxed.gpu"]),
    ],
)
def test_preludes_orders_and_scopes_arrive(statement: str, wanted: list[str]) -> None:
    got = ordering(statement)
    allowed = [fences(word) if word.startswith("fence") else {word} for word in wanted]
    assert len(got) == len(wanted) and all(map(set.__contains__, allowed, got)), got


def test_doctors_kernel_compiles() -> None:
    backend = ShimBackend()
    text, threads = doctor(backend)
    assert "__hip_atomic_fetch_add(g, v" in text.text  # the ROCm prelude's own words
    for arch in ("sm_80", "sm_90a"):
        binary = backend.compiler().compile(text, Target(arch, threads))
        assert binary.data and " 0 bytes spill stores" in binary.log


def test_doctor_passes_on_a_gpu() -> None:
    probed = ShimBackend().probe()
    if not probed.devices:
        if "cuda" in os.environ.get("ARK_REQUIRE", ""):
            pytest.fail(f"ARK_REQUIRE promises an NVIDIA GPU, but {probed.reason}")
        pytest.skip(probed.reason)
    done = subprocess.run(
        [sys.executable, "-m", "ark", "doctor", "--backend", "rocm", "--json"],
        env={**os.environ, "ARK_ROCM_DEVICE": "shim"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "rocm" and report["device"]["arch"].startswith("sm_")
    assert len(report["checks"]) >= 11
    assert not [c for c in report["checks"] if c["verdict"] == "fail"]
