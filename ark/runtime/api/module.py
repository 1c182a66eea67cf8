"""Modules: containers of parameters and other modules by attribute name, as in torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ark import log
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import ArrayLike, as_array, is_torch
from ark.frontend.model import Model
from ark.frontend.tensor import Parameter, Tensor, as_tensor
from ark.ir import values as ir
from ark.ir.dtype import FLOATS
from ark.ops.gradients import grad

if TYPE_CHECKING:
    import torch

Hook = Callable[["Module", Any], Any]


class Module:
    """Base class of models: subclasses make parameters and modules and write forward.

    If an attribute is a list of modules, each is registered under the attribute's name and its
    index.

    Examples:
        >>> class Layer(ark.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = ark.parameter([2, 3])
        ...
        ...     def forward(self, x):
        ...         return ark.relu(ark.linear(x, self.weight))
        >>> layer = Layer()
        >>> layer(ark.tensor([4, 3])).shape(), list(layer.params_dict())
        ([4, 2], ['weight'])
    """

    def __init__(self) -> None:
        self.sub_modules: dict[str, Module] = {}
        self.parameters: dict[str, Parameter] = {}
        self._hooks: list[Hook] = []
        self._name = ""
        self._called: tuple[list[ir.Tensor], list[ir.Tensor]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Module):
            self.register_module(name, value)
        elif isinstance(value, Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, (list, tuple)) and all(isinstance(v, Module) for v in value):
            for i, module in enumerate(value):
                self.register_module(f"{name}.{i}", module)

    def register_module(self, name: str, module: Module) -> None:
        """Adds a module under a name; raises TypeError if it is not a Module."""
        if not isinstance(module, Module):
            raise TypeError(f"{name!r} is a {type(module).__name__}, not an ark.Module")
        self.sub_modules[name] = module
        module._name = name

    def register_parameter(self, name: str, param: Parameter) -> None:
        """Adds a parameter under a name; raises TypeError if it is not a Parameter."""
        if not isinstance(param, Parameter):
            raise TypeError(f"{name!r} is a {type(param).__name__}, not an ark.Parameter")
        self.parameters[name] = param

    def register_forward_hook(self, hook: Hook) -> None:
        """Adds a function that is called after each forward; `hook(module, output)` returns the
        module's result.
        """
        self._hooks.append(hook)

    def name_tensors(self, prefix: str = "") -> None:
        """Names parameters and other tensors after their attributes; plans show these names.

        It must be called before ops use the tensors. A tensor that two modules share has the first
        of its names.
        """
        seen: set[int] = set()
        self._name_tensors(prefix, seen)

    def _name_tensors(self, prefix: str, seen: set[int]) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                value.rename(prefix + name)
        for name, module in self.sub_modules.items():
            module._name_tensors(f"{prefix}{name}.", seen)

    def params_dict(self, prefix: str = "") -> dict[str, Parameter]:
        """All parameters, including those of contained modules, by dotted name."""
        params = {prefix + name: p for name, p in self.parameters.items()}
        for name, module in self.sub_modules.items():
            params.update(module.params_dict(f"{prefix}{name}."))
        return params

    @overload
    def state_dict(
        self, prefix: str = "", mode: Literal["numpy"] = "numpy"
    ) -> dict[str, np.ndarray]: ...

    @overload
    def state_dict(
        self, prefix: str = "", *, mode: Literal["torch"]
    ) -> dict[str, torch.Tensor]: ...

    def state_dict(
        self, prefix: str = "", mode: str = "numpy"
    ) -> dict[str, np.ndarray] | dict[str, torch.Tensor]:
        """Contents of all parameters by dotted name, as NumPy arrays or (mode "torch") tensors."""
        if mode not in ("numpy", "torch"):
            raise InvalidUsageError(f"the mode is {mode!r}; it must be 'numpy' or 'torch'")
        params = self.params_dict(prefix)
        if mode == "torch":
            return {name: p.to_torch().clone() for name, p in params.items()}
        return {name: p.to_numpy() for name, p in params.items()}

    def load_state_dict(self, state_dict: Mapping[str, ArrayLike], prefix: str = "") -> None:
        """Writes parameters from arrays or torch tensors; call it after Runtime.launch.

        Raises InvalidUsageError, which names them, if entries are missing; extra entries cause a
        warning.
        """
        params = self.params_dict(prefix)
        missing = sorted(set(params) - set(state_dict))
        if missing:
            raise InvalidUsageError(
                f"the state dictionary lacks {', '.join(missing[:5])}"
                f"{' and more' if len(missing) > 5 else ''}; it has {len(state_dict)} entries"
            )
        for name in sorted(set(state_dict) - set(params)):
            if name.startswith(prefix):
                log.warn(
                    f"the state dictionary has {name!r}, but the module has no parameter of that "
                    "name"
                )
        for name, parameter in params.items():
            data = state_dict[name]
            shape = list(data.shape) if is_torch(data) else list(as_array(data).shape)
            if shape != parameter.shape():
                raise InvalidUsageError(
                    f"{name!r} has shape {shape} in the state dictionary, but {parameter.shape()} "
                    "in the module"
                )
            parameter.copy(data)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's result. Subclasses define this method."""
        raise UnsupportedError(f"{type(self).__name__} has no forward; write one")

    def backward(self, *grad_outputs: Any) -> Any:
        """Adds the gradients of the module's last call.

        The gradients with respect to parameters with requires_grad are stored in them
        (Parameter.update_gradient). Those with respect to the floating-point tensors of the call
        are returned (None, one tensor, or a tuple).

        grad_outputs: a gradient for each tensor that the call returned; may be None for an output
        of one element. Subclasses may define their own `backward`. Errors as of ark.grad.
        """
        if self._called is None:
            raise InvalidUsageError(
                f"{type(self).__name__} was not called; call it before backward"
            )
        inputs, outputs = (
            [Tensor(t, Model.get_model()) for t in listed if t.dtype in FLOATS]
            for listed in self._called
        )
        parameters = [p for p in self.params_dict().values() if p.requires_grad]
        given = grad_outputs or [None] * len(outputs)
        gradients = grad(outputs, [*parameters, *inputs], given)
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.update_gradient(gradient)
        input_gradients = gradients[len(parameters) :]
        return (
            tuple(input_gradients)
            if len(input_gradients) > 1
            else input_gradients[0]
            if input_gradients
            else None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, then the registered hooks."""
        graph = Model.get_model().graph
        with graph.scope(self._name) if graph.scopes and self._name else nullcontext():
            result = self.forward(*args, **kwargs)
            for hook in self._hooks:
                result = hook(self, result)
        self._called = _tensors([*args, *kwargs.values()]), _tensors([result])
        return result


def _tensors(values: Iterable[Any]) -> list[ir.Tensor]:
    """The graph's tensors among the values, which may be in lists. They are returned instead of the
    users' handles, because a handle would keep the tensor's memory alive.
    """
    tensors: list[ir.Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(as_tensor(value).ir)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors
