"""ark.init: resets ark, and sets backend, rank and number of ranks."""

from __future__ import annotations

from ark.frontend.model import Model
from ark.runtime import session
from ark.runtime.rank_info import rank_from_environment
from ark.runtime.runtime import Runtime


def init(
    backend: str | None = None,
    arch: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Resets ark: stops launches, drops the current model, sets rank and number of ranks.

    backend: "cpu" or an installed vendor's name. It stays set for later calls; if it was never set,
    the first launch chooses it (the only vendor with devices, else the CPU). arch: the architecture
    that the device must have. rank, world_size: by default those of the launcher's environment,
    else 0 of 1. Raises SystemError with the probe's reason if the named backend has no device.

    Examples:
        >>> ark.init(backend="cpu")
    """
    Runtime.stop_all()
    Model.reset()
    session.select(backend, arch)
    rank_info = rank_from_environment()
    Model.set_rank(rank_info.rank if rank is None else rank)
    Model.set_world_size(rank_info.world_size if world_size is None else world_size)
    Model.set_device_id(rank_info.local_rank if rank_info.world_size > 1 else 0)


def set_rank(rank: int) -> None:
    """Sets the rank of the current and of new models.

    If the number of ranks is not set, it becomes the launcher's, or 1: a process with any rank then
    runs by itself.

    Examples:
        >>> ark.set_world_size(4)
        >>> ark.set_rank(3)
        >>> ark.Model.get_rank()
        3
    """
    Model.set_rank(rank)
    if not Model.has_world_size():
        Model.set_world_size(rank_from_environment().world_size)


def set_world_size(world_size: int) -> None:
    """Sets the number of ranks of the current and of new models.

    Launching a model of several ranks needs a launcher (ark.launch, torchrun, mpirun, srun),
    through which the ranks find each other; building and planning a model does not.

    Examples:
        >>> ark.set_world_size(4)
        >>> ark.Model.get_world_size()
        4
    """
    Model.set_world_size(world_size)
