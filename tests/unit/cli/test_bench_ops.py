"""`ark bench ops`: figures as JSON, a chart of ark and torch, and errors that list the available
cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ark.backend import registry
from ark.cli import bench_ops, main
from ark.cli.bench_ops import _copy_cells, chosen
from ark.cli.measure.cases import cases
from ark.cli.measure.memory_cases import moves
from ark.cli.measure.ops import OpFigures, measure
from ark.cli.measure.results import read
from tests.slow import slow

CASE = "adds-64x4096-fp32"


def test_figures_and_chart_beside_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    table, chart = tmp_path / "rows.json", tmp_path / "chart.svg"
    asked = ["--backend", "cpu", "--vs", "torch", "--repeats", "1"]
    files = ["--json", str(table), "--svg", str(chart)]
    assert main(["bench", "ops", CASE, *asked, *files]) == 0
    (row,) = read(table).figures
    assert row.figure == f"ops/{CASE}" and row.peer == "torch" and row.error == ""
    assert row.us and row.peer_us and row.ratio == pytest.approx(row.peer_us / row.us)
    assert row.detail["distance"] == 0.0
    assert CASE in {text.text for text in ElementTree.parse(chart).iter() if text.text}


def test_memory_bound_ops_are_compared_with_an_equal_copy() -> None:
    """`ark bench ops` compares memory-bound ops with a copy of as many bytes. A result that two ops
    write counts as a whole; a small result is not compared.
    """
    pytest.importorskip("torch")
    case = next(c for c in moves() if c.name.startswith("concat"))
    backend = registry.get("cpu")
    with contextlib.closing(backend.open(0)) as device:
        for rows, beside in ((512, True), (8, False)):
            shapes, nbytes = ((rows, 512),) * 2, 2.0 * 2 * 2 * rows * 512
            small = dataclasses.replace(case, shapes=shapes, nbytes=nbytes)
            row = measure(small, backend, device, device.machine, repeats=1, peer=True)
            assert row.error == "" and row.distance == 0.0
            assert (row.copy_seconds is not None) == beside
    cells = _copy_cells(OpFigures("x", 4e-6, nbytes=12e6, copy_seconds=3e-6), 4e12)
    assert list(cells) == ["0.75", "0.75"]


def test_ops_result_is_compared_and_not_its_operands() -> None:
    """The output of a product with a fused epilogue is compared with the peer's, although it is not
    the product's last operand.
    """
    from ark_cuda import machines

    from ark.cli.measure.ops import planned

    case = next(c for c in cases() if c.name.startswith("linear-gelu"))
    plan, name = planned(case, machines.MODELS["h100"])
    assert [op.kind for op in plan.ops] == ["matmul"]
    shapes = {t.name: t.shape for t in plan.tensors}
    assert shapes[name] == (4096, 4096) and name not in ("in0", "in1", "in2")


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "no-such-case"]) != 0
    assert "the case 'no-such-case' does not exist" in capsys.readouterr().err


LOOP = """
kernel:
	v_mov_b32 v0, 0
.LBB0_1:
	global_load_dwordx4 v[0:3], v8, s[0:1]
	ds_read_b128 v[4:7], v9
	s_waitcnt lgkmcnt(0)
	v_mfma_f32_16x16x16_bf16 v[16:19], v[4:5], v[6:7], v[16:19]
	v_mfma_f32_32x32x8_f16 v[20:35], v[4:5], v[6:7], v[20:35]
	s_add_i32 s2, s2, -1
	s_cmp_lg_u32 s2, 0
	s_cbranch_scc1 .LBB0_1
	s_endpgm
	.amdgpu_metadata
---
amdhsa.kernels:
  - .name: kernel
    .private_segment_fixed_size: 0
    .vgpr_count: 36
    .vgpr_spill_count: 0
...
	.end_amdgpu_metadata
