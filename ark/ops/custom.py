"""Custom ops: the user writes an op's device code once, for all vendors, in terms of ark's device
functions (the device ABI).

    scale = ark.custom_op("scale", TEXT, "x[m, k] -> y[m, k]", tile={"m": 4},
                          constants={"by": 2.0})
    y = scale(x, by=3.0)

TEXT contains a function template `ARK_DEVICE void scale(ArkCtx& c, const Task& task, X x, Y y)`,
which is called for each tile; docs/custom-ops.md explains an example. The signature states which
memory a tile accesses (ark.tasks.custom_form). The planner and the verifier rely on the signature.
They do not check TEXT against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.frontend.model import Model
from ark.frontend.tensor import Tensor, as_tensor
from ark.ir import values as ir
from ark.ir.attributes import CustomAttributes
from ark.ir.dtype import DataType
from ark.ir.values import whole
from ark.lower.ops.custom import lower_channel_custom, lower_custom
from ark.lower.registry import register
from ark.ops.communication.channels import CUSTOM, Channel
from ark.ops.custom_checks import (
    Types,
    check_no_overlap,
    check_types,
    constant_of,
    cut_of,
    results_by_name,
    scratch_of,
    sizes_of,
    text_of,
    types_of,
)
from ark.plan.params import INT_MAX
from ark.tasks import custom_form
from ark.tasks.custom_form import Form, Operand

# A constant of a custom op: its default value, or its type if each call must give a value.
Constant: TypeAlias = "int | float | bool | type[int] | type[float] | type[bool]"


class CustomOp:
    """An op that a user has defined; calling it adds a node to the current model.

    Inputs are positional arguments, in the signature's order. Keyword arguments are constants,
    sizes of axes that no input has, and, under the name of a result, the tensor to write this
    result to. A call returns the result, or a tuple if there are several. waits, signals: channels
    to other ranks on which each task of the op waits at its start and signals at its end. Task
    number i waits for task number i of the peer's next op that signals on the channel. Raises
    ModelError if shapes or types do not fit the signature.
    """

    def __init__(
        self,
        form: Form,
        defaults: Mapping[str, Any],
        result_types: Mapping[str, DataType],
        sizes: Callable[..., Mapping[str, int]] | None,
        reference: Callable[..., Any] | None,
        backward: CustomOp | None,
    ) -> None:
        self.name, self.digest = form.name, custom_form.register(form)
        self.reference, self.backward = reference, backward
        self._form, self._defaults, self._types = form, dict(defaults), dict(result_types)
        self._sizes = sizes
        key = (self.digest, sizes, reference, backward)
        self._number = _NUMBERS.setdefault(key, len(_NUMBERS))
        _OPS[self._number] = self

    def __repr__(self) -> str:
        operands = {o.name: custom_form.shown(o) for o in self._form.operands}
        left = ", ".join(operands[o.name] for o in self._form.operands if o.read)
        right = ", ".join(operands[name] for name in self._form.results)
        return f"<custom op {self.name}: {left} -> {right}>"

    def __call__(
        self,
        *inputs: Any,
        waits: Channel | Sequence[Channel] = (),
        signals: Channel | Sequence[Channel] = (),
        name: str = "",
        **named: Any,
    ) -> Any:
        """Adds the op to the current model; returns its result, or a tuple of them."""
        form = self._form
        read = [o for o in form.operands if o.read]
        if len(inputs) != len(read):
            raise InvalidUsageError(
                f"{self.name} takes {len(read)} inputs ({', '.join(o.name for o in read)}), and "
                f"{len(inputs)} were given"
            )
        tensors = dict(zip((o.name for o in read), map(as_tensor, inputs), strict=True))
        given, sizes, constants = self._sorted(named)
        known = sizes_of(form, {n: t.ir.shape for n, t in {**tensors, **given}.items()})
        known = self._completed({**sizes, **known}, sizes, constants)
        model = Model.get_model()
        outputs = [
            self._result(model, form.operands[form.place(n)], tensors, given, known, name)
            for n in form.results
        ]
        check_no_overlap(form, tensors, outputs)
        check_types(
            form, {**{n: t.ir for n, t in tensors.items()}, **results_by_name(form, outputs)}
        )
        awaited, signalled = _channels(self.name, waits), _channels(self.name, signals)
        read_from = [t.ir for t in tensors.values()]
        between = any(t.buffer.rank >= 0 for t in (*read_from, *outputs))
        remote = between or bool(awaited or signalled)
        attrs = CustomAttributes(
            name=self.name,
            digest=self.digest,
            constants=constants,
            op=self._number,
            waits=[(c.peer, c.tag) for c in awaited] if remote else None,
            signals=[(c.peer, c.tag) for c in signalled] if remote else None,
        )
        type = CUSTOM if remote else "custom"
        model.graph.add(type, read_from, outputs, attrs.to_node(), name or self.name)
        for channel in awaited:
            channel.after(outputs)
        results = tuple(Tensor(t, model) for t in outputs)
        return results if len(results) > 1 else results[0]

    def constants_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The constants in `given` (those of another op) whose names are also constants of this
        op.
        """
        return {name: value for name, value in given.items() if name in self._form.constants}

    def _sorted(
        self, named: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, int], dict[str, Any]]:
        """Divides the keyword arguments of a call into (result tensors, sizes of axes, constants),
        each by name.
        """
        form, given, sizes = self._form, {}, {}
        constants = dict(self._defaults)
        targets = [o.name for o in form.operands if o.written and not o.read]
        for word, value in named.items():
            if word in form.constants:
                constants[word] = constant_of(self.name, word, form.constants[word], value)
            elif word in targets:
                given[word] = as_tensor(value)
            elif word in form.axes:
                sizes[word] = whole(f"{self.name}: {word}", value)
            else:
                words = (*form.constants, *targets, *form.axes)
                raise InvalidUsageError(
                    f"{self.name} has no argument {word!r}; it has {', '.join(words)}"
                )
        for missing in (n for n in form.constants if n not in constants):
            raise InvalidUsageError(f"{self.name}: give a value for the constant {missing}")
        return given, sizes, {n: constants[n] for n in form.constants}

    def _completed(
        self, known: dict[str, int], named: Mapping[str, int], constants: Mapping[str, Any]
    ) -> dict[str, int]:
        """The size of each axis of the signature. known: the sizes that follow from the shapes of
        the inputs. Other sizes come from the keyword arguments of the call (`named`) or from the
        op's function `sizes`.
        """
        for axis, n in named.items():
            if known[axis] != n:
                raise InvalidUsageError(
                    f"{self.name}: {axis} is {n}, but the operands' shapes give {known[axis]}"
                )
        missing = [axis for axis in self._form.axes if axis not in known]
        if missing and self._sizes is not None:
            known = {**self._sizes(**known, **constants), **known}
            missing = [axis for axis in self._form.axes if axis not in known]
        if missing:
            raise InvalidUsageError(
                f"{self.name}: no input determines the size of {missing[0]}; name it in the call "
                f"({missing[0]}=8), or give custom_op a function sizes="
            )
        for axis, n in known.items():
            if not 1 <= whole(f"{self.name}: {axis}", n) <= INT_MAX:
                raise InvalidUsageError(f"{self.name}: {axis} is {n}; expected 1 or more")
        return known

    def _result(
        self,
        model: Model,
        operand: Operand,
        tensors: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        name: str,
    ) -> ir.Tensor:
        """The result tensor for `operand`: a new tensor or, if the call was given a tensor to write
        the result to, a view of that tensor.
        """
        if target := tensors.get(operand.name) or given.get(operand.name):
            return model.graph.rewrite(target.ir, name)
        dtype = self._types.get(operand.name)
        if dtype is None:
            if not tensors:
                raise InvalidUsageError(
                    f"{self.name} has no input whose type {operand.name} could have; pass dtypes="
                )
            dtype = next(iter(tensors.values())).ir.dtype
        shape = [sizes[dim.axis] if dim.axis else dim.size for dim in operand.dims]
        last = operand.name if len(self._form.results) > 1 else ""
        label = model.graph.scoped(".".join(part for part in (name or self.name, last) if part))
        return model.new_tensor(shape, dtype, name=label)


