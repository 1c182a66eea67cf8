"""The planner of the current model. ark.lower.pipeline does most of the work.

`ark.Planner` (ark.runtime.api.planner) extends it: it returns ARK's plans and supports rules that
configure ops. Planning needs no device: without one, `plan_script` and `Planner` plan for a machine
model.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ark import log
from ark.errors import BaseError, InvalidUsageError, PlanError
from ark.frontend.model import Model
from ark.ir.graph import Graph
from ark.ir.values import whole
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan import types as inner
from ark.plan.verify import verify
from ark.runtime import tuned, tuned_collectives
from ark.runtime.planned import Planned
from ark.runtime.run import Ranks
from ark.runtime.session import device

Result = TypeVar("Result")


class Planner:
    """Makes the plan of the current (or a given) model for a device's machine, or for `machine`.

    ranks: the connection to the other ranks, if all ranks plan at the same time; then all use the
    measurements of rank 0. Without `ranks` each rank uses its own measurements, and a launch
    rejects plans that were made with different measurements. activation_bytes: a limit for the
    memory of activations; activations that do not fit are recomputed.
    """

    machine_override: Machine | None = None

    def __init__(
        self,
        device_id: int = 0,
        model: Model | None = None,
        machine: Machine | None = None,
        ranks: Ranks | None = None,
        activation_bytes: int | None = None,
    ) -> None:
        self.device_id = whole("device_id", device_id)
        self.model = model
        self.machine = machine
        self.ranks = ranks
        self.activation_bytes = activation_bytes

    def plan(self) -> Planned:
        """The verified plan of this rank. Plans of several ranks are verified when they are
        launched.

        Tensors that Python objects still refer to have memory of their own; other tensors may share
        memory.
        """
        model = self.model or Model.get_model()
        graph = model.graph
        if not any(not n.virtual for n in graph.nodes):
            return Planned(None, model, {"Rank": graph.rank, "WorldSize": graph.world_size})
        machine = self.machine or Planner.machine_override or device(self.device_id).machine
        graph = self._configured(graph, machine.arch)
        held = (i for i in model.storages if model.graph.buffers[i].arena != "symmetric")
        options: dict[str, Any] = {"external": sorted(held)}
        if self.activation_bytes is not None:
            options["activation_bytes"] = self.activation_bytes
        if graph.world_size == 1:
            options |= tuned.options(machine)
        options |= tuned_collectives.options(machine, graph.world_size, self.ranks)
        with log.timed(f"planned {len(graph.nodes)} ops for {machine.name}"):
            plan = make_plan(graph, machine, options)
        if graph.world_size == 1:
            verify([plan])
        return Planned(plan, model)

    def _configured(self, graph: Graph, arch: str) -> Graph:
        """The graph, with the user's hints attached to the ops that they are for."""
        return graph


class _Planned(BaseException):
    """Raised to end a script at its first launch. plan: the plan that the script would have
    launched.
    """

    def __init__(self, plan: Planned) -> None:
        super().__init__()
        self.plan = plan


def capture(plan: Planned | None) -> None:
    """Called at every launch. If a script is run only to plan its model, it raises _Planned with
    the plan, which ends the script.
    """
    if Planner.machine_override is not None:
        raise _Planned(plan or Planner().plan())


class ScriptError(BaseError):
    """An error that a script itself raised, which is this error's cause.

    Its traceback begins with the script's own frames.
    """


def _own_error(path: str, error: Exception) -> ScriptError | None:
    """The ScriptError for an error. None if the error was raised before the script ran, for example
    because the file does not exist.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    if frames is None:
        return None
    raised = ScriptError(f"{path} raised an error of its own, {type(error).__name__}: {error}")
    raised.__cause__ = error.with_traceback(frames)
    return raised


def _run(path: str) -> dict[str, Any]:
    """Runs a script and returns its global names.

    A script that ends by `sys.exit()` or with exit code 0 counts as complete. Any other exit code
    or message raises InvalidUsageError.
    """
    try:
        return runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise InvalidUsageError(
                f"{path} exited before its first launch: sys.exit({end.code!r})"
            ) from end
        return {}


def plan_script(path: str, machine: Machine) -> list[inner.Plan]:
    """The verified plan of the model that a Python script builds up to its first launch.

    Nothing runs on a device. Raises PlanError if the script builds nothing, and ScriptError if the
    script raises an error.
    """

    def inner_plan(planned: Planned | None) -> inner.Plan | None:
        plan = planned.built(machine).inner if planned else None
        return plan or Planner(model=planned.model if planned else None).plan().inner

    plan = _of_script(path, machine, inner_plan)
    if plan is None:
        raise _no_model(path)
    return [plan]


def graph_of_script(path: str, machine: Machine) -> Graph:
    """The graph of the model that a Python script builds up to its first launch. Raises the errors
    of plan_script.
    """

    def graph(planned: Planned | None) -> Graph:
        model = planned.model if planned else None
        return (model or Model.get_model()).graph

    result = _of_script(path, machine, graph)
    if all(node.virtual for node in result.nodes):
        raise _no_model(path)
    return result


def _no_model(path: str) -> PlanError:
    return PlanError(f"{path} builds no model; call ops such as ark.add")


def _of_script(
    path: str, machine: Machine, result_of: Callable[[Planned | None], Result]
) -> Result:
    """Runs a script up to its first launch, and returns `result_of` of the launched plan. If the
    script launches none, `result_of` is called with None after the script has ended.
    """
    if os.path.isdir(path):
        raise InvalidUsageError(f"{path} is a directory; give a Python script")
    Model.reset()
    Planner.machine_override = machine
    arguments = sys.argv
    sys.argv = [path]
    try:
        try:
            names = _run(path)
            result = result_of(None)
            del names  # until here, these names keep the memory of tensors
            return result
        except _Planned as planned:
            return result_of(planned.plan)
        except BaseError:
            raise
        except Exception as error:
            own = _own_error(path, error)
            if own is not None:
                raise own from own.__cause__
            if isinstance(error, OSError):
                raise InvalidUsageError(f"{path} cannot be read: {error}") from error
            if isinstance(error, SyntaxError):
                raise InvalidUsageError(f"{path} is not a valid Python script: {error}") from error
            raise
    finally:
        Planner.machine_override = None
        sys.argv = arguments