"""


def test_slots_of_a_loop_are_counted_by_passes() -> None:
    """The share of a loop's issue slots that matrix instructions take, compared with a share
    computed by hand from the number of cycles (passes) that each instruction takes.
    """
    lint = pytest.importorskip("ark_rocm_emulator.lint.matrix_loop")
    loop = lint.matrix_loop(LOOP, "gfx942", "kernel")
    assert loop.matrix_share == (4 + 8) / (4 + 8 + 6)
    assert loop.instructions == {
        **{"memory": 1, "shared memory": 1, "wait": 1, "matrix": 2, "scalar": 2, "branch": 1}
    }
    assert (loop.registers, loop.spills, loop.scratch_bytes) == (36, 0, 0)
    older = lint.matrix_loop(LOOP, "gfx90a", "kernel")  # on which they take 8 and 16 passes
    assert older.matrix_share == (8 + 16) / (8 + 16 + 6)


def test_slots_of_rdna_are_cycles() -> None:
    """A WMMA instruction takes 32 cycles, a transcendental one four and every other one one."""
    lint = pytest.importorskip("ark_rocm_emulator.lint.matrix_loop")
    products = "v_wmma_f32_16x16x16_bf16 v[16:23], v[0:7], v[8:15], v[16:23]\n\tv_exp_f32 v4, v4"
    listing = "\n".join(line for line in LOOP.splitlines() if "v_mfma_f32_32" not in line)
    old = "v_mfma_f32_16x16x16_bf16 v[16:19], v[4:5], v[6:7], v[16:19]"
    loop = lint.matrix_loop(listing.replace(old, products), "gfx1100", "kernel")
    assert loop.matrix_share == 32 / (32 + 4 + 6)


@pytest.mark.parametrize(
    # The next test compiles for gfx942 in `nox`, so gfx942 is marked slow here.
    "arch",
    ["gfx1100", *(pytest.param(a, marks=slow) for a in ("gfx942", "gfx90a", "gfx950"))],
)
def test_products_on_amd_are_matrix_instructions_for_the_most_part(
    arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ark_rocm_emulator")
    case = "matmul-4096x4096x4096-nt-bf16"
    assert main(["bench", "ops", case, "--isa", arch, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)[case]
    assert report["matrix_share"] > 0.4
    assert report["spills"] == report["scratch_bytes"] == 0
    if arch in ("gfx942", "gfx950"):  # the timing model has the memory banks of these
        assert 0.0 <= report["bank_conflicts"] < 0.05
    else:
        assert report["bank_conflicts"] is None


def test_products_of_transposed_operands_have_no_bank_conflicts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A product on an MI300X whose operands are contiguous along rows: shared memory holds them
    contiguous along k, without bank conflicts.
    """
    pytest.importorskip("ark_rocm_emulator")
    case = "matmul-4096x4096x4096-tn-bf16"
    assert main(["bench", "ops", case, "--isa", "gfx942", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)[case]
    assert report["matrix_share"] >= 0.8
    assert (report["spills"], report["bank_conflicts"]) == (0, 0.0)


def test_attention_on_amd_has_no_bank_conflicts(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention on an MI300X accesses shared memory without bank conflicts, although values are
    written transposed.
    """
    pytest.importorskip("ark_rocm_emulator")
    case = "attention-16x128-8192-causal-bf16"
    assert main(["bench", "ops", case, "--isa", "gfx942", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)[case]
    assert report["matrix_share"] > 0.45 and report["instructions"]["matrix"] == 128
    assert (report["spills"], report["bank_conflicts"]) == (0, 0.0)


def test_unsupported_architecture_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "--isa", "sm_90"]) == 2
    message = capsys.readouterr().err
    assert "sm_90" in message and "gfx942" in message


def test_sweep_is_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`ark bench ops` lists the cases named `sweep-*`, but runs them only if they are named on the
    command line.
    """
    assert main(["bench", "ops", "--list"]) == 0
    assert "sweep-roll-4096x4096-fp32" in capsys.readouterr().out.split()
    assert len(chosen(["sweep-*"], cpu=False)) > 300
    assert not [c.name for c in chosen([], cpu=False) if c.name.startswith("sweep-")]


@pytest.mark.parametrize("name", ["roll", "layer-norm", "index-select-1", "nearest", "turn"])
def test_functions_of_torch_are_measured_beside_torch(name: str) -> None:
    """In cases that measure a torch function, ark's translation of the function gives torch's
    result, also if the function reads only parts of its inputs.
    """
    pytest.importorskip("torch")
    backend = registry.get("cpu")
    case = next(c for c in cases() if c.name.startswith(f"sweep-{name}-"))
    shapes = tuple(tuple(min(n, 24) for n in shape) for shape in case.shapes)
    small = dataclasses.replace(case, shapes=shapes, indices=dict.fromkeys(case.indices, 24))
    with contextlib.closing(backend.open(0)) as device:
        row = measure(small, backend, device, device.machine, repeats=1, peer=True)
    assert row.error == "" and row.distance is not None and row.distance < 1e-5


def test_failing_peer_is_reported_and_the_next_cases_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If torch raises an exception in a case, for example because it lacks a product of 8-bit
    floats, the exception becomes an entry of the table and the next cases run.
    """
    (case,) = chosen([CASE], True)

    def cannot(*_: object) -> None:
        raise NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'Float8_e5m2'\nat ...")

    broken = dataclasses.replace(case, name="broken", peer=cannot, others=(("other", cannot),))
    monkeypatch.setattr(bench_ops, "chosen", lambda *_: [broken, case])
    argv = ["bench", "ops", "broken", "--backend", "cpu", "--vs", "torch", "--repeats", "1"]
    assert main([*argv, "--json", "-"]) == 0
    printed = capsys.readouterr()
    first, last = json.loads(printed.out)["figures"]
    assert first["us"] > 0 and first.get("peer_us") is None and not first.get("error")
    errors = first["detail"]["peer_errors"]
    assert set(errors) == {"torch", "other"} and "at ..." not in printed.err
    assert "not implemented for 'Float8_e5m2'" in errors["torch"]
    assert last["peer_us"] > 0 and "peer_errors" not in last["detail"]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "cannot" in shown.out and max(map(len, shown.out.splitlines())) <= 80
    assert CASE in shown.out.splitlines(), "a name is a line of its own, whole"
    assert "us" not in shown.err.split(), "figures stand in the table alone"
