"""Compiles the loop kernel with the host's C++ compiler (ark.backend.native).

$ARK_CPU_FLAGS holds additional compiler flags. Examples are "-O1", which compiles in a third of the
time, and "-g -fsanitize=address". They follow ark's own flags and take precedence over them.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from functools import cache

from ark.backend import native
from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.native import find_compiler
from ark.backend.protocol import Target
from ark.errors import InvalidUsageError, SystemError

# The compiler may reorder sums, so that loops over them vectorise; infinities and NaN keep their
# meaning.
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
    """A text that identifies the processor features on which -march=native depends."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


def flags() -> tuple[str, ...]:
    """ark's flags, followed by the user's. Raises InvalidUsageError if the user's text cannot be
    split into flags.
    """
    words = os.environ.get("ARK_CPU_FLAGS", "")
    try:
        return (*FLAGS, *shlex.split(words))
    except ValueError as error:
        raise InvalidUsageError(
            f"ARK_CPU_FLAGS is {words!r}, which cannot be split into flags: {error}"
        ) from None


class CpuCompiler:
    """Compiles C++ source to a shared library."""

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
        return "|".join((*command, native.version(command), *flags(), target.arch, _features()))

    def compile(self, source: Source, target: Target) -> Binary:
        return self._built(source.text, ".so", "-shared")

    def compile_loop(self, source: Source, target: Target) -> Binary:
        return self._built(source.loop, ".o", "-c")

    def link(self, source: Source, target: Target, loop: Binary) -> Binary:
        return self._built(source.text, ".so", "-shared", "-DARK_PART=1", loop=loop)

    def _built(self, text: str, suffix: str, *words: str, loop: Binary | None = None) -> Binary:
        options = (*words, "-march=native", *flags())
        objects = [loop.data] if loop else []
        files = {"loop.cpp": text}
        data, log = native.compiled(self._command(), files, options, "the loop kernel", objects)
        return Binary(data, suffix, log)
