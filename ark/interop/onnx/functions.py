"""Finds and expands operators that the ONNX standard defines as functions of other operators.
Called by ark.interop.onnx.convert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from ark.interop.onnx.values import Value


def schema_of(node: onnx.NodeProto, version: int) -> Any:
    """The definition of a node's operator in the standard; None if there is none."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def has_body(node: onnx.NodeProto, version: int) -> bool:
    """True if the standard defines the operator as a function of others."""
    schema = schema_of(node, version)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def body_of(
    node: onnx.NodeProto, version: int, given: Sequence[Value | None]
) -> onnx.FunctionProto:
    """The function that defines the operator for these inputs, with the node's attributes
    inserted.
    """
    schema = schema_of(node, version)
    versions = schema.function_opset_versions or schema.context_dependent_function_opset_versions
    newest = max((v for v in versions if v <= version), default=min(versions))
    body: onnx.FunctionProto
    if schema.has_function:
        body = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(newest))
    else:
        body = onnx.FunctionProto.FromString(
            schema.get_context_dependent_function_with_opset_version(
                newest, node.SerializeToString(), [_type(v) for v in given]
            )
        )
    values = {a.name: a for a in body.attribute_proto}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.type:
            values[name] = attribute.default_value
    values.update({a.name: a for a in node.attribute})
    for inner in body.node:
        _resolve(inner, values)
    return body


def _type(value: Value | None) -> bytes:
    if value is None:
        return b""
    if value.items is not None:
        elements = value.items[0].dtype if value.items else "float32"
        inner = _tensor_type(elements, value.items[0].shape if value.items else None)
        return bytes(onnx.helper.make_sequence_type_proto(inner).SerializeToString())
    return bytes(_tensor_type(value.dtype, value.shape).SerializeToString())


def _tensor_type(dtype: Any, shape: Any) -> onnx.TypeProto:
    elements = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_tensor_type_proto(elements, shape)


def _resolve(node: onnx.NodeProto, values: dict[str, Any]) -> None:
    """Replaces references to the function's attributes by the values that the call gives.
    References to attributes without a value are removed.
    """
    kept = []
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    _resolve(inner, values)
            kept.append(attribute)
        elif attribute.ref_attr_name in values:
            given = onnx.AttributeProto()
            given.CopyFrom(values[attribute.ref_attr_name])
            given.name = attribute.name
            kept.append(given)
    del node.attribute[:]
    node.attribute.extend(kept)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name. Byte strings become str, and tensors become arrays."""
    values = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.to_array(value)
        values[attribute.name] = value
    return values
