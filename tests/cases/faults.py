"""Cases and helpers of tests/backend/test_faults.py, which other tests use too."""

from __future__ import annotations

import numpy as np

from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.plans import plans
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.unit.plan.oracle import tasks
from tests.unit.plan.shapes import CONFIG, replace_task


def small_machine(machine: Machine, *capabilities: Capability) -> Machine:
    """Returns the description of the device with at most 3 processors, and without packets unless
    they are passed in `capabilities`.
    """
    few = machine.with_processors(min(3, machine.processors + 1))
    return few.without_capabilities(Capability.PACKETS).with_capabilities(*capabilities)


def decoder(machine: Machine, **options: object) -> Plan:
    return plans(Shape(CONFIG, by_name("fp32"), 64, 0), machine, options)[0]


def prepare(executor: Executor) -> None:
    rng = np.random.default_rng(0)
    for tensor in executor.plan.tensors:
        if executor.plan.buffers[tensor.buffer].arena == "parameter":
            executor.write(tensor.name, rng.standard_normal(tensor.shape) * 0.1)
    sizes = {t.name: t.shape[0] for t in executor.plan.tensors if t.name in ("tokens", "position")}
    executor.write("tokens", np.full(sizes["tokens"], 3, np.int32))
    executor.write("position", np.zeros(sizes["position"], np.int32))
    settings = [0, 0, 0, 0, 60, 0, 0] * sizes["position"]
    executor.write("settings", np.array(settings, np.int32))


def without_a_signal(plan: Plan) -> tuple[Plan, int]:
    """Returns the plan with one signal of a linear task removed, and the number of the counter that
    this task then does not increment.
    """
    for place, task in tasks(plan).items():
        if plan.ops[task.op].kind == "linear" and task.signals and task.signals[0] != 0:
            return replace_task(plan, place, signals=task.signals[1:]), task.signals[0]
    raise AssertionError("no task of a linear layer signals a counter")
