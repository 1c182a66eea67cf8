"""Stale mode on the kernel suite, on planted defects and on whole models.

Correct kernels give the right values on every schedule. With a weakened order or scope, or a
missing wait, write-back or invalidation, some of a few schedules give wrong values or a wait
without end.
"""

from __future__ import annotations

import os
from pathlib import Path

import defects as planted
import kernel_cases
import numpy as np
import pytest
from ark_rocm_emulator import emulated
from hip import hip
from hip_runner import (
    HipError,
    check,
    code_object,
    exchange_between_devices,
    run_case,
    run_work,
)
from kernel_cases import ALL, Target, compare

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.checkpoints import make_checkpoint

SWEEP = os.environ.get("ARK_EMULATOR_SWEEP") == "1"
CASES = kernel_cases.load_all()
SYNC = [name for name, case in CASES.items() if case.source == "sync.hip"]
SEEDS = range(60)  # a schedule that shows a defect is among these
OPTIONS = {"stale": 1, "max_slice": 24, "report": 0, "external_wait_ms": 3000}
DEFECTS = [d for d in planted.DEFECTS if d.kernel in SYNC and d.kinds == planted.RACE]


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("name", list(CASES) if SWEEP else SYNC)
def test_sound_kernels_give_the_right_values(name: str, arch: str) -> None:
    if arch not in CASES[name].archs:
        pytest.skip(f"{name} is not for {arch}")
    for seed in range(10 if SWEEP else 2):
        with emulated(arch, seed=seed, **OPTIONS):
            run_case(CASES[name], arch, ("-O3",), seed)


def gives_wrong_values(defect: planted.Defect, seed: int) -> bool:
    case = CASES[defect.kernel]
    with emulated(defect.arch, seed=seed, **OPTIONS):
        module = check(hip.hipModuleLoadData(planted.broken(defect)))
        function = check(hip.hipModuleGetFunction(module, defect.kernel.encode()))
        work = case.make(np.random.default_rng(seed), Target(defect.arch))
        try:
            compare(work, run_work(function, case, work))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(
    "defect", [pytest.param(d, id=f"{d.kernel}-{d.description}".replace(" ", "_")) for d in DEFECTS]
)
def test_defect_gives_wrong_values(defect: planted.Defect) -> None:
    assert any(gives_wrong_values(defect, seed) for seed in SEEDS)


@pytest.mark.parametrize("arch", ALL)
def test_sound_exchange_between_devices(arch: str) -> None:
    for seed in range(3):
        with emulated(arch, 2, seed=seed, **OPTIONS):
            exchange_between_devices(code_object("sync.hip", arch, ("-O3",)))


def test_scope_that_ends_at_the_device_is_not_seen_by_another() -> None:
    """A signal to another device, stored with the scope of the storing device only, stays in that
    device's caches, so the other device waits without end.
    """
    defect = next(d for d in planted.DEVICE_DEFECTS if d.description == "signal's scope")
    with emulated(defect.arch, 2, seed=1, **OPTIONS), pytest.raises(HipError, match="deadlock"):
        exchange_between_devices(planted.broken(defect))


def tokens(directory: Path, backend: str, count: int) -> list[int]:
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 320, 13)]
    chosen = registry.get(backend)
    device = chosen.open(0)
    try:
        with Generator(Checkpoint.open(directory), chosen, device, chunk=8) as generator:
            return list(generator.stream(prompt, count, stop_tokens=()))
    finally:
        device.close()


RUNS = [(arch, seed) for seed in range(3) for arch in ALL] if SWEEP else [("gfx942", 1)]


@pytest.mark.parametrize(("arch", "seed"), RUNS)
def test_model_gives_the_tokens_of_the_cpu(arch: str, seed: int, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    with emulated(arch, seed=seed, stale=1, report=0):
        ours = tokens(directory, "rocm", 12)
    assert ours == tokens(directory, "cpu", 12)
