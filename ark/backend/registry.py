"""Finds backends through the entry-point group `ark.backends`, and selects one for a user.

Called by ark.runtime.session, the planner's front ends and the command line.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from ark import log
from ark.backend.protocol import Backend, KernelBackend, Probe
from ark.errors import InvalidUsageError, SystemError, UnsupportedError
from ark.machine import Machine

GROUP = "ark.backends"
FALLBACK = "cpu"


@cache
def names() -> tuple[str, ...]:
    """Names of all installed backends, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


@cache
def get(name: str) -> Backend:
    """The backend of that name.

    Raises InvalidUsageError if no such backend is installed, SystemError if its package is broken.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                backend: Backend = importlib.import_module(point.value).backend
                return backend
            except (ImportError, AttributeError) as error:
                raise SystemError(
                    f"the backend {name!r} is installed, but its package {point.value} cannot "
                    f"be imported: {error}; install it again"
                ) from error
    raise InvalidUsageError(
        f"the backend {name!r} is not installed; installed are {', '.join(names()) or 'none'}"
    )


def probe(name: str) -> Probe:
    """The result of the backend's probe for devices. If the backend's package is broken, the result
    has the reason; no exception is raised.
    """
    try:
        return get(name).probe()
    except SystemError as error:
        return Probe(reason=str(error))


def unavailable(name: str, seen: Probe) -> SystemError:
    """The error to raise if a backend has no usable device. seen: the result of the backend's
    probe.
    """
    remedy = f"; to fix it: {seen.remedy}" if seen.remedy else ""
    return SystemError(
        f"the backend {name!r} has no usable device: {seen.reason or 'none was found'}{remedy}"
    )


def choose(name: str | None = None) -> tuple[Backend, Probe]:
    """The backend `name` and the result of its probe. Without a name: the only backend with
    accelerators, or the CPU if no backend has any. Raises SystemError with the probe's reason if
    the named backend has no device, and InvalidUsageError if several backends have accelerators and
    no name was given.
    """
    if name is not None:
        backend = get(name)
        seen = backend.probe()
        if not seen.devices:
            raise unavailable(name, seen)
        log.debug(f"backend {name}: {', '.join(device.name for device in seen.devices)}")
        return backend, seen
    probes = {n: probe(n) for n in names() if n != FALLBACK}
    able = [n for n, seen in probes.items() if seen.devices and not seen.simulated]
    if len(able) > 1:
        raise InvalidUsageError(
            f"devices of several backends were found ({', '.join(able)}); name one of them"
        )
    return choose(able[0] if able else FALLBACK)


def with_kernels(backend: Backend) -> KernelBackend:
    """Returns the backend if it runs loop kernels; raises UnsupportedError if it executes plans
    itself.
    """
    if not isinstance(backend, KernelBackend):
        raise UnsupportedError(
            f"the backend {backend.name!r} has no loop kernels, so it has no source, binary, "
            "trace or timing of one; name another backend"
        )
    return backend


def machine(name: str) -> Machine:
    """The machine model of that name, from any installed backend."""
    known: list[str] = []
    broken = ""
    for backend_name in names():
        try:
            backend = get(backend_name)
        except SystemError as error:
            broken += f"; {error}"
            continue
        model = backend.machine(name)
        if model is not None:
            return model
        known += backend.machine_names()
    raise InvalidUsageError(
        f"the machine model {name!r} does not exist; known are {', '.join(sorted(known))}{broken}"
    )
