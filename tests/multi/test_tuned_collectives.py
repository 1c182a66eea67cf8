"""Models use the engines that `ark tune --collectives` measured, for each size and algorithm; all
ranks use the same ones. The table is part of the plan cache's key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.plans import plans
from ark.plan.rotated import Rotated
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import tuned_collectives as tuned
from ark.runtime.api.planner import Planner
from ark.runtime.rank_info import rank_from_environment
from ark.runtime.tuned_collectives import Entry
from tests.ranks import run_ranks

CPU, GPU = registry.machine("cpu-2"), registry.machine("h100")
SMALL_BYTES, LARGE_BYTES = (
    64 << 10,
    4 << 20,
)  # in bytes; without measurements, packets, and no packets on a GPU
CALLS: dict[str, tuple[Any, int]] = {  # and how much larger a rank's larger side is than its input
    "all_reduce": (ark.all_reduce, 1),
    "all_gather": (ark.all_gather, 2),
    "reduce_scatter": (ark.reduce_scatter, 1),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))


def table(collective: str, nbytes: int, **engines: str) -> dict[str, Any]:
    return {collective: [[nbytes, engines]]}


def plans_of(
    collective: str, nbytes: int, engines: Mapping[str, Any] | None, **words: Any
) -> Sequence[Plan]:
    """Returns two ranks' plans of a collective whose input or output, whichever is larger, has
    `nbytes` on a rank.
    """
    call, larger = CALLS[collective]
    graphs = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            x = ark.mul(ark.tensor([nbytes // larger // 4], name="x"), 2.0)
            ark.mul(call(x, rank, 2, **words), 3.0)
        graphs.append(model.graph)
    plans = plan_ranks(graphs, GPU, {} if engines is None else {"engines": engines})
    verify(plans)
    return plans


def in_packets(rank_plans: Sequence[Plan]) -> bool:
    """True if the ranks' puts to each other are packets."""
    buffers = rank_plans[0].buffers
    puts = [t.packet for t in rank_plans[0].tensors if buffers[t.buffer].arena == "symmetric"]
    assert puts and len(set(puts)) == 1
    return puts[0]


