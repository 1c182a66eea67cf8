"""Makes hip-python use emulated AMD devices. Called by the ROCm backend and by tests.

`activate` builds a library that replaces `libamdhip64.so` and `libhiprtc.so` (the stand-in), and
loads it before hip-python looks for them. hip-python itself is not changed. `emulated` does the
same for the duration of a `with` block. Kernels are then executed by an interpreter of AMD machine
code on the CPU. Its times say nothing about a GPU; the text of `describe` states this.
"""

from __future__ import annotations

import ctypes
import enum
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ark.errors import InvalidUsageError, SystemError
from ark_rocm_emulator import build
from ark_rocm_emulator.compile import TARGETS, CompileError, to_code

VARIABLE = "ARK_ROCM_DEVICE"
_PREFIX = "emulated:"
_OPTIONS = ("seed", "checks", "stale", "compute_units", "stores_only", "implicit_sync")
# Products that the timing model supports: architecture, index in core/timing_models.cpp, compute
# units.
TIMED = {"mi300x": ("gfx942", 1, 304), "mi355x": ("gfx950", 2, 256)}
_COMPILE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_char_p),
    ctypes.POINTER(ctypes.c_char_p),
)


@dataclass(frozen=True)
class Activation:
    """The emulated devices: `count` devices of `arch`, provided by the shared library `library`.
    Their times are host times, or a timing model's predictions for the product `model`.
    """

    arch: str
    count: int
    library: Path
    model: str = ""

    def __str__(self) -> str:
        devices = "device" if self.count == 1 else "devices"
        if self.model:
            return (
                f"{self.count} emulated {self.arch} {devices}: AMD machine code interpreted on the "
                f"CPU, no GPU; times are predictions of a timing model of {self.model}, nothing "
                f"was measured"
            )
        return (
            f"{self.count} emulated {self.arch} {devices}: AMD machine code interpreted on the "
            f"CPU, no GPU; times and sizes are the emulation's"
        )


class ErrorKind(enum.IntEnum):
    """The reason why the emulator stopped a kernel, a DMA queue, or a call that was made while a
    kernel ran.
    """

    BAD_LAUNCH = 1
    UNKNOWN_OPCODE = 2
    OUT_OF_BOUNDS = 3
    UNINITIALISED = 4
    LDS_RANGE = 5
    MISALIGNED = 6
    MISSING_WAIT = 7
    RACE = 8
    DEADLOCK = 9
    BUDGET = 10
    TRAP = 11
    CANCELLED = 12
    STALE = 13
    LINK = 14
    DMA = 100
    UNDER_KERNEL = 101


@dataclass(frozen=True)
class Failure:
    """A failure of an emulated device: the reason why the emulator stopped a kernel, a DMA queue or
    a call. It has the kind of error and the full message.
    """

    kind: ErrorKind
    message: str


_active: Activation | None = None


def parse_request(request: str) -> tuple[str, int] | None:
    """Parses a request such as "emulated:gfx942,2" to (architecture or product, number of
    devices). None if it does not request an emulated device.

    Raises:
        InvalidUsageError: it starts with "emulated:" but the rest is not valid.
    """
    if not request.startswith(_PREFIX):
        return None
    match = re.fullmatch(r"emulated:(\w+)(?:,(\d+))?", request)
    arch, count = (match[1], int(match[2] or 1)) if match else ("", 0)
    if arch not in (*TARGETS, *TIMED) or not 1 <= count <= 64:
        raise InvalidUsageError(
            f"{VARIABLE}={request} cannot be emulated. Expected "
            f"emulated:<arch>[,<count>] with arch one of {', '.join(TARGETS)}, or one of "
            f"{', '.join(TIMED)} (times are predicted), and 1 to 64 devices."
        )
    return arch, count


