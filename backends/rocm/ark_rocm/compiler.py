"""Compiles HIP source to a code object: with hiprtc if ROCm is installed, otherwise with plain
clang.

If an old hiprtc refuses the source, clang compiles it, too. The device source includes no headers,
so the clang of the `ziglang` wheel suffices: it supports the AMD targets and contains the linker.
The same source and compiler give the same bytes. Called by ark.runtime and `ark emit`; needs no
GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from ark import log
from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import Target, Toolchain
from ark.errors import BaseError, SystemError
from ark_rocm import driver, machines

_COMMON = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=fast",
    "-mcode-object-version=5",
)
_CLANG = (
    "-x",
    "hip",
    "-nogpuinc",
    "-nogpulib",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-fms-extensions",
    "-fuse-cuid=none",
)
# Options that make clang write an object file. Without them clang would start the linker program,
# which may not be installed.
_TO_OBJECT = ("-Xclang", "-emit-obj")
_LOG_LINES = 30


class Compiler:
    """Compiles loop kernels; see ark.backend.protocol.Compiler."""

    def key(self, target: Target) -> str:
        machines.describe(target.arch)
        return " ".join((_tool(), *_COMMON, target.arch, str(target.threads)))

    def compile(self, source: Source, target: Target) -> Binary:
        machines.describe(target.arch)
        if not _hiprtc_version():
            return _with_clang(source, target)
        try:
            return _with_hiprtc(source, target)
        except SystemError as error:
            if not _has_ziglang():
                raise
            log.WARN(f"{error}\nCompiling with the clang of ziglang {_ziglang()} instead.")
            return _with_clang(source, target)


def assembly(source: Source, target: Target) -> str:
    """The kernel as assembly text. Used by checks of the generated code."""
    with tempfile.TemporaryDirectory(prefix="ark-") as folder:
        return _generated(source, target, Path(folder), ()).read_text()


def toolchain(arch: str) -> Toolchain:
    """The versions of the compiler, the HIP runtime and the driver."""
    version = driver.call("hipRuntimeGetVersion", driver.module().hipRuntimeGetVersion)
    key = f"{Compiler().key(Target(arch, 0))} runtime {version}"
    remedy = "update ROCm" if _hiprtc_version() else "run `pip install -U ziglang`"
    return Toolchain(_tool(), key, remedy)


def _tool() -> str:
    version = _hiprtc_version()
    if not version:
        return f"ziglang clang {_ziglang()}"
    other = f", then ziglang clang {_ziglang()}" if _has_ziglang() else ""
    return f"hiprtc {version}{other}"


@functools.cache
def _hiprtc_version() -> str:
    """The version of ROCm's runtime compiler, or an empty string if it is not installed."""
    try:
        rtc = driver.rtc()
        major, minor = driver.call("hiprtcVersion", rtc.hiprtcVersion)
    except BaseError:
        return ""
    return f"{major}.{minor}"


def _has_ziglang() -> bool:
    return importlib.util.find_spec("ziglang") is not None


def _ziglang() -> str:
    if not _has_ziglang():
        raise SystemError(
            "no compiler for AMD GPUs was found: neither ROCm's hiprtc library nor the package "
            f"ziglang, which contains clang; install it with `{driver.INSTALL}`"
        )
    return metadata.version("ziglang")


def _with_clang(source: Source, target: Target) -> Binary:
    with tempfile.TemporaryDirectory(prefix="ark-") as name:
        folder = Path(name)
        object_file = _generated(source, target, folder, _TO_OBJECT)
        output = _zig(folder, ["ld.lld", "-shared", object_file.name, "-o", "loop.hsaco"])
        return Binary((folder / "loop.hsaco").read_bytes(), ".hsaco", output)


def _generated(source: Source, target: Target, folder: Path, words: tuple[str, ...]) -> Path:
    """Runs the code generator and returns the path of its output: assembly text, or an object file
    if `words` ask for one.
    """
    (folder / "loop.hip").write_text(source.text)
    arch = f"--offload-arch={target.arch}"
    _zig(folder, ["clang", *_CLANG, *_COMMON, *words, arch, "-S", "loop.hip", "-o", "loop.out"])
    return folder / "loop.out"


@functools.cache
def _zig_program() -> str:
    """The path of the zig program. Calling it directly avoids starting Python (`python -m ziglang`)
    three times per kernel.
    """
    _ziglang()
    import ziglang

    return str(Path(ziglang.__file__).parent / "zig")


def _zig(folder: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [_zig_program(), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise _rejected(" ".join(arguments[:1]), done.stderr)
    return done.stderr


def _rejected(tool: str, output: str) -> SystemError:
    lines = output.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line), 0)
    shown = "\n".join(lines[first : first + _LOG_LINES])
    return SystemError(
        f"{tool} cannot compile the loop kernel. This is a bug of ark or of this compiler version; "
        f"please report it with the compiler's output:\n{shown}"
    )


def _with_hiprtc(source: Source, target: Target) -> Binary:
    rtc = driver.rtc()
    name = f"loop-{hashlib.sha256(source.text.encode()).hexdigest()[:12]}.hip"
    program = driver.call(
        "hiprtcCreateProgram",
        rtc.hiprtcCreateProgram,
        source.text.encode(),
        name.encode(),
        0,
        [],
        [],
    )
    try:
        options = [*_COMMON, f"--offload-arch={target.arch}"]
        encoded = [option.encode() for option in options]
        result = rtc.hiprtcCompileProgram(program, len(encoded), encoded)
        code = result[0] if isinstance(result, tuple) else result
        output = _log(rtc, program)
        if int(code) != 0:
            raise _rejected("hiprtc", output)
        size = int(driver.call("hiprtcGetCodeSize", rtc.hiprtcGetCodeSize, program))
        data = bytearray(size)
        driver.call("hiprtcGetCode", rtc.hiprtcGetCode, program, data)
        return Binary(bytes(data), ".hsaco", output)
    finally:
        rtc.hiprtcDestroyProgram(_reference(program))


def _log(rtc: Any, program: Any) -> str:
    size = int(driver.call("hiprtcGetProgramLogSize", rtc.hiprtcGetProgramLogSize, program))
    data = bytearray(max(size, 1))
    driver.call("hiprtcGetProgramLog", rtc.hiprtcGetProgramLog, program, data)
    return bytes(data).rstrip(b"\0").decode(errors="replace")


def _reference(program: Any) -> Any:
    """The address of a program's handle, which hiprtcDestroyProgram takes instead of the handle."""
    return program.createRef() if hasattr(program, "createRef") else program
