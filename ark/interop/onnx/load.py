"""Reads an ONNX file and makes every check that is possible before a graph is built. Called by
ark.interop.onnx.model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import checker, inliner, shape_inference, version_converter
from onnx.external_data_helper import load_external_data_for_model

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.interop.onnx.functions import has_body, schema_of

OPSETS = (13, 28)  # oldest and newest supported versions of the operators
MOST_BYTES = 1 << 31  # the size limit of a protobuf message
_FAILURES = (DecodeError, RuntimeError, ValueError, TypeError, KeyError, IndexError, OverflowError)


def read(path: Any, dims: Mapping[str, int] | None) -> onnx.ModelProto:
    """Reads and checks a model, and replaces calls of the file's own functions by the functions'
    bodies.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidUsageError(
            f"from_onnx has the type {type(path).__name__} for its path; save the model by "
            "onnx.save and pass the file's path"
        )
    file = Path(path)
    try:
        size = file.stat().st_size
        if not file.is_file() or size >= MOST_BYTES:
            raise InvalidUsageError(
                f"{file} is not an ONNX file of less than 2 GiB; larger weights belong in "
                "external data files"
            )
        model = onnx.load_model_from_string(file.read_bytes())
    except OSError as error:
        raise InvalidUsageError(f"{file} cannot be read: {error}") from error
    except _FAILURES as error:
        raise ModelError(f"{file} is not an ONNX model: {error}; export it again") from error
    model = checked(model, str(file), file.parent)
    model = expanded(model, str(file))
    bind(model, dims or {}, str(file))
    return model


def checked(model: onnx.ModelProto, name: str, folder: Path | None) -> onnx.ModelProto:
    """Returns the model, converted to an opset within OPSETS if necessary. Reads external weights
    from `folder`. Dimensions of -1 and 0 are treated as unknown. Raises ModelError if the model is
    not valid.
    """
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:
                dim.Clear()
    try:
        if folder is not None:
            _check_places(model, name)
            with warnings.catch_warnings():  # ignores warnings about keys that onnx does not know
                warnings.simplefilter("ignore", UserWarning)
                load_external_data_for_model(model, str(folder))
        checker.check_model(model)
        model = _converted(model, name)
        shape_inference.infer_shapes(model, check_type=True)  # build() checks the shapes
    except (checker.ValidationError, shape_inference.InferenceError, OSError) as error:
        raise ModelError(f"{name} is not a valid ONNX model: {_first(error)}") from error
    except _FAILURES as error:
        raise ModelError(f"{name} is not a valid ONNX model: {_first(error)}") from error
    return model


def _converted(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Returns the model itself if its opset is within OPSETS. Otherwise onnx's version converter
    converts it to the oldest of OPSETS.
    """
    version = opset(model, name)
    if version >= OPSETS[0]:
        return model
    if all(_unchanged(node, version) for node in nodes(model.graph)):
        for entry in model.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = OPSETS[0]
        return model
    try:
        converted = version_converter.convert_version(model, OPSETS[0])
        ports = [
            [(v.name, v.type.SerializeToString()) for v in (*m.graph.input, *m.graph.output)]
            for m in (model, converted)
        ]
        if ports[0] != ports[1]:  # the converter changes inputs or outputs for a Scan of opset 8
            raise ValueError("the conversion would change the types of inputs and outputs")
        return converted
    except _FAILURES as error:
        raise UnsupportedError(
            f"{name} uses opset {version}, which onnx's version converter cannot bring to "
            f"{OPSETS[0]}: {_first(error)}; export it again"
        ) from error


def _unchanged(node: onnx.NodeProto, version: int) -> bool:
    """True if a node needs no conversion, because its operator has the same definition in the
    oldest opset of OPSETS.
    """
    old, new = schema_of(node, version), schema_of(node, OPSETS[0])
    return not (old is None or new is None) and old.since_version == new.since_version


def _check_places(model: onnx.ModelProto, name: str) -> None:
    """Raises ModelError if the path of external weights is outside of the model's folder."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            place = Path(entry.value)
            if entry.key == "location" and (place.is_absolute() or ".." in place.parts):
                raise ModelError(
                    f"{name}: the weights of {tensor.name!r} are recorded to be in "
                    f"{entry.value!r}, which is outside of the model's folder; move them into it"
                )


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def expanded(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model, with calls of the file's own functions replaced by the functions' bodies."""
    try:
        return inliner.inline_local_functions(model) if model.functions else model
    except _FAILURES as error:
        raise ModelError(f"{name}: its functions cannot be expanded: {_first(error)}") from error


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of all graphs within its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes(attribute.g)


def opset(model: onnx.ModelProto, name: str) -> int:
    """The version of the standard's operators. Raises UnsupportedError if it is not supported."""
    versions: list[int] = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not versions:  # the model has no standard operators
        return OPSETS[0]
    if not 1 <= versions[0] <= onnx.defs.onnx_opset_version():
        raise UnsupportedError(
            f"{name} uses opset {versions[0]}, which the installed onnx does not know; expected "
            f"1 to {OPSETS[1]}"
        )
    return versions[0]


def in_range(op: str, version: int) -> bool:
    """True if the operator's definition in opset `version` is also the one in some opset that ark
    supports (OPSETS).
    """
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
    """Raises UnsupportedError that lists all operators that ark lacks, with their nodes. Operators
    in a branch are checked only when the branch is built, because it may never be taken.
    """
    known = set(known)
    versions = {i.domain: i.version for i in model.opset_import}
    versions[""] = opset(model, name)
    lacking: dict[str, list[str]] = {}
    for place, node in enumerate(model.graph.node):
        standard = node.domain in ("", "ai.onnx")
        op = node.op_type if standard else f"{node.domain}::{node.op_type}"
        version = versions["" if standard else node.domain]
        if standard and op in known:
            if in_range(op, version):
                continue
            op += f" (as opset {version} defines it; {OPSETS[0]} to {OPSETS[1]} are built)"
        elif op in known or has_body(node, version):
            continue
        lacking.setdefault(op, []).append(node.name or f"number {place}")
    if lacking:
        listed = "; ".join(
            f"{op}: {', '.join(labels[:4])}{f' and {len(labels) - 4} more' * (len(labels) > 4)}"
            for op, labels in sorted(lacking.items())
        )
        raise UnsupportedError(
            f"{name} uses operators that are not supported (with nodes): {listed}"
        )


def bind(model: onnx.ModelProto, dims: Mapping[str, int], name: str) -> None:
    """Replaces symbolic dimensions by sizes. Raises InvalidUsageError for a name that the model
    does not have, or a size below 1.
    """
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
            f"{name} has the symbolic dimensions {sorted(symbols)}, and was given {dict(dims)}: "
            + (f"it has no dimensions {unknown}" if unknown else "a size is below 1")
        )
