"""Checks a compiler when it is first used on a device, by computations with known results.

Compilers that are installed separately from ark have many versions, and wrong machine code gives
wrong numbers without an error. So each version of a `CheckedBackend`'s compiler is checked on a
device before it compiles anything else for it. The verdict is cached; its key has everything that
the results depend on. Called by ark.runtime.kernels. The computations are in ark.runtime.known,
which is in a layer above the planner and therefore registers itself in `examiners`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache as once
from pathlib import Path

from ark import log
from ark._version import __version__
from ark.backend.devices import KernelDevice
from ark.backend.protocol import CheckedBackend, KernelBackend, Toolchain
from ark.errors import GpuError, SystemError
from ark.ir.late import LateTable
from ark.runtime import cache

Examiner = Callable[[KernelBackend, KernelDevice], str]
"""A function that runs computations with known results. It returns a text that describes the wrong
results, or an empty text.
"""
examiners: LateTable[Examiner] = LateTable("examiners")
_RIGHT = b"right"
_admitted: set[str] = set()
_held = threading.RLock()  # other threads wait for the first check
_checking = False


def admit(backend: KernelBackend, device: KernelDevice) -> None:
    """Checks that the backend's compiler makes correct code for the device.

    Raises SystemError with the compiler and the remedy if it does not. If the check itself fails
    (too little memory, a failed kernel), its error is raised and no verdict is stored.
    """
    compiler = toolchain(backend, device)
    if compiler is None:
        return
    name = _name(compiler, backend, device)
    with _held:
        if _checking or name in _admitted:
            return
        verdict = cache.load(cache.CHECKS, name)
        if verdict is None:
            with cache.making(cache.CHECKS, name):
                verdict = cache.load(cache.CHECKS, name)
                if verdict is None:
                    verdict = _examined(compiler, backend, device)
                    cache.store(cache.CHECKS, name, verdict)
        if verdict != _RIGHT:
            raise SystemError(refusal(compiler, device.arch, verdict.decode()))
        _admitted.add(name)


def toolchain(backend: KernelBackend, device: KernelDevice) -> Toolchain | None:
    """The compiler that must be checked before it makes code for the device; None if no check is
    needed.
    """
    return backend.toolchain(device.arch) if isinstance(backend, CheckedBackend) else None


def examine(backend: KernelBackend, device: KernelDevice) -> str:
    """Computes the known results now, whatever the cache says. Returns the reason why they are
    wrong, or an empty text.
    """
    global _checking
    with _held:
        before, _checking = _checking, True
        try:
            reasons = (e(backend, device) for e in examiners.filled().values())
            return next((reason for reason in reasons if reason), "")
        finally:
            _checking = before


def refusal(compiler: Toolchain, arch: str, reason: str) -> str:
    """The error message for a compiler that has failed the check."""
    return (
        f"{compiler.name} generates wrong code for {arch} and is not used: {reason}. For another "
        f"version, {compiler.remedy}; `ark doctor` repeats the check, and `ark cache clear` "
        "forgets its result"
    )


def _examined(compiler: Toolchain, backend: KernelBackend, device: KernelDevice) -> bytes:
    log.info(f"first use of {compiler.name} on this kind of device: comparing known results")
    try:
        with log.slow(f"comparing known results of {compiler.name}, once for this kind of device"):
            return examine(backend, device).encode() or _RIGHT
    except GpuError as error:
        raise GpuError(
            f"the check of {compiler.name}, which computes known results, failed: {error}"
        ) from error


def _name(compiler: Toolchain, backend: KernelBackend, device: KernelDevice) -> str:
    text = _texts(Path(__file__).resolve().parent.parent)
    return cache.key(
        __version__, backend.name, compiler.key, device.arch, cache.code_digest(), text
    )


@once
def _texts(root: Path) -> str:
    """A hash of all device source files in a folder."""
    paths = sorted(p for p in root.rglob("*") if p.suffix in (".h", ".cpp"))
    return cache.key(*(part for p in paths for part in (p.name, p.read_bytes())))
