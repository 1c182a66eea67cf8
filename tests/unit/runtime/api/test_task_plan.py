"""Plans in ARK's own layout: the faults for which they are refused, and the error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.runtime.api.task_messages import FUSED_TAGS
from tests.task_plans import (
    COLUMNS,
    OUT,
    ROWS,
    fused_sum,
    norm_and_product,
    packet_ring,
    packet_sum,
    ring,
)

Data = dict[str, Any]


@pytest.fixture(autouse=True)
def model() -> Any:
    ark.init()
    x, w = ark.tensor([1, ROWS, COLUMNS], ark.fp16), ark.tensor([COLUMNS, OUT])
    wide = ark.cast(x, ark.fp32)
    mean = ark.reduce_mean(ark.mul(wide, wide), axis=2)
    return x, w, ark.matmul(ark.div(wide, mean), w)


def first_op(data: Data) -> Data:
    op: Data = data["TaskInfos"][0]["Ops"][0]
    return op


def groups(data: Data, number: int) -> Data:
    listed: Data = data["ProcessorGroups"][number]["ResourceGroups"][0]
    return listed


CHANGES: dict[str, tuple[Callable[[Data], object], str]] = {
    "an unknown field": (lambda d: d.update(Extra=1), "unknown field `Extra`"),
    "text for a number": (lambda d: d.update(NumProcessors="2"), "NumProcessors"),
    "no such type": (lambda d: first_op(d).update(Type="Conv"), "of type Conv"),
    "code in a type": (lambda d: first_op(d).update(Type="Cast(); //"), "Type"),
    "no such dtype": (
        lambda d: first_op(d)["ReadTensors"][0].update(DataType="FP12"),
        "the data type 'fp12' does not exist",
    ),
    "too many dimensions": (
        lambda d: first_op(d)["ReadTensors"][0].update(Shape=[1] * 40),
        "Shape",
    ),
    "beyond its buffer": (
        lambda d: first_op(d)["ReadTensors"][0].update(Offsets=[0, 1, 0]),
        "does not fit its buffer",
    ),
    "a tile that is none": (
        lambda d: first_op(d)["Config"].update(Tile="all"),
        "the configuration of op 'cast'",
    ),
    "more tasks than tiles": (lambda d: first_op(d)["Config"].update(NumTasks=25), "task 0"),
    "tasks left out": (
        lambda d: groups(d, 1)["TaskGroups"][0].update(TaskRange=[0, 5]),
        r"task 3 \(div\) has 6 tasks, and the processor groups run the task ranges \[\[0, 5\]\]",
    ),
    "a task run twice": (
        lambda d: groups(d, 1)["TaskGroups"].append(groups(d, 1)["TaskGroups"][0]),
        "must run each task once",
    ),
    "no such task": (
        lambda d: groups(d, 1)["TaskGroups"][0].update(TaskId=99),
        "which does not exist",
    ),
    "processors that are none": (
        lambda d: groups(d, 1).update(ProcessorRange=[1, 3]),
        "within the plan's 2 processors",
    ),
    "steps": (lambda d: groups(d, 1).update(ProcessorRange=[0, 2, 2]), "steps other than 1"),
    "more processors than the machine": (lambda d: d.update(NumProcessors=3), "cpu-2 has 2"),
    "another device": (lambda d: d.update(Architecture="CUDA_90"), "is for CUDA_90"),
    "an argument of another type": (
        lambda d: d["TaskInfos"][0]["Ops"][2]["Args"].update(Axis={"DIMS": [2]}),
        "Axis is wrong",
    ),
    "an argument that is not there": (
        lambda d: d["TaskInfos"][0]["Ops"][2]["Args"].pop("Axis"),
        "no argument Axis",
    ),
    "an axis that is none": (
        lambda d: d["TaskInfos"][0]["Ops"][2]["Args"].update(Axis={"INT": 7}),
        "axis 7 is out of range",
    ),
    "too many operands": (
        lambda d: first_op(d)["ReadTensors"].append(first_op(d)["ReadTensors"][0]),
        "op 'cast'",
    ),
    "nothing written": (lambda d: first_op(d)["WriteTensors"].clear(), "writes 0 tensors"),
    "an input of nobody": (
        lambda d: first_op(d)["ReadTensors"][0]["Buffer"].update(Id=77),
        "reads tensor 9, which no op before it writes",
    ),
    "a rank that is none": (lambda d: d.update(Rank=3, WorldSize=2), "for rank 3 of 2 ranks"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_plan_is_refused(name: str, model: Any) -> None:
    change, words = CHANGES[name]
    data = norm_and_product()
    if name == "an input of nobody":  # without the model, names cannot be compared
        ark.init()
    change(data)
    with pytest.raises(ark.BaseError, match=words) as caught:
        ark.Plan.from_str(json.dumps(data)).built(registry.machine("cpu-2"))
    assert isinstance(caught.value, (ark.PlanError, ark.UnsupportedError, ark.InvalidUsageError))


def of(data: Data, number: int, which: str) -> Data:
    """Returns the tensor that task `number`'s op reads or writes."""
    operand: Data = data["TaskInfos"][number]["Ops"][0][which][0]
    return operand


