"""The model to which op calls add nodes. There is always a current model. It belongs to the whole
process, except inside of a with block of use_model, where the thread has a current model of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from ark.errors import InvalidUsageError
from ark.frontend.storage import Storage
from ark.ir import values as ir
from ark.ir.dtype import DataType
from ark.ir.export import to_json
from ark.ir.graph import Graph


class Model:
    """A graph under construction, with its rank and the memory that Python can access.

    Examples:
        >>> with ark.use_model(ark.Model(0, 2)) as model:
        ...     x = ark.relu(ark.tensor([4]))
        >>> model.graph.world_size, len(model.graph.nodes) > 0
        (2, True)
    """

    _current: Model | None = None  # the current model of the process
    _within: ContextVar[Model | None] = ContextVar("within", default=None)  # that of a with block
    _rank = 0
    _world_size: int | None = None  # None until it is set
    _device_id = 0

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self.graph = Graph(
            Model._rank if rank is None else rank,
            Model.get_world_size() if world_size is None else world_size,
        )
        self.storages: WeakValueDictionary[int, Storage] = WeakValueDictionary()
        self._adopted: WeakKeyDictionary[Storage, ir.Buffer] = WeakKeyDictionary()
        self._kept: list[Storage] = []
        self._foreign: dict[tuple[int, int], ir.Buffer] = {}

    @staticmethod
    def get_model() -> Model:
        """The current model; made on first use."""
        within = Model._within.get()
        if within is not None:
            return within
        if Model._current is None:
            Model._current = Model()
        return Model._current

    @staticmethod
    def _all_current() -> tuple[Model, ...]:
        """The current models: that of the process and, in a with block of use_model, that of the
        block. set_rank and set_world_size change both.
        """
        return tuple(m for m in (Model._within.get(), Model._current) if m is not None)

    @staticmethod
    def reset() -> None:
        """Drops the current model; the next op call creates a new one."""
        set_model(None)

    @staticmethod
    def get_rank() -> int:
        """The rank that new models belong to; 0 until ark.init or ark.set_rank sets it.

        A launcher's variables are read by ark.init, not by this function.
        """
        return Model._rank

    @staticmethod
    def set_rank(rank: int) -> None:
        """Sets the rank of the current and of new models."""
        rank = ir.whole("the rank", rank)
        if rank < 0:
            raise InvalidUsageError(f"rank={rank} is not valid; ranks are numbered from 0")
        Model._rank = rank
        for model in Model._all_current():
            model.graph.rank = Model._rank

    @staticmethod
    def get_world_size() -> int:
        """The number of ranks of new models; 1 until it is set."""
        return Model._world_size or 1

    @staticmethod
    def has_world_size() -> bool:
        """True if the number of ranks was set."""
        return Model._world_size is not None

    @staticmethod
    def set_world_size(world_size: int) -> None:
        """Sets the number of ranks of the current and of new models."""
        world_size = ir.whole("the world size", world_size)
        if world_size < 1:
            raise InvalidUsageError(f"world_size={world_size} must be at least 1")
        Model._world_size = world_size
        for model in Model._all_current():
            model.graph.world_size = Model._world_size

    @staticmethod
    def get_device_id() -> int:
        """The number of the device that models run on, from 0."""
        return Model._device_id

    @staticmethod
    def set_device_id(device_id: int) -> None:
        """Sets the device that models run on; `device_id` is its number, from 0."""
        if device_id < 0:
            raise InvalidUsageError(
                f"device_id={device_id} is not valid; devices are numbered from 0"
            )
        Model._device_id = int(device_id)

    def compress(self) -> Model:
        """Returns the model itself. Nothing has to be removed, because a model contains only data
        that a plan needs.
        """
        return self

    def serialize(self, pretty: bool = True) -> str:
        """The graph as JSON, in ARK's layout."""
        return to_json(self.graph, pretty)

    def __str__(self) -> str:
        return self.serialize()

    def new_tensor(
        self,
        shape: Sequence[int],
        dtype: DataType,
        *,
        arena: str = "activation",
        extents: Sequence[int] = (),
        offsets: Sequence[int] = (),
        padded: Sequence[int] = (),
        name: str = "",
    ) -> ir.Tensor:
        """A new tensor of this model, on a new buffer. The name of the buffer is `name`, changed if
        necessary so that it is unique in the model.
        """
        sizes = tuple(extents) or dtype.whole_rows(tuple(padded) or tuple(shape))
        nbytes = dtype.nbytes(math.prod(int(n) for n in sizes))
        label = f"{name or 'tensor'}.{len(self.graph.buffers)}"
        return self.graph.tensor(
            shape,
            dtype,
            buffer=self.graph.buffer(arena, nbytes, name=label),
            extents=extents,
            offsets=offsets,
            padded=padded,
            name=name,
        )

    def storage(self, buffer: ir.Buffer) -> Storage:
        """The memory of a buffer; it lives as long as it is referenced."""
        storage = self.storages.get(buffer.id)
        if storage is None:
            storage = Storage(buffer.nbytes, buffer.arena == "external", buffer.name)
            storage.symmetric = buffer.arena == "symmetric"
            storage.on_host = buffer.arena == "host"
            self.storages[buffer.id] = storage
        return storage

    def keep(self, storage: Storage) -> None:
        """Keeps a reference to foreign memory, so that it lives as long as the model. Ops may read
        it even after its tensor is dropped.
        """
        self._kept.append(storage)

    def foreign(self, address: int, shape: Sequence[int], dtype: DataType) -> ir.Tensor:
        """A dense tensor on memory of the caller. Calls with the same memory use the
        same buffer.
        """
        nbytes = dtype.nbytes(math.prod(shape))
        buffer = self._foreign.get((address, nbytes))
        if buffer is None:
            tensor = self.new_tensor(shape, dtype, arena="external")
            self._foreign[address, nbytes] = tensor.buffer
            return tensor
        return self.graph.tensor(shape, dtype, buffer=buffer)

    def adopt(self, tensor: ir.Tensor, storage: Storage) -> ir.Tensor:
        """A tensor in this model that uses the memory of `tensor`, a tensor of another model."""
        buffer = self._adopted.get(storage)
        if buffer is None:
            label = f"adopted.{len(self.graph.buffers)}"
            buffer = self.graph.buffer("state", storage.nbytes, name=label)
            self._adopted[storage] = buffer
            self.storages[buffer.id] = storage
        return self.graph.tensor(
            tensor.shape,
            tensor.dtype,
            buffer=buffer,
            extents=tensor.extents,
            offsets=tensor.offsets,
            padded=tensor.padded,
            name=tensor.name,
        )


