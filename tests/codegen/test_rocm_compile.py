"""The loop kernel as AMD machine code: compiled for every architecture, and inspected."""

from __future__ import annotations

import dataclasses
import re

import pytest
from ark_rocm import backend, compiler

from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import Emitted, write
from ark.backend.devices import Binary
from ark.backend.protocol import Target
from ark.errors import SystemError, UnsupportedError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Phase, Plan, PlanBuffer, PlanOp, PlanTensor
from tests import kept, signatures
from tests.cases.rocm_compile import ARCHS, assembly, fact, machine_for, target
from tests.slow import in_turns, slow


def plan_of(
    machine: Machine, tensors: tuple[PlanTensor, ...] = (), ops: tuple[PlanOp, ...] = ()
) -> Plan:
    buffers = tuple(PlanBuffer(i, f"b{i}", "external", 1 << 20) for i in range(len(tensors)))
    idle = Phase("decode", ((),) * machine.processors)
    return Plan(0, 1, dataclasses.asdict(machine), buffers, tensors, ops, (), (idle,), {})


def emit(arch: str, plan: Plan | None = None) -> Emitted:
    machine = machine_for(arch)
    return write(plan or plan_of(machine), machine, backend.dialect(arch))


@pytest.fixture(autouse=True)
def _plain_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_hiprtc_version", lambda: "")


@pytest.fixture(scope="module")
def listing() -> dict[str, str]:
    """Returns the assembly of an empty plan's loop, by architecture."""
    return {arch: assembly(emit(arch).source, arch) for arch in ARCHS}


@pytest.mark.parametrize("arch", ARCHS)
def test_pause_sleeps_once(arch: str, listing: dict[str, str]) -> None:
    """The branch between a short and a long sleep is uniform for the wave. A wave would otherwise
    sleep in both branches.
    """
    between = re.findall(r"\ts_sleep \d+\n(.*?)(?=\ts_sleep \d+\n)", listing[arch], re.S)
    assert between
    assert all(re.search(r"\ts_c?branch", part) for part in between)


@pytest.mark.parametrize("arch", ARCHS)
def test_loop_compiles_to_a_code_object(arch: str) -> None:
    binary = kept.binary(backend, emit(arch).source, target(arch))
    assert binary.suffix == ".hsaco"
    assert binary.data[:4] == b"\x7fELF"
    assert int.from_bytes(binary.data[18:20], "little") == 224  # EM_AMDGPU
    assert f"amdgcn-amd-amdhsa--{arch}".encode() in binary.data
    assert b"ark_loop.kd\0" in binary.data


def test_same_source_gives_the_same_bytes() -> None:
    source = emit("gfx942").source
    first, second = (backend.compiler().compile(source, target("gfx942")) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_lives_in_scratch_memory(listing: dict[str, str], arch: str) -> None:
    text = listing[arch]
    assert fact(text, "private_segment_fixed_size") == 0
    assert fact(text, "vgpr_spill_count") == 0 and fact(text, "sgpr_spill_count") == 0
    assert fact(text, "wavefront_size") == machine_for(arch).lanes
    assert fact(text, "max_flat_workgroup_size") == machine_for(arch).threads


def flat_accesses(text: str) -> list[str]:
    return re.findall("\tflat_.*", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_access_takes_the_flat_path(listing: dict[str, str], arch: str) -> None:
    assert flat_accesses(listing[arch]) == []
    assert "\tglobal_load" in listing[arch] and "\tds_" in listing[arch]


def test_failure_is_recorded_in_one_place(listing: dict[str, str]) -> None:
    """A failing task claims the error record by an atomic exchange, which is in one place of the
    code although there are many waits.
    """
    text = listing["gfx942"]
    assert text.count("\tglobal_atomic_cmpswap") == 1
    assert text.count("\ts_swappc_b64") > 3


def _before(text: str, mark: str, store: str) -> bool:
    """True if every `mark` is followed by a `store` before the next branch target."""
    return re.search(rf"{mark}\n(?:\t(?!s_cbranch).*\n)*?\t{store}", text) is not None


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_scopes_become_cache_control_on_cdna3(listing: dict[str, str], arch: str) -> None:
    text = listing[arch]
    # Expects the release for peers and the host (sc0 sc1), then the release for the device (sc1),
    # then the two acquires in the same order.
    assert _before(text, r"\tbuffer_wbl2 sc0 sc1", r"global_atomic_add")
    assert _before(text, r"\tbuffer_wbl2 sc0 sc1", r"global_store_dword .* sc0 sc1")
    assert _before(text, r"\tbuffer_wbl2 sc1", r"global_atomic_add")
    arrived = r"\n\ts_waitcnt vmcnt\(0\)\n"
    assert re.search(rf"global_load_dword .* sc0 sc1{arrived}\tbuffer_inv sc0 sc1", text)
    assert re.search(rf"global_load_dword .* sc1{arrived}\tbuffer_inv sc1", text)


def test_scopes_become_cache_control_on_rdna3(listing: dict[str, str]) -> None:
    text = listing["gfx1100"]
    acquire = r"global_load_b32 .* glc\n\ts_waitcnt vmcnt\(0\)\n\tbuffer_gl1_inv\n\tbuffer_gl0_inv"
    assert re.search(acquire, text)
    marked = r"\t;;#ASMSTART\n\t; ark.release \w+\n\t;;#ASMEND\n"
    drained = rf"s_waitcnt_vscnt null, 0x0\n\t;;#ASMEND\n{marked}\tglobal_atomic_add_u32"
    assert re.search(drained, text)


@pytest.mark.parametrize("arch", ARCHS)
def test_stores_have_left_the_wave_before_the_block_signals(
    listing: dict[str, str], arch: str
) -> None:
    drain = r"s_waitcnt vmcnt\(0\)" if arch.startswith("gfx9") else r"s_waitcnt_vscnt null, 0x0"
    text = listing[arch]
    marks = re.findall(r";#ASMSTART\n\t(.+)\n", text)
    assert any(re.fullmatch(drain, mark) for mark in marks)


def matmul_plan(
    arch: str, dtype: str, shape: tuple[int, int, int], transposes: tuple[bool, bool]
) -> Plan:
    machine = machine_for(arch)
    m, n, k = shape
    ta, tb = transposes
    shapes = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n)]
    tensors = tuple(PlanTensor(i, f"t{i}", dtype, s, s, (0, 0), i) for i, s in enumerate(shapes))
    tile = machine.matmul_tile(m, n, 1)
    params = {"transpose_a": ta, "transpose_b": tb, "tile": tile}
    return plan_of(machine, tensors, (PlanOp(0, "product", "matmul", params, (0, 1, 2)),))


