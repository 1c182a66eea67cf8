"""The inputs and outputs of an ONNX model, as the file declares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ark.errors import ModelError, UnsupportedError


class Port:
    """An input or output: its name, its NumPy type, and its sizes (a str for a symbolic
    dimension).
    """

    def __init__(self, info: onnx.ValueInfoProto, role: str) -> None:
        self.name = info.name
        kind = info.type.WhichOneof("value")
        self.shape: tuple[int | str, ...] | None = None
        self.dtype: Any = None  # None for an output of a stage, which has the computed type
        if kind is None and role == "output":
            return
        if kind != "tensor_type":
            raise UnsupportedError(
                f"the {role} {info.name!r} is a {kind or 'value without a type'}; only tensors "
                "are supported"
            )
        tensor = info.type.tensor_type
        try:
            self.dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError as error:
            raise ModelError(
                f"the {role} {info.name!r} has the element type {tensor.elem_type}, which ONNX "
                "does not have; export the model again"
            ) from error
        if tensor.HasField("shape"):
            self.shape = tuple(
                d.dim_value if d.HasField("dim_value") else (d.dim_param or "?")
                for d in tensor.shape.dim
            )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The shape of the input or output; None if a size is symbolic or unknown."""
        known = tuple(n for n in self.shape or () if isinstance(n, int))
        return known if self.shape is not None and len(known) == len(self.shape) else None

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype} {list(self.shape) if self.shape is not None else '?'}"