def set_model(model: Model | None) -> None:
    """Sets the current model, to which op calls add nodes.

    If `model` is None, a new model is created on first use. Inside a with block of use_model this
    holds until the block's end, elsewhere for the whole process.

    Examples:
        >>> ark.set_model(ark.Model(0, 1))
    """
    checked = _checked(model)
    if Model._within.get() is not None:
        Model._within.set(checked or Model())
    else:
        Model._current = checked


def _checked(model: Model | None) -> Model | None:
    if model is not None and not isinstance(model, Model):
        raise InvalidUsageError(
            f"expected a model, got {type(model).__name__}; create one with ark.Model()"
        )
    return model


def current_model() -> Model:
    """The current model, to which op calls add nodes.

    Examples:
        >>> isinstance(ark.current_model(), ark.Model)
        True
    """
    return Model.get_model()


@contextmanager
def use_model(model: Model | None = None) -> Iterator[Model]:
    """Sets the current model, to which op calls add nodes, for a with block.

    If `model` is None, a new model is created. The model is current in this thread only. Threads
    that build models at the same time each need such a block, because a model takes the ops of one
    thread at a time.

    Examples:
        >>> with ark.use_model() as model:
        ...     x = ark.relu(ark.tensor([4]))
        ...
        >>> len(model.graph.nodes) > 0
        True
    """
    before, inner = Model._within.get(), _checked(model) or Model()
    Model._within.set(inner)
    try:
        yield inner
    finally:
        Model._within.set(before)
