"""ark.inference_model and ark.training_model: a torch module whose calls run k iterations in one
launch, with PopTorch's options (deviceIterations, replication, gradient accumulation, output modes,
pipeline blocks).

An input of a call has rows for all iterations, replicas and accumulated batches, one after another.
An iteration selects its rows by a counter on the device, without the host. Replicas and accumulated
batches are copies of the graph within an iteration; they share parameters. Replicas are divided
among the ranks of a job. A rank is called with the rows of its own replicas, and its kernel sums
gradients with those of the other ranks.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import address_of, dense, written
from ark.interop.torch.calls import Fixed
from ark.interop.torch.compile import refuse_missing
from ark.interop.torch.export import check_module, export
from ark.interop.torch.graph import apply, drop_checks, pool_before_relu
from ark.interop.torch.kept import Kept
from ark.interop.torch.optimizers import Rates
from ark.interop.torch.options import Options
from ark.interop.torch.program import Program
from ark.interop.torch.stages import Stages
from ark.interop.torch.values import Value, input_of
from ark.runtime import session
from ark.runtime.run import Ranks


class Executor:
    """A module that is called like the original module, except that every input has the rows of all
    iterations, replicas and batches, concatenated in its first dimension. The executor is compiled
    at the first call, and later calls must have the same shapes. The rows of results are in the
    same order as those of inputs.

    optimizer: for training; then the last result of the module must be the loss, and a call updates
    the module's parameters in place, once per iteration.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: Options | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.options = Options() if options is None else options
        if not isinstance(self.options, Options):
            raise InvalidUsageError(
                f"options has type {type(options).__name__}; expected ark.torch.Options"
            )
        self.module = check_module(module)
        self._rates = Rates(optimizer) if optimizer is not None else None
        if self._rates is None and self.options.gradient_accumulation != 1:
            raise InvalidUsageError("gradient_accumulation requires training_model")
        self._turn = threading.RLock()  # for calls of several threads
        self._closed = False
        self._program: Program | None = None
        self._kept: Kept | None = None
        self._buffers: list[str] = []  # names of the buffers that the kernel writes in place
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []

    @property
    def _training(self) -> bool:
        return self._rates is not None

    @property
    def _mode(self) -> str:
        return self.options.output_mode or ("final" if self._training else "all")

    def __call__(self, *given: torch.Tensor) -> Any:
        """Runs all iterations in one launch. Raises InvalidUsageError for shapes and types other
        than those of the first call, UnsupportedError with every operator that ark lacks.
        """
        for value in given:
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                layout = getattr(value, "layout", "")
                raise InvalidUsageError(
                    f"expected a dense tensor, got {type(value).__name__} {layout}".rstrip()
                )
        with self._turn:
            return self._call(given)

    def _call(self, given: Sequence[torch.Tensor]) -> Any:
        if self._closed:
            raise InvalidUsageError(
                "the model was closed, and its optimizer's state was freed; create another one"
            )
        if self._rates is not None:
            self._rates.check()
        shapes = [(tuple(t.shape), t.dtype) for t in given]
        if self._program is None:
            self._program = self._compile(given)
            self._shapes = shapes
        elif shapes != self._shapes:
            raise InvalidUsageError(
                f"the model was compiled for {self._shapes}, but was called with {shapes}; "
                "create another one for these sizes"
            )
        self._follow(self._program)
        count = self.options.device_iterations
        whole = [t.reshape(count, -1, *t.shape[1:]) for t in given]
        rates = self._rates.now(given[0].device) if self._rates is not None else []
        results = self._program(*whole, *rates, iterations=count)
        for tensor in self._written():
            written(tensor)
        return torch.utils._pytree.tree_unflatten(results, self._structure)

    def _compile(self, given: Sequence[torch.Tensor]) -> Program:
        examples = self._examples(given)
        if self._training and any(
            part._backward_hooks or part._backward_pre_hooks for part in self.module.modules()
        ):
            raise UnsupportedError("backward hooks of modules are not supported; remove them")
        exported = export(self.module, examples, self._training)
        graph, self._structure = exported.graph_module, exported.call_spec.out_spec
        drop_checks(graph)
        if self._training:
            pool_before_relu(graph)
        refuse_missing(graph)
        ranks = self.options.ranks if self._training else 1
        rank = ark.Model.get_rank() if ranks > 1 else 0
        members = replicas(self.module) if ranks > 1 else None
        self._buffers = list(exported.graph_signature.buffers_to_mutate.values())
        with ark.use_model(ark.Model(rank, ranks)) as model:
            builder = _Builder(self, exported, given)
            program = builder.build(model, members)
        self._kept = builder.kept
        self._fixed = Fixed(range(len(self._kept.tensors)))
        self._fixed.learn(self._kept.tensors)
        return program

    def _follow(self, program: Program) -> None:
        """Updates the kernel after parameters or buffers were replaced or have moved to other
        addresses.
        """
        kept = self._kept
        assert kept is not None
        if kept.same() and self._fixed.lie(kept.tensors):
            return
        now = kept.checked()
        trained = set(self._rates.parameters()) if self._rates is not None else set()
        names: dict[torch.Tensor, str] = {}
        for name, old, new in zip(kept.names, kept.tensors, now, strict=True):
            first = names.setdefault(old, name)
            if new is not now[kept.names.index(first)]:
                raise InvalidUsageError(
                    f"the module's {first!r} and {name!r} were one tensor and are two now; "
                    "create another model"
                )
            if new is not old and old in trained:
                raise InvalidUsageError(
                    f"the module's {name!r} was replaced by another tensor, but the optimizer "
                    "trains the former; create another model with an optimizer of its parameters"
                )
            _in_place(name, new)
        program.hold([t.detach() for t in dict.fromkeys(now)])
        kept.tensors = now
        self._fixed.learn(now)

    def _written(self) -> list[torch.Tensor]:
        """The module's tensors that a call writes: buffers, and the tensors that the optimizer
        trains.
        """
        assert self._kept is not None
        held = dict(zip(self._kept.names, self._kept.tensors, strict=True))
        trained = self._rates.parameters() if self._rates is not None else []
        return [*(held[name] for name in self._buffers if name in held), *trained]

    def _examples(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The inputs of one batch, cut from the inputs of a call: the examples with which the
        module is exported.
        """
        parts = self.options.device_iterations * self.options.shares
        rows = {t.shape[0] if t.dim() else 0 for t in given}
        if len(rows) != 1 or not min(rows) or min(rows) % parts:
            raise InvalidUsageError(
                f"the inputs have {sorted(rows)} rows; all must have the same number, a multiple "
                f"of {parts} (device_iterations times this rank's replicas times "
                "gradient_accumulation)"
            )
        each = min(rows) // parts
        return tuple(t[:each].clone() for t in given)

    def close(self) -> None:
        """Frees the kernel's memory; the model cannot be called afterwards."""
        with self._turn:
            self._closed = True
            if self._program is not None:
                self._program.close()
                self._program = None


class _Builder:
    """Builds the graph of one iteration, which contains all replicas and accumulated batches of
    this rank.
    """

    def __init__(self, executor: Executor, exported: Any, given: Sequence[torch.Tensor]) -> None:
        self.options, self.mode = executor.options, executor._mode
        self.rates = executor._rates
        self.module = executor.module
        self.stages = Stages(executor.module)
        self.exported = exported
        self.given = given
        self.at: ark.Tensor | None = None

    def build(self, model: ark.Model, members: Ranks | None) -> Program:
        count, shares = self.options.device_iterations, self.options.shares
        if count > 1:
            self.at = ark.tensor([1], ark.int32, name="iteration")
        inputs = [input_of((count, t.shape[0] // count, *t.shape[1:]), t.dtype) for t in self.given]
        kept = self._values()
        batches = [self._rows(value) for value in inputs]
        results: list[list[Value]] = []
        for share in range(shares):
            rows = [_part(batch, share, shares) for batch in batches]
            results.append(self._share(rows, kept))
        rates = self._train(results, kept) if self.rates is not None else []
        outputs = [self._result([r[i] for r in results]) for i in range(len(results[0]))]
        if self.at is not None:
            after = ark.add(self.at, 1)
            ark.where(ark.less(after, count), after, 0, output=self.at)
        given = [*inputs, *rates, *{id(v): v for v in kept.values()}.values()]
        tensors = [t.detach() for t in dict.fromkeys(self.kept.tensors)]
        return Program(model, given, outputs, tensors, members=members)

    def _values(self) -> dict[str, Value]:
        """Values for parameters, buffers and constants, by the name of their placeholder in the
        exported graph. If several names refer to one tensor (tied weights), they have the same
        value.
        """
        specs = [
            spec
            for spec in self.exported.graph_signature.input_specs
            if spec.kind != InputKind.USER_INPUT
        ]
        names = [spec.target for spec in specs]
        self.kept = kept = Kept(self.module, names, self.exported.constants)
        if kept.missing:
            raise UnsupportedError(f"{kept.missing[0]!r} of the module is not a tensor")
        known: dict[torch.Tensor, Value] = {}
        for name, tensor in zip(names, kept.tensors, strict=True):
            if tensor not in known:
                _in_place(name, tensor)
                known[tensor] = input_of(tuple(tensor.shape), tensor.dtype)
        return {spec.arg.name: known[t] for spec, t in zip(specs, kept.tensors, strict=True)}

    def _rows(self, value: Value) -> Value:
        """The rows of the running iteration. value: an input of shape (iterations, rows, ...)."""
        count, *shape = value.shape
        if self.at is None:
            rows = value.tensor
        else:
            flat = ark.reshape(value.tensor, [count, math.prod(shape)])
            rows = ark.gather(flat, self.at)
        return Value(tuple(shape), value.dtype, ark.reshape(rows, shape))

    def _share(self, rows: Sequence[Value], kept: dict[str, Value]) -> list[Value]:
        """Adds the module's ops for one batch to the graph and returns the module's results. If the
        module writes buffers, these writes are added too. rows: the inputs of the batch. kept:
        values of parameters, buffers and constants.
        """
        given = iter(rows)
        signature = self.exported.graph_signature
        values = [
            next(given) if spec.kind == InputKind.USER_INPUT else kept[spec.arg.name]
            for spec in signature.input_specs
        ]
        outputs = apply(self.exported.graph_module, values, self.stages.of_node)
        results = []
        names = {spec.target: spec.arg.name for spec in signature.input_specs}
        for spec, value in zip(signature.output_specs, outputs, strict=True):
            if spec.kind == OutputKind.USER_OUTPUT and isinstance(value, Value):
                results.append(value)
            elif spec.kind == OutputKind.BUFFER_MUTATION:
                ark.copy(value.tensor, kept[names[spec.target]].tensor)
            else:
                raise UnsupportedError(
                    f"a result of the kind {spec.kind.name} is not supported; return only tensors"
                )
        return results

    def _train(self, results: Sequence[Sequence[Value]], kept: dict[str, Value]) -> list[Value]:
        """Adds the gradients of the mean loss, and the update; returns the values of the learning
        rates.
        """
        assert self.rates is not None
        losses = [r[-1] for r in results]
        if math.prod(losses[0].shape) != 1:
            raise InvalidUsageError(
                f"the module's last result has the shape {list(losses[0].shape)}; in training it "
                "must be the loss, of one element"
            )
        total = losses[0].tensor
        for loss in losses[1:]:
            total = ark.add(total, loss.tensor)
        names = {
            spec.target: spec.arg.name
            for spec in self.exported.graph_signature.input_specs
            if spec.kind == InputKind.PARAMETER
        }
        values: dict[torch.Tensor, ark.Tensor] = {
            tensor: kept[names[name]].tensor
            for name, tensor in self.module.named_parameters(remove_duplicate=False)
            if name in names
        }
        count = len(losses) * self.options.ranks
        return self.rates.step(total, count, values, self.stages)

    def _result(self, parts: Sequence[Value]) -> Value:
        """Writes a result of the module to the memory that a call returns. options.output_mode
        selects the iterations: all, the last one or every n-th one. It can also select the sum over
        all iterations. parts: the result of each batch of the current iteration.
        """
        count, every = self.options.device_iterations, self.options.every
        first = parts[0]
        shape = first.shape or (1,)
        tensors = [ark.reshape(p.tensor, list(shape)) for p in parts]
        each = tensors[0] if len(tensors) == 1 else ark.concat(tensors, 0)
        rows, size = shape[0] * len(parts), math.prod(shape) * len(parts)
        groups = {"all": count, "every": count // every}.get(self.mode, 1)
        returned = input_of((groups * rows, *shape[1:]), first.dtype)
        target = ark.reshape(returned.tensor, [groups, size])
        flat = ark.reshape(each, [1, size])
        if self.mode == "sum" and self.at is not None:
            ark.where(ark.equal(self.at, 0), flat, ark.add(target, flat), output=target)
        elif groups == 1 or self.at is None:
            ark.copy(flat, target)
        else:
            begin = ark.mul(ark.iota([groups, 1], 0, ark.int32), count // groups)
            end = ark.add(begin, count // groups)
            here = ark.logical_and(ark.greater_equal(self.at, begin), ark.less(self.at, end))
            ark.where(here, flat, target, output=target)
        return returned


def replicas(module: torch.nn.Module) -> Ranks | None:
    """The job's ranks, or None. Raises SystemError unless all ranks start with equal parameters,
    because their replicas would otherwise be different models.
    """
    members = session.ranks()
    digest = hashlib.sha256()
    for name, value in module.named_parameters():
        digest.update(name.encode())
        digest.update(dense(value.detach()).cpu().reshape(-1).view(torch.uint8).numpy().data)
    if members is not None:
        members.check_same("the parameters of the module", digest.hexdigest())
    return members


def _in_place(name: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedError if a kernel cannot use the module's tensor in place."""
    try:
        address_of(tensor)
    except InvalidUsageError as error:
        raise UnsupportedError(
            f"{name!r} of the module cannot be used in place: {error}"
        ) from error


def _part(batch: Value, share: int, shares: int) -> Value:
    """The rows of one batch of an iteration. batch: the rows of all `shares` batches of the
    iteration, one batch after another. share: the number of the batch.
    """
    rows = batch.shape[0] // shares
    shape = (rows, *batch.shape[1:])
    if shares == 1:
        return batch
    return Value(shape, batch.dtype, batch.tensor[share * rows : (share + 1) * rows])
