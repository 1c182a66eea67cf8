"""Models of other programs' formats; each format is a room of its own with its own library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ark.comm.packages import require

if TYPE_CHECKING:
    from ark.interop.onnx.model import OnnxModel
    from ark.interop.torch import Module


def from_onnx(path: Any, dims: Mapping[str, int] | None = None) -> OnnxModel:
    """An ONNX file (opset 7 to 28) as a model that runs on NumPy arrays.

    dims: sizes of the file's symbolic dimensions; those left open take the sizes of the arrays of a
    run. ModelError for a file that is no valid model, UnsupportedError that lists every operator
    that ark lacks, SystemError where the package onnx is missing.
    """
    require("onnx", "onnx")
    from ark.interop.onnx.model import from_onnx as load

    return load(path, dims)


def from_torch(module: Any, example: Sequence[Any], dynamic_shapes: Any = None) -> Module:
    """A torch module as a torch module that computes in one kernel, by torch.export; inference.

    example: a tuple of tensors of the shapes and types that it will be called with.
    dynamic_shapes: sizes that may vary and their bounds, as torch.export takes them. Parameters are
    shared, not copied. UnsupportedError that lists every operator that ark lacks, SystemError where
    torch is missing.
    """
    require("torch", "torch")
    from ark.interop.torch import from_torch as load

    return load(module, example, dynamic_shapes)


def inference_model(module: Any, options: Any = None) -> Any:
    """A torch module of which a call runs options.device_iterations iterations in one launch.

    options: an ark.torch.Options. SystemError where torch is missing.
    """
    require("torch", "torch")
    from ark.interop.torch import inference_model as make

    return make(module, options)


def training_model(module: Any, options: Any, optimizer: Any) -> Any:
    """A torch module of which a call trains for options.device_iterations steps in one launch.

    Its last result is the loss. optimizer: torch's SGD, Adam or AdamW over its parameters. options:
    an ark.torch.Options. SystemError where torch is missing.
    """
    require("torch", "torch")
    from ark.interop.torch import training_model as make

    return make(module, options, optimizer)


__all__ = ["from_onnx", "from_torch", "inference_model", "training_model"]