@pytest.mark.parametrize(
    ("arch", "dtype", "shape", "transposes"),
    in_turns(
        ("gfx942", "gfx1100", "gfx950", "gfx90a"),
        [
            ("bf16", (256, 512, 1024), (False, True)),
            ("fp16", (137, 45, 260), (True, False)),
            ("fp16", (128, 128, 64), (False, False)),
            ("bf16", (128, 128, 64), (False, False)),
        ],
    ),
)
def test_matmul_uses_the_matrix_unit(
    arch: str, dtype: str, shape: tuple[int, int, int], transposes: tuple[bool, bool]
) -> None:
    emitted = emit(arch, matmul_plan(arch, dtype, shape, transposes))
    text = assembly(emitted.source, arch)
    wanted = {
        "gfx90a": ("v_mfma_f32_16x16x16bf16_1k",) * 2,  # fp16 as two bf16
        "gfx942": ("v_mfma_f32_16x16x16_f16", "v_mfma_f32_16x16x16_bf16"),
        "gfx950": ("v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x32_bf16"),
        "gfx1100": ("v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_bf16"),
    }[arch][dtype == "bf16"]
    assert re.search(rf"\t{wanted} ", text)
    assert fact(text, "private_segment_fixed_size") == 0
    assert emitted.scratch_bytes <= machine_for(arch).shared_bytes


GELU_AND_RESIDUAL = ["add", ["gelu", ["add", ["input", 0], ["input", 1]]], ["input", 2]]


