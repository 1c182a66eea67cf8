"""Converts a torch graph of ATen operators to a graph of ark, and determines which nodes cannot be
converted and why.

As a trial before the graph is built, each node is converted on its own, with tensors of the shapes
that torch computed. If the trial raises an error, the node stays in torch, and the error is the
reason. Called by compile.py and program.py.
"""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

import ark
from ark.errors import BaseError, UnsupportedError
from ark.interop.torch import attention as attention
from ark.interop.torch import elementwise as elementwise
from ark.interop.torch import lookup as lookup
from ark.interop.torch import movement as movement
from ark.interop.torch import products as products
from ark.interop.torch import reductions as reductions
from ark.interop.torch import softmax as softmax
from ark.interop.torch.values import TABLE, Call, Value, fitted, input_of

MAX_POOLS = ("max_pool2d.default", "max_pool3d.default")


def drop_checks(module: fx.GraphModule) -> None:
    """Removes nodes without effect. These are assertions of facts that torch's shape propagation
    has already proven, and views by strides (as_strided) that have the strides of their tensor, as
    pooling over whole images creates them.
    """
    for node in list(module.graph.nodes):
        if _same_view(node):
            node.replace_all_uses_with(node.args[0])
        elif name_of(node.target) != "_assert_tensor_metadata.default":
            continue
        module.graph.erase_node(node)
    module.recompile()


def pool_before_relu(module: fx.GraphModule) -> None:
    """Moves each relu that only a max pool reads behind the pool: the largest element after a relu
    is the relu of the largest element. In a training step the relu and its gradient then have
    fewer elements.
    """
    for pool in list(module.graph.nodes):
        relu = pool.args[0] if name_of(pool.target) in MAX_POOLS and pool.args else None
        if not isinstance(relu, fx.Node) or name_of(relu.target) != "relu.default":
            continue
        if len(relu.users) > 1:
            continue
        with module.graph.inserting_after(pool):
            behind = module.graph.call_function(cast(Any, relu.target), (pool,))
        behind.meta = dict(pool.meta)
        pool.replace_all_uses_with(behind, delete_user_cb=lambda user, own=behind: user != own)
        pool.replace_input_with(relu, cast(fx.Node, relu.args[0]))
        module.graph.erase_node(relu)
    module.recompile()


def _same_view(node: fx.Node) -> bool:
    """True if the node is a view by strides (as_strided) that has exactly the elements of its
    tensor, in the same order. False if the view is a result of the graph: its strides along
    dimensions of one element may differ, and a caller may read them.
    """
    if name_of(node.target) != "as_strided.default" or any(n.op == "output" for n in node.users):
        return False
    seen, given = node.meta.get("val"), cast(fx.Node, node.args[0]).meta.get("val")
    if not isinstance(seen, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False

    def places(t: torch.Tensor) -> tuple[Any, ...]:
        return t.storage_offset(), [
            (n, s if n > 1 else 0) for n, s in zip(t.shape, t.stride(), strict=True)
        ]

    fixed = all(isinstance(n, int) for t in (seen, given) for n in t.shape)
    return fixed and places(seen) == places(given)


def name_of(target: Any) -> str:
    """The name of an operator in the table of operators: "add.Tensor" for an overload of ATen,
    "ark.attention.default" for an operator of ark. Empty for any other target.
    """
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "ark"):
        return str(target).removeprefix("aten.")
    return ""


def results_of(node: fx.Node) -> list[Any]:
    """The results of a node, as torch's shape propagation computed them."""
    value: Any = node.meta.get("val")
    return list(value) if _several(node) else [value]


def _several(node: fx.Node) -> bool:
    """True if the node returns a list."""
    return isinstance(node.meta.get("val"), (list, tuple))


