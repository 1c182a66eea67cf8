"""Finds and runs the host's C++ compiler: $CXX, otherwise the system's, otherwise the one in the
ziglang wheel. Called by the CPU backend, which compiles loop kernels with it, and by the proxy (the
host thread that copies memory for kernels).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ark.errors import SystemError

TIMEOUT_S = 300


@cache
def find_compiler() -> tuple[str, ...] | None:
    """The command that compiles C++: $CXX or, if unset, c++, g++, clang++ or zig; None if there is
    none. Raises SystemError if $CXX is not a valid command.
    """
    if named := os.environ.get("CXX", "").strip():
        return _named(named)
    for candidate in ("c++", "g++", "clang++"):
        if path := shutil.which(candidate):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _named(text: str) -> tuple[str, ...]:
    """The command in $CXX, which may have several words: `ccache g++`."""
    remedy = "set it to a C++ compiler and its options, or unset it"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SystemError(f"CXX={text!r} is not a valid command: {error}; {remedy}") from error
    command = shutil.which(words[0]) if words else None
    if command is None:
        raise SystemError(f"CXX={text!r}: the command does not exist; {remedy}")
    return (command, *words[1:])


@cache
def version(command: tuple[str, ...]) -> str:
    """The compiler's version text."""
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The reason why a compiler failed: the beginning of its output, or its exit status if it
    printed nothing.
    """
    output = done.stderr.strip() or done.stdout.strip()
    if output:
        return f"its output: {output[:2000]}"
    if done.returncode < 0:
        return (
            f"it was ended by signal {-done.returncode} ({signal.Signals(-done.returncode).name}) "
            "without output, as happens when memory runs out"
        )
    return f"it exited with code {done.returncode}, without output or result"


def compiled(
    command: Sequence[str],
    files: Mapping[str, str],
    options: Sequence[str],
    subject: str,
    objects: Sequence[bytes] = (),
) -> tuple[bytes, str]:
    """Compiles C++ to a library (with -shared in `options`) or an object (with -c); returns the
    result's bytes and the compiler's output.

    files: sources by file name; the first source is compiled, and it may include the others.
    options: the compiler's options and libraries. subject: the name of the source in errors.
    objects: more objects to link. Raises SystemError on failure.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="ark-") as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            out = Path(folder, "compiled")
            first = str(Path(folder, next(iter(files))))
            linked = [Path(folder, f"linked{i}.o") for i in range(len(objects))]
            for path, data in zip(linked, objects, strict=True):
                path.write_bytes(data)
            done = _run([*command, first, *map(str, linked), "-o", str(out), *options])
            if done.returncode != 0 or not out.is_file():
                raise SystemError(
                    f"the C++ compiler {' '.join(command)} could not compile {subject} (it must "
                    f"support C++17; set CXX to one that does): {complaint(done)}"
                )
            return out.read_bytes(), done.stderr
    except OSError as error:
        raise SystemError(
            f"the source of {subject} cannot be written to a temporary file: {error}; free some "
            "space in the temporary folder, or set TMPDIR to another one"
        ) from error


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        own = (
            " (the ziglang compiler, used because no other is installed, first builds its own "
            "libraries: 36 s of processor time, cached for the next run)"
        )
        raise SystemError(
            f"the C++ compiler {' '.join(words[:3])} did not finish within {TIMEOUT_S} "
            f"s{own if 'ziglang' in words else ''}; try again when the machine is less busy, or "
            "install g++ or clang"
        ) from error
    except OSError as error:
        raise SystemError(
            f"the C++ compiler {words[0]} could not be run: {error}; set CXX to one that works"
        ) from error