SEND, RECV, ADD = 1, 3, 4
MESSAGES: dict[str, tuple[Callable[[Data], object], str]] = {
    "a send to itself": (
        lambda d: of(d, SEND, "WriteTensors")["Buffer"].update(Rank=0),
        "on rank 0 it must write to another rank",
    ),
    "a buffer of two ranks": (
        lambda d: of(d, RECV, "ReadTensors")["Buffer"].update(Id=0),
        "lies in buffer 0 of Rank 1",
    ),
    "a rank beyond the world": (
        lambda d: of(d, RECV, "ReadTensors")["Buffer"].update(Rank=2),
        "of Rank 2; it must be of one of the plan's 2 ranks",
    ),
    "received from itself": (
        lambda d: of(d, RECV, "ReadTensors")["Buffer"].update(Rank=-1),
        "on rank 0 it must read from another rank",
    ),
    "no tag in common": (
        lambda d: of(d, SEND, "ReadTensors")["Buffer"].update(SendTags=[[1, 3]]),
        r"SendTags of the buffer on rank 0 lists the tags \[3\] for rank 1, .* lists \[0\]",
    ),
    "a tag for another peer": (
        lambda d: of(d, RECV, "WriteTensors")["Buffer"].update(RecvTags=[[2, 1]]),
        r"RecvTags of the buffer on rank 0 lists the tags \[\] for rank 1",
    ),
    "two tags in common": (
        lambda d: [
            of(d, RECV, "WriteTensors")["Buffer"].update(RecvTags=[[1, 1], [1, 2]]),
            of(d, RECV, "ReadTensors")["Buffer"].update(SendTags=[[-1, 1], [-1, 2]]),
        ],
        "they must have exactly one in common",
    ),
    "code in a tag": (
        lambda d: of(d, SEND, "ReadTensors")["Buffer"].update(SendTags=[[1, "0; //"]]),
        "SendTags",
    ),
    "types that differ": (
        lambda d: of(d, SEND, "WriteTensors").update(DataType="FP16"),
        r"reads FP32\[3, 700\] and writes FP16\[3, 700\]",
    ),
    "nothing written": (
        lambda d: d["TaskInfos"][SEND]["Ops"][0].update(WriteTensors=[]),
        "reads 1 tensors and writes 0",
    ),
    "an add of another rank's memory": (
        lambda d: d["TaskInfos"][ADD]["Ops"][0].update(
            ReadTensors=[of(d, RECV, "ReadTensors")] * 2
        ),
        "only Send and Recv name memory of other ranks",
    ),
    "a collective that is none of ARK's": (
        lambda d: d["TaskInfos"][SEND]["Ops"][0].update(Type="AllReduceTree"),
        "of type AllReduceTree, which ark does not run",
    ),
    "a tag of fused all-reduces": (
        lambda d: [
            of(d, SEND, "ReadTensors")["Buffer"].update(SendTags=[[1, FUSED_TAGS]]),
            of(d, SEND, "WriteTensors")["Buffer"].update(RecvTags=[[-1, FUSED_TAGS]]),
        ],
        "has the tag 2147418112; tags from 2147418112 on are reserved for AllReducePacketFused",
    ),
    "no packets behind a packet form": (
        lambda d: d["TaskInfos"][SEND]["Ops"][0].update(Type="SendPacket"),
        r"packets need 2 bytes for each byte of data, so the buffer must be UINT8\[16800\]",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_wrong_message_is_refused(name: str) -> None:
    change, words = MESSAGES[name]
    ark.init()
    tensors = [ark.tensor([3, 700]) for _ in range(8)]
    data = ring(0, 2)
    assert ark.Plan(data).built(registry.machine("cpu-2")).inner is not None, tensors
    change(data)
    with pytest.raises((ark.PlanError, ark.UnsupportedError), match=words):
        ark.Plan.from_str(json.dumps(data)).built(registry.machine("cpu-2"))


FUSED: dict[str, tuple[Callable[[Data], object], str]] = {
    "another type": (
        lambda d: of(d, 0, "WriteTensors").update(DataType="FP32"),
        r"reads FP16\[96\] and writes FP32\[96\]",
    ),
    "an input elsewhere": (
        lambda d: of(d, 0, "ReadTensors")["Buffer"].update(Rank=1),
        "of another rank than 0|lies in buffer 0 of Rank",
    ),
    "packets of no bytes": (
        lambda d: op_of(d, 0)["ReadTensors"][1].update(DataType="FP16"),
        "these tensors hold packets and must be of UINT8",
    ),
    "a peer left out": (
        lambda d: op_of(d, 0)["WriteTensors"].pop(),
        r"writes packets to the ranks \[1\]; on rank 0 of 3 it must write to \[1, 2\]",
    ),
    "another rank's": (
        lambda d: op_of(d, 0)["Args"].update(Rank={"INT": 2}),
        "has Rank 2 in the plan of rank 0 of 3 ranks; expected 0",
    ),
    "another world": (
        lambda d: op_of(d, 0)["Args"].update(RankNum={"INT": 4}),
        "has RankNum 4 in the plan of rank 0 of 3 ranks; expected 3",
    ),
    "no output": (
        lambda d: op_of(d, 0).update(WriteTensors=[]),
        "it must read its input and write its output",
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_wrong_fused_all_reduce_is_refused(name: str) -> None:
    change, words = FUSED[name]
    ark.init()
    tensors = [ark.tensor([96], ark.fp16) for _ in range(6)]
    data = fused_sum(0, 3)
    assert ark.Plan(data).built(registry.machine("cpu-2")).inner is not None, tensors
    change(data)
    with pytest.raises(ark.PlanError, match=words):
        ark.Plan.from_str(json.dumps(data)).built(registry.machine("cpu-2"))


def op_of(data: Data, number: int) -> Data:
    entry: Data = data["TaskInfos"][number]["Ops"][0]
    return entry


PACKET_RECV, REDUCE = 2, 1  # the task numbers in packet_ring and packet_sum
PACKETS: dict[str, tuple[Callable[[int, int], Data], Callable[[Data], object], str]] = {
    "too little room": (
        packet_ring,
        lambda d: of(d, SEND, "WriteTensors").update(
            Shape=[16799], Strides=[16799], PaddedShape=[16799]
        ),
        "packets need 2 bytes for each",
    ),
    "no flag": (packet_ring, lambda d: op_of(d, SEND).update(Args={}), "has no argument Flag"),
    "a flag that is no number": (
        packet_ring,
        lambda d: op_of(d, SEND).update(Args={"Flag": {"INT": "1"}}),
        "Flag is wrong",
    ),
    "packets to itself": (
        packet_ring,
        lambda d: of(d, SEND, "WriteTensors")["Buffer"].update(Rank=-1),
        "passes packets between rank 0 and rank -1",
    ),
    "packets that arrive elsewhere": (
        packet_ring,
        lambda d: op_of(d, PACKET_RECV)["ReadTensors"][1]["Buffer"].update(Rank=1),
        "the buffer must be on the receiving rank",
    ),
    "no tag": (
        packet_ring,
        lambda d: op_of(d, PACKET_RECV)["ReadTensors"][1]["Buffer"].update(RecvTags=[]),
        r"packets from rank 1 has the tags \[\] for it",
    ),
    "nothing that holds packets": (
        packet_ring,
        lambda d: op_of(d, PACKET_RECV)["ReadTensors"].pop(),
        "it must read the peer's and one that holds the packets",
    ),
    "fewer peers": (
        packet_sum,
        lambda d: op_of(d, REDUCE)["Args"].update(NPeers={"INT": 2}),
        "has NPeers 2 and Rank 0, but it writes to 1 peers in the plan of rank 0",
    ),
    "a sum of two types": (
        packet_sum,
        lambda d: of(d, REDUCE, "ReadTensors").update(DataType="INT32"),
        r"reads INT32\[96\] and writes FP32\[96\]",
    ),
    "one peer's packets missing": (
        packet_sum,
        lambda d: op_of(d, REDUCE)["ReadTensors"].pop(),
        "one that holds packets for each peer",
    ),
}


@pytest.mark.parametrize("name", PACKETS)
def test_wrong_message_of_packets_is_refused(name: str) -> None:
    form, change, words = PACKETS[name]
    ark.init()
    if form is packet_sum:
        ark.sharding(ark.tensor([2 * 96]), 0, 96)
    tensors = [ark.tensor([3, 700]) for _ in range(8)]
    data = form(0, 2)
    assert ark.Plan(data).built(registry.machine("cpu-2")).inner is not None, tensors
    change(data)
    with pytest.raises((ark.PlanError, ark.UnsupportedError), match=words):
        ark.Plan.from_str(json.dumps(data)).built(registry.machine("cpu-2"))


@pytest.mark.parametrize(
    ("architecture", "machine"),
    [
        ("ANY", "cpu-2"),
        ("ANY", "h100"),
        ("CUDA", "a100"),
        ("CUDA_90", "h100"),
        ("ROCM_942", "mi300x"),
    ],
)
def test_architectures_are_families_of_devices(architecture: str, machine: str, model: Any) -> None:
    data = {**norm_and_product(), "Architecture": architecture}
    built = ark.Plan.from_str(json.dumps(data)).built(registry.machine(machine))
    assert built.inner is not None and built.architecture == registry.machine(machine).arch


def test_task_shared_out_over_groups_runs_whole(model: Any) -> None:
    data = norm_and_product()
    ((task,),) = [g["TaskGroups"] for g in data["ProcessorGroups"][1]["ResourceGroups"]]
    other = json.loads(json.dumps(groups(data, 1)))
    other["ProcessorRange"], other["TaskGroups"][0]["TaskRange"] = [0, 1], [4, 6]
    task["TaskRange"] = [0, 4]
    data["ProcessorGroups"][1]["ResourceGroups"].append(other)
    assert ark.Plan.from_str(json.dumps(data)).built(registry.machine("cpu-2")).inner is not None


def test_exported_model_files_can_be_planned_by_hand() -> None:
    """ark's serialised model has all that a plan in ARK's layout needs: the test writes one by hand
    from the model's ops, scalars included.
    """
    ark.init()
    x = ark.tensor([8, 8])
    gated = ark.swiglu(ark.layernorm(x), x)
    y = ark.softmax(ark.transpose(ark.sub(gated, 2.0), [1, 0]))
    infos = []
    for number, node in enumerate(json.loads(ark.Model.get_model().serialize())["Nodes"]):
        infos.append(
            {"Id": number, "NumWarps": 1, "SramBytes": 0, "Ops": [{**node["Op"], "Config": {}}]}
        )
    task_groups = [{"TaskId": i, "TaskRange": [0, 1], "Granularity": 1} for i in range(len(infos))]
    resources = {"ProcessorRange": [0, 1], "WarpRange": [0, 1], "SramRange": [0, 0]}
    data = {
        **{"Rank": 0, "WorldSize": 1, "Architecture": "ANY", "NumProcessors": 1},
        **{"NumWarpsPerProcessor": 1, "TaskInfos": infos},
        "ProcessorGroups": [
            {
                "ProcessorRange": [0, 1],
                "ResourceGroups": [{**resources, "TaskGroups": task_groups}],
            }
        ],
    }
    inner = ark.Plan(data).built(registry.machine("cpu-2")).inner
    assert inner is not None
    ops = [op for op in inner.ops if op.kind != "iteration_end"]
    kinds = ["row_norm", "elementwise", "elementwise", "transpose", "row_norm"]
    assert [op.kind for op in ops] == kinds
    assert inner.buffers[inner.tensors[ops[-1].operands[-1]].buffer].arena == "external"
    del y
