"""Finds the fastest cut (division into tiles and parts of k) of a matmul on a machine: each
candidate is planned, run and timed.

A cut is stored only if it is faster than the default cut by more than measurement noise. Called by
`ark tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.ops import median
from ark.errors import BaseError
from ark.ir.attributes import MatmulAttributes
from ark.ir.dtype import INTEGERS, by_name
from ark.ir.fold import fold
from ark.ir.graph import Graph
from ark.lower import cuts, k_parts
from ark.lower.cuts import Cut
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan import kind as kinds
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.runtime.tuned import Choice
from ark.tasks.matmul_form import dims
from ark.tasks.matmul_params import MatmulParams

MIN_RELATIVE_GAIN = 0.03  # the least relative gain for which a cut is stored
MAX_TIMED_CUTS = 8  # only this many cuts, of least predicted time, are run


@dataclass(frozen=True)
class Product:
    """A matmul of a plan. shapes, dtypes: those of the two inputs and the result, which have at
    most four dimensions. variant: the kernel variant under which it runs.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    transposes: tuple[bool, bool]
    tf32: bool
    variant: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result: two batch dimensions, rows and columns."""
        return fold(self.shapes[2])

    @property
    def depth(self) -> int:
        """The length of k."""
        return self.shapes[0][-2 if self.transposes[0] else -1]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the left input."""
        return by_name(self.dtypes[0]).itemsize

    @property
    def key(self) -> str:
        """The key under which the chosen cut is stored."""
        return cuts.key(self.shape, self.depth, self.itemsize)

    def __str__(self) -> str:
        m, n = self.shape[2:]
        batch = self.shape[0] * self.shape[1]
        many = f"{batch} x " if batch > 1 else ""
        layout = "".join("t" if t else "n" for t in self.transposes)
        return f"{many}{m}x{n}x{self.depth} {layout} {self.dtypes[0]}"


def products(plans: Iterable[Plan]) -> list[Product]:
    """The distinct matmuls of the plans whose cut (tiles and parts of k) can be chosen."""
    by_key: dict[str, Product] = {}
    for plan in plans:
        names = {
            op: plan.variant_of(number)
            for number, phase in enumerate(plan.phases)
            for op in {t.op for tasks in phase.processors for t in tasks}
        }
        for op in plan.ops:
            if op.kind != "matmul" or op.id not in names:
                continue
            sig = kinds.signature(plan, op)
            params = sig.read(MatmulParams)
            if params.gated or params.rotary or params.reads_images:
                continue
            m, n, _ = dims(sig)
            a, b, out = sig.operands[:3]
            batch = () if params.splits > 1 else out.shape[:-2]
            dtype = a.dtype if params.splits > 1 else out.dtype
            product = Product(
                (a.shape, b.shape, (*batch, m, n)),
                (a.dtype, b.dtype, dtype),
                (params.transpose_a, params.transpose_b),
                params.tf32,
                names[op.id],
            )
            by_key.setdefault(product.key, product)
    return list(by_key.values())


def candidates(product: Product, machine: Machine) -> list[Cut]:
    """The cuts of a matmul to time. The first one is the default cut."""
    several = len(product.shapes[2]) == 2
    dtypes, shape, depth = product.dtypes[:2], product.shape, product.depth
    if product.variant == "matrix":
        narrow = product.transposes[1]
        able = cuts.candidates(shape, depth, product.itemsize, machine, several, narrow, plain=True)
        us = {c: cuts.predicted_us(c, shape, depth, product.itemsize, machine) for c in able}
    elif k_parts.serves(dtypes, shape, machine):
        able = k_parts.candidates(shape, depth, dtypes, machine, several)
        us = {c: k_parts.predicted_us(c, shape, depth, dtypes, machine) for c in able}
    else:
        exact = cuts.is_exact(dtypes, shape, depth, machine)
        return cuts.tiles(shape, depth, product.itemsize, machine, exact)
    return sorted(able, key=us.__getitem__)[:MAX_TIMED_CUTS]


def planned(product: Product, cut: Cut, machine: Machine) -> Plan:
    """The verified plan of a graph that has only this matmul, with this cut."""
    graph = Graph()
    types = [by_name(name) for name in product.dtypes]
    a, b, c = (
        graph.tensor(shape, dtype, arena="state", name=name)
        for shape, dtype, name in zip(product.shapes, types, "abc", strict=True)
    )
    given = MatmulAttributes(*product.transposes, tf32=product.tf32)
    graph.add("matmul", [a, b], [c], given.to_node(), "product")
    chosen = {product.key: [cut.rows, cut.columns, cut.parts]}
    plan = make_plan(graph, machine, {"variant": product.variant, "cuts": chosen})
    verify([plan])
    return plan


def seconds(
    product: Product, cut: Cut, backend: Backend, device: Device, repeats: int
) -> float | None:
    """Seconds per iteration of the matmul with this cut; None if the machine cannot run the cut."""
    try:
        plan = planned(product, cut, device.machine)
        rng = np.random.default_rng(0)
        with Executor(plan, backend, device) as executor:
            for name, shape, dtype in zip("ab", product.shapes, product.dtypes, strict=False):
                kind = by_name(dtype)
                size = 127.0 if kind in INTEGERS else 1.0
                array = rng.uniform(-size, size, shape).astype(np.float32)
                executor.write(name, array.astype(kind.numpy))

            def launch(iterations: int) -> float:
                run = executor.start(iterations)
                run.wait()
                return run.elapsed_ms() / 1e3 / iterations

            return median(launch, repeats)
    except BaseError:
        return None


def tune(
    product: Product,
    backend: Backend,
    device: Device,
    repeats: int = 5,
    tell: Callable[[Cut, float | None], None] = lambda cut, elapsed: None,
) -> Choice | None:
    """The fastest cut of a matmul; None if the machine can run no cut. tell: a function that is
    called with each cut and its seconds.
    """
    times: list[tuple[float, Cut]] = []
    listed = candidates(product, device.machine.using(product.variant))
    for cut in listed:
        elapsed = seconds(product, cut, backend, device, repeats)
        tell(cut, elapsed)
        if elapsed is not None:
            times.append((elapsed, cut))
    return chosen(times, listed[0])


def chosen(times: Sequence[tuple[float, Cut]], usual: Cut) -> Choice | None:
    """The fastest of the timed cuts, or the default cut if no other one is faster by more than
    measurement noise.
    """
    if not times:
        return None
    best = min(times, key=lambda t: t[0])
    before = next((t for t in times if t[1] == usual), best)
    if best[0] > (1.0 - MIN_RELATIVE_GAIN) * before[0]:
        best = before
    cut = best[1]
    return Choice((cut.rows, cut.columns, cut.parts), best[0] * 1e6, before[0] * 1e6)
