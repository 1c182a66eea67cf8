"""Holds the backend, the device, and the connection to the other ranks of the job that this process
uses.

Nothing is opened until something must run, so models can be built and planned without a device.
Called by ark.runtime.api.init, ark.runtime.runtime and ark.runtime.planner.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ark import log
from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError, SystemError
from ark.frontend.model import Model
from ark.ir.values import whole
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.rank_info import PORT_BASE, rank_among_siblings, rank_from_environment


@dataclass
class _State:
    backend: Backend | None = None
    arch: str | None = None
    ranks: Bootstrap | None = None
    devices: dict[tuple[str, int], Device] = field(default_factory=dict)


_state = _State()


def select(name: str | None, arch: str | None) -> None:
    """Sets the backend (None leaves it as it is) and the required architecture (None allows any).

    Raises SystemError with the probe's reason if the named backend has no device, or no device of
    that architecture.
    """
    if name is not None:
        _state.backend, _ = registry.choose(name)
    if arch is not None:
        _check_arch(arch)
    _state.arch = arch or (None if name else _state.arch)


def _check_arch(arch: str) -> None:
    if not isinstance(arch, str):
        raise InvalidUsageError(
            f"the architecture is {arch!r:.60}; give a name, for example 'sm_90a' or 'gfx942'"
        )
    named = _state.backend.name if _state.backend is not None else None
    chosen, probe = registry.choose(named)
    there = sorted({info.arch for info in probe.devices})
    if arch and arch not in there:
        raise SystemError(
            f"ark.init was given the architecture {arch!r}, but the devices of {chosen.name!r} are "
            f"{', '.join(map(repr, there))}; give one of them, another backend, or neither"
        )


def backend() -> Backend:
    """The backend in use. It is chosen at the first call. If only the CPU is available, a message
    says so.
    """
    if _state.backend is None:
        _state.backend, _ = registry.choose(None)
        if _state.backend.name == registry.FALLBACK:
            log.info("no accelerator was found; running on the CPU")
    return _state.backend


def device(index: int | None = None) -> Device:
    """The opened device, by default the model's. Each device is opened once per process.

    The CPU is a single device, which all ranks share; any rank's number is accepted as its index.
    """
    chosen = backend()
    number = Model.get_device_id() if index is None else whole("the device", index)
    if number < -1:
        raise InvalidUsageError(f"device {number} does not exist; give -1 for the model's device")
    number = Model.get_device_id() if number < 0 else number
    if chosen.name == registry.FALLBACK:
        most = max(Model.get_world_size(), rank_from_environment().world_size)
        if index is not None and number >= most:
            raise InvalidUsageError(
                f"device {number} does not exist: the CPU is one device, number 0; give "
                "device 0, or no device"
            )
        number = 0
    key = (chosen.name, number)
    if key not in _state.devices:
        _state.devices[key] = chosen.open(number)
    opened = _state.devices[key]
    if _state.arch is not None and opened.arch != _state.arch:
        raise SystemError(
            f"ark.init was given the architecture {_state.arch!r}, but device {number} is "
            f"{opened.arch!r}; give ark.init that architecture, or none"
        )
    return opened


def forget(name: str) -> None:
    """Closes the opened devices of a backend; the next use opens them again.

    Called when hardware disappears from a running process, as at the end of an emulator.
    """
    for key in [key for key in _state.devices if key[0] == name]:
        _state.devices.pop(key).close()


def set_aside(name: str) -> dict[tuple[str, int], Device]:
    """Removes the opened devices of a backend from the session, without closing them. `put_back`
    adds them again.
    """
    return {key: _state.devices.pop(key) for key in [k for k in _state.devices if k[0] == name]}


def put_back(devices: Mapping[tuple[str, int], Device]) -> None:
    """Puts devices that `set_aside` has removed back into the session."""
    _state.devices.update(devices)


def ranks() -> Bootstrap | None:
    """The connection to the other ranks of the job. The first call joins the job. None if there is
    only one rank.

    Raises InvalidUsageError if the model's rank and number of ranks differ from the launcher's.
    """
    rank, world = Model.get_rank(), Model.get_world_size()
    if world == 1:
        return None
    here = rank_from_environment()
    if here.world_size == 1:
        among = rank_among_siblings(rank, world)
        if among is None:
            raise InvalidUsageError(
                f"the model is for {world} ranks (ark.set_world_size), but no launcher started "
                f"this process as one of {world}, so it cannot find the others; start it with "
                f"ark.launch({world}, function), multiprocessing, `torchrun --nproc-per-node "
                f"{world} script.py` or `mpirun -n {world} python script.py`, or set {PORT_BASE} "
                "to one free port for all of them"
            )
        here = among
    if (here.rank, here.world_size) != (rank, world):
        raise InvalidUsageError(
            f"the model is for rank {rank} of {world} (ark.set_rank, ark.set_world_size), but the "
            f"launcher started this process as rank {here.rank} of {here.world_size}; set the "
            "launcher's values, or let ark.init() set them"
        )
    if _state.ranks is None:
        _state.ranks = Bootstrap.from_environment(here)
        _at_the_end(_state.ranks.close)
    elif (_state.ranks.rank, _state.ranks.world_size) != (rank, world):
        raise InvalidUsageError(
            f"the model is for rank {rank} of {world} (ark.set_rank, ark.set_world_size), but this "
            f"process has joined its job as rank {_state.ranks.rank} of {_state.ranks.world_size} "
            "and cannot change its rank; start another process for another rank"
        )
    return _state.ranks


def _at_the_end(leave: Callable[[], None]) -> None:
    """Registers `leave` to be called when the process ends.

    In a process that multiprocessing has forked, atexit functions are not called, so
    multiprocessing's finalizers are used there.
    """
    atexit.register(leave)
    if "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"].Finalize(None, leave, exitpriority=0)
