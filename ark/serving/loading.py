"""Loads a checkpoint for an engine: chooses the shape of its plan and its pages, plans it, and
loads its weights onto the device. Called by ark.serving.engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ark.backend import registry
from ark.backend.devices import Device, KernelDevice
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.dtype import DataType
from ark.ir.values import whole
from ark.machine import Machine
from ark.models.adapters import AdapterSet
from ark.models.build import Pages, Shape
from ark.models.checkpoint import Checkpoint
from ark.models.load import weights
from ark.models.plans import (
    Drafted,
    choose_chunk,
    choose_context,
    digest,
    plans,
    usual_chunk,
)
from ark.models.same import check_same_model
from ark.plan.rotated import on_rank
from ark.plan.types import Plan
from ark.runtime import tuned_collectives
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S, Executor
from ark.runtime.program import begin
from ark.runtime.runner import load
from ark.serving.pages import PagePool
from ark.serving.scheduler import forms_of
from ark.tasks.sequences import MAX_BATCH

Report = Callable[[str, int, int], None]
PAGE_POSITIONS = 16
"""The default number of positions (tokens) in a page of the cache of keys and values."""


@dataclass(frozen=True)
class LoadedModel:
    """A plan with a paged cache on a device, with its weights. opened: the device, if `close` must
    close it too. ranks: the ranks that share the model. adapters: names of adapters, numbered from
    1.
    """

    executor: Executor
    shape: Shape
    opened: Device | None = None
    ranks: Bootstrap | None = None
    adapters: tuple[str, ...] = ()

    def adapter(self, name: str) -> int:
        """The number of an adapter; 0 for an empty name."""
        return self.adapters.index(name) + 1 if name else 0

    def page_pool(self, reserved: int) -> PagePool:
        """A pool of all pages except the first `reserved` ones."""
        assert self.shape.pages is not None
        return PagePool(reserved, self.shape.pages.pool - reserved, self.shape.pages.size)

    def close(self) -> None:
        """Frees everything."""
        self.executor.close(collective=False)
        if self.opened is not None:
            self.opened.close()


def pages_of(slots: int, context: int, size: int, asked: int | None, draft: int = 0) -> Pages:
    """The pages of an engine's KV cache: `asked` pages for requests (by default enough for all
    slots), one for each row of the batch, and one for prompts. Raises InvalidUsageError if they
    cannot hold one request.
    """
    if whole("the page size", size) < 1:
        raise InvalidUsageError(f"page={size} is out of range; expected at least 1")
    each = -(-context // size)
    count = slots * each if asked is None else whole("the number of pages", asked)
    if count < each:
        raise InvalidUsageError(
            f"pages={count} is too few: a request of {context} positions needs {each} pages of "
            f"{size}; give more pages or a smaller context"
        )
    return Pages(count + slots + 1, size, forms_of(slots), apart=draft == 0)


def load_model(
    checkpoint: Checkpoint | Path | str,
    backend: Backend | str = "",
    device: Device | int = 0,
    *,
    slots: int = 8,
    context: int | None = None,
    chunk: int | None = None,
    pages: int | None = None,
    page: int = PAGE_POSITIONS,
    draft: int = 0,
    sampling: str = "",
    max_logprobs: int = 0,
    budget_s: float = BUDGET_S,
    progress: Report | None = None,
    ranks: Bootstrap | None = None,
    machine: Machine | None = None,
    adapters: Mapping[str, Path | str] | None = None,
) -> LoadedModel:
    """Plans, compiles and loads a checkpoint. For arguments and errors see Engine.open."""
    if not 1 <= whole("the number of slots", slots) <= MAX_BATCH:
        raise InvalidUsageError(f"slots={slots} is out of range; expected 1 to {MAX_BATCH}")
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint.open(Path(checkpoint))
    chosen = backend if not isinstance(backend, str) else registry.choose(backend)[0]
    opened = None if not isinstance(device, int) else chosen.open(device)
    target = device if not isinstance(device, int) else opened
    assert target is not None
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    machine = machine or target.machine
    try:
        if adapters and world_size > 1:
            raise UnsupportedError(
                f"adapters on {world_size} ranks are not supported; omit them, or use one rank"
            )
        owned = AdapterSet.open(adapters or {}, checkpoint)
        length = choose_context(checkpoint, context)
        dtype = DataType.from_numpy(checkpoint.dtype)
        shape = Shape(
            checkpoint.config,
            dtype,
            length,
            choose_chunk(chunk, length, usual_chunk(machine, dtype)),
            rank,
            world_size,
            batch=slots,
            pages=pages_of(slots, length, page, pages, draft),
            sampling=sampling,
            logprobs=whole("the number of log probabilities", max_logprobs),
            adapters=owned.shape,
        )
        executor = loaded(
            checkpoint, chosen, target, shape, budget_s, progress, ranks, machine, owned
        )
        return LoadedModel(executor, shape, opened, ranks, owned.names)
    except BaseException:
        if opened is not None:
            opened.close()
        raise


def compiling(backend: Backend, device: Device, rank: int = 0) -> Drafted:
    """Returns a callback for the planner, which calls it with each rank's plan before the plan is
    finished. For the plan of rank `rank` the callback starts to compile all kernels on other
    threads, so that compilation overlaps with the rest of planning.
    """

    def drafted(number: int, draft: Plan) -> None:
        if number == rank and isinstance(device, KernelDevice):
            begin(on_rank(draft, rank), backend, device.arch)

    return drafted


def loaded(
    checkpoint: Checkpoint,
    backend: Backend,
    device: Device,
    shape: Shape,
    budget_s: float,
    progress: Report | None,
    ranks: Bootstrap | None = None,
    machine: Machine | None = None,
    adapters: AdapterSet | None = None,
) -> Executor:
    """Plans the shape, and loads the plan and the weights onto the device. ranks: the ranks that
    share the model. machine: the machine to plan for, by default the device's. adapters: the
    adapters that `shape.adapters` describes.
    """
    machine = machine or device.machine
    tell = progress or (lambda label, done, total: None)
    tell("planning", 0, 0)
    options = tuned_collectives.options(machine, shape.world_size, ranks)
    everyone = plans(shape, machine, options or None, compiling(backend, device, shape.rank))
    if ranks is not None and shape.world_size > 1:
        ranks.check_same("the plan", digest(everyone))
        check_same_model(ranks, checkpoint)
    tell("compiling", 0, 0)
    plan = everyone[shape.rank]
    runner = load(plan, backend, device, ranks=ranks, budget_s=budget_s)
    try:
        if not isinstance(runner, Executor):
            raise UnsupportedError(
                f"the backend {backend.name!r} runs plans without a loop kernel, which an engine "
                "needs; use another backend, or ark.models.generate.Generator"
            )
        total, done = plan.arenas["parameter"], 0
        matrices = adapters.arrays(shape.dtype.numpy) if adapters else {}
        for name, array in weights(checkpoint, shape, plan, matrices):
            runner.write(name, array)
            done += array.nbytes
            tell("loading", min(done, total), total)
    except BaseException:
        runner.close(collective=False)
        raise
    return runner
