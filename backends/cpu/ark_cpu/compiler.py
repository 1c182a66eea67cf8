"""Compiles the loop kernel with the host's C++ compiler (ark.backend.native)."""

from __future__ import annotations

import hashlib
from functools import cache

from ark.backend import native
from ark.backend.native import find_compiler
from ark.backend.protocol import Binary, Target
from ark.codegen.dialect import Source
from ark.errors import SystemError

# Sums may be reordered so that they vectorise; infinities and NaN keep their meaning.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-w",
)


@cache
def _features() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


class CpuCompiler:
    """C++ source to a shared library."""

    def _command(self) -> tuple[str, ...]:
        command = find_compiler()
        if command is None:
            raise SystemError(
                "no C++ compiler was found (looked for $CXX, c++, g++, clang++ and the ziglang "
                "package); install one, or run `pip install 'ark-gpu[cpu]'`"
            )
        return command

    def key(self, target: Target) -> str:
        command = self._command()
        return "|".join((*command, native.version(command), *FLAGS, target.arch, _features()))

    def compile(self, source: Source, target: Target) -> Binary:
        options = (*FLAGS, "-shared", "-march=native")
        data, said = native.shared_library(
            self._command(), {"loop.cpp": source.text}, options, "the loop kernel"
        )
        return Binary(data, ".so", said)
