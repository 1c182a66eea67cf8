"""The tensor that users hold: a value of a model's graph, with access to its memory after a launch.

Created by ark.ops; all conversions to and from NumPy, torch and DLPack are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend import dlpack
from ark.frontend.dlpack import SupportsDLPack
from ark.frontend.foreign import ArrayLike, address_of, as_array, is_torch
from ark.frontend.indices import index_range
from ark.frontend.model import Model
from ark.frontend.streams import StreamLike, wait_for_stream
from ark.ir import values as ir
from ark.ir.dtype import DataType
from ark.ir.late import LateTable
from ark.ir.packed import alike, cast

if TYPE_CHECKING:
    import torch

# An operand of an op: a tensor of a model, or a torch tensor, which is read in place.
TensorLike: TypeAlias = "Tensor | torch.Tensor"
# An operand that may also be a number.
Operand: TypeAlias = "TensorLike | float"
# The tensor that an op writes into; None (in scripts written for ARK, NullTensor) for a new one.
Output: TypeAlias = "TensorLike | None"
NullTensor: Any = None

# Functions that a tensor calls but that modules of higher layers define. Those modules register
# them when they are imported: ark.ops registers the public ops by name and `view` (a box of a
# tensor), ark.runtime.runtime registers `run` (runs the model once).
provided: LateTable[Callable[..., Any]] = LateTable("methods of tensors")


def _called(name: str, *given: Any) -> Tensor:
    result: Tensor = provided[name](*given)
    return result


def _operator(name: str) -> Callable[[Tensor, Any], Tensor]:
    return lambda self, other: _called(name, self, other)


def _both_sides(name: str) -> tuple[Callable[[Tensor, Any], Tensor], ...]:
    """Methods that call the op `name` with the tensor as its left and as its right operand."""
    return _operator(name), lambda self, other: _called(name, other, self)


def _unary(name: str) -> Callable[[Tensor], Tensor]:
    return lambda self: _called(name, self)


class _FromTorch:
    """A descriptor that gives `from_torch` two meanings. On the class, Tensor.from_torch(t) returns
    a tensor on the memory of the torch tensor t. On an instance, tensor.from_torch(t) writes t's
    values to the tensor, as from_numpy does.
    """

    def __get__(self, tensor: Tensor | None, owner: type) -> Callable[..., Tensor]:
        return _on_torchs_memory if tensor is None else partial(_write_torchs, tensor)


class Tensor:
    """A value of a model.

    Holding one keeps its memory; `initializer` returns its first contents.

    Examples:
        >>> x = ark.tensor([2, 3], ark.bf16)
        >>> x.shape(), x.nelems(), (x * 2.0)[0].shape()
        ([2, 3], 6, [1, 3])
    """

    requires_grad = False
    # Without this, NumPy would evaluate array * tensor with an op for each element of the array.
    __array_ufunc__ = None

    def __init__(
        self, tensor: ir.Tensor, model: Model, initializer: Callable[[], ArrayLike] | None = None
    ) -> None:
        self.ir = tensor
        self.model = model
        self.storage = model.storage(tensor.buffer)
        self.initializer = initializer

    def shape(self) -> list[int]:
        """Sizes per dimension."""
        return list(self.ir.shape)

    def strides(self) -> list[int]:
        """The size of the underlying buffer in each dimension. ARK calls these sizes strides."""
        return list(self.ir.extents)

    def nelems(self) -> int:
        """Number of elements."""
        return self.ir.elements

    def dtype(self) -> DataType:
        """The element type."""
        return self.ir.dtype

    def rename(self, name: str) -> None:
        """Names the tensor, and its buffer if the tensor covers it; only before an op uses it."""
        graph, buffer = self.model.graph, self.ir.buffer
        if self.ir.nbytes == buffer.nbytes:
            buffer = dataclasses.replace(buffer, name=name)
        self.ir = dataclasses.replace(self.ir, name=name, buffer=buffer)
        graph.tensors[self.ir.id], graph.buffers[buffer.id] = self.ir, buffer

    def is_external(self) -> bool:
        """True if the caller owns the memory (a placeholder)."""
        return self.storage.foreign

    def data_ptr(self) -> int:
        """The device address of the first element; 0 before the first launch."""
        start = sum(o * s for o, s in zip(self.ir.offsets, self.ir.strides, strict=True))
        base = self.storage.address
        return base + self.ir.dtype.nbytes(start) if base else 0

    def bind(self, data: int | torch.Tensor) -> None:
        """Binds a placeholder to a torch tensor's memory or a device address; 0 binds nothing."""
        if isinstance(data, int):
            if data:
                self.storage.bind(data, None)
                self.model.keep(self.storage)
            return
        self.storage.bind(*_foreign(self, data))
        self.model.keep(self.storage)

    def to_numpy(self, ndarray: np.ndarray | None = None, stream: StreamLike = 0) -> np.ndarray:
        """Returns a copy of the contents; bf16 becomes ml_dtypes.bfloat16. If `ndarray` is given,
        the contents are copied into it.

        Waits for `stream`, and for iterations in progress.
        """
        wait_for_stream(stream)
        data = self.storage.read(self.ir)
        if ndarray is None:
            return data
        if ndarray.shape != data.shape or ndarray.dtype != data.dtype:
            raise InvalidUsageError(
                f"the array has shape {list(ndarray.shape)} and type {ndarray.dtype}; the tensor "
                f"has {list(data.shape)} and {data.dtype}"
            )
        ndarray[...] = data
        return ndarray

    def from_numpy(self, ndarray: ArrayLike, stream: StreamLike = 0) -> Tensor:
        """Writes the contents; the array has the tensor's shape, up to dimensions of 1.

        Values are cast as in NumPy, floats are rounded. Raises InvalidUsageError for integers that
        the type cannot represent, and for fractions written to integers. Waits for `stream`, and
        for iterations in progress.
        """
        wait_for_stream(stream)
        array = as_array(ndarray)
        if array.dtype.kind in "cmMOSU":
            raise InvalidUsageError(
                f"the array has elements of type {array.dtype}; expected real numbers"
            )
        shape = self.ir.dtype.host_shape(self.ir.shape)
        if not alike(array.shape, shape):
            raise InvalidUsageError(
                f"the array has {array.size} elements of shape {list(array.shape)}; the tensor has "
                f"shape {list(shape)}"
            )
        values = cast(array, self.ir.dtype, f"tensor {self.ir.name!r}").reshape(shape)
        self.storage.write(self.ir, values)
        return self

    def to_dlpack(self) -> object:
        """A DLPack capsule that views the same memory, after iterations in progress have ended."""
        self.storage.wait()
        return dlpack.export(self.ir, self.storage)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack 0.8 capsule for another library.

        Raises BufferError, as the protocol requires, for a device that is neither the tensor's nor
        the host, or one that needs a copy with copy=False.
        """
        return dlpack.export(self.ir, self.storage, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self.storage)

    @staticmethod
    def from_dlpack(ext_tensor: SupportsDLPack) -> Tensor:
        """A tensor on the memory of any object with __dlpack__."""
        if not is_torch(ext_tensor):  # torch would drop the negative bit of its own tensors
            ext_tensor = _torch().from_dlpack(ext_tensor)
        return Tensor.from_torch(ext_tensor)

    def to_torch(self) -> torch.Tensor:
        """A torch tensor that views the same memory."""
        view: torch.Tensor = _torch().from_dlpack(self)
        return view

    get_torch_view = to_torch

    from_torch = _FromTorch()

    def copy(self, data: ArrayLike, stream: StreamLike = 0) -> Tensor:
        """Writes the contents from a NumPy array or a torch tensor of any device."""
        return self.from_numpy(data, stream)

    def initialize(self) -> Tensor:
        """Writes the values that the tensor's initializer returns, if it has one."""
        return self if self.initializer is None else self.copy(self.initializer())

    def eval(self, stream: StreamLike = None) -> Any:
        """Runs the tensor's model once and returns the contents.

        A torch tensor, or a NumPy array without torch. The model is that in which the tensor was
        created, even if it is not the current model. stream: the model runs after the work that is
        queued on this stream.
        """
        wait_for_stream(stream)
        provided["run"](self.model)
        return self.to_torch() if find_spec("torch") else self.to_numpy()

    def __getitem__(self, index: Any) -> Tensor:
        """A view: integers give a dimension of size 1, slices must have step 1, other dimensions
        are whole.
        """
        parts = index if isinstance(index, tuple) else (index,)
        shape = self.ir.shape
        if len(parts) > len(shape):
            raise InvalidUsageError(f"{len(parts)} indices were given for {len(shape)} dimensions")
        ranges = [index_range(part, n) for part, n in zip(parts, shape, strict=False)]
        ranges += [(0, n) for n in shape[len(parts) :]]
        return _called("view", as_tensor(self), [e - b for b, e in ranges], [b for b, _ in ranges])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(self.ir.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The contents for NumPy's functions; always a copy."""
        if copy is False:
            raise ValueError("an ark tensor cannot be viewed as an array without a copy")
        return np.asarray(self.to_numpy(), dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and self.model is other.model and self.ir.id == other.ir.id

    def __hash__(self) -> int:
        return hash((id(self.model), self.ir.id))

    def __repr__(self) -> str:
        return f"ark.Tensor({self.ir.name!r}, {list(self.ir.shape)}, {self.ir.dtype.name})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls the op that has the name of the torch function."""
        name = getattr(func, "__name__", str(func))
        if name not in provided and name not in provided.filled():
            raise UnsupportedError(
                f"torch.{name} of an ark tensor is not supported; use the ops of ark"
            )
        return provided[name](*args, **(kwargs or {}))

    __add__, __radd__ = _both_sides("add")
    __sub__, __rsub__ = _both_sides("sub")
    __mul__, __rmul__ = _both_sides("mul")
    __truediv__, __rtruediv__ = _both_sides("div")
    __mod__, __rmod__ = _both_sides("mod")
    __pow__, __rpow__ = _both_sides("pow")
    __and__, __rand__ = _both_sides("logical_and")
    __or__, __ror__ = _both_sides("logical_or")
    __xor__, __rxor__ = _both_sides("logical_xor")
    __matmul__ = _operator("matmul")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("logical_not")


class Parameter(Tensor):
    """A tensor that a Module collects under the name of its attribute.

    gradient: the last argument of `update_gradient`. requires_grad: Module.backward computes it.

    Examples:
        >>> ark.Parameter(ark.tensor([4])).requires_grad
        True
    """

    requires_grad = True
    gradient: Tensor | None = None

    def __init__(self, tensor: TensorLike, from_torch: bool = False) -> None:
        if from_torch and not isinstance(tensor, Tensor):
            tensor = Tensor.from_torch(tensor.detach())
        base = as_tensor(tensor)
        super().__init__(base.ir, base.model, base.initializer)
        self.storage.weight = True

    def update_gradient(self, ark_tensor: Tensor) -> None:
        """Sets `gradient`, for an optimizer's step, to a tensor of the parameter's shape."""
        if ark_tensor.ir.shape != self.ir.shape:
            raise InvalidUsageError(
                f"the gradient has shape {ark_tensor.shape()}, the parameter {self.shape()}; they "
                "must be equal"
            )
        self.gradient = ark_tensor


def _on_torchs_memory(tensor: Any) -> Tensor:
    """A tensor of the current model on the memory of a contiguous torch tensor."""
    _check_torch(tensor)
    model = Model.get_model()
    dtype = DataType.from_torch(tensor.dtype)
    shape = tuple(tensor.shape) or (1,)
    handle = Tensor(model.foreign(address_of(tensor), shape, dtype), model)
    if not handle.storage.address:
        handle.bind(tensor)
    return handle


def _write_torchs(tensor: Tensor, data: torch.Tensor, stream: StreamLike = 0) -> Tensor:
    """Writes the values of a torch tensor on any device, cast to the type of `tensor`."""
    _check_torch(data)
    return tensor.from_numpy(data, stream)


def _check_torch(value: Any) -> None:
    if not is_torch(value):
        raise InvalidUsageError(f"expected a torch tensor, got {type(value).__name__}")


def as_tensor(value: Any) -> Tensor:
    """A tensor of the current model for `value`: `value` itself if it is one; a tensor that uses
    the same memory if `value` is a tensor of another model or a torch tensor. Raises
    InvalidUsageError for anything else.
    """
    if isinstance(value, Tensor):
        model = Model.get_model()
        if value.model is model:
            return value
        return Tensor(model.adopt(value.ir, value.storage), model)
    if is_torch(value):
        return Tensor.from_torch(value)
    raise InvalidUsageError(
        f"expected a tensor, got {type(value).__name__}; create one with ark.tensor"
    )


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            "torch is not installed; install it with `pip install ark-gpu[torch]`, or use to_numpy"
        ) from error
    return torch


def _foreign(tensor: Tensor, data: Any) -> tuple[int, Any]:
    """Returns (address, owner) of a torch tensor that is to be bound to a placeholder."""
    if not is_torch(data):
        raise InvalidUsageError(
            f"a placeholder takes a torch tensor, got {type(data).__name__}; pass "
            "torch.from_numpy(...)"
        )
    address, wanted = address_of(data), tensor.ir
    if DataType.from_torch(data.dtype) != wanted.dtype:
        raise ModelError(f"the torch tensor is {data.dtype}, expected {wanted.dtype.name}")
    if not alike(data.shape, wanted.extents):
        raise ModelError(
            f"the torch tensor has {data.numel()} elements of shape {list(data.shape)}; the "
            f"placeholder needs shape {list(wanted.extents)}"
        )
    return address, data


def _cpp_tensor(*given: Any, **named: Any) -> Tensor:
    """ARK's internal function to create a tensor, as its tests call it."""
    tensor: Tensor = provided["tensor"](*given, **named)
    return tensor
