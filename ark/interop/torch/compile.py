"""torch.compile(model, backend="ark"), and the same for callers that already have a torch graph.

Graphs come from torch (Dynamo and AOTAutograd, or torch.export: module.py), decomposed into
operators that ark has. Consecutive supported operators become kernels. The other operators stay in
torch, and one log line lists them with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from ark import log
from ark.errors import BaseError, InternalError, InvalidUsageError, UnsupportedError
from ark.interop.kernels import Kernels
from ark.interop.torch.attention_calls import keep_attention
from ark.interop.torch.buckets import Padding
from ark.interop.torch.concats import nest_concats
from ark.interop.torch.constants import fold_constants
from ark.interop.torch.export import TRACING, decompositions
from ark.interop.torch.fallback import or_torch
from ark.interop.torch.graph import drop_checks, name_of, results_of, why_not
from ark.interop.torch.parts import divided, joint_products, part_starts
from ark.interop.torch.program import LEFT, Program, torch_device
from ark.interop.torch.recurrences import keep_recurrences
from ark.interop.torch.strides import read_by_strides


class _Support(OperatorSupportBase):
    """Tells torch's partitioner which nodes ark supports, and records for each other node the
    reason why it is not supported. stay: nodes that stay in torch because code reads their strides.
    """

    def __init__(self, stay: Iterable[fx.Node]) -> None:
        self.reasons: dict[fx.Node, str | None] = dict.fromkeys(stay, "its strides are read")

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        if node not in self.reasons:
            self.reasons[node] = _elsewhere(node) or why_not(node)
        return self.reasons[node] is None


def _elsewhere(node: fx.Node) -> str | None:
    """Returns a reason if a node must stay in torch because some of its tensors are not on ark's
    device; otherwise None. Constants may be on another device, because they are moved once. Tensors
    without dimensions may be too, because they are moved in every call, as torch does.
    """
    moved = [n for n in node.all_input_nodes if n.op == "get_attr"]
    read = [v for n in node.all_input_nodes if n not in moved for v in results_of(n)]
    tensors = [v for v in read if isinstance(v, torch.Tensor) and v.dim()]
    if not _copies_number(node):
        tensors += [v for v in results_of(node) if isinstance(v, torch.Tensor)]
    strange = sorted({str(t.device) for t in tensors if t.device != torch_device()})
    return f"a tensor is on {strange[0]}, but ark runs on {torch_device()}" if strange else None


def _copies_number(node: fx.Node) -> bool:
    """True if the node copies a constant without dimensions to the device. Assigning a number to a
    slice of a tensor (x[0] = 2.0) creates such a constant, which tracing makes on the CPU.
    """
    if name_of(node.target) != "lift_fresh_copy.default":
        return False
    (value,) = results_of(node)
    source = cast(fx.Node, node.args[0])
    return (
        source.op == "get_attr" and not value.dim() and "output" not in {n.op for n in node.users}
    )


class _Kernel(torch.nn.Module):
    """A kernel that replaces a part of a torch graph, in the form of a module that the graph
    calls.
    """

    def __init__(self, program: Program, single: bool) -> None:
        super().__init__()
        self.program, self.single = program, single

    def forward(self, *given: Any) -> Any:
        results = self.program(*given)
        return results[0] if self.single else tuple(results)


def compile_graph(
    module: fx.GraphModule,
    examples: Sequence[Any],
    fixed: Sequence[int] = (),
    guarded: bool = False,
    by_torch: bool = False,
    visible: int | None = None,
) -> Callable[..., Any]:
    """Returns a function of the graph's inputs that returns its results, as a list or in the
    graph's own form.

    fixed: indices of inputs that are the same tensors in nearly every call. guarded: the caller
    ensures that the inputs have the properties of the first call's. by_torch: the inputs are
    results of torch's operators, for example values that pass between the parts of a graph. Program
    describes guarded and by_torch. visible: the number of results that the caller sees, by default
    all; later results are for the backward graph only. A graph with varying sizes is compiled once
    for each combination of sizes. If some operators stay in torch, or if one kernel would take long
    to compile (parts.py), the graph is called part by part.
    """
    if any(varies(e) for e in examples) or any(varies(v) for v in values(module)):
        return _Sized(module, fixed, by_torch)
    drop_checks(module)
    keep_recurrences(module)
    fold_constants(module)
    nest_concats(module)
    support = _Support(read_by_strides(module))
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    missing = [n for n in calls if not support.is_node_supported({}, n)]
    _tell(missing, support, len(calls))
    starts = [] if missing else part_starts(module, joint_products())
    if not missing and not starts and calls:
        whole = Program.of(
            module, examples, fixed, guarded=guarded, by_torch=by_torch, visible=visible
        )
        return _listed(module, whole)
    module = _copied(module, support)
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    parameters = {places[i] for i in fixed}
    if starts:
        fused = divided(module, starts)
    else:
        partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        fused = partitioner.partition_and_fuse()
    programs: list[Program] = []
    for name, part in list(fused.named_children()):
        if isinstance(part, fx.GraphModule) and name.startswith("fused"):
            places = [n for n in part.graph.nodes if n.op == "placeholder"]
            inner = [n.meta.get("val") for n in places]
            (caller,) = (n for n in fused.graph.nodes if n.target == name)
            kept = [i for i, n in enumerate(caller.args) if n in parameters]
            (ends,) = next(n for n in part.graph.nodes if n.op == "output").args
            single = not isinstance(ends, (list, tuple))
            several = bool(starts)
            program = Program.of(part, inner, kept, by_torch=True, compare=several, later=several)
            programs.append(program)
            setattr(fused, name, _Kernel(program, single))
    if starts:  # all kernels compile while their plans are scheduled one by one
        for program in programs:
            program.finish()
    fused.recompile()
    return fused


def _copied(module: fx.GraphModule, support: _Support) -> fx.GraphModule:
    """A copy of the graph, which the partitioner may change. The nodes that `support` refers to are
    replaced by the copy's nodes.
    """
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, places)
    graph.output(output)
    support.reasons = {places[n]: why for n, why in support.reasons.items()}
    return fx.GraphModule(module, graph)


def _listed(module: fx.GraphModule, program: Program) -> Callable[..., Any]:
    (ends,) = next(n for n in module.graph.nodes if n.op == "output").args
    return program if isinstance(ends, (list, tuple)) else _Kernel(program, True)


def _tell(missing: Sequence[fx.Node], support: _Support, count: int) -> None:
    """Logs one line that lists the operators that stay in torch."""
    if not missing:
        return
    counts = Counter(
        f"{name_of(n.target) or getattr(n.target, '__name__', n.target)}: "
        f"{(support.reasons[n] or '').splitlines()[0]}"
        for n in missing
    )
    summary = "; ".join(
        f"{reason} ({times}x)" if times > 1 else reason for reason, times in counts.items()
    )
    LEFT.append(f"{len(missing)} of {count} operators: {summary}")
    log.warn(f"{len(missing)} of {count} operators stay in torch: {summary}")


def values(module: fx.GraphModule) -> list[Any]:
    return [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]


def varies(value: Any) -> bool:
    """True for a size that is known only at a call, and for a tensor with such a size."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(n, int) for n in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class _Sized:
    """A graph whose tensors have varying sizes. It is compiled to one kernel for each combination
    of sizes with which it is called. Sizes are rounded up if the graph permits it (buckets.py).
    """

    def __init__(self, module: fx.GraphModule, fixed: Sequence[int], by_torch: bool) -> None:
        self._module, self._fixed, self._by_torch = module, set(fixed), by_torch
        self._padding = Padding(module)
        self._varying = [i for i, v in enumerate(values(module)) if varies(v)]
        self._kernels: Kernels[Callable[..., Any]] = Kernels(_end)
        for symbol, why in self._padding.reasons.items():
            if why is not None:
                log.info(
                    f"the size {symbol} is not rounded up, so each value needs a kernel: {why}"
                )

    def __call__(self, *given: Any) -> Any:
        now, up = self._padding.sizes(given)
        if now == up:
            return self._exactly(*given)
        padded_results = self._exactly(*self._padding.pad(given, now, up))
        return self._padding.cut(padded_results, now, self._padding.strides(given))

    def _exactly(self, *given: Any) -> Any:
        sizes = (given[i] for i in self._varying)
        key = tuple(s.shape if isinstance(s, torch.Tensor) else s for s in sizes)
        return self._kernels.get(key, lambda: self._compile(given))(*given)

    def _compile(self, given: Sequence[Any]) -> Callable[..., Any]:
        """Compiles the graph for the sizes of the arguments `given`. The compiled graph has no
        arguments for sizes.
        """
        with TRACING:
            traced = make_fx(self._module, tracing_mode="fake")(*given)
        traced.graph.eliminate_dead_code()
        for node, value in zip(list(traced.graph.nodes), given, strict=False):
            if not isinstance(value, torch.Tensor):
                traced.graph.erase_node(node)
        traced.recompile()
        tensors = [i for i, g in enumerate(given) if isinstance(g, torch.Tensor)]
        fixed = [place for place, i in enumerate(tensors) if i in self._fixed]
        try:
            inner = compile_graph(
                traced, [given[i] for i in tensors], fixed, by_torch=self._by_torch
            )
        except BaseError:
            raise
        except Exception as error:
            raise InternalError(
                f"compiling for these sizes failed: {type(error).__name__}: {error}"
            ) from error
        return inner if len(tensors) == len(given) else _OfTensors(inner, tensors)


