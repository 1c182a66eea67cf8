"""Gradients of custom ops. The gradient is computed by another custom op, which the user passes as
`backward`.
"""

from __future__ import annotations

from ark.errors import ModelError, UnsupportedError
from ark.ir.attributes import CustomAttributes
from ark.ops.custom import of_attributes
from ark.ops.gradients.table import Call, Gradients, rule


@rule("custom")
def _custom(call: Call) -> Gradients:
    own = call.node.read(CustomAttributes)
    op = of_attributes(own)
    if op.backward is None:
        raise UnsupportedError(
            f"the custom op {op.name!r} (op {call.node.name!r}) has no gradient: pass its gradient "
            "op as custom_op(backward=...), or ark.detach its inputs to treat them as constants"
        )
    inputs = [call.input(i) for i in range(len(call.node.inputs))]
    given = [call.gradient(i) for i in range(len(call.node.outputs))]
    results = op.backward(*inputs, *given, **op.backward.constants_of(own.constants))
    gradients = results if isinstance(results, tuple) else (results,)
    for gradient, tensor in zip(gradients, call.node.inputs, strict=False):
        if gradient.ir.shape != tensor.shape:
            raise ModelError(
                f"{op.backward.name}, the backward of {op.name}, returns a gradient of shape "
                f"{list(gradient.ir.shape)} for an input of shape {list(tensor.shape)}; both "
                "must be equal"
            )
    if len(gradients) != len(inputs):
        raise ModelError(
            f"{op.backward.name}, the backward of {op.name}, returns {len(gradients)} gradients "
            f"for {len(inputs)} inputs; return one for each"
        )
    return gradients
