"""Converts models of other formats to ark. Each format is a package with its own dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ark.collective.packages import require

if TYPE_CHECKING:
    from os import PathLike

    import torch

    from ark.interop.onnx.model import OnnxModel
    from ark.interop.torch import Module, Options
    from ark.interop.torch.iterate import Executor


def from_onnx(path: str | PathLike[str], dims: Mapping[str, int] | None = None) -> OnnxModel:
    """Returns an ONNX file (opset 7 to 28) as a model that runs on NumPy arrays.

    dims: sizes of the file's symbolic dimensions. A dimension without a size here takes the size of
    the arrays of each run. Raises ModelError if the file is not a valid model, UnsupportedError
    with the list of all operators that ark lacks, SystemError if the package onnx is missing.

    Examples:
        >>> from onnx import TensorProto, helper
        >>> x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
        >>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
        >>> opset = helper.make_opsetid("", 20)
        >>> model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/model.onnx"
        >>> with open(path, "wb") as file:
        ...     _ = file.write(model.SerializeToString())
        >>> relu = ark.from_onnx(path)
        >>> relu(torch.tensor([-1.0, 2.0]).numpy())
        [array([0., 2.], dtype=float32)]
        >>> relu.close()
    """
    require("onnx", "onnx")
    from ark.interop.onnx.model import from_onnx as load

    return load(path, dims)


def from_torch(
    module: torch.nn.Module,
    example: Sequence[torch.Tensor],
    dynamic_shapes: Mapping[str, object] | Sequence[object] | None = None,
) -> Module:
    """Returns a torch module that computes like `module`, in one kernel, for inference.

    The graph is made by torch.export. example: a tuple of tensors of the shapes and types of later
    calls. dynamic_shapes: sizes that may vary and their bounds, in torch.export's form. Parameters
    are shared, not copied. Raises UnsupportedError with the list of all operators that ark lacks,
    SystemError if torch is missing.

    Examples:
        >>> layer = torch.nn.ReLU()
        >>> kernel = ark.from_torch(layer, (torch.ones(2),))
        >>> kernel(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    require("torch", "torch")
    from ark.interop.torch import from_torch as load

    return load(module, example, dynamic_shapes)


def inference_model(module: torch.nn.Module, options: Options | None = None) -> Executor:
    """Returns a torch module whose call runs options.device_iterations iterations in one launch.

    options: an ark.torch.Options. Raises SystemError if torch is missing.

    Examples:
        >>> options = ark.torch.Options(device_iterations=2, output_mode="all")
        >>> model = ark.inference_model(torch.nn.ReLU(), options)
        >>> model(torch.tensor([[-1.0], [2.0]]))  # a row for each iteration
        tensor([[0.],
                [2.]])
    """
    require("torch", "torch")
    from ark.interop.torch import inference_model as make

    return make(module, options)


def training_model(
    module: torch.nn.Module, options: Options | None, optimizer: torch.optim.Optimizer
) -> Executor:
    """Returns a torch module whose call trains for options.device_iterations steps in one launch.

    The last result of `module` must be the loss. optimizer: torch's SGD, Adam or AdamW over the
    module's parameters; InvalidUsageError is raised for another type. options: an
    ark.torch.Options. Raises SystemError if torch is missing.

    Examples:
        >>> class Loss(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.ones(1))
        ...     def forward(self, x):
        ...         return (self.w * x).mean()
        >>> loss = Loss()
        >>> sgd = torch.optim.SGD(loss.parameters(), lr=0.5)
        >>> step = ark.training_model(loss, ark.torch.Options(device_iterations=2), sgd)
        >>> _ = step(torch.ones(2, 1))  # two steps in one launch
        >>> loss.w.data
        tensor([0.])
    """
    require("torch", "torch")
    from ark.interop.torch import training_model as make

    return make(module, options, optimizer)


__all__ = ["from_onnx", "from_torch", "inference_model", "training_model"]
