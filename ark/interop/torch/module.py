"""ark.from_torch and ark.torch.Module: a torch module that computes in one kernel.

torch.export makes the graph once. A call only passes the module's parameters and the arguments to
the kernel. It does little other work, because the kernel of a small network takes only tens of
microseconds. Called by users, through ark.interop.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import is_literal
from ark.interop.torch.calls import Fixed
from ark.interop.torch.compile import compile_graph, refuse_missing, values, varies
from ark.interop.torch.export import export
from ark.interop.torch.graph import drop_checks
from ark.interop.torch.kept import Kept
from ark.interop.torch.look import looker
from ark.interop.torch.program import Program, torch_device

# Sizes that may vary, in the forms that torch.export accepts.
Shapes: TypeAlias = "Mapping[str, object] | Sequence[object] | None"
WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


class Module(torch.nn.Module):
    """A torch module that computes the same as another torch module, in one kernel, and uses the
    other module's parameters in place.

    module: the original, which torch.export exports for `example`, a tuple of tensors. The result
    is called like the original, for inference only. dynamic_shapes: sizes that may vary, with their
    bounds, in torch.export's form; there is one kernel for each size that is called. The kernel
    reads the module's parameters and buffers in place: it sees later writes to them, their moves to
    other memory (`to`, `weight.data = ...`), and their replacement
    (`load_state_dict(assign=True)`). Raises InvalidUsageError if torch.export cannot export the
    module, or if later the shapes or types of arguments or parameters have changed. Raises
    UnsupportedError with every operator that ark lacks and the reasons.

    Examples:
        >>> linear = torch.nn.Linear(8, 2)
        >>> fast = ark.torch.Module(linear, (torch.ones(4, 8),))
        >>> torch.allclose(fast(torch.ones(4, 8)), linear(torch.ones(4, 8)), atol=1e-5)
        True
    """

    def __init__(
        self, module: torch.nn.Module, example: Sequence[object], dynamic_shapes: Shapes = None
    ) -> None:
        super().__init__()
        self._exported = exported = export(module, example, False, dynamic_shapes)
        self.module = module
        graph, given = exported.graph_module, exported.call_spec.in_spec
        drop_checks(graph)
        self._sized = any(varies(v) for v in values(graph))
        if not self._sized:
            refuse_missing(graph)
        self._kept = _kept(module, exported)
        self._constants = _constants(exported.graph_signature)
        graph = _without(graph, self._constants, len(self._kept.tensors))
        self._writes = _writes(exported.graph_signature)
        results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        if not any(isinstance(result, fx.Node) for result in results):
            raise InvalidUsageError(
                "the module returns no tensor and writes none, so that a kernel has nothing to "
                "compute; return its results"
            )
        self._program: Program | None = None
        self._moving = threading.Lock()
        if self._sized:
            self._run = compile_graph(graph, values(graph), range(len(self._kept.tensors)))
        else:
            kept = self._kept.tensors
            self._bound = [i for i, t in enumerate(kept) if _in_place(t)]
            held = {i: kept[i].detach() for i in self._bound}
            self._loose = [i for i in range(len(kept)) if i not in held]
            self._program = Program.of(graph, values(graph), bound=held)
            self._learn(kept)
        flat = pytree.tree_structure(((0,) * given.num_leaves, {}))
        self._plain = given.num_leaves if given == flat and not self._constants else None
        self._out_spec = exported.call_spec.out_spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results."""
        known = len(args) == self._plain and not kwargs and not self._sized
        given = args if known else self._flat(args, kwargs)
        kept = self._kept.now()
        if self._program is None:
            if not self._kept.same():
                self._kept.tensors = self._kept.checked()
            results = self._run(*kept, *given)
        else:
            here = [kept[i] for i in self._bound] if self._loose else kept
            if self._look(here) is None and not (self._kept.same() and self._fixed.lie(here)):
                with self._moving:
                    self._moved(self._program)
            results = self._program.run([*(kept[i] for i in self._loose), *given])
        if self._writes:
            written = [*kept, *given]
            for place, value in zip(self._writes, results, strict=False):
                written[place].copy_(value)
            results = results[len(self._writes) :]
        return (
            results[0]
            if self._out_spec.is_leaf()
            else pytree.tree_unflatten(results, self._out_spec)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by pickle and copy. Raises an error, because a kernel belongs to one process and
        device.
        """
        raise InvalidUsageError(
            "an ark.torch.Module cannot be copied or pickled; copy or save its torch module "
            "(the attribute `module`), and call ark.from_torch on that"
        )

    def _learn(self, kept: list[torch.Tensor]) -> None:
        """Records the parameters and the addresses of those that the kernel reads in place."""
        here = [kept[i] for i in self._bound]
        fixed = Fixed(range(len(here)))
        fixed.learn(here)
        self._kept.tensors, self._fixed, self._look = kept, fixed, looker(here, [])

    def _moved(self, program: Program) -> None:
        """Updates the kernel after parameters have moved to other addresses (by `to`, for example)
        or were replaced.
        """
        kept = self._kept.checked()
        now = [kept[i].detach() for i in self._bound]
        if not all(map(_in_place, now)):
            raise InvalidUsageError(
                "the module's parameters were contiguous and are strided or negative views now; "
                "call ark.from_torch again"
            )
        program.hold(now)
        self._learn(kept)

    def _flat(self, args: Any, kwargs: Any) -> list[Any]:
        """The tensors of a call, given by position or keyword, in the graph's order."""
        try:
            flat = self._exported._graph_module_flat_inputs(args, kwargs)
        except (RuntimeError, ValueError) as error:
            raise InvalidUsageError(
                f"the module was exported for other inputs: {str(error).splitlines()[0]}"
            ) from error
        flat = flat[len(self._kept.tensors) :]
        return [t for i, t in enumerate(flat) if i not in self._constants]


def _in_place(tensor: torch.Tensor) -> bool:
    """True if a kernel can read the tensor in place."""
    return tensor.is_contiguous() and is_literal(tensor)


def _kept(module: torch.nn.Module, exported: Any) -> Kept:
    """The module's parameters, buffers and constants, in the order of the graph's inputs."""
    where = torch_device()  # tracing creates constants on the CPU
    specs = [s for s in exported.graph_signature.input_specs if s.kind != InputKind.USER_INPUT]
    constants = {
        name: value.to(where) if isinstance(value, torch.Tensor) else value
        for name, value in exported.constants.items()
    }
    kept = Kept(module, [s.target for s in specs], constants)
    if kept.missing:
        strange = next(s.kind.name for s in specs if s.target in kept.missing)
        raise UnsupportedError(f"an input of the kind {strange} is not supported")
    return kept


def _constants(signature: Any) -> list[int]:
    """The indices of arguments that are not tensors. torch.export has put their values into the
    graph, and refuses other values.
    """
    users = [s.arg for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    return [i for i, a in enumerate(users) if isinstance(a, ConstantArgument)]


def _without(graph: fx.GraphModule, constants: Sequence[int], first: int) -> fx.GraphModule:
    """A copy of the graph without the inputs number `constants`, which are not tensors. It is a
    copy because torch.export checks calls against the original graph.
    """
    if not constants:
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    places = [n for n in copied.graph.nodes if n.op == "placeholder"]
    for place in constants:
        copied.graph.erase_node(places[first + place])
    copied.recompile()
    return copied


def _writes(signature: Any) -> list[int]:
    """The indices of the inputs that the module writes, in the order of the graph's first
    results.
    """
    names = {spec.target: i for i, spec in enumerate(signature.input_specs)}
    places = {spec.arg.name: i for i, spec in enumerate(signature.input_specs)}
    written = []
    for spec in signature.output_specs:
        if spec.kind in WRITES:
            written.append((places if spec.kind == WRITES[1] else names)[spec.target])
        elif spec.kind != OutputKind.USER_OUTPUT:
            raise UnsupportedError(
                f"a result of the kind {spec.kind.name} is not supported; return only tensors"
            )
    return written


def from_torch(
    module: torch.nn.Module, example: Sequence[object], dynamic_shapes: Shapes = None
) -> Module:
    """A torch module as one kernel, as `ark.from_torch`; see Module.

    Examples:
        >>> from ark.interop.torch import from_torch
        >>> kernel = from_torch(torch.nn.ReLU(), (torch.ones(2),))
        >>> kernel(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    return Module(module, example, dynamic_shapes)
