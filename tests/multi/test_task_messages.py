"""Plans in ARK's own layout for several ranks: each process reads its own file. The messages
between them run, or are refused on every rank with the same message. A launch runs many plans,
since starting a rank takes longer than most of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from tests.slow import few, slow
from tests.task_plans import fused_sum, packet_ring, packet_sum, ring

SHAPE = (3, 700)
Plans = list[dict[str, Any]]


def share(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(SHAPE).astype(np.float32)


def write(folder: Path, plans: Plans) -> str:
    for rank, plan in enumerate(plans):
        (folder / f"plan.{rank}.json").write_text(json.dumps(plan))
    return str(folder)


def run_own_file(folder: str, world: int, backend: str, of_model: bool) -> None:
    """The body of each rank. of_model: the rank has built the model that the plan belongs to;
    otherwise it has only tensors with the plan's numbers.
    """
    ark.init(backend=backend)
    rank = ark.Model.get_rank()
    after, before = (rank + 1) % world, (rank - 1) % world
    x, y = ark.tensor(SHAPE), ark.tensor(SHAPE)
    if of_model:
        y = ark.mul(x, rank + 1.0, output=y)
        ark.send_done(ark.send(y, after, tag=rank))
        received = ark.recv(ark.tensor(SHAPE), before, tag=before)
        z = ark.add(y, received)
    else:
        numbered = {t.ir.id: t for t in (x, y, *(ark.tensor(SHAPE) for _ in range(8)))}
        x, z = numbered[0], numbered[6]
    plan = ark.Plan.from_file(Path(folder) / f"plan.{rank}.json")
    assert (plan.rank, plan.world_size) == (rank, world)
    for loop_mode in (True, False):
        with ark.Runtime() as runtime:
            runtime.launch(plan=plan, loop_mode=loop_mode)
            x.from_numpy(share(rank))
            runtime.barrier()
            runtime.run(3)
            want = (rank + 1) * share(rank) + (before + 1) * share(before)
            np.testing.assert_allclose(z.to_numpy(), want, rtol=1e-6)
            runtime.barrier()


def refuse_all(folders: list[str]) -> None:
    """A rank's process: calls `refuse` for one folder after another."""
    for folder in folders:
        refuse(folder)


def refuse(folder: str) -> None:
    """The body of each rank for plans that do not fit together: every rank raises an error, and
    none waits for another.
    """
    ark.init(backend="cpu")
    rank = ark.Model.get_rank()
    plan = ark.Plan.from_file(Path(folder) / f"plan.{rank}.json")
    x = plan.task_infos[0]["Ops"][0]["ReadTensors"][0]
    dtype = ark.DataType.from_name(x["DataType"].lower())
    tensors = [ark.tensor(x["Shape"], dtype) for _ in range(10)]
    try:
        with ark.Runtime() as runtime:
            runtime.launch(plan=plan)
    except ark.BaseError as error:
        (Path(folder) / f"said.{rank}").write_text(str(error))
        return
    raise AssertionError(
        f"the plans in {folder} do not fit together, but were launched on {len(tensors)} tensors"
    )


def run_sum(folder: str, world: int, backend: str, size: int) -> None:
    """The body of each rank for `packet_sum`: three runs on different values."""
    ark.init(backend=backend)
    rank = ark.Model.get_rank()
    x = ark.tensor([world * size])
    parts = ark.sharding(x, 0, size)
    y = ark.tensor([world * size])
    parts += ark.sharding(y, 0, size)
    assert [t.ir.id for t in (x, y, *parts)][:2] == [0, world + 1]
    plan = ark.Plan.from_file(Path(folder) / f"plan.{rank}.json")
    with ark.Runtime() as runtime:
        runtime.launch(plan=plan)
        for number in range(3):
            shares = np.random.default_rng(number).standard_normal((world, world * size))
            x.from_numpy(shares[rank].astype(np.float32))
            runtime.barrier()
            runtime.run(2)
            np.testing.assert_allclose(y.to_numpy(), shares.sum(0), 1e-4, 1e-5)
            runtime.barrier()


def run_fused(folder: str, world: int, backend: str, of_model: bool) -> None:
    """The body of each rank for `fused_sum`. of_model: as in run_own_file."""
    ark.init(backend=backend)
    rank = ark.Model.get_rank()
    x = ark.tensor([96], ark.fp16)
    if of_model:
        y = ark.all_reduce_packet(x, rank, world)
        z = ark.all_reduce_packet(y, rank, world)
    else:
        numbered = {t.ir.id: t for t in (x, *(ark.tensor([96], ark.fp16) for _ in range(5)))}
        y, z = numbered[2], numbered[4]
    plan = ark.Plan.from_file(Path(folder) / f"plan.{rank}.json")
    with ark.Runtime() as runtime:
        runtime.launch(plan=plan)
        shares = np.random.default_rng(0).standard_normal((world, 96)).astype(np.float16)
        x.from_numpy(shares[rank])
        runtime.barrier()
        runtime.run(3)
        want = functools.reduce(np.add, shares.astype(np.float32)).astype(np.float16)
        np.testing.assert_array_equal(y.to_numpy(), want)
        in_fp32 = functools.reduce(np.add, [want.astype(np.float32)] * world).astype(np.float16)
        np.testing.assert_array_equal(z.to_numpy(), in_fp32)
        runtime.barrier()


