"""Runs an accepted plan on the CPU and compares its final memory with the oracle's.

The oracle defines the meaning of a plan: its ops run in program order, one task after the other, on
one processor, without counters. Under AddressSanitizer (see tests.fuzz.__main__) memory between
buffers is poisoned, so that a task that accesses memory outside of its operands ends the process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import numpy as np
from ark_cpu import backend

from ark.errors import BaseError
from ark.ir.dtype import by_name
from ark.plan.types import ITERATION_BARRIER, Phase, Plan
from ark.runtime.executor import Executor

BUDGET_S = 5.0
LAST_PHASE_ITERATIONS = 3
_LASTING = ("state", "host", "external")


def sanitize() -> None:
    """Lets this process compile loop kernels with AddressSanitizer from now on."""
    os.environ["ARK_CPU_FLAGS"] = "-O1 -fsanitize=address -fno-omit-frame-pointer"


def sanitized() -> bool:
    """True if this process was started with the sanitizer's library preloaded."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def serial(plan: Plan) -> Plan:
    """Returns the plan for one processor: every phase's tasks in program order, without waits."""
    phases = []
    for phase in plan.phases:
        tasks = sorted((t for own in phase.processors for t in own), key=lambda t: (t.op, t.coord))
        alone = [dataclasses.replace(t, waits=(), signals=()) for t in tasks]
        if alone:
            alone[-1] = dataclasses.replace(alone[-1], signals=(ITERATION_BARRIER,))
        phases.append(Phase(phase.name, (tuple(alone),)))
    # In this plan only the last task signals the barrier at the end of an iteration. In the
    # original plan, several tasks may signal it.
    once = (
        dataclasses.replace(c, step=1) if c.id == ITERATION_BARRIER else c for c in plan.counters
    )
    return dataclasses.replace(
        plan,
        machine={**plan.machine, "processors": 1},
        counters=tuple(once),
        phases=tuple(phases),
    )


def _contents(plan: Plan, buffer: int) -> np.ndarray:
    """Returns a buffer's initial contents: a valid state for the inputs of a decoder, otherwise
    small numbers that depend on the buffer's name alone.
    """
    entry = plan.buffers[buffer]
    held = next((t for t in plan.tensors if t.buffer == buffer), None)
    values = np.zeros(entry.nbytes, np.uint8)
    if held is None or not entry.initial or held.name == "position":
        return values
    kind = by_name(held.dtype)
    view = values[: len(values) // kind.itemsize * kind.itemsize].view(kind.numpy)
    if held.name == "settings":
        context = next((t.shape[0] for t in plan.tensors if t.name == "tokens"), 8)
        view[: min(7, len(view))] = [0, 0, 1, 2, context, 0, 0][: len(view)]
        return values
    rng = np.random.default_rng(sum(entry.name.encode()))
    if np.issubdtype(view.dtype, np.integer):
        view[:] = rng.integers(0, 4, view.shape)
    else:
        view[:] = rng.uniform(-1, 1, view.shape).astype(view.dtype)
    return values


def run(plan: Plan) -> dict[str, bytes] | str:
    """Runs a plan. Returns the final contents of the buffers that outlive an iteration, by name, or
    the error's text if it ends with one.
    """
    device = backend.open(0)
    externals = {
        b.id: device.alloc(b.nbytes, "device") for b in plan.buffers if b.arena == "external"
    }
    held: list[tuple[int, int]] = []
    try:
        addresses = {i: memory.address for i, memory in externals.items()}
        with Executor(plan, backend, device, externals=addresses, budget_s=BUDGET_S) as executor:
            held = _poison(executor)
            for b in plan.buffers:
                if b.initial:
                    device.write(executor.buffer_address(b.id), _contents(plan, b.id))
            executor.start([*([1] * (len(plan.phases) - 1)), LAST_PHASE_ITERATIONS]).wait()
            return {
                b.name: device.read(executor.buffer_address(b.id), b.nbytes).tobytes()
                for b in plan.buffers
                if b.arena in _LASTING
            }
    except BaseError as error:
        return type(error).__name__
    finally:
        for address, nbytes in held:
            _sanitizer().__asan_unpoison_memory_region(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
            )
        device.close()


def _sanitizer() -> Any:
    return ctypes.CDLL(None)


def _poison(executor: Executor) -> list[tuple[int, int]]:
    """Poisons the memory between buffers if the sanitizer is loaded. Returns the poisoned
    arenas.
    """
    if not sanitized():
        return []
    # The packet arena is not poisoned, because a launch first writes zeros to all of it, also
    # between buffers.
    arenas = [(m.address, m.nbytes) for name, m in executor._arenas.items() if name != "packet"]
    plan = executor.plan
    for address, nbytes in arenas:
        _sanitizer().__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    for b in plan.buffers:
        if b.arena in executor._arenas:
            _sanitizer().__asan_unpoison_memory_region(
                ctypes.c_void_p(executor.buffer_address(b.id)), ctypes.c_size_t(b.nbytes)
            )
    return arenas


@dataclasses.dataclass(frozen=True)
class Outcome:
    """ran: both the plan and its oracle ran to their end. wrong: the first difference, or "" if
    there is none.
    """

    ran: bool
    wrong: str


def compare(plan: Plan) -> Outcome:
    """Runs the plan and its oracle (the serial execution) and compares their results. A plan and an
    oracle that end with the same error count as equal.
    """
    mine, oracle = run(plan), run(serial(plan))
    if isinstance(mine, str) or isinstance(oracle, str):
        alike = mine == oracle
        wrong = "" if alike else f"the plan gives {mine!s:.60}, the oracle {oracle!s:.60}"
        return Outcome(False, wrong)
    different = next((f"{name} differs" for name in mine if mine[name] != oracle[name]), "")
    return Outcome(True, different)