def built() -> Path:
    """The path of the stand-in's library, which is built if necessary."""
    sources = [*build.core_sources(), *sorted((build.PACKAGE / "hip").glob("*.cpp"))]
    return build.shared_library("libamdhip64.so", sources, includes=[build.PACKAGE / "hip"])


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL, Path]:
    """Builds the stand-in if necessary and loads it under the names that hip-python looks for."""
    path = built()
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(build.alias(path, "libhiprtc.so")), mode=ctypes.RTLD_GLOBAL)
    library.ark_emulator_enter.restype = ctypes.c_char_p
    library.ark_emulator_set.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    library.ark_emulator_failure.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    library.ark_emulator_instructions.restype = ctypes.c_uint64
    library.ark_emulator_set_compiler(_COMPILER)
    return library, path


def _compile_for_hiprtc(
    program: int, source: bytes, arch: bytes, options: Any, headers: Any
) -> int:
    """Implements hiprtcCompileProgram. It returns clang's result through ark_emulator_compiled."""
    code, log, words = b"", "", []
    for k in range(1_000_000):
        if not options[k]:
            break
        words.append(options[k].decode())
    pairs: list[tuple[str, str]] = []
    while headers[2 * len(pairs)]:
        at = 2 * len(pairs)
        pairs.append((headers[at].decode(), headers[at + 1].decode()))
    if not any(word.startswith("-O") for word in words):
        words.append("-O3")
    target = arch.decode().split(":")[0]
    try:
        options_used = ["-D__HIPCC_RTC__=1", *words]
        code, log = to_code(source.decode(), target, options_used, headers=pairs)
    except (CompileError, SystemError) as error:
        log = str(error)
    library, _ = _library()
    library.ark_emulator_compiled(
        ctypes.c_void_p(program), code, ctypes.c_size_t(len(code)), log.encode()
    )
    return 0 if code else 1


_COMPILER = _COMPILE(_compile_for_hiprtc)  # kept: the library calls it as long as it is loaded


def _hip_version() -> int:
    """The HIP version that the installed hip-python was built for, in hipRuntimeGetVersion's
    form.
    """
    import hip

    return int(getattr(hip, "HIP_VERSION", 60000000))


def _lead_hip_python_to(path: Path) -> None:
    """Makes hip-python open the emulator's libraries instead of ROCm's. hip-python opens a library
    when one of the library's functions is first called, and looks for it in the directory
    ROCM_PATH. So ROCM_PATH is changed while one function of each library is called. path: the
    emulator's library.
    """
    before = os.environ.get("ROCM_PATH")
    os.environ["ROCM_PATH"] = str(path.parent.parent)
    try:
        from hip import hip, hiprtc

        error, name = hip.hipDeviceGetName(256, 0)
        hiprtc.hiprtcVersion()
    finally:
        if before is None:
            del os.environ["ROCM_PATH"]
        else:
            os.environ["ROCM_PATH"] = before
    if int(error) != 0 or "emulated" not in str(name):
        raise SystemError(
            "hip-python has already loaded another ROCm runtime in this process, which an emulated "
            "device cannot replace. Start a new process and call ark_rocm_emulator.activate() "
            "before anything else uses HIP."
        )


def _enter(name: str, count: int) -> Activation:
    library, path = _library()
    arch, model, units = TIMED.get(name, (name, 0, 0))
    why = library.ark_emulator_enter(arch.encode(), count, _hip_version())
    if why:
        raise SystemError(f"No emulated {arch} device could be created: {why.decode()}.")
    try:
        _lead_hip_python_to(path)
    except BaseException:
        library.ark_emulator_leave()
        raise
    if model:
        _set_options({"timing": model, "compute_units": units})
    return Activation(arch, count, path, name if model else "")


def _set_options(options: dict[str, int]) -> None:
    library, _ = _library()
    for name, value in options.items():
        if library.ark_emulator_set(name.encode(), int(value)) != 0:
            raise InvalidUsageError(
                f"The emulator has no setting {name!r}; see ark_rocm_emulator.emulated for the "
                "settings."
            )