def run_all(cases: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """A rank's process: runs one plan after another."""
    for function, args in cases:
        function(*args)


# The cases: (number of ranks, True if the tensors are those of the plan's model).
PLACES = few(1, [(3, True), (2, False), (2, True), (3, False)])


@pytest.mark.parametrize(("world", "of_model"), PLACES)
def test_ranks_run_their_own_plan_files(world: int, of_model: bool, tmp_path: Path) -> None:
    """Ranks run their own plan files: messages by puts and by packets, and ARK's all-reduces, in
    two steps by packets and in one op. All ranks get the same bits.
    """

    def written(name: str, form: Callable[..., dict[str, Any]], *more: Any) -> str:
        (tmp_path / name).mkdir()
        return write(tmp_path / name, [form(rank, world, *more) for rank in range(world)])

    cases = [
        (run_own_file, (written("ring", ring, SHAPE), world, "cpu", of_model)),
        (run_own_file, (written("packets", packet_ring, SHAPE), world, "cpu", of_model)),
        (run_sum, (written("sum", packet_sum, 96), world, "cpu", 96)),
        (run_fused, (written("fused", fused_sum), world, "cpu", of_model)),
    ]
    assert ark.launch(world, run_all, cases) == 0


@pytest.mark.parametrize("of_model", [True, pytest.param(False, marks=slow)])
def test_fused_all_reduce_of_one_rank(of_model: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, [fused_sum(0, 1)])
    assert ark.launch(1, run_fused, folder, 1, "cpu", of_model) == 0


def test_two_emulated_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan files with puts, signals, waits and packets between two processes with an emulated
    gfx942 each.
    """
    pytest.importorskip("ark_rocm_emulator")
    pytest.importorskip("hip")
    monkeypatch.setenv("ARK_ROCM_DEVICE", "emulated:gfx942,2")
    cases = []
    for form in (ring, packet_ring, fused_sum):
        (tmp_path / form.__name__).mkdir()
        folder = write(tmp_path / form.__name__, [form(rank, 2) for rank in range(2)])
        run = run_fused if form is fused_sum else run_own_file
        cases.append((run, (folder, 2, "rocm", True)))
    assert ark.launch(2, run_all, cases) == 0


def op(plans: Plans, rank: int, name: str) -> dict[str, Any]:
    ops = [op for task in plans[rank]["TaskInfos"] for op in task["Ops"]]
    return next(op for op in ops if op["Name"] == name)


def tags(plans: Plans, rank: int, tag: int) -> None:
    """Plants a fault: changes the tag of the receive in the rank's plan."""
    received = op(plans, rank, "recv")
    received["ReadTensors"][0]["Buffer"]["SendTags"] = [[-1, tag]]
    received["WriteTensors"][0]["Buffer"]["RecvTags"] = [[1 - rank, tag]]


def smaller(plans: Plans) -> None:
    plans[1] = ring(1, 2, (3, 600))


def half(plans: Plans) -> None:
    for task in plans[1]["TaskInfos"]:
        for one in task["Ops"]:
            for entry in (*one["ReadTensors"], *one["WriteTensors"], *one["ResultTensors"]):
                entry["DataType"] = "FP16"


def elsewhere(plans: Plans) -> None:
    (there,) = op(plans, 0, "send")["WriteTensors"]
    there.update(Strides=[3, 800], Offsets=[0, 50])


def twice(plans: Plans) -> None:
    plans[1] = ring(0, 2)


def late(plans: Plans) -> None:
    """Plants a fault: both ranks receive before they send, so that each waits for the other."""
    for plan in plans:
        infos = plan["TaskInfos"]
        infos[0]["Ops"][0]["ReadTensors"] = op(plans, plan["Rank"], "recv")["ResultTensors"]
        groups = plan["ProcessorGroups"]
        groups.insert(0, groups.pop(3))


def flags(plans: Plans) -> None:
    plans[:] = [packet_ring(rank, 2) for rank in range(2)]
    op(plans, 1, "recvpacket")["Args"] = {"Flag": {"UINT32": 2}}


WRONG: dict[str, tuple[Callable[[Plans], object], str]] = {
    "another tag": (
        lambda p: tags(p, 1, 7),
        "under tag 0, rank 0 sends 1 message ('send') to rank 1, but rank 1 receives nothing",
    ),
    "another size": (
        smaller,
        "under tag 0, rank 0 sends FP32[3, 700] to rank 1 (op 'send'), but rank 1 receives "
        "FP32[3, 600] (op 'recv')",
    ),
    "another type": (half, "but rank 1 receives FP16[3, 700] (op 'recv')"),
    "another place": (
        elsewhere,
        "rank 0 sends to a tensor of Strides [3, 800] and Offsets [0, 50] on rank 1 (op 'send'), "
        "but rank 1 receives into Strides [3, 700] and Offsets [0, 0] (op 'recv')",
    ),
    "another's plan": (twice, "rank 1 of 2 was given the plan of rank 0 of 2"),
    "nobody sends first": (late, "rank"),
    "another flag": (
        flags,
        "rank 0 sends packets of Flag 1 to rank 1 (op 'sendpacket'), but rank 1 receives packets "
        "of Flag 2 (op 'recvpacket')",
    ),
}


def unlike(plans: Plans) -> None:
    """Plants a fault: the second rank's plan has an op that ark does not have."""
    op(plans, 1, "add")["Type"] = "Conv"


def test_plans_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    folders = []
    for change in (*(change for change, _ in WRONG.values()), unlike):
        plans = [ring(rank, 2) for rank in range(2)]
        change(plans)
        (tmp_path / str(len(folders))).mkdir()
        folders.append(write(tmp_path / str(len(folders)), plans))
    assert ark.launch(2, refuse_all, folders) == 0
    messages = [[Path(f, f"said.{rank}").read_text() for rank in range(2)] for f in folders]
    for (name, (_, words)), (first, second) in zip(WRONG.items(), messages[:-1], strict=True):
        assert first == second and words in first, (name, first, second)
    first, second = messages[-1]  # a rank that refuses its own plan tells the others
    assert second.startswith("op 'add' is of type Conv")
    assert first == f"rank 1 cannot run its plan: {second}"
