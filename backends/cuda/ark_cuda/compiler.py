"""Compiles loop kernels to a cubin with NVRTC. It needs no CUDA toolkit, GPU or driver.

The compiler comes from the wheel nvidia-cuda-nvrtc. Kernels whose functions are compiled separately
are linked by nvidia-nvjitlink. If that wheel is missing or older than the compiler, such kernels
are compiled as one program, which takes longer. Called by ark.runtime.program, `ark emit` and the
tests that compile every kernel for every architecture.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import Target, Toolchain
from ark.errors import SystemError
from ark_cuda.alignment import check_alignment

_MULTIPROCESSOR_REGISTERS = 65536  # registers of a multiprocessor
# The number of NVRTC's warning about unused functions. It is switched off, because a plan uses only
# some of the device ABI's functions.
_UNUSED_FUNCTION_DIAGNOSTIC = 177
# Kernels are compiled by several threads. cuda.core cannot be imported by two threads at once: one
# of them would get an incomplete module.
_IMPORTING = threading.Lock()
# LOOP: a text that only the source of a loop kernel contains. LIBRARIES: for each library that
# compiles or links a cubin, its name in messages and the package that contains it.
LOOP = "ark_static_at<ArkParams"  # every loop kernel's source has this: entry.h
LIBRARIES = {
    "libnvrtc.so": ("NVRTC", "nvidia-cuda-nvrtc"),
    "libnvJitLink.so": ("nvJitLink", "nvidia-nvjitlink"),
}


class NvrtcCompiler:
    """Implements ark.backend.protocol.Compiler with cuda.core's Program."""

    def key(self, target: Target) -> str:
        """Identifies compiler and linker by their versions, the architecture and the flags."""
        major, minor = _version()
        linker = _linker()
        linked = f" nvjitlink {linker[0]}.{linker[1]}" if linker else ""
        files = "+".join(str(path.stat().st_size) for path in _libraries())  # distinguishes builds
        return f"nvrtc {major}.{minor}{linked} {target.arch} c++17 {files}"

    def compile(self, source: Source, target: Target) -> Binary:
        """Compiles a cubin for `target.arch`. Its log lists the kernel's registers and stack.

        Raises SystemError if the source does not compile, this NVRTC does not support the
        architecture, or NVRTC is not installed.
        """
        _version()
        core = _core()
        if not re.fullmatch(r"sm_\d{2,3}[af]?", target.arch):
            raise SystemError(
                f"{target.arch!r} is not an NVIDIA GPU architecture; expected a name such as sm_90a"
            )
        separate = source.parts > 0 and _linker() is not None
        options = core.ProgramOptions(
            name=f"{source.entry}.cu",
            std="c++17",
            arch=target.arch,
            ptxas_options="-v",
            diag_suppress=_UNUSED_FUNCTION_DIAGNOSTIC,
            device_as_default_execution_space=True,  # NVRTC 13.0 treats lambdas as host code
            no_cache=True,  # ark caches binaries itself; NVRTC's cache omits the log
            relocatable_device_code=separate,
            max_register_count=_registers(target.threads) if separate else None,
        )

        def compiled(text: str) -> tuple[Any, str]:
            log = io.StringIO()
            try:
                return core.Program(text, "c++", options).compile("cubin", logs=log), log.getvalue()
            except Exception as error:  # cuda.core has its own types, with the log in the message
                raise SystemError(
                    f"NVRTC cannot compile the loop kernel for {target.arch}: {error}\n"
                    f"{log.getvalue()}"
                ) from error

        several = range(source.parts) if separate and source.parts > 1 else ()
        texts = [f"#define ARK_PART {n}\n{source.text}" for n in several] or [source.text]
        with ThreadPoolExecutor(len(texts), "ark-part") as pool:
            objects, logs = zip(*pool.map(compiled, texts), strict=True)
        log = "".join(logs)
        if not separate:
            return _checked(Binary(bytes(objects[0].code), ".cubin", log), source)
        try:
            options = core.LinkerOptions(arch=target.arch, verbose=True)
            linker = core.Linker(*objects, options=options)
            linked = linker.link("cubin")
        except Exception as error:
            raise SystemError(
                f"nvJitLink cannot link the loop kernel for {target.arch}: {error}"
            ) from error
        whole = Binary(bytes(linked.code), ".cubin", log + linker.get_info_log())
        return _checked(whole, source)


def toolchain(arch: str) -> Toolchain:
    """The versions of NVRTC, nvJitLink and the driver that this process has loaded."""
    from cuda.bindings import driver

    code, version = driver.cuDriverGetVersion()
    key = f"{NvrtcCompiler().key(Target(arch, 0))} driver {code} {version}"
    remedy = "run `pip install -U nvidia-cuda-nvrtc nvidia-nvjitlink`"
    return Toolchain(" with ".join(map(_exact, _libraries())) or key, key, remedy)


def _libraries() -> list[Path]:
    """The files of NVRTC and nvJitLink that this process has loaded, since the bindings report
    versions without build numbers. Empty if the system does not list loaded files.
    """
    _version(), _linker()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = sorted({Path(line.split(maxsplit=5)[5]) for line in lines if ".so" in line})
    each = ((p for p in mapped if p.name.startswith(stem)) for stem in LIBRARIES)
    return [first for paths in each if (first := next(paths, None))]


def _exact(library: Path) -> str:
    """The name of a library with the version of the package that installed it, or with its path if
    no package did.
    """
    name, package = LIBRARIES[next(s for s in LIBRARIES if library.name.startswith(s))]
    with contextlib.suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(package)
        places = [
            Path(str(distribution.locate_file(f))).resolve() for f in distribution.files or ()
        ]
        if library.resolve() in places:
            return f"{name} {distribution.version}"
    return f"{name} of {library}"


def _checked(binary: Binary, source: Source) -> Binary:
    """Returns the binary. Raises SystemError if it is a loop kernel whose shared memory is not
    aligned as required. Other kernels, such as those of ark.cli.doctor, declare their own static
    shared memory and are not checked.
    """
    reason = check_alignment(binary.data, source.entry) if LOOP in source.text else ""
    if reason:
        (major, minor), linker = _version(), _linker()
        with_linker = f" with nvJitLink {linker[0]}.{linker[1]}" if linker else ""
        raise SystemError(
            f"NVRTC {major}.{minor}{with_linker} lost the alignment of shared memory, and the "
            f"kernel would give wrong results: {reason}. Install another version with "
            "`pip install -U nvidia-cuda-nvrtc nvidia-nvjitlink`"
        )
    return binary


def _registers(threads: int) -> int:
    """The most registers per thread with which a block of `threads` threads can run. Registers are
    allocated in multiples of eight.
    """
    return min(255, _MULTIPROCESSOR_REGISTERS // threads // 8 * 8)


def _core() -> Any:
    with _IMPORTING:
        import cuda.core
    return cuda.core


def _version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package and a missing library raise different types
        raise SystemError(
            f"NVRTC, the compiler for NVIDIA GPUs, cannot be loaded ({error}); install it with "
            '`pip install "ark-gpu[cuda]"`'
        ) from error
    return int(major), int(minor)


@cache
def _linker() -> tuple[int, int] | None:
    """The version of nvJitLink; None if it is missing or too old for this NVRTC's objects."""
    try:
        from cuda.bindings import nvjitlink

        version = nvjitlink.version()
    except Exception:  # a missing package and a missing library raise different types
        return None
    return version if version >= _version() else None
