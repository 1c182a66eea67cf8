"""Compiles HIP to an AMD code object with clang alone. Called by the stand-in's hiprtc and by
tests.

There are two steps (HIP to an object, and the object to a shared object), because the clang in the
`ziglang` wheel cannot start its linker. Tests that change the assembly text use three steps.
$ARK_ROCM_CLANG and $ARK_ROCM_LLD name another clang and ld.lld.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ark.errors import BaseError, SystemError

TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100")
PRELUDE = Path(__file__).parent / "hip" / "hiprtc_builtins.h"
_OBJECT_VERSION = "-mcode-object-version=5"
_FEATURES = ("-mwavefrontsize64", "-mno-wavefrontsize64", "-mcumode", "-mno-cumode")
_HIP_FLAGS = (
    "-x",
    "hip",
    "-nogpuinc",
    "-nogpulib",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-fms-extensions",
    "-fuse-cuid=none",
    "-Wno-unused-command-line-argument",
    _OBJECT_VERSION,
)
# Options that make clang write an object file itself, without starting the linker.
_TO_OBJECT = ("-Xclang", "-emit-obj")


class CompileError(BaseError):
    """clang, its assembler or its linker refused a program. The message contains their output."""


@dataclass(frozen=True)
class Toolchain:
    """The commands that start clang and ld.lld, as lists of words without arguments."""

    clang: tuple[str, ...]
    lld: tuple[str, ...]


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The clang and ld.lld to use: those named in the environment, otherwise those of the `ziglang`
    wheel.

    Raises:
        SystemError: neither is installed.
    """
    clang, lld = os.environ.get("ARK_ROCM_CLANG"), os.environ.get("ARK_ROCM_LLD")
    if clang and lld:
        return Toolchain((clang,), (lld,))
    try:
        import ziglang
    except ImportError:
        raise SystemError(
            "No clang for AMD targets was found. Expected the `ziglang` wheel, or both "
            "ARK_ROCM_CLANG and ARK_ROCM_LLD naming programs. Install it: "
            "pip install ark-gpu-rocm-emulator."
        ) from None
    zig = str(Path(ziglang.__file__).parent / "zig")
    return Toolchain((zig, "clang"), (zig, "ld.lld"))


def _run(command: Sequence[str], step: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemError(
            f"{step} failed: {command[0]} cannot be started ({error.strerror}). Expected "
            f"ARK_ROCM_CLANG and ARK_ROCM_LLD to name programs; unset both for the `ziglang` wheel."
        ) from error
    if done.returncode != 0:
        raise CompileError(f"{step} failed (exit code {done.returncode}):\n{done.stderr.strip()}")
    return done.stderr


def to_assembly(
    source: str,
    arch: str,
    options: Sequence[str] = ("-O3",),
    headers: Sequence[tuple[str, str]] = (),
) -> tuple[str, str]:
    """Compiles HIP source text to AMD assembly text.

    Args:
        source: HIP C++, device code only.
        arch: a target such as "gfx942"; features ("gfx942:sramecc+") are passed on.
        options: further options for clang, including the optimisation level.
        headers: (name, text) of files that the source may include.

    Returns:
        The assembly text and clang's warnings.

    Raises:
        CompileError: the compilation failed. The message contains clang's diagnostics.
    """
    with tempfile.TemporaryDirectory(prefix="ark-hip-") as folder:
        first = ("-include", str(PRELUDE))
        text, log = _generated(Path(folder), source, arch, (*first, *options), headers)
        return text.read_text(), log


def _generated(
    folder: Path,
    source: str,
    arch: str,
    options: Sequence[str],
    headers: Sequence[tuple[str, str]],
) -> tuple[Path, str]:
    """Compiles HIP source text to a file. Returns its path and clang's diagnostics."""
    program, out = folder / "kernel.hip", folder / "kernel.out"
    program.write_text(source)
    for name, content in headers:
        header = folder / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(content)
    files = (f"-I{folder}", "-S", str(program), "-o", str(out))
    log = _run(
        [*toolchain().clang, *_HIP_FLAGS, f"--offload-arch={arch}", *options, *files],
        f"compiling HIP for {arch}",
    )
    return out, log


def assemble(assembly: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """Assembles and links AMD assembly text to a code object (.hsaco).

    Args:
        assembly: the text.
        arch: its target.
        options: the options with which the text was compiled. Those that select features of the
            target, such as "-mwavefrontsize64", are passed to the assembler.

    Raises:
        CompileError: the assembler or the linker failed.
    """
    with tempfile.TemporaryDirectory(prefix="ark-hip-") as folder:
        text, part, whole = (Path(folder, f"kernel.{end}") for end in ("s", "o", "hsaco"))
        text.write_text(assembly)
        target = ["-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
        target += [option for option in options if option in _FEATURES]
        _run(
            [*toolchain().clang, *target, _OBJECT_VERSION, "-c", str(text), "-o", str(part)],
            f"assembling for {arch}",
        )
        return _linked(part, whole, arch)


def _linked(part: Path, whole: Path, arch: str) -> bytes:
    _run([*toolchain().lld, "-shared", str(part), "-o", str(whole)], f"linking for {arch}")
    return whole.read_bytes()


def to_code(
    source: str,
    arch: str,
    options: Sequence[str] = ("-O3",),
    headers: Sequence[tuple[str, str]] = (),
) -> tuple[bytes, str]:
    """Compiles HIP source text to a code object (.hsaco). Arguments and errors are those of
    `to_assembly`.

    Returns:
        The code object and clang's warnings.
    """
    with tempfile.TemporaryDirectory(prefix="ark-hip-") as name:
        folder = Path(name)
        words = ("-include", str(PRELUDE), *options, *_TO_OBJECT)
        part, log = _generated(folder, source, arch, words, headers)
        return _linked(part, folder / "kernel.hsaco", arch), log


def compile_hip(source: str, arch: str, options: Sequence[str] = ("-O3",)) -> bytes:
    """Compiles as `to_code` does and returns only the code object."""
    return to_code(source, arch, options)[0]
