"""The first use of a compiler on a device: known results are computed and compared, once.

Compilers that are installed apart from ark come in many versions, and one that makes wrong code
gives wrong numbers without an error. So each version of a `CheckedBackend`'s compiler is examined
on a device before it runs anything else there; the verdict is kept in the cache, by all that the
results depend on. Called by ark.runtime.kernels. What is computed is in ark.api.known, which
lies above the planner and puts itself into `examiners`.
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
from ark.runtime import cache

Examiner = Callable[[KernelBackend, KernelDevice], str]
"""Computes known results; the reason why they are wrong, empty if all are right."""
examiners: list[Examiner] = []
_RIGHT = b"right"
_admitted: set[str] = set()
_held = threading.RLock()  # other threads wait until the first one's check has ended
_checking = False


def admit(backend: KernelBackend, device: KernelDevice) -> None:
    """Sees to it that the backend's compiler makes right code for the device.

    Raises SystemError, naming the compiler and what to install, if it does not. A check that could
    not be made (too little memory, a kernel that failed) raises what stopped it, and is not kept.
    """
    found = toolchain(backend, device)
    if found is None:
        return
    name = _name(found, backend, device)
    with _held:
        if _checking or name in _admitted:
            return
        verdict = cache.load(cache.CHECKS, name)
        if verdict is None:
            with cache.making(cache.CHECKS, name):
                verdict = cache.load(cache.CHECKS, name)
                if verdict is None:
                    verdict = _examined(found, backend, device)
                    cache.store(cache.CHECKS, name, verdict)
        if verdict != _RIGHT:
            raise SystemError(refusal(found, device.arch, verdict.decode()))
        _admitted.add(name)


def toolchain(backend: KernelBackend, device: KernelDevice) -> Toolchain | None:
    """What is to be examined before it makes code for the device; None if nothing is."""
    return backend.toolchain(device.arch) if isinstance(backend, CheckedBackend) else None


def examine(backend: KernelBackend, device: KernelDevice) -> str:
    """Computes the known results now, whatever is in the cache; why they are wrong, or empty."""
    global _checking
    with _held:
        before, _checking = _checking, True
        try:
            return next((reason for e in examiners if (reason := e(backend, device))), "")
        finally:
            _checking = before


def refusal(found: Toolchain, arch: str, reason: str) -> str:
    """What people are told of a compiler that failed."""
    return (
        f"{found.name} makes wrong code for {arch} and is not used: {reason}. For another "
        f"version, {found.remedy}; `ark doctor` repeats the check, and `ark cache clear` forgets "
        "its result"
    )


def _examined(found: Toolchain, backend: KernelBackend, device: KernelDevice) -> bytes:
    log.info(f"first use of {found.name} on this kind of device: comparing known results")
    try:
        with log.slow(f"comparing known results of {found.name}, once for this kind of device"):
            return examine(backend, device).encode() or _RIGHT
    except GpuError as error:
        raise GpuError(f"known results could not be computed with {found.name}: {error}") from error


def _name(found: Toolchain, backend: KernelBackend, device: KernelDevice) -> str:
    text = _texts(Path(__file__).resolve().parent.parent)
    return cache.key(__version__, backend.name, found.key, device.arch, cache.code_digest(), text)


@once
def _texts(root: Path) -> str:
    """A hash of all device text under a folder."""
    found = sorted(p for p in root.rglob("*") if p.suffix in (".h", ".cpp"))
    return cache.key(*(part for p in found for part in (p.name, p.read_bytes())))
