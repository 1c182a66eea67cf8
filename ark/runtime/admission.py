"""Admission: the checks that every plan passes before it is run, emitted or exported.

A plan may come from a file, a user's dictionary or another rank. Its form was checked when it was
read (ark.plan.schema). Here it is verified, its machine is compared with the model of that name and
with the device, its shared memory is counted as the backend's own bodies use it, and its memory is
compared with what the device has. `admit_rank` is called by ark.runtime.runner.load for every plan;
`admit` by ark.export and the offline commands, which have the plans of all ranks and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import KernelBackend
from ark.capability import Capability
from ark.codegen.shared_memory import check_shared_memory
from ark.errors import InvalidUsageError, PlanError, SystemError
from ark.machine import Machine
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.run import Ranks

# What differs between devices of one model without changing what a plan means.
_FREE = (
    "name",
    "processors",
    "memory_bytes",
    "bandwidth_gbps",
    "tflops",
    "costs",
    "line_bytes",
    "tile",
)
_BY_ARCH = ("lanes", "variants")  # what devices of one architecture have in common


def admit_rank(plan: Plan, device: Device, ranks: Ranks | None = None) -> None:
    """Accepts one rank's plan to run on an opened device, or raises PlanError, or SystemError where
    the device has too little memory.

    A plan that is verified already is not verified again. Several ranks call this together: where
    the plan of any of them is not verified yet, they exchange their plans and verify all of them.
    """
    if plan.world_size > 1 and ranks is not None:
        if b"0" in ranks.all_gather(b"1" if plan.verified else b"0"):
            texts = ranks.all_gather(to_json(plan).encode())
            admit([from_json(text.decode()) for text in texts], device.machine)
            plan.mark_verified()
    elif not plan.verified:
        admit([plan], device.machine)
    if shortage := memory_shortage(plan, device.free_bytes(), "the device has free only"):
        raise SystemError(shortage)


def memory_shortage(plan: Plan, room: int, holder: str) -> str:
    """A sentence for people if a rank's plan needs more memory than the `room` bytes that `holder`
    ("h100 has") names; empty if it fits or the room is not known (0). Memory that the caller
    provides is not counted.
    """
    arenas = {name: nbytes for name, nbytes in plan.arenas.items() if name != "host"}
    needed = sum(arenas.values())
    if not room or needed <= room:
        return ""
    parts = {
        "weights": arenas.get("parameter", 0),
        "cache and state": arenas.get("state", 0),
        "other buffers": needed - arenas.get("parameter", 0) - arenas.get("state", 0),
    }
    listed = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in parts.items() if nbytes)
    return (
        f"the plan needs {_size(needed)} of device memory for each rank ({listed}), but "
        f"{holder} {_size(room)}; use a smaller context, more ranks, or a device with more memory"
    )


def _size(nbytes: int) -> str:
    """Bytes for people, in the largest unit of which there is at least one."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} bytes"


def admit(plans: Sequence[Plan], device: Machine | None = None) -> None:
    """Accepts the plans of all ranks, to run on such a device if one is given, or raises PlanError.

    device: the machine model of the opened device.
    """
    for plan in plans:
        check_machine(machine_of(plan), device)
        _check_links(plan, device)
    verify(plans)
    for plan in plans:
        for phases in plan.kernels:
            machine = machine_of(plan, phases[0])
            backend = registry.get(machine.backend)
            if not isinstance(backend, KernelBackend):
                continue  # which counts its own memory when it loads the plan
            dialect = backend.dialect(machine.arch)
            check_shared_memory(plan, machine, dialect, phases)


def _check_links(plan: Plan, device: Machine | None) -> None:
    """Raises PlanError where ranks would signal by what the device's links do not carry."""
    if device is None or plan.world_size == 1 or not device.has(Capability.PEER_STORES):
        return
    if not machine_of(plan).has(Capability.PEER_STORES):
        raise PlanError(
            f"the plan's ranks signal each other by additions, but the links of {device.name} to "
            "other devices carry stores alone; make the plan again on this device"
        )


def check_asked(asked: Machine, device: Machine) -> None:
    """InvalidUsageError where somebody asks to plan for a machine whose kernels this device, on
    which the plan is to run at once, cannot run.
    """
    if (asked.backend, asked.arch) != (device.backend, device.arch):
        raise InvalidUsageError(
            f"the machine {asked.name} is a {asked.backend} {asked.arch}, but the model is to run "
            f"on {device.name} ({device.backend} {device.arch}); name a machine of that kind or "
            "none, or plan without running by `ark plan`"
        )


def check_machine(made_for: Machine, device: Machine | None) -> None:
    """Raises PlanError where a plan's machine is not this device's, or none that is known."""
    if device is not None:
        if (made_for.backend, made_for.arch) != (device.backend, device.arch):
            raise PlanError(
                f"the plan was made for {made_for.name} ({made_for.backend} {made_for.arch}), but "
                f"it is to run on {device.name} ({device.backend} {device.arch}); make it again "
                "with `ark plan` and --machine for this device"
            )
        if device.backend != registry.FALLBACK and made_for.processors > device.processors:
            raise PlanError(
                f"the plan needs {made_for.processors} processors at once, but {device.name} has "
                f"{device.processors}; make it again for this device"
            )
    try:
        named = registry.machine(made_for.name)
    except InvalidUsageError:
        named = None
    models = [m for m in (named, device) if m is not None]
    fields = [f.name for f in dataclasses.fields(Machine)]
    if not models:  # a device without a model of its name; what its architecture fixes is known
        models, fields = _models(made_for), list(_BY_ARCH)
    differences = [_difference(made_for, m, fields) for m in models]
    if models and all(differences):
        raise PlanError(f"the plan is refused: it says that {differences[0]}")


def check_target(made_for: Machine, backend: str, arch: str | None) -> None:
    """InvalidUsageError where a plan's kernel is asked for a backend or an architecture (None: its
    own) that cannot run it.
    """
    target = made_for.arch if arch is None else arch
    models = _models(dataclasses.replace(made_for, backend=backend, arch=target))
    fields = ["backend", *_BY_ARCH]
    if made_for.backend != backend or (
        models and all(_difference(made_for, model, fields) for model in models)
    ):
        names = ", ".join(m.name for m in models) or f"a machine of {backend!r}"
        raise InvalidUsageError(
            f"the plan was made for {made_for.name} ({made_for.backend} {made_for.arch}), whose "
            f"kernels do not run on {backend} {arch or ''}".rstrip()
            + f"; make it again by `ark plan --machine` for {names}"
        )


def _models(made_for: Machine) -> list[Machine]:
    """The machine models of the same architecture."""
    backend = registry.get(made_for.backend)
    models = (backend.machine(name) for name in (*backend.machine_names(), backend.name))
    return [m for m in models if m is not None and m.arch == made_for.arch]


def _difference(made_for: Machine, model: Machine, fields: Sequence[str]) -> str | None:
    for name in fields:
        found, value = getattr(made_for, name), getattr(model, name)
        if name == "variants":  # a plan has one that the model offers, with its ring or without
            if not set(found) <= {*value, *model.without_ring().variants}:
                return f"{made_for.name} runs {found[0]}, which {model.name} does not offer"
        elif name not in _FREE and found != value:
            return f"{made_for.name} has {name} {found!r}, but that of {model.name} is {value!r}"
    return None