def activate(request: str | None = None) -> Activation | None:
    """Makes hip-python use emulated devices if they are requested. Builds the stand-in if
    necessary. Has no effect if emulated devices are active already.

    Args:
        request: "emulated:gfx942[,2]", or "emulated:mi300x" with predicted times. The default is
            the value of the environment variable ARK_ROCM_DEVICE. The variables
            ARK_ROCM_EMULATOR_SEED, _CHECKS, _STALE, _COMPUTE_UNITS, _STORES_ONLY and
            _IMPLICIT_SYNC set options of `emulated`.

    Returns:
        The active emulation, or None if none is requested.

    Raises:
        InvalidUsageError: the requested device cannot be emulated.
        SystemError: no compiler is installed, or hip-python already uses another runtime.
    """
    global _active
    if _active is not None:
        return _active
    asked = parse_request(request or os.environ.get(VARIABLE, ""))
    if asked is None:
        return None
    _active = _enter(*asked)
    named = {name: os.environ.get(f"ARK_ROCM_EMULATOR_{name.upper()}") for name in _OPTIONS}
    _set_options({name: int(value, 0) for name, value in named.items() if value})
    return _active


@contextmanager
def emulated(arch: str = "gfx942", count: int = 1, **options: int) -> Iterator[Activation]:
    """Emulates `count` devices of `arch` for the duration of a `with` block.

    Args:
        arch: one of gfx90a, gfx942, gfx950, gfx1100, or a product with predicted times (TIMED).
        count: the number of devices, 1 to 64.
        options: numbers; 0 and 1 switch an option off and on. seed: of the wave scheduler. checks:
            race and initialisation checks. stale: caches hold old values (ignored with checks).
            compute_units: per device. stores_only: links between devices support no
            read-modify-write. implicit_sync: freeing memory and unloading code wait for kernels,
            as in HIP (on by default); if off, they return hipErrorNotReady while a kernel runs and
            count as failures. parallel: independent workgroups run on several threads. max_slice,
            step_budget: in wave-instructions. external_wait_ms: the time limit of a wait for other
            devices. report: print failures when they happen.

    Earlier emulated devices are kept unchanged and are current again after the block. Handles and
    pointers from inside the block are then invalid. Child processes get the devices through
    $ARK_ROCM_DEVICE.
    """
    global _active
    before, variable = _active, os.environ.get(VARIABLE)
    request = f"{_PREFIX}{arch},{count}"
    parse_request(request)
    session = sys.modules.get("ark.runtime.session")
    aside = session.set_aside("rocm") if session is not None else {}
    _active = _enter(arch, count)
    os.environ[VARIABLE] = request
    try:
        _set_options(options)
        yield _active
    finally:
        _active = before
        if variable is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = variable
        try:
            _close_opened()
        finally:
            library, _ = _library()
            library.ark_emulator_leave()
            if session is not None:
                session.put_back(aside)


def _close_opened() -> None:
    """Makes ark's own session close everything that it opened on the devices that are about to be
    removed. Their streams and memory are invalid afterwards, even if new devices have the same
    name.
    """
    session = sys.modules.get("ark.runtime.session")
    if session is not None:
        session.forget("rocm")


def set_option(name: str, value: int) -> None:
    """Changes one of the options that the context manager `emulated` takes, for later launches."""
    _set_options({name: value})


def active() -> bool:
    """True while hip-python uses emulated devices."""
    return _active is not None


def describe() -> str:
    """One sentence that names the emulated devices of this process, if any."""
    return str(_active) if _active else "nothing is emulated"


def failures() -> list[Failure]:
    """The failures since the devices were created, oldest first."""
    library, _ = _library()
    result: list[Failure] = []
    text = ctypes.create_string_buffer(1 << 16)
    while (kind := library.ark_emulator_failure(len(result), text, len(text))) != -1:
        result.append(Failure(ErrorKind(kind), text.value.decode()))
    return result


def instructions() -> tuple[int, int]:
    """Wave-instructions that finished launches executed, and the number of those launches."""
    library, _ = _library()
    launches = ctypes.c_uint64()
    return int(library.ark_emulator_instructions(ctypes.byref(launches))), launches.value
