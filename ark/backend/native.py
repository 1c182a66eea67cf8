"""The host's C++ compiler: $CXX, the system's, else the ziglang wheel's. Called by the CPU backend,
which compiles loop kernels with it, and by the proxy.
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
    """The command that compiles C++: $CXX or, where that is unset, c++, g++, clang++ or zig; None
    if there is none. SystemError where $CXX is no command that can be found.
    """
    if named := os.environ.get("CXX", "").strip():
        return _named(named)
    for candidate in ("c++", "g++", "clang++"):
        if found := shutil.which(candidate):
            return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def _named(text: str) -> tuple[str, ...]:
    """The command of $CXX, which may have several words: `ccache g++`."""
    remedy = "set it to a C++ compiler and its options, or unset it"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SystemError(f"CXX is {text!r}, which is no command: {error}; {remedy}") from error
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise SystemError(f"CXX is {text!r}, and no such command was found; {remedy}")
    return (found, *words[1:])


@cache
def version(command: tuple[str, ...]) -> str:
    """What a compiler says of itself."""
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def complaint(done: subprocess.CompletedProcess[str]) -> str:
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


def shared_library(
    command: Sequence[str],
    files: Mapping[str, str],
    options: Sequence[str],
    what: str,
    objects: Sequence[bytes] = (),
) -> tuple[bytes, str]:
    """Compiles C++ to a shared library: its bytes, and what the compiler said.

    files: texts by name, the first of which is compiled and may include the others. options: for
    the compiler, those that name libraries too. what: names the text in errors. objects: compiled
    ones that are linked to it. SystemError if it cannot.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="ark-") as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            out = Path(folder, "made.so")
            first = str(Path(folder, next(iter(files))))
            linked = [Path(folder, f"linked{i}.o") for i in range(len(objects))]
            for path, data in zip(linked, objects, strict=True):
                path.write_bytes(data)
            done = _run([*command, first, *map(str, linked), "-o", str(out), *options])
            if done.returncode != 0 or not out.is_file():
                raise SystemError(
                    f"the C++ compiler {' '.join(command)} refused {what} (if it does not "
                    f"compile C++17, set CXX to one that does): {complaint(done)}"
                )
            return out.read_bytes(), done.stderr
    except OSError as error:
        raise SystemError(
            f"{what}'s source cannot be written for the compiler: {error}; free some space in the "
            "folder for temporary files, or name another in TMPDIR"
        ) from error


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        own = (
            " (ziglang's, taken where no other is installed, builds its own libraries first: 36 "
            "seconds of a processor, kept for the next time)"
        )
        raise SystemError(
            f"the C++ compiler {' '.join(words[:3])} was not done after {TIMEOUT_S} s"
            f"{own if 'ziglang' in words else ''}; try again when the machine is less busy, or "
            "install g++ or clang"
        ) from error
    except OSError as error:
        raise SystemError(
            f"the C++ compiler {words[0]} could not be run: {error}; set CXX to one that works"
        ) from error
