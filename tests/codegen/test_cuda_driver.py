"""The CUDA backend's device object against every supported version of cuda-bindings, and its
kernels against the oldest NVRTC, without a GPU.

The bindings' structs and signatures change between minor versions. The oldest, the newest and the
installed version run unmodified on a stand-in for libcuda (driver_stand_in.cpp), whose memory is
host memory and whose kernels compute nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

pytest.importorskip("cuda.bindings.driver")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLDEST = "13.0.0"
OLDEST_NVRTC = "13.0.48"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in libcuda.so.1."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    words = [compiler] if compiler else [sys.executable, "-m", "ziglang", "c++"]
    folder = tmp_path_factory.mktemp("driver")
    source, library = str(HERE / "driver_stand_in.cpp"), str(folder / "libcuda.so.1")
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-o", library, source]
    subprocess.run([*words, *flags], check=True)
    return folder


@pytest.fixture(scope="module")
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to which wheels are unpacked: in pytest's cache, if there is one, so that the next
    run finds them.
    """
    cache = getattr(request.config, "cache", None)  # none with `-p no:cacheprovider`
    if cache is None:
        return tmp_path_factory.mktemp("cuda-bindings")
    return Path(cache.mkdir("cuda-bindings"))


def newest() -> str:
    """The newest cuda-bindings in the index that the package's requirements allow."""
    done = pip("index", "versions", "cuda-bindings")
    matches = re.search(r"Available versions: (.*)", done.stdout)
    if done.returncode or matches is None:
        pytest.skip(f"the package index cannot be asked: {done.stderr.strip()[-200:]}")
    return next(v for v in matches[1].split(", ") if v.startswith("13."))


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=250)


def unpacked(package: str, version: str, wheels: Path) -> Path:
    folder = wheels / f"{package}-{version}-{sys.implementation.cache_tag}"
    if not folder.exists():
        partial = folder.with_suffix(f".{os.getpid()}")
        words = ("install", "-q", "--no-deps", "--no-compile", "--only-binary", ":all:")
        done = pip(*words, "--target", str(partial), f"{package}=={version}")
        if done.returncode:
            pytest.skip(f"{package} {version} cannot be had: {done.stderr.strip()[-200:]}")
        partial.rename(folder)
    return folder


def check(stand_in: Path, *words: str, first: str = "", **environment: str) -> str:
    packages = ["backends/cpu", "backends/cuda", "backends/rocm", "tests"]
    path = [first, str(ROOT), *(str(ROOT / p) for p in packages), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "driver_check.py"), *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "LD_LIBRARY_PATH": str(stand_in),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("which", ["installed", "oldest", pytest.param("newest", marks=slow)])
def test_device_object_fits_the_bindings(which: str, stand_in: Path, wheels: Path) -> None:
    if which == "installed":
        check(stand_in)
        return
    version = OLDEST if which == "oldest" else newest()
    output = check(stand_in, first=str(unpacked("cuda-bindings", version, wheels)))
    assert output.split()[-1] == version


@slow
def test_oldest_nvrtc_compiles_the_bodies(wheels: Path) -> None:
    """The oldest supported NVRTC compiles the bodies. NVRTC 13.0 needs an option for that;
    otherwise it treats a lambda in a kernel as a host function and refuses it.
    """
    folder = unpacked("nvidia-cuda-nvrtc", OLDEST_NVRTC, wheels)
    (library,) = folder.rglob("libnvrtc.so.13")
    path = [str(ROOT), str(ROOT / "backends/cuda"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "nvrtc_check.py"), str(library)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "LD_LIBRARY_PATH": str(library.parent),  # of its built-in declarations
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["nvrtc 13.0", "block", "matrix", "negated"]


def test_modules_are_unloaded(stand_in: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    check(stand_in, STAND_IN_LOG=str(log))
    lines = log.read_text().splitlines()
    assert lines == ["loaded", "unloaded"] * 4


@pytest.mark.parametrize("kernel", ["aborts", "stuck"])
def test_nothing_is_freed_under_a_running_kernel(
    kernel: str, stand_in: Path, tmp_path: Path
) -> None:
    """Ends an executor while a kernel runs: one kernel ends when the host requests it, the other
    never does. Nothing is freed before the kernel has ended.
    """
    output = check(stand_in, "run", STAND_IN_KERNEL=kernel, ARK_CACHE_DIR=str(tmp_path))
    if kernel == "aborts":
        assert output == "closed True\n"
    else:
        assert "closed False" in output
        assert "did not leave its device" in output and "is freed only when" in output
