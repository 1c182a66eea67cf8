"""Compiles loop kernels with NVRTC to a cubin: no toolkit, no GPU and no driver needed.

The compiler comes from the wheel nvidia-cuda-nvrtc, the linker for kernels whose functions are
compiled separately from nvidia-nvjitlink; without that one, or where it is older than the compiler,
they are compiled as one program, which takes longer. Called by ark.runtime.program, `ark emit` and
the tests that compile every kernel for every architecture.
"""

from __future__ import annotations

import io
import re
import threading
from functools import cache
from typing import Any

from ark.backend.devices import Binary
from ark.backend.protocol import Target
from ark.codegen.dialect import Source
from ark.errors import SystemError

_REGISTERS = 65536  # of a multiprocessor
# No plan uses every helper of the device ABI.
_UNUSED = 177
# The kernels of a plan are compiled side by side, and cuda.core is no package that two threads can
# import at once: one of them gets half of it.
_IMPORTING = threading.Lock()


class NvrtcCompiler:
    """ark.backend.protocol.Compiler over cuda.core's Program."""

    def key(self, target: Target) -> str:
        """Compiler and linker with their versions, architecture and flags."""
        major, minor = _version()
        linker = _linker()
        linked = f" nvjitlink {linker[0]}.{linker[1]}" if linker else ""
        return f"nvrtc {major}.{minor}{linked} {target.arch} c++17"

    def compile(self, source: Source, target: Target) -> Binary:
        """A cubin for `target.arch`; the log holds registers and stack of the kernel.

        Raises SystemError if the source does not compile, the architecture is unknown to this
        NVRTC, or NVRTC is not installed.
        """
        _version()
        core = _core()
        if not re.fullmatch(r"sm_\d{2,3}[af]?", target.arch):
            raise SystemError(
                f"{target.arch!r} is no architecture of an NVIDIA GPU; it is spelt like sm_90a"
            )
        log = io.StringIO()
        separate = source.separate and _linker() is not None
        options = core.ProgramOptions(
            name=f"{source.entry}.cu",
            std="c++17",
            arch=target.arch,
            ptxas_options="-v",
            diag_suppress=_UNUSED,
            device_as_default_execution_space=True,  # NVRTC 13.0 takes lambdas for host code
            no_cache=True,  # ark keeps binaries itself; NVRTC's own come without the log
            relocatable_device_code=separate,
            max_register_count=_registers(target.threads) if separate else None,
        )
        try:
            program = core.Program(source.text, "c++", options)
            made = program.compile("cubin", logs=log)
            if separate:
                linker = core.Linker(
                    made, options=core.LinkerOptions(arch=target.arch, verbose=True)
                )
                made = linker.link("cubin")
                log.write(linker.get_info_log())
        except Exception as error:  # cuda.core raises its own types, the log inside the message
            raise SystemError(
                f"NVRTC cannot compile the loop kernel for {target.arch}: {error}\n{log.getvalue()}"
            ) from error
        return Binary(bytes(made.code), ".cubin", log.getvalue())


def _registers(threads: int) -> int:
    """The most that each thread of a block of so many can have; they are given out by eights."""
    return min(255, _REGISTERS // threads // 8 * 8)


def _core() -> Any:
    with _IMPORTING:
        import cuda.core
    return cuda.core


def _version() -> tuple[int, int]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # missing package and missing library have types of their own
        raise SystemError(
            f"NVRTC, the compiler for NVIDIA GPUs, cannot be loaded ({error}); install it with "
            '`pip install "ark-gpu[cuda]"`'
        ) from error
    return int(major), int(minor)


@cache
def _linker() -> tuple[int, int] | None:
    """The version of nvJitLink; None where it is missing or does not know this NVRTC's objects."""
    try:
        from cuda.bindings import nvjitlink

        found = nvjitlink.version()
    except Exception:  # missing package and missing library have types of their own
        return None
    return found if found >= _version() else None