def _known(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and type of a result."""
    if value is None:
        return (), torch.float32
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"a result of the type {type(value).__name__} is not supported")
    if any(not isinstance(n, int) for n in value.shape):
        raise UnsupportedError(f"a result of unknown shape {list(value.shape)} is not supported")
    return tuple(value.shape), value.dtype


def _used(node: fx.Node) -> list[bool]:
    """For each result of a node, True if another node or the caller uses it."""
    results = results_of(node)
    if not _several(node):
        return [True]
    used = [False] * len(results)
    for user in node.users:
        if user.target is python.getitem:
            used[cast(int, user.args[1])] = True
        else:
            used = [True] * len(results)
    return used


def call_node(node: fx.Node, arguments: Mapping[fx.Node, Any]) -> Any:
    """Converts a node. Returns its results as values of the current model: one value, or a list."""
    whole: Any = (node.args, node.kwargs)
    given, named = cast(Any, fx.node.map_arg(whole, lambda n: arguments[n]))
    if node.target is python.getitem:
        return given[0][given[1]]
    name = name_of(node.target)
    if name not in TABLE:
        raise UnsupportedError(f"{name or node.target} is not supported")
    used = _used(node)
    expected = [
        _known(v) if u else ((), torch.float32) for v, u in zip(results_of(node), used, strict=True)
    ]
    results = TABLE[name](Call(expected, used), *given, **named)
    if not _several(node):
        return fitted(results, *expected[0])
    return [
        fitted(t, *e) if t is not None and u else None
        for t, e, u in zip(results, expected, used, strict=True)
    ]


def why_not(node: fx.Node) -> str | None:
    """The reason why a node cannot be converted, or None if it can be."""
    if node.op != "call_function":
        return f"{node.op} is not supported"
    try:
        with ark.use_model(ark.Model(0, 1)):
            arguments: dict[fx.Node, Any] = {}
            for source in node.all_input_nodes:
                examples = [
                    input_of(*_known(v)) if u else None
                    for v, u in zip(results_of(source), _used(source), strict=True)
                ]
                arguments[source] = examples if _several(source) else examples[0]
            call_node(node, arguments)
    except BaseError as error:
        return str(error)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        return f"its arguments have a form that is not supported ({error})"
    return None


@dataclass
class Built:
    """A converted graph. inputs: values in the order of the torch graph's inputs. outputs: values,
    or constants that were known at conversion (None, numbers).
    """

    model: ark.Model
    inputs: list[Value]
    outputs: list[Any]


def build(
    module: fx.GraphModule,
    examples: Sequence[Any],
    into: ark.Model | None = None,
    ends: Sequence[Any] | None = None,
) -> Built:
    """Converts a module, all of whose nodes ark must support.

    examples: tensors or fake tensors, one per input. Tensors that the module holds become further
    inputs after these, in the order of `held`. ends: the nodes whose values are the results; by
    default the module's outputs.
    """
    with ark.use_model(into or ark.Model(0, 1)) as model:
        values: dict[fx.Node, Any] = {}
        inputs: list[Value] = []
        given = iter(examples)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = value = input_of(*_known(next(given)))
                inputs.append(value)
        for node, tensor in held(module):
            values[node] = value = input_of(tuple(tensor.shape), tensor.dtype)
            inputs.append(value)
        outputs = _walk(module, values, nullcontext, ends)
    return Built(model, inputs, outputs)


def apply(
    module: fx.GraphModule,
    given: Sequence[Value],
    within: Callable[[fx.Node], AbstractContextManager[Any]] = nullcontext,
) -> list[Any]:
    """Adds the ops of a module that holds no tensors to the current model. given: values of the
    current model for the module's inputs. within: a function that returns the context in which a
    node is built. Returns the module's results.
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    return _walk(module, dict(zip(places, given, strict=True)), within)


def _walk(
    module: fx.GraphModule,
    values: dict[fx.Node, Any],
    within: Callable[[fx.Node], AbstractContextManager[Any]],
    ends: Sequence[Any] | None = None,
) -> list[Any]:
    for node in module.graph.nodes:
        if node.op == "call_function":
            with within(node):
                values[node] = call_node(node, values)
    if ends is None:
        (listed,) = next(n for n in module.graph.nodes if n.op == "output").args
        ends = listed if isinstance(listed, (list, tuple)) else [listed]
    return [values[end] if isinstance(end, fx.Node) else end for end in ends]


def held(module: fx.GraphModule) -> list[tuple[fx.Node, torch.Tensor]]:
    """The tensors that a module holds, each with the node that refers to it."""
    tensors = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            owner: Any = module
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            tensors.append((node, owner))
    return tensors
