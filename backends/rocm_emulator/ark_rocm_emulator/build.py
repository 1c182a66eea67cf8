"""Builds the emulator's C++ on first use, for the HIP stand-in and for the Python module.

Every source is compiled to an object whose name is the hash of all its inputs. Only changed files
are therefore compiled again, and two processes never see a partly written library. The compiler is
$CXX, otherwise the system's, otherwise the one in the `ziglang` wheel. Results are stored under
$ARK_CACHE_DIR (default: `ark/rocm_emulator` in the user's cache folder).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ark.errors import SystemError

PACKAGE = Path(__file__).parent
# The emulator's arithmetic depends on two flags: no contraction (a * b + c must round twice), and
# no assumptions about aliasing.
FLAGS = (
    "-std=c++20",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    # One GPU register of all 64 lanes fills four 512-bit vectors of the host. Without this option,
    # compilers use vectors of half the width.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)

# Source files whose code runs at every emulated instruction are compiled with -O3. Plain loops over
# lanes are compiled with -O2 and unrolling, which produces equally fast vector code. Files that
# match _ONCE gain nothing from -O3 or unrolling: they execute scalar and rare instructions, check
# memory accesses, or run once (decoding, printing, loading, starting).
_ONCE = re.compile(
    r"code_object|decode|disasm|elf|launch|machine|metadata|module|opcodes|ops|timing_models"
    r"|exec_cvt_scale"
)
_LANES = re.compile(r"exec_(cross|gfx11|valu_(?!rare).+|vop3p)")
_HOT = re.compile(r"access|half|scheduler|wave|exec_(buffer|lds|mem|mfma|wmma)")
# Headers that most sources begin with are precompiled if at least this many sources must be
# compiled.
_PRECOMPILED = PACKAGE / "core" / "precompiled.h"
_WORTH_PRECOMPILING = 8


def _level(source: Path) -> tuple[str, ...]:
    """The optimisation flags for `source`."""
    if source.parent.name != "core" or _ONCE.match(source.stem):
        return ("-O1",)
    if _LANES.fullmatch(source.stem):
        return ("-O2", "-fpeel-loops")
    return ("-O3",) if _HOT.fullmatch(source.stem) else ("-O2",)


def cache_folder() -> Path:
    """The folder in which built libraries are kept between runs."""
    named = os.environ.get("ARK_CACHE_DIR")
    if named:
        return Path(named) / "rocm_emulator"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ark" / "rocm_emulator"


@lru_cache(maxsize=1)
def compiler() -> tuple[str, ...]:
    """The words that start a C++20 compiler.

    Raises: SystemError: No compiler is installed.
    """
    named = os.environ.get("CXX")
    if named:
        return tuple(shlex.split(named))
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return (path,)
    try:
        import ziglang
    except ImportError:
        raise SystemError(
            "No C++ compiler was found to build the ROCm emulator. Expected CXX, c++, g++ or "
            "clang++ on PATH, or the `ziglang` wheel: pip install ark-gpu-rocm-emulator."
        ) from None
    return (str(Path(ziglang.__file__).parent / "zig"), "c++")


@lru_cache(maxsize=1)
def _compiler_identity() -> str:
    done = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=False)
    return " ".join(compiler()) + done.stdout + _processor()


def _processor() -> str:
    """A text that identifies the processor features on which `-march=native` depends. It is part of
    the cache key, so that different machines can share a cache.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("flags", "Features", "model name")
    return platform.machine() + "".join(sorted({x for x in lines if x.startswith(wanted)}))


def _run(command: Sequence[str], step: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemError(
            f"Building the ROCm emulator failed at {step} (exit code {done.returncode}). "
            f"Expected a compiler for C++20; set CXX to choose another.\n{done.stderr.strip()}"
        )


def _place(command: Sequence[str], target: Path, step: str) -> Path:
    """Runs `command` with an output path appended, then renames the output to `target`, so that
    other processes never see a partly written file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as folder:
        built = Path(folder) / target.name
        _run([*command, "-o", str(built)], step)
        os.replace(built, target)
    return target


def _say(note: str) -> None:
    print(f"ark_rocm_emulator: {note}", file=sys.stderr, flush=True)


@contextmanager
def _one_at_a_time(file_name: str) -> Iterator[None]:
    """Makes processes that need the same build wait until the first of them has built it.

    A process that has waited for two seconds reports once that it waits.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    began, reported = time.monotonic(), False
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported and time.monotonic() - began > 2:
                    _say(f"waiting for another process that builds in {folder}, for {file_name}")
                    reported = True
                time.sleep(0.05)
        yield


# Matches strings, which may contain text that looks like a comment, and comments.
_TEXT = re.compile(
    r"""(R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/""", re.DOTALL
)


def _code_of(file: Path) -> bytes:
    """The source without comments and without the space around them."""
    text = _TEXT.sub(lambda match: match[1] or " ", file.read_text())
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()).encode()


