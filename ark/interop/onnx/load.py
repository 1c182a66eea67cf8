"""Reading an ONNX file: every check that can be made before a graph is built."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import checker, inliner, shape_inference, version_converter
from onnx.external_data_helper import load_external_data_for_model

from ark.errors import InvalidUsageError, ModelError, UnsupportedError

OPSETS = (13, 28)  # of these definitions are the operators' functions
OLDEST = 7  # from here on onnx's version converter makes the oldest of OPSETS
MOST_BYTES = 1 << 31  # of one protobuf message
CONTROL_FLOW = ("Loop", "Scan", "SequenceMap")
_FAILURES = (DecodeError, RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError)


def read(path: Any, dims: Mapping[str, int] | None, known: Iterable[str]) -> onnx.ModelProto:
    """The checked model: functions that ark has no operator for are replaced by their bodies.

    known: the operators that ark has.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        if not file.is_file() or size >= MOST_BYTES:
            raise InvalidUsageError(
                f"{file} is no ONNX file below 2 GiB; larger weights lie in files beside it"
            )
        model = onnx.load_model_from_string(file.read_bytes())
    except OSError as error:
        raise InvalidUsageError(f"{file} cannot be read: {error}") from error
    except _FAILURES as error:
        raise ModelError(f"{file} is no ONNX model: {error}; export it again") from error
    model = checked(model, str(file), file.parent)
    model = expanded(model, str(file), known)
    bind(model, dims or {}, str(file))
    return model


def checked(model: onnx.ModelProto, name: str, folder: Path | None) -> onnx.ModelProto:
    """The model with operators of OPSETS; ModelError unless it is valid. Weights beside it are read
    here. Sizes of -1 and 0 are unknown ones.
    """
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:
                dim.Clear()
    try:
        if folder is not None:
            _check_places(model, name)
            with warnings.catch_warnings():  # keys of it that onnx does not know are no matter
                warnings.simplefilter("ignore", UserWarning)
                load_external_data_for_model(model, str(folder))
        checker.check_model(model)
        model = _converted(model, name)
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (checker.ValidationError, shape_inference.InferenceError, OSError) as error:
        raise ModelError(f"{name} is no valid ONNX model: {_first(error)}") from error
    except _FAILURES as error:
        raise ModelError(f"{name} is no valid ONNX model: {_first(error)}") from error
    return model


def _converted(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model itself, or by onnx's version converter one of the oldest of OPSETS."""
    version = opset(model, name)
    if version >= OPSETS[0]:
        return model
    if version < OLDEST:
        raise UnsupportedError(
            f"{name} uses opset {version}; expected {OLDEST} to {OPSETS[1]}. Convert it with "
            "onnx.version_converter, or export it again"
        )
    try:
        return version_converter.convert_version(model, OPSETS[0])
    except _FAILURES as error:
        raise UnsupportedError(
            f"{name} uses opset {version}, which onnx's version converter cannot bring to "
            f"{OPSETS[0]}: {_first(error)}; export it again"
        ) from error


def _check_places(model: onnx.ModelProto, name: str) -> None:
    """Weights may lie in the model's folder only, wherever the file says that they are."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            place = Path(entry.value)
            if entry.key == "location" and (place.is_absolute() or ".." in place.parts):
                raise ModelError(
                    f"{name}: the weights of {tensor.name!r} are said to be in {entry.value!r}, "
                    "which is outside of the model's folder; move them into it"
                )


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def expanded(model: onnx.ModelProto, name: str, known: Iterable[str]) -> onnx.ModelProto:
    """The model with functions of the file and of the standard replaced where ark lacks them."""
    known = {*known, *CONTROL_FLOW}
    version = opset(model, name)
    try:
        model = inliner.inline_local_functions(model) if model.functions else model
    except _FAILURES as error:
        raise ModelError(f"{name}: its functions cannot be expanded: {_first(error)}") from error
    lacking = sorted({n.op_type for n in nodes(model.graph) if not n.domain} - known)
    wanted = [("", op) for op in lacking if _has_body(op, version)]
    if not wanted:
        return model
    try:
        return inliner.inline_selected_functions(model, wanted, inline_schema_functions=True)
    except _FAILURES:  # not every body can be expanded: `missing` lists these operators
        return model


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the graphs in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


def _has_body(op: str, version: int) -> bool:
    if not onnx.defs.has(op):
        return False
    schema: Any = onnx.defs.get_schema(op, version)
    return bool(schema.has_function or schema.has_context_dependent_function)


def opset(model: onnx.ModelProto, name: str) -> int:
    """The version of the standard's operators; UnsupportedError for one that is not covered."""
    found = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not found:  # it uses none of the standard's operators
        return OPSETS[0]
    if not 1 <= found[0] <= onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"{name} uses opset {found[0]}, which the installed onnx does not know; expected "
            f"{OLDEST} to {OPSETS[1]}"
        )
    return found[0]


def in_range(op: str, version: int) -> bool:
    """Is the operator, as this opset defines it, one that an opset of OPSETS has?"""
    low, high = OPSETS
    try:
        since = onnx.defs.get_schema(op, version).since_version
        newest = onnx.defs.get_schema(op, min(high, onnx.defs.onnx_opset_version())).since_version
    except onnx.defs.SchemaError:
        return False
    try:
        oldest = onnx.defs.get_schema(op, low).since_version
    except onnx.defs.SchemaError:
        oldest = low
    return bool(oldest <= since <= newest)


def missing(model: onnx.ModelProto, name: str, known: Iterable[str]) -> None:
    """UnsupportedError that lists every operator that ark lacks, with its nodes."""
    known, version = set(known), opset(model, name)
    lacking: dict[str, list[str]] = {}
    for place, node in enumerate(model.graph.node):
        op = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
        if op in CONTROL_FLOW:
            op += " (control flow)"
        elif op == "If" or (op in known and in_range(op, version)):
            continue
        elif op in known:
            op += f" (as opset {version} defines it; {OPSETS[0]} to {OPSETS[1]} are built)"
        lacking.setdefault(op, []).append(node.name or f"number {place}")
    if lacking:
        listed = "; ".join(
            f"{op}: {', '.join(found[:4])}{f' and {len(found) - 4} more' * (len(found) > 4)}"
            for op, found in sorted(lacking.items())
        )
        raise UnsupportedError(f"{name} uses operators that are not built (with nodes): {listed}")


def bind(model: onnx.ModelProto, dims: Mapping[str, int], name: str) -> None:
    """Puts sizes in the place of symbolic dimensions; InvalidUsageError for a name it lacks."""
    symbols = set()
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                symbols.add(dim.dim_param)
                if dim.dim_param in dims:
                    dim.dim_value = dims[dim.dim_param]
    unknown = sorted(set(dims) - symbols)
    if unknown or any(n < 1 for n in dims.values()):
        raise InvalidUsageError(
            f"{name} has the symbolic dimensions {sorted(symbols)}; {dict(dims)} gives "
            + (f"{unknown}, which it lacks" if unknown else "a size below 1")
        )
