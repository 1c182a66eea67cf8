"""Which backend and device a process uses, and which rank it is: what ark.init decides.

Nothing is opened before something must run, so models are built and planned without a device.
Called by ark.runtime.runtime and ark.planner.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field

from ark import log
from ark.backend import registry
from ark.backend.protocol import Backend, Device
from ark.errors import SystemError
from ark.model import Model
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.place import place_from_environment


@dataclass
class _State:
    backend: Backend | None = None
    arch: str | None = None
    ranks: Bootstrap | None = None
    devices: dict[tuple[str, int], Device] = field(default_factory=dict)


_state = _State()


def init(
    backend: str | None = None,
    arch: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Starts afresh: stops what runs, drops the current model, sets rank and number of ranks.

    backend: "cpu" or an installed vendor's name; kept from call to call, and chosen by the first
    launch if never named (the only vendor with devices, else the CPU). arch: what the device must
    be. rank, world_size: default as the launcher's environment says, else 0 of 1. Raises
    SystemError with the probe's reason if the named backend has no device.
    """
    from ark.runtime.runtime import Runtime

    Runtime.stop_all()
    Model.reset()
    if backend is not None:
        _state.backend, _ = registry.choose(backend)
    _state.arch = arch or (None if backend else _state.arch)
    place = place_from_environment()
    Model.set_rank(place.rank if rank is None else rank)
    Model.set_world_size(place.world_size if world_size is None else world_size)
    Model.set_device_id(place.local_rank if place.world_size > 1 else 0)


def backend() -> Backend:
    """The backend in use; picks one on first use and says so where it is only the CPU."""
    if _state.backend is None:
        _state.backend, _ = registry.choose(None)
        if _state.backend.name == registry.FALLBACK:
            log.info("no accelerator was found; running on the CPU")
    return _state.backend


def device(index: int | None = None) -> Device:
    """The opened device; default the model's. Opened once per process."""
    chosen = backend()
    number = Model.get_device_id() if index is None or index < 0 else index
    if chosen.name == registry.FALLBACK:
        number = 0
    key = (chosen.name, number)
    if key not in _state.devices:
        _state.devices[key] = chosen.open(number)
    found = _state.devices[key]
    if _state.arch is not None and found.arch != _state.arch:
        raise SystemError(
            f"ark.init asked for the architecture {_state.arch!r}, but device {number} is "
            f"{found.arch!r}; name that one or none"
        )
    return found


def ranks() -> Bootstrap | None:
    """This process's membership of its job, joined on first use; None for a lone rank."""
    if Model.get_world_size() == 1:
        return None
    if _state.ranks is None:
        _state.ranks = Bootstrap.from_environment()
        atexit.register(_state.ranks.close)
    return _state.ranks


def set_rank(rank: int) -> None:
    """Sets the rank of the current and of new models."""
    Model.set_rank(rank)


def set_world_size(world_size: int) -> None:
    """Sets the number of ranks of the current and of new models."""
    Model.set_world_size(world_size)
