"""Admission: the checks that every plan passes before it is run, emitted or exported.

A plan may come from a file, a user's dictionary or another rank. Its form was checked when it was
read (ark.plan.schema). Here four things are checked: the plan is verified; its machine is compared
with the machine model of that name and with the device; the shared memory that the backend's bodies
(device functions) need is summed; and the plan's memory is compared with the device's. `admit_rank`
is called by ark.runtime.runner.load for every plan; `admit` by ark.cli.export and the offline
commands, which have the plans of all ranks and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ark.backend import registry
from ark.backend.codegen.shared_memory import check_shared_memory
from ark.backend.devices import Device
from ark.backend.protocol import KernelBackend
from ark.errors import InvalidUsageError, PlanError, SystemError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.run import Ranks

# Fields of a machine model that affect only a plan's speed. In these fields the machine that a plan
# was made for may differ from the device that runs the plan.
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
_BY_ARCH = ("lanes", "variants")  # equal on all devices of an architecture


def admit_rank(plan: Plan, device: Device, ranks: Ranks | None = None) -> None:
    """Checks one rank's plan for an opened device. Raises PlanError if the plan is not valid for
    the device, and SystemError if the device has too little memory.

    A plan that was verified before is not verified again. All ranks must call this function at the
    same time. If any rank's plan is not verified, the ranks exchange their plans and verify all of
    them.
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
    """Returns a message if a rank's plan needs more memory than `room` bytes. Returns an empty text
    if the plan fits, or if `room` is 0 (unknown). holder: the beginning of the message, with the
    device and a verb ("h100 has"). Memory that the caller provides is not counted.
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
    """A number of bytes as text, in the largest unit in which it is at least 1."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} bytes"


def admit(plans: Sequence[Plan], device: Machine | None = None) -> None:
    """Checks the plans of all ranks. Raises PlanError if they are not valid.

    device: the machine model of the opened device; None if there is no particular device.
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
                continue  # this backend counts its memory when it loads the plan
            dialect = backend.dialect(machine.arch)
            check_shared_memory(plan, machine, dialect, phases)


def _check_links(plan: Plan, device: Machine | None) -> None:
    """Raises PlanError if ranks signal each other by operations that the device's links do not
    support.
    """
    if device is None or plan.world_size == 1 or not device.has(Capability.PEER_STORES):
        return
    if not machine_of(plan).has(Capability.PEER_STORES):
        raise PlanError(
            f"the plan's ranks signal each other by additions, but the links of {device.name} to "
            "other devices support stores only; plan again on this device"
        )


def check_asked(asked: Machine, device: Machine) -> None:
    """Raises InvalidUsageError if kernels for the machine that the user requested cannot run on
    this device.
    """
    if (asked.backend, asked.arch) != (device.backend, device.arch):
        raise InvalidUsageError(
            f"machine={asked.name} is a {asked.backend} {asked.arch}, but the model runs on "
            f"{device.name} ({device.backend} {device.arch}); omit the machine or name one of "
            "that architecture, or use `ark plan` to plan without running"
        )


def check_machine(made_for: Machine, device: Machine | None) -> None:
    """Raises PlanError if the machine for which a plan was made is unknown or does not match this
    device.
    """
    if device is not None:
        if (made_for.backend, made_for.arch) != (device.backend, device.arch):
            raise PlanError(
                f"the plan was made for {made_for.name} ({made_for.backend} {made_for.arch}), "
                f"but runs on {device.name} ({device.backend} {device.arch}); plan again with "
                "`ark plan --machine` for this device"
            )
        if device.backend != registry.FALLBACK and made_for.processors > device.processors:
            raise PlanError(
                f"the plan needs {made_for.processors} processors that run at the same time, but "
                f"{device.name} has {device.processors}; plan again for this device"
            )
    try:
        named = registry.machine(made_for.name)
    except InvalidUsageError:
        named = None
    models = [m for m in (named, device) if m is not None]
    fields = [f.name for f in dataclasses.fields(Machine)]
    if not models:  # the device has no machine model, but its architecture's properties are known
        models, fields = _models(made_for), list(_BY_ARCH)
    differences = [_difference(made_for, m, fields) for m in models]
    if models and all(differences):
        raise PlanError(
            f"the plan is refused: it records that {differences[0]}; plan again for this device"
        )


def check_target(made_for: Machine, backend: str, arch: str | None) -> None:
    """Raises InvalidUsageError if a plan's kernel cannot run on the requested backend or
    architecture. arch: None stands for the plan's own architecture.
    """
    target = made_for.arch if arch is None else arch
    models = _models(dataclasses.replace(made_for, backend=backend, arch=target))
    fields = ["backend", *_BY_ARCH]
    if made_for.backend != backend or (
        models and all(_difference(made_for, model, fields) for model in models)
    ):
        names = ", ".join(m.name for m in models) or f"a machine of {backend!r}"
        raise InvalidUsageError(
            f"the plan was made for {made_for.name} ({made_for.backend} {made_for.arch}), and "
            f"its kernels do not run on {backend} {arch or ''}".rstrip()
            + f"; plan again with `ark plan --machine` for {names}"
        )


def _models(made_for: Machine) -> list[Machine]:
    """The installed machine models that have the same backend and architecture as the given
    machine.
    """
    backend = registry.get(made_for.backend)
    models = (backend.machine(name) for name in (*backend.machine_names(), backend.name))
    return [m for m in models if m is not None and m.arch == made_for.arch]


def _difference(made_for: Machine, model: Machine, fields: Sequence[str]) -> str | None:
    for name in fields:
        planned, value = getattr(made_for, name), getattr(model, name)
        if name == "variants":  # a plan has one of the model's variants, with or without its ring
            if not set(planned) <= {*value, *model.without_ring().variants}:
                return f"{made_for.name} runs {planned[0]}, which {model.name} does not offer"
        elif name not in _FREE and planned != value:
            return f"{made_for.name} has {name} {planned!r}, but that of {model.name} is {value!r}"
    return None