@contextmanager
def _parsed_once(sources: int, flags: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The flags with which the compiler uses precompiled common headers, for a build of the given
    number of sources.

    gcc and clang both look for `NAME.gch` when an option includes `NAME`. The file takes 100 MB, so
    it is deleted after the build. With a compiler that does not write it, the headers are parsed
    for each source.
    """
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".making-") as folder:
        header = Path(folder) / _PRECOMPILED.name
        header.write_text(f'#include "{_PRECOMPILED}"\n')
        words = [*compiler(), *flags, "-O2", "-x", "c++-header", str(header)]
        options = (
            sources >= _WORTH_PRECOMPILING
            and not subprocess.run(
                [*words, "-o", f"{header}.gch"], capture_output=True, check=False
            ).returncode
        )
        yield ("-include", str(header)) if options else ()


def _headers_of(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The headers of this package that `source` includes directly or indirectly, sorted."""
    headers: set[Path] = set()
    waiting = [source]
    while waiting:
        file = waiting.pop()
        for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE):
            for folder in (file.parent, *folders):
                header = folder / name
                if header.exists() and header not in headers:
                    headers.add(header)
                    waiting.append(header)
    return sorted(headers)


def shared_library(
    file_name: str,
    sources: Sequence[Path],
    includes: Sequence[Path] = (),
) -> Path:
    """Compiles `sources` into the shared library `file_name`, unless that was done before.

    Args:
        file_name: the library's file name, which is also its soname.
        sources: C++ files of this package.
        includes: include folders besides the core's.

    Returns:
        The library's path. It is the only file of a folder `lib`.

    Raises:
        SystemError: no compiler is installed, or the compilation failed.
    """
    core = PACKAGE / "core"
    shared = set(core_sources())  # the same objects serve every library

    def folders_of(source: Path) -> tuple[Path, ...]:
        return (core,) if source in shared else (core, *includes)

    def object_of(source: Path) -> Path:
        headers = _headers_of(source, folders_of(source))
        name = hashlib.sha256(_compiler_identity().encode())
        # The build is named by a hash of flags and contents, not by the location of this package,
        # so that two checkouts of the same sources share it.
        outside = (str(f) for f in folders_of(source) if PACKAGE not in f.parents)
        for word in (*FLAGS, *_level(source), *outside):
            name.update(word.encode() + b"\0")
        for file in (*headers, source):
            name.update(_code_of(file))
        return cache_folder() / "objects" / f"{source.stem}-{name.hexdigest()[:24]}.o"

    def compiled(source: Path, parsed: Sequence[str]) -> None:
        flags = [*FLAGS, *_level(source), *parsed]
        folders = [f"-I{folder}" for folder in folders_of(source)]
        _place([*compiler(), *flags, *folders, "-c", str(source)], objects[source], source.name)

    objects = {source: object_of(source) for source in sorted(sources)}
    with _one_at_a_time(file_name), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        missing = [source for source, target in objects.items() if not target.exists()]
        if missing:
            _say(f"building {file_name}, {len(missing)} files, once for this version")
        with _parsed_once(len(missing), FLAGS) as parsed:
            list(pool.map(lambda source: compiled(source, parsed), missing))
    made_of = [str(target) for target in objects.values()]
    digest = hashlib.sha256("\n".join([file_name, *made_of]).encode()).hexdigest()[:24]
    library = cache_folder() / digest / "lib" / file_name
    if not library.exists():
        link = [*compiler(), "-shared", f"-Wl,-soname,{file_name}", *made_of, "-pthread"]
        _place(link, library, f"linking {file_name}")
    return library


def alias(library: Path, file_name: str) -> Path:
    """Creates an empty library `file_name` beside `library` that depends on `library`.

    A program that opens it by that name finds every symbol of `library`.
    """
    target = library.with_name(file_name)
    if not target.exists():
        needs = ["-Wl,--no-as-needed", str(library), "-Wl,-rpath,$ORIGIN"]
        command = [*compiler(), "-shared", "-fPIC", "-x", "c++", os.devnull, "-x", "none", *needs]
        _place([*command, f"-Wl,-soname,{file_name}"], target, f"linking {file_name}")
    return target


def core_sources() -> list[Path]:
    """The source files of the emulator core, without its Python module."""
    return [p for p in sorted((PACKAGE / "core").glob("*.cpp")) if p.name != "module.cpp"]