@pytest.mark.parametrize("collective", CALLS)
def test_engine_is_the_measured_one_of_the_nearest_size(collective: str) -> None:
    assert in_packets(plans_of(collective, SMALL_BYTES, None))
    assert not in_packets(plans_of(collective, LARGE_BYTES, None))
    for size in (SMALL_BYTES // 2, SMALL_BYTES, 2 * SMALL_BYTES):
        assert not in_packets(
            plans_of(collective, size, table(collective, SMALL_BYTES, one_shot="threads"))
        )
    assert in_packets(
        plans_of(collective, LARGE_BYTES, table(collective, LARGE_BYTES, one_shot="packet"))
    )
    # The table is not used for a size far from the measured one, another collective or algorithm,
    # or if it names an engine that the machine lacks.
    assert in_packets(
        plans_of(collective, SMALL_BYTES // 4, table(collective, SMALL_BYTES, one_shot="threads"))
    )
    assert in_packets(
        plans_of(collective, SMALL_BYTES, table("broadcast", SMALL_BYTES, one_shot="threads"))
    )
    assert in_packets(
        plans_of(collective, SMALL_BYTES, table(collective, SMALL_BYTES, ring="threads"))
    )
    assert in_packets(
        plans_of(collective, SMALL_BYTES, table(collective, SMALL_BYTES, one_shot="warp"))
    )


def test_named_algorithm_has_its_own_and_a_named_engine_stays() -> None:
    two_rows = table("all_reduce", SMALL_BYTES, one_shot="packet", ring="threads")
    assert not in_packets(plans_of("all_reduce", SMALL_BYTES, two_rows, algorithm="ring"))
    assert in_packets(
        plans_of("all_reduce", SMALL_BYTES, two_rows, algorithm="ring", engine="packet")
    )
    bulk = plans_of("all_reduce", SMALL_BYTES, table("all_reduce", SMALL_BYTES, one_shot="bulk"))
    assert "bulk" in {op.kind for op in bulk[0].ops}


def test_ranks_that_do_the_same_are_planned_once_and_always_alike() -> None:
    engines = table("all_reduce", SMALL_BYTES, one_shot="threads")
    first, second = (plans_of("all_reduce", SMALL_BYTES, engines) for _ in range(2))
    assert isinstance(first, Rotated)
    assert to_json(first[1]) == to_json(second[1])
    assert json.loads(to_json(first[1]))["meta"]["engines"] == engines
    assert to_json(from_json(to_json(first[1]))) == to_json(first[1])


def test_plans_of_different_tables_are_refused_in_a_sentence() -> None:
    mine = plans_of("all_reduce", SMALL_BYTES, table("all_reduce", SMALL_BYTES, one_shot="threads"))
    other = plans_of("all_reduce", SMALL_BYTES, table("all_reduce", SMALL_BYTES, one_shot="bulk"))
    with pytest.raises(PlanError, match=r"ranks 0 and 1 .*ark tune --collectives.*--forget"):
        verify([mine[0], other[1]])


def keep(engine: str, nbytes: int = SMALL_BYTES) -> None:
    """Stores a table as `ark tune --collectives` would for two CPU ranks."""
    entry = Entry(nbytes, "ring", "packet", 1.0, 2.0, {"one_shot": engine})
    tuned.KEPT.store(CPU, {"all_reduce.2": [entry], "all_reduce.3": [entry], "all_gather.2": []})


def test_all_ranks_plan_with_the_table_of_rank_0(tmp_path: Path) -> None:
    keep("packet")
    want = {"engines": {"all_reduce": [[SMALL_BYTES, {"one_shot": "packet"}]]}}
    assert tuned.options(CPU, 2) == want
    assert tuned.options(CPU, 1) == {}
    assert tuned.options(CPU, 4) == {"engines": {}}
    expected_data = tuned.KEPT.encoded(CPU, tuned.KEPT.load(CPU))

    class Ranks:
        """Rank 1 has a table of measurements that differs from rank 0's."""

        def all_gather(self, data: bytes) -> list[bytes]:
            assert data != expected_data
            return [expected_data, data]

    keep("threads")
    assert tuned.options(CPU, 2, Ranks()) == want  # type: ignore[arg-type]
    actual = run_ranks(2, lambda ranks: tuned.options(CPU, 2, ranks))
    assert actual[0] == actual[1] != want


def test_decoders_plans_are_kept_under_their_table() -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=600,
        max_position_embeddings=256,
    )
    shape = Shape(config, ark.fp32, 64, 16, 0, 2)

    def received(rank_plans: Sequence[Plan]) -> bool:
        """True if the all-reduces of the prompt, which have 16 rows, travel as packets."""
        sums = [t for t in rank_plans[0].tensors if t.name.startswith("all_reduce.")]
        return all(t.packet for t in sums)

    usual = plans(shape, CPU)
    nbytes = 16 * config.hidden_size * 4
    keep("packet", nbytes)
    taken = plans(shape, CPU)
    assert not received(usual) and received(taken)
    assert plans(shape, CPU, {"engines": {}})[0].ops == usual[0].ops
    tuned.KEPT.forget(CPU)
    assert plans(shape, CPU)[0].ops == usual[0].ops


def _sum_by_tables(root: str) -> None:
    """The body of each rank of the test below. Each rank has a different table of measurements. A
    launch plans all ranks by rank 0's table, so the launch below succeeds. Plans that each rank
    makes by its own table do not fit together and are refused.
    """
    rank = rank_from_environment().rank
    os.environ["ARK_CACHE_DIR"] = str(Path(root) / str(rank))
    ark.init(backend="cpu")
    device = registry.get("cpu").open(0)
    entry = Entry(
        SMALL_BYTES, "ring", "packet", 1.0, 2.0, {"one_shot": ("packet", "threads")[rank]}
    )
    tuned.KEPT.store(device.machine, {"all_reduce.2": [entry]})
    x = ark.tensor([SMALL_BYTES // 4])
    total = ark.all_reduce(x, rank, 2)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(np.arange(SMALL_BYTES // 4) * (rank + 1.0))
        runtime.barrier()
        runtime.run(2)
        np.testing.assert_array_equal(total.to_numpy(), 3.0 * np.arange(SMALL_BYTES // 4))
        assert runtime._plan is not None and runtime._plan.inner is not None
        assert in_packets([runtime._plan.inner])
        runtime.barrier()
    with ark.Runtime() as runtime, pytest.raises(PlanError, match="ark tune --collectives"):
        runtime.launch(Planner().plan(), loop_mode=False)


def test_launch_plans_all_ranks_by_one_table(tmp_path: Path) -> None:
    assert ark.launch(2, _sum_by_tables, str(tmp_path)) == 0