class _OfTensors:
    """A graph that was compiled for fixed sizes. A call omits the arguments of the original graph
    that are sizes.
    """

    def __init__(self, run: Callable[..., Any], tensors: Sequence[int]) -> None:
        self.run, self._tensors = run, tensors

    def __call__(self, *given: Any) -> Any:
        return self.run(*[given[i] for i in self._tensors])


def _end(compiled: Callable[..., Any]) -> None:
    """Frees the memory of a graph's kernels after their last launch has ended."""
    compiled = compiled.run if isinstance(compiled, _OfTensors) else compiled
    parts = compiled.modules() if isinstance(compiled, torch.nn.Module) else []
    programs = [p.program for p in parts if isinstance(p, _Kernel)]
    for program in [compiled, *programs]:
        if isinstance(program, Program):
            program.retire()


def _compile_traced(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The compiler that AOTAutograd calls for forward graphs."""
    context = torch._guards.TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    fixed = known.static_input_indices if known is not None else ()
    visible = known.num_forward if known is not None else None
    guarded = known is not None
    return or_torch(
        module, lambda: compile_graph(module, examples, fixed, guarded=guarded, visible=visible)
    )


def _compile_backward(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The compiler that AOTAutograd calls for backward graphs. Their inputs are the values that the
    forward graph has saved.
    """
    return or_torch(module, lambda: compile_graph(module, examples, by_torch=True))


def backend(
    module: fx.GraphModule, examples: Sequence[object], **given: object
) -> Callable[..., object]:
    """The backend "ark" of torch.compile.

    It compiles forward graphs, and backward graphs if gradients are needed. Raises
    InvalidUsageError if torch.compile is given a mode or options, which this backend does not
    support.

    Examples:
        >>> fast = torch.compile(torch.nn.ReLU(), backend="ark")
        >>> fast(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    if given:
        listed = ", ".join(f"{name}={value!r:.60}" for name, value in given.items())
        raise InvalidUsageError(
            f"torch.compile was given {listed}; the backend ark has no modes and no options: omit "
            "them"
        )
    keep_attention(module, examples)
    compiled: Callable[..., Callable[..., Any]] = aot_autograd(
        fw_compiler=_compile_traced,
        bw_compiler=_compile_backward,
        inference_compiler=_compile_traced,
        decompositions=decompositions(),
    )
    return compiled(module, examples)


def refuse_missing(graph: fx.GraphModule) -> None:
    """Raises UnsupportedError with all operators of a graph that ark lacks."""
    refused = [
        f"{n.name} ({n.target}): {reason}"
        for n in graph.graph.nodes
        if n.op == "call_function" and (reason := why_not(n)) is not None
    ]
    if refused:
        raise UnsupportedError(f"{len(refused)} operators are not supported: {'; '.join(refused)}")