@pytest.mark.parametrize(
    ("end", "tile"),
    in_turns(["parts", "expression", "gates"], [((256, 256),), ((128, 128),), ((128, 32),)]),
)
def test_epilogues_of_products_spill_nothing(end: str, tile: tuple[int, int]) -> None:
    machine = machine_for("gfx942")
    m, n, k = 1024, 2048, 1024
    params = {"transpose_a": False, "transpose_b": True, "tile": tile}
    shapes: list[tuple[int, ...]] = [(m, k), (n, k), (m, n)]
    types = ["bf16"] * 3
    if end == "expression":
        params["expr"] = GELU_AND_RESIDUAL
        shapes += [(n,), (m, n)]
        types += ["bf16", "fp32"]
    elif end == "gates":
        params["gated"] = True
        shapes[2] = (m, n // 2)
    else:
        params["splits"] = 4
        shapes[2], types[2] = (4, m, n), "fp32"
    tensors = tuple(
        PlanTensor(i, f"t{i}", dtype, shape, shape, (0,) * len(shape), i)
        for i, (shape, dtype) in enumerate(zip(shapes, types, strict=True))
    )
    op = PlanOp(0, "product", "matmul", params, tuple(range(len(shapes))))
    emitted = emit("gfx942", plan_of(machine, tensors, (op,)))
    body = emitted.source.text.split("task_0_matmul", 1)[1]
    assert "ark_large_tile<" in body or "ark_matrix_tile<" in body
    text = assembly(emitted.source, "gfx942")
    assert fact(text, "private_segment_fixed_size") == 0
    assert fact(text, "vgpr_spill_count") == 0
    # The epilogue, which has the exponentials, is emitted only once, whatever the tile's size.
    assert text.count("v_exp_f32") <= 64


@pytest.mark.parametrize(
    ("dtype", "shape"), [("fp32", (64, 64, 64)), ("bf16", (8, 64, 64)), ("bf16", (1, 64, 64))]
)
def test_other_matmuls_keep_to_the_common_body(dtype: str, shape: tuple[int, int, int]) -> None:
    emitted = emit("gfx942", matmul_plan("gfx942", dtype, shape, (False, True)))
    assert "ark_matrix_tile<" not in emitted.source.text.split("task_0_matmul", 1)[1]
    assert emitted.scratch_bytes <= machine_for("gfx942").shared_bytes
    assert "mfma" not in assembly(emitted.source, "gfx942")


# `nox` executes code for gfx942 and gfx1100 instead (ci/matrix.toml).
@slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_task_kind_compiles(arch: str) -> None:
    own = {body.kind for body in backend.dialect(arch).bodies}
    which = ARCHS.index(arch)
    types = signatures.types_for(arch, ARCHS)
    for plan in signatures.united(machine_for(arch), types, own, which):
        emitted = emit(arch, plan)
        text = assembly(emitted.source, arch)
        body_names = f"one of {emitted.bodies}"
        assert fact(text, "private_segment_fixed_size") == 0, body_names
        assert fact(text, "vgpr_spill_count") == 0, body_names
        assert flat_accesses(text) == [], body_names


def test_source_that_does_not_compile_shows_the_compilers_words() -> None:
    with pytest.raises(SystemError, match=r"unknown type name 'nonsense'"):
        backend.compiler().compile(Source("nonsense here;\n"), target("gfx942"))


@pytest.mark.parametrize("arch", ARCHS)
def test_clock_without_its_builtin(listing: dict[str, str], arch: str) -> None:
    """The clock is read without __builtin_readsteadycounter, which LLVM 18 lacks, by the same
    instruction.
    """
    text = emit(arch).source.text
    asked = "__has_builtin(__builtin_readsteadycounter)"
    assert text.count(asked) == 1
    old = assembly(Source(text.replace(asked, "0")), arch)
    clock = "s_sendmsg_rtn_b64" if arch == "gfx1100" else "s_memrealtime"
    assert old.count(clock) == listing[arch].count(clock) > 0


def _old_hiprtc(source: Source, target: Target) -> Binary:
    """Replaces hiprtc by one that is too old to compile the source."""
    raise SystemError("hiprtc cannot compile the loop kernel")


def test_sources_that_hiprtc_refuses_are_compiled_by_clang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = backend.compiler().compile(emit("gfx942").source, target("gfx942"))
    monkeypatch.setattr(compiler, "_hiprtc_version", lambda: "9.0")
    monkeypatch.setattr(compiler, "_with_hiprtc", _old_hiprtc)
    assert backend.compiler().key(target("gfx942")).startswith("hiprtc 9.0, then ziglang clang")
    assert backend.compiler().compile(emit("gfx942").source, target("gfx942")) == plain
    assert "hiprtc cannot compile" in capsys.readouterr().err
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemError, match="hiprtc cannot compile"):
        backend.compiler().compile(emit("gfx942").source, target("gfx942"))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemError, match=r"no compiler for AMD GPUs .*ark-gpu\[rocm\]"):
        backend.compiler().key(target("gfx942"))


def test_unknown_architectures_are_refused() -> None:
    for attempt in (backend.dialect, lambda arch: backend.compiler().key(Target(arch, 256))):
        with pytest.raises(UnsupportedError, match=r"'gfx803'.*gfx90a, gfx942, gfx950, gfx1100"):
            attempt("gfx803")


def test_machine_models() -> None:
    assert backend.machine("h100") is None
    assert backend.default_arch() in ARCHS
    for name in backend.machine_names():
        machine = backend.machine(name)
        assert machine is not None and machine.name == name and machine.backend == "rocm"
        assert machine.lanes * machine.warps <= 1024
        assert machine.has(Capability.MFMA) == machine.arch.startswith("gfx9")
