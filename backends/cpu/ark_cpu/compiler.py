"""Compiles the loop kernel with the system's C++ compiler, else with the ziglang wheel's."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from ark.backend.protocol import Binary, Target
from ark.codegen.dialect import Source
from ark.errors import SystemError

# Sums may be reordered so that they vectorise; infinities and NaN keep their meaning.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-w",
)
TIMEOUT_S = 300


@cache
def find_compiler() -> tuple[str, ...] | None:
    """The command that compiles C++: $CXX, c++, g++, clang++, or zig; None if there is none."""
    named = os.environ.get("CXX")
    for candidate in (named, "c++", "g++", "clang++"):
        # $CXX may be several words: `ccache g++`.
        try:
            words = shlex.split(candidate) if candidate else []
        except ValueError as error:
            raise SystemError(
                f"CXX is {candidate!r}, which is no command: {error}; set it to a C++ compiler and "
                "its options, or unset it"
            ) from error
        if words and shutil.which(words[0]):
            return (shutil.which(words[0]) or words[0], *words[1:])
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


@cache
def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


@cache
def _features() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Why a compiler failed: its own first words, or how it ended where it said nothing."""
    said = done.stderr.strip() or done.stdout.strip()
    if said:
        return f"it said: {said[:2000]}"
    if done.returncode < 0:
        return (
            f"it was ended by signal {-done.returncode} ({signal.Signals(-done.returncode).name}) "
            "without a word, as the system does where memory runs out"
        )
    return f"it ended with code {done.returncode} and made nothing, without a word"


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
        return "|".join((*command, _version(command), *FLAGS, target.arch, _features()))

    def compile(self, source: Source, target: Target) -> Binary:
        try:
            return self._compile(source)
        except OSError as error:
            raise SystemError(
                f"the loop kernel's source cannot be written for the compiler: {error}; free some "
                "space in the folder for temporary files, or name another in TMPDIR"
            ) from error

    def _compile(self, source: Source) -> Binary:
        command = self._command()
        with tempfile.TemporaryDirectory(prefix="ark-") as folder:
            path = Path(folder, "loop.cpp")
            path.write_text(source.text)
            out = Path(folder, "loop.so")
            words = [*command, *FLAGS, "-march=native", str(path), "-o", str(out)]
            try:
                done = subprocess.run(
                    words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SystemError(
                    f"the C++ compiler {' '.join(command)} could not be run: {error}; set CXX to "
                    "one that works"
                ) from error
            if done.returncode != 0 or not out.is_file():
                raise SystemError(
                    f"the C++ compiler {' '.join(command)} refused the loop kernel: "
                    f"{_complaint(done)}; set CXX to one that compiles C++17"
                )
            return Binary(out.read_bytes(), ".so", done.stderr)