_OPS: dict[int, CustomOp] = {}  # by number
# The number of each definition of a custom op. The number is stored in graphs, which must be equal
# on all ranks. So equal definitions get the same number on all ranks.
_NUMBERS: dict[tuple[object, ...], int] = {}


def of_attributes(given: CustomAttributes) -> CustomOp:
    """The custom op to which a node with these attributes belongs, as defined in this process."""
    return _OPS[given.op]


def _channels(name: str, given: Any) -> tuple[Channel, ...]:
    channels = (given,) if isinstance(given, Channel) else tuple(given)
    for channel in channels:
        if not isinstance(channel, Channel):
            raise InvalidUsageError(
                f"{name}: waits and signals are channels, not {channel!r:.60}; make one with "
                "ark.comm.channel"
            )
    return channels


def custom_op(
    name: str,
    source: str | Path,
    signature: str,
    tile: Mapping[str, int | None] | None = None,
    dtypes: Mapping[str, Types] | None = None,
    constants: Mapping[str, Constant] | None = None,
    sizes: Callable[..., Mapping[str, int]] | None = None,
    scratch: int = 0,
    scratch_each: Mapping[str, int] | None = None,
    reference: Callable[..., np.ndarray | Sequence[np.ndarray]] | None = None,
    backward: CustomOp | None = None,
    packets: Sequence[str] = (),
) -> CustomOp:
    """Defines an op by a device function, which every vendor's compiler compiles without changes.

    The text is trusted code, like the Python code around it: it is compiled and runs with the
    rights of this process. Never use a text from an untrusted source.

    name: the name of the op and of its device function. source: the text, or the path of a file
    (pathlib.Path). signature: the axes of inputs and results, as in `x[m, k], w[k] -> y[m, k]`
    (docs/custom-ops.md); an operand on both sides is updated in place.

    tile: the axes that are cut into tasks, with the size of a tile, or None for a size that gives
    each processor one tile; by default there is a single task.

    dtypes: the allowed type or types of an operand, by its name. A result has the first of them, by
    default the type of the first input.

    constants: the default value (a bool, int or float) of each constant, by name, or one of these
    types if each call must give a value.

    sizes: a function that returns the sizes of axes that no input has, from the known sizes and the
    constants.

    scratch: bytes of shared memory per task. scratch_each: for an axis, further bytes per index of
    the tile.

    reference: a function that computes the results with NumPy from the inputs and the constants.

    backward: the op that computes the inputs' gradients from the inputs and the results' gradients.

    packets: names of operands that the text accesses only by ark_load and ark_store. ark may then
    transfer them as packets, if they are small or in symmetric memory.

    Raises InvalidUsageError for arguments that are wrong or do not fit each other.

    Examples:
        >>> text = '''
        ... template <class Task, class X, class Y>
        ... ARK_DEVICE void twice(ArkCtx& c, const Task& task, X x, Y y) {
        ...   for (int i = task.i.begin + ark_tid(); i < task.i.end; i += ARK_THREADS)
        ...     ark_store(c, y, 2.0f * ark_load(c, x, i), i);
        ... }'''
        >>> twice = ark.custom_op("twice", text, "x[i] -> y[i]", tile={"i": 64})
        >>> twice(torch.tensor([1.0, 2.0])).eval()
        tensor([2., 4.])
    """
    file, text = text_of(name, source)
    kinds, defaults = {}, {}
    for word, value in (constants or {}).items():
        kind = value if isinstance(value, type) else type(value)
        if kind not in (bool, int, float):
            raise InvalidUsageError(
                f"custom op {name!r}: the constant {word} is {value!r:.60}; expected a bool, an "
                "int or a float, or one of these types"
            )
        kinds[word] = kind.__name__
        if not isinstance(value, type):
            defaults[word] = constant_of(name, word, kind.__name__, value)
    allowed = {word: types_of(name, word, given) for word, given in (dtypes or {}).items()}
    form = custom_form.parse(
        name,
        file,
        text,
        signature,
        cut_of(name, tile or {}),
        {word: [t.name for t in types] for word, types in allowed.items()},
        kinds,
        scratch_of(name, scratch, scratch_each or {}),
        tuple(sorted(packets)),
    )
    if backward is not None and not isinstance(backward, CustomOp):
        raise InvalidUsageError(
            f"custom op {name!r}: backward is {backward!r:.60}; expected a custom op"
        )
    first = {word: types[0] for word, types in allowed.items()}
    return CustomOp(form, defaults, first, sizes, reference, backward)


def _reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    given = CustomAttributes.from_node(attrs)
    op = of_attributes(given)
    if op.reference is None:
        raise UnsupportedError(
            f"the custom op {op.name!r} has no reference to compare with; give custom_op one by "
            "reference="
        )
    results = op.reference(*inputs, **given.constants)
    arrays = [
        np.asarray(a) for a in (results if isinstance(results, (tuple, list)) else (results,))
    ]
    wanted = len(custom_form.get(given.name, given.digest).results)
    if len(arrays) != wanted:
        raise ModelError(
            f"the reference of the custom op {op.name!r} makes {len(arrays)} arrays; its signature "
            f"has {wanted} results"
        )
    return arrays


register("custom", _reference, lower_custom)
register(CUSTOM, None, lower_channel_custom, names_ranks=True, iteration_barrier=True)
