"""Compares the predicted time of a plan for many ranks with its measured time. The plan splits a
decoder, which processes several sequences, over ranks by a named method.

Each sequence is a micro-batch, and one launch has all micro-batches of a step. The prediction is
that of `ark parallelize --inference` for the same model, mesh and links. Called by
ark.cli.bench_parallel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import ark
from ark import log
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.decode import random_weights
from ark.errors import InvalidUsageError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.models import registry
from ark.models.config import LlamaConfig
from ark.ops.tokens import TokenState
from ark.parallel import parallelize
from ark.parallel.pipeline.named import PIPELINES
from ark.parallel.plans.parallelize import STAGED
from ark.parallel.plans.predict import predict
from ark.parallel.plans.prediction import Prediction, Target, Work
from ark.parallel.plans.rules import PLANS
from ark.parallel.plans.splits import Splits
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor


@dataclass(frozen=True)
class ParallelCase:
    """A plan to measure. plan: the name of a plan. It can also be two names, such as
    `1f1b+megatron`: the first is a pipeline, and the second is the plan that splits each stage over
    `width` ranks. sequence: tokens of a micro-batch. batch: micro-batches of a step.
    """

    config: LlamaConfig
    dtype: DataType
    plan: str
    sequence: int
    batch: int
    link_gbps: float
    repeats: int = 5
    width: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.plan.split("+"))

    def mesh(self, ranks: int) -> tuple[int, ...]:
        """The sizes of the mesh's axes for this number of ranks. Raises InvalidUsageError if the
        ranks do not form such a mesh.
        """
        if len(self.names) == 1 and self.width == 1:
            return (ranks,)
        if len(self.names) != 2 or ranks % self.width or min(ranks // self.width, self.width) < 2:
            raise InvalidUsageError(
                f"{self.plan!r} over {ranks} ranks in stages of {self.width} does not form a "
                "mesh; give two names, as in 1f1b+megatron, and --width N, the ranks of a "
                "stage, with at least two stages"
            )
        return ranks // self.width, self.width

    @property
    def two_axes(self) -> bool:
        """True if the plan is a pipeline whose stages are themselves split over ranks."""
        return len(self.names) == 2 and self.names[0] in STAGED and self.names[1] in PLANS

    def check(self, ranks: int) -> None:
        """Raises InvalidUsageError for plans that cannot be measured, or cannot be measured on this
        number of ranks.
        """
        self.mesh(ranks)
        if self.plan in STAGED or self.plan in PLANS or self.two_axes:
            return
        others = sorted(set(PIPELINES) - set(STAGED))
        raise InvalidUsageError(
            f"{self.plan!r} cannot be measured; give one of {', '.join((*PLANS, *STAGED))} "
            f"({', '.join(others)} have other models), or a pipeline and a plan of its stages, "
            "as 1f1b+megatron"
        )


@dataclass(frozen=True)
class ParallelFigures:
    """Times of a step in microseconds. measured: the slowest rank's time, the median of `runs`."""

    plan: str
    ranks: int
    sequence: int
    batch: int
    predicted_us: float
    measured_us: float
    runs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The measured time relative to the predicted one."""
        return self.measured_us / self.predicted_us


def predicted(case: ParallelCase, ranks: int, machine: Machine) -> Prediction:
    """The prediction of `ark parallelize --inference` for a step."""
    one = micro_batches(replace(case, batch=1), [0] * case.config.num_hidden_layers, 0)
    splits = Splits(one)
    target = Target(machine, case.link_gbps, case.link_gbps, ranks)
    work = Work(training=False, batch=case.batch)
    return predict(splits, case.mesh(ranks), case.names, target, work)


def graphs(case: ParallelCase, ranks: int, machine: Machine, prediction: Prediction) -> list[Graph]:
    """The graph of an inference step on each rank, divided into the prediction's pipeline
    stages.
    """
    layers = [
        s for b, s in zip(prediction.blocks, prediction.stage_of, strict=True) if b.block.numbered
    ]
    graph = micro_batches(case, layers, max(prediction.stage_of))
    if case.plan in STAGED:
        return parallelize(graph, ranks, case.plan).ranks.graphs
    how = {"machine": machine, "link_gbps": case.link_gbps}
    if case.two_axes:
        return parallelize(graph, case.mesh(ranks), case.names, **how).ranks.graphs  # type: ignore[arg-type]
    return parallelize(graph, ranks, case.plan, **how).ranks.graphs  # type: ignore[arg-type]


def micro_batches(case: ParallelCase, stage_of: Sequence[int], last: int) -> Graph:
    """The graph of a step: a pass over each sequence, with each stage in a separate scope. It ends
    with a sum of the logits, so that split logits need not be gathered. stage_of: the stage of each
    layer. last: the stage of the head.
    """
    c, model = case.config, Model(0, 1)
    with use_model(model):
        decoder = registry.decoder(c.architecture)(c, case.dtype)
        decoder.name_tensors()
        for m in range(case.batch):
            decoder.setup(case.sequence)
            state = TokenState.make(case.sequence)
            for tensor in (state.tokens, state.position, state.settings, state.stops, state.output):
                tensor.rename(f"{tensor.ir.name}.{m}")
            with model.graph.scope(f"f0-{m}"):
                h = ark.embed(state.tokens, decoder.embedding, state.position, case.sequence)
            for i, layer in enumerate(decoder.layers):
                with model.graph.scope(f"f{stage_of[i]}-{m}"), model.graph.scope(f"layers.{i}"):
                    h = layer(h, state, decoder.frequencies)
            with model.graph.scope(f"f{last}-{m}"):
                logits = decoder.head(ark.rmsnorm(h, decoder.norm, decoder.eps))
                ark.reduce_sum(logits, axis=1)
    return model.graph


def measure(
    case: ParallelCase, job: Bootstrap, backend: Backend, device: Device, machine: Machine
) -> ParallelFigures:
    """Runs a step several times on all ranks; returns the same figures on each."""
    aloud = job.rank == 0
    with log.slow(f"planning {case.plan} for {job.world_size} ranks", aloud):
        prediction = predicted(case, job.world_size, machine)
        plans = plan_ranks(graphs(case, job.world_size, machine, prediction), machine)
        verify(plans)
    plan = plans[job.rank]
    with Executor(plan, backend, device, ranks=job) as executor:
        with log.slow("writing weights to the devices", aloud):
            for name, array in random_weights(plan, case.config):
                executor.write(name, array)
        own = []
        with log.slow(f"measuring {case.repeats + 1} steps of {case.plan}", aloud):
            for _ in range(case.repeats + 1):  # the first run is not counted
                job.barrier("a repeat")
                run = executor.start(1)
                run.wait(600.0)
                own.append(run.elapsed_ms() * 1e3)
        del own[0]
        times_of = [json.loads(s) for s in job.all_gather(json.dumps(own).encode())]
    runs = tuple(max(times) for times in zip(*times_of, strict=True))
    median = float(np.median(runs))
    return ParallelFigures(
        case.plan, job.world_size, case.sequence, case.batch, prediction.us, median, runs
    )
