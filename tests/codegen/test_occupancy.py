"""The resources that a binary occupies: read from machine code, and compared with the compilers'
own reports and with published tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ark_cuda import footprint
from ark_rocm import code_object, machines
from ark_rocm.compiler import Compiler, assembly
from ark_rocm_emulator.lint.targets import TARGETS

import ark
from ark.backend import registry
from ark.backend.codegen.dialect import Source
from ark.backend.occupancy import ProcessorLimits, Used, occupancy
from ark.backend.protocol import Target
from ark.cli import main
from ark.errors import SystemError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.serialize import to_json

# A sum of COUNT products that are all live at once, and LDS.
KERNEL = """
#define DEVICE __attribute__((device))
#define UNROLL _Pragma("unroll")
typedef unsigned int u32;
extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256),
    amdgpu_waves_per_eu(WAVES))) void ark_loop(float* data) {
  __attribute__((shared)) static float kept[1000];
  u32 lane = __builtin_amdgcn_workitem_id_x();
  float values[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) values[i] = data[256 * i + lane];
  kept[lane] = values[0];
  __builtin_amdgcn_s_barrier();
  UNROLL for (int i = 0; i < COUNT; ++i)
    data[256 * i + lane] = values[i] * values[COUNT - 1 - i] + kept[lane ^ 1u];
}
"""


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize(("count", "waves"), [(8, 1), (100, 1), (150, 8)])
def test_registers_and_waves_are_the_compilers(arch: str, count: int, waves: int) -> None:
    text = f"#define COUNT {count}\n#define WAVES {waves}\n{KERNEL}"
    target = Target(arch, 256)
    listing = assembly(Source(text), target)
    used = code_object.used(Compiler().compile(Source(text), target).data)

    def number(pattern: str) -> int:
        match = re.search(pattern, listing)
        assert match, pattern
        return int(match[1])

    assert used.registers == number(r"\.vgpr_count:\s+(\d+)")
    assert used.scalar_registers == number(r"\.sgpr_count:\s+(\d+)")
    assert used.spills == number(r"\.vgpr_spill_count:\s+(\d+)")
    assert used.scratch_bytes == number(r"; ScratchSize: (\d+)")
    assert used.shared_bytes == number(r"; LDSByteSize: (\d+)") >= 4000
    # clang reports the waves that fit on a SIMD by their registers; it does not count LDS.
    alone = occupancy(used, machines.ARCHS[arch].limits, 4, -used.shared_bytes)
    assert alone.warps // 4 == number(r"; Occupancy: (\d+)")


def test_limits_are_those_of_the_lint() -> None:
    """The limits in the machine models equal those in the lint, which has a separate table from the
    ISA guides.
    """
    for arch, lint in TARGETS.items():
        own = machines.ARCHS[arch].limits
        assert own == ProcessorLimits(
            files=lint.simds_per_cu,
            registers=lint.vgprs_per_simd,
            granule=lint.vgpr_granule,
            warps=lint.waves_per_simd,
            shared_bytes=lint.lds_per_cu,
            shared_granule=lint.lds_granule,
        )


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limit"),
    [
        # Expected values of NVIDIA's occupancy calculator.
        ("sm_80", 256, 32, 0, 8, "registers and warps"),
        ("sm_80", 256, 64, 0, 4, "registers"),
        ("sm_80", 256, 65, 0, 3, "registers"),
        ("sm_90a", 1024, 40, 0, 1, "registers"),
        ("sm_90a", 128, 32, 48 << 10, 4, "shared memory"),
        ("sm_120", 128, 32, 0, 12, "warps"),
    ],
)
def test_blocks_of_a_multiprocessor(
    arch: str, threads: int, registers: int, shared: int, blocks: int, limit: str
) -> None:
    got = occupancy(Used(registers), footprint.limits(arch), threads // 32, shared)
    assert (got.blocks, got.limit) == (blocks, limit)


def test_ptxas_log_of_several_functions() -> None:
    log = (
        "ptxas info    : Compiling entry function 'ark_loop' for 'sm_90a'\n"
        "ptxas info    : Function properties for ark_loop\n"
        "ptxas         .     40 bytes stack frame, 52 bytes spill stores, 48 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers, 144 bytes cumulative stack size, "
        "1024 bytes smem\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    )
    expected = Used(168, spills=13, scratch_bytes=144, shared_bytes=1024)
    assert footprint.used(log) == expected
    with pytest.raises(SystemError, match="no figures of 'other'"):
        footprint.used(log, "other")


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 90])
def test_broken_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(SystemError, match="the code object cannot be read"):
        code_object.used(data)


@pytest.mark.parametrize(("backend", "machine"), [("rocm", "mi300x"), ("cuda", "h100")])
def test_emit_prints_registers_and_occupancy(
    backend: str, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    with use_model(model):
        ark.add(ark.tensor([3, 40], ark.fp32), 2)
    file = tmp_path / "plan.json"
    file.write_text(to_json(plan(model.graph, registry.machine(machine))))
    argv = ["emit", str(file), "--backend", backend, "-o", str(tmp_path / "out"), "--binary"]
    assert main(argv) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    words = r"\d+ vector registers a lane, .*0 spilled.*shared memory a block; \d+ blocks? a"
    assert re.search(words, last), last
