"""Plans the network of an ONNX file, with named inputs and outputs. Called by `ark export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import ark
from ark.cli.export.description import named
from ark.errors import InvalidUsageError, UnsupportedError
from ark.interop import from_onnx
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan, PlanTensor
from ark.plan.verify import verify


@dataclass(frozen=True)
class Network:
    """A planned ONNX network. inputs, outputs: names of the plan's tensors, in the order of the
    ONNX file. They are the names in the file; an output that is also an input gets ".out" appended.
    weights: arrays by tensor name.
    """

    plan: Plan
    weights: Mapping[str, np.ndarray]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def network(path: Path, dims: Mapping[str, int], machine: Machine) -> Network:
    """Plans the network. dims: the sizes of symbolic dimensions; other sizes are in the file.

    Raises InvalidUsageError if a symbolic dimension has no size, and UnsupportedError if an input's
    values determine shapes or an output is constant.
    """
    model = from_onnx(path, dict(dims))
    arrays = {}
    for port in model.inputs:
        if port.sizes is None:
            raise InvalidUsageError(
                f"the input {port} has sizes without a value; set each by --dim NAME=N"
            )
        if port.dtype == np.float64:
            raise UnsupportedError(
                f"the input {port} is of float64, which is not supported; "
                "export the model in float32"
            )
        arrays[port.name] = np.zeros(port.sizes, port.dtype)
    built = model.graph(arrays)
    for name, value in (*built.inputs.items(), *built.results.items()):
        if value.kind is not None:
            raise UnsupportedError(
                f"{name!r} is of {value.kind}, which ark has no type for; cast it in the model"
            )
    kept = []
    with ark.use_model(built.model):
        for name, value in built.results.items():
            if value.tensor is None:
                raise UnsupportedError(
                    f"the output {name!r} does not depend on the inputs; remove it from the model"
                )
            last = ark.tensor(value.tensor.shape(), value.tensor.ir.dtype)
            ark.copy(value.tensor, last)
            kept.append(last)
    plan = make_plan(built.model.graph, machine, {"pack": False})  # weights keep the file's layout
    ports = {t.tensor.ir.buffer.name: n for n, t in built.inputs.items() if t.tensor is not None}
    ports |= {
        t.ir.buffer.name: f"{n}.out" if n in built.inputs else n  # the output is also an input
        for n, t in zip(built.results, kept, strict=True)
    }
    plan = _with_names(plan, ports)
    verify([plan])
    names: dict[str, str] = {}  # by buffer name
    for lasting in named(plan):
        names.setdefault(plan.buffers[lasting.buffer].name, lasting.name)
    given = [built.inputs[n].tensor if n in built.inputs else None for n in arrays]
    for name, tensor in zip(arrays, given, strict=True):
        if tensor is None or tensor.ir.buffer.name not in names:
            raise UnsupportedError(
                f"no op reads the input {name!r} as a tensor; remove it from the model"
            )
    contents = {t.ir.buffer.name: a for t, a in built.constants}
    weights = {
        t.name: contents[plan.buffers[t.buffer].name]
        for t in named(plan)
        if plan.buffers[t.buffer].arena == "parameter"
    }
    inputs = tuple(names[t.ir.buffer.name] for t in given if t is not None)
    return Network(plan, weights, inputs, tuple(names[t.ir.buffer.name] for t in kept))


def _with_names(plan: Plan, ports: Mapping[str, str]) -> Plan:
    """The plan, with its inputs and outputs named as in the file. ports: the names, by buffer."""
    taken = set(ports.values())

    def renamed(tensor: PlanTensor) -> PlanTensor:
        name = ports.get(plan.buffers[tensor.buffer].name)
        if name is None and tensor.name in taken:
            name = f"{tensor.name}.{tensor.id}"
        return tensor if name is None else replace(tensor, name=name)

    return replace(plan, tensors=tuple(renamed(t) for t in plan.tensors))
