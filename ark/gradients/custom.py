"""Custom ops: the gradient is what their user says, another custom op."""

from __future__ import annotations

from ark.errors import ModelError, UnsupportedError
from ark.gradients.table import Call, Gradients, rule
from ark.ops.custom import of_attrs


@rule("custom")
def _custom(call: Call) -> Gradients:
    op = of_attrs(call.attrs)
    if op.backward is None:
        raise UnsupportedError(
            f"the custom op {op.name!r} (op {call.node.name!r}) has no gradient: give custom_op "
            "another op by backward=, or ark.detach what goes in, to take it as a constant"
        )
    inputs = [call.input(i) for i in range(len(call.node.inputs))]
    given = [call.gradient(i) for i in range(len(call.node.outputs))]
    made = op.backward(*inputs, *given, **op.backward.constants_of(call.attrs["constants"]))
    gradients = made if isinstance(made, tuple) else (made,)
    for gradient, tensor in zip(gradients, call.node.inputs, strict=False):
        if gradient.ir.shape != tensor.shape:
            raise ModelError(
                f"{op.backward.name}, the backward of {op.name}, makes a gradient of shape "
                f"{list(gradient.ir.shape)} for an input of shape {list(tensor.shape)}"
            )
    if len(gradients) != len(inputs):
        raise ModelError(
            f"{op.backward.name}, the backward of {op.name}, makes {len(gradients)} gradients for "
            f"{len(inputs)} inputs"
        )
    return gradients
