"""Plans in ARK's own layout, written by hand according to ARK's description of plan files."""

from __future__ import annotations

import copy
from typing import Any

ROWS, COLUMNS, OUT = 24, 32, 16


def tensor(number: int, buffer: int, shape: list[int], dtype: str = "FP32") -> dict[str, Any]:
    """A dense tensor. ARK gives the result of an op a separate tensor number on the output's
    buffer.
    """
    return {
        "Id": number,
        "DataType": dtype,
        "Shape": shape,
        "Strides": shape,
        "Offsets": [0] * len(shape),
        "PaddedShape": shape,
        "Buffer": {
            "Id": buffer,
            "Rank": -1,
            "SendTags": [],
            "RecvTags": [],
            "IsExternal": False,
        },
    }


def op(
    kind: str,
    reads: list[Any],
    written: Any,
    config: dict[str, Any],
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "Type": kind,
        "Name": kind.lower(),
        "IsVirtual": False,
        "ReadTensors": reads,
        "WriteTensors": [written],
        "ResultTensors": [{**written, "Id": written["Id"] + 1}],
        "Args": args or {},
        "Config": {"NumWarps": 1, "SramBytes": 0, **config},
    }


def group(
    tasks: list[tuple[int, int]], processors: list[int], granularity: int = 1
) -> dict[str, Any]:
    return {
        "ProcessorRange": processors,
        "ResourceGroups": [
            {
                "ProcessorRange": processors,
                "WarpRange": [0, 8],
                "SramRange": [0, 0],
                "TaskGroups": [
                    {"TaskId": i, "TaskRange": [0, n], "Granularity": granularity} for i, n in tasks
                ],
            }
        ],
    }


def norm_and_product() -> dict[str, Any]:
    """x / mean(x x) w: five ops in three task infos, the first of which has three ops."""
    wide, narrow = [1, ROWS, COLUMNS], [1, ROWS, 1]
    x, weight = tensor(9, 9, wide, "FP16"), tensor(0, 0, [COLUMNS, OUT])
    cast, square = tensor(11, 11, wide), tensor(13, 12, wide)
    mean, scaled = tensor(15, 13, narrow), tensor(17, 14, wide)
    product = tensor(19, 15, [1, ROWS, OUT])
    rows = {"Tile": [1, COLUMNS], "NumTasks": ROWS}

    def output_of(t: dict[str, Any]) -> dict[str, Any]:
        return {**t, "Id": t["Id"] + 1}

    first = [
        op("Cast", [x], cast, rows),
        op("Mul", [output_of(cast), output_of(cast)], square, rows),
        op(
            "ReduceMean",
            [output_of(square)],
            mean,
            {"ImplType": "WarpWise", "NumTasks": ROWS},
            {"Axis": {"INT": 2}, "KeepDim": {"BOOL": True}},
        ),
    ]
    second = [
        op("Div", [output_of(cast), output_of(mean)], scaled, {"Tile": [4, COLUMNS], "NumTasks": 6})
    ]
    third = [
        op(
            "Matmul",
            [output_of(scaled), weight],
            product,
            {"TileShapeMNK": [8, 16, 32], "TilePadMNK": [8, 16, 32], "NumTasks": 3, "NumWarps": 4},
            {"TransposeInput": {"BOOL": False}, "TransposeOther": {"BOOL": False}},
        )
    ]
    infos = [
        {"Id": 3 * i, "NumWarps": 1, "SramBytes": 0, "Ops": ops}
        for i, ops in enumerate((first, second, third))
    ]
    return copy.deepcopy(
        {
            "Rank": 0,
            "WorldSize": 1,
            "Architecture": "ANY",
            "NumProcessors": 2,
            "NumWarpsPerProcessor": 8,
            "TaskInfos": infos,
            "ProcessorGroups": [
                group([(0, ROWS)], [0, 2], 7),
                group([(3, 6)], [1, 2]),
                group([(6, 3)], [0, 2, 1]),
            ],
        }
    )


def _on(entry: dict[str, Any], **buffer: Any) -> dict[str, Any]:
    """Returns the tensor's entry with other fields of its buffer."""
    return {**entry, "Buffer": {**entry["Buffer"], **buffer}}


def ring(rank: int, world: int, shape: tuple[int, ...] = (3, 700)) -> dict[str, Any]:
    """A rank's plan: y = (rank + 1) x is sent to the next rank, and z = y + r, where r is the
    tensor received. The tensor numbers of x, y, r and z are 0, 2, 4, 6. The tag of each message is
    its sender's rank.
    """
    after, before = (rank + 1) % world, (rank - 1) % world
    dims = list(shape)
    x, y = tensor(0, 0, dims), _on(tensor(2, 1, dims), SendTags=[[after, rank]])
    received = _on(tensor(4, 2, dims), RecvTags=[[before, before]])
    there = _on(tensor(8, 4, dims), Rank=after, RecvTags=[[-1, rank]])
    source = _on(tensor(10, 5, dims), Rank=before, SendTags=[[-1, before]])
    total = tensor(6, 3, dims)
    by_proxy = {"ChannelType": "Proxy", "NumTasks": 1}
    done = {**op("SendDone", [{**there, "Id": 9}], there, by_proxy), "WriteTensors": []}
    ops = [
        op("ScalarMul", [x], y, {"NumTasks": 1}, {"Factor": {"FLOAT": rank + 1.0}}),
        op("Send", [{**y, "Id": 3}], there, {**by_proxy, "Signal": True}),
        done,
        op("Recv", [source], received, by_proxy),
        op("Add", [{**y, "Id": 3}, {**received, "Id": 5}], total, {"NumTasks": 1}),
    ]
    return _plan_of(rank, world, ops)


def _packets(number: int, nbytes: int, at: int = 0, slots: int = 1, **buffer: Any) -> Any:
    """Returns a byte tensor in which packets with `nbytes` bytes of data arrive: number `at` of the
    `slots` equal parts of a buffer.
    """
    one = 2 * nbytes
    held = _on(tensor(number, number, [one], "UINT8"), **buffer)
    return {**held, "Strides": [slots * one], "Offsets": [at * one]}


def _plan_of(rank: int, world: int, ops: list[dict[str, Any]]) -> dict[str, Any]:
    infos = [{"Id": i, "NumWarps": 1, "SramBytes": 0, "Ops": [one]} for i, one in enumerate(ops)]
    return copy.deepcopy(
        {
            "Rank": rank,
            "WorldSize": world,
            "Architecture": "ANY",
            "NumProcessors": 1,
            "NumWarpsPerProcessor": 8,
            "TaskInfos": infos,
            "ProcessorGroups": [group([(i, 1)], [0, 1]) for i in range(len(ops))],
        }
    )


_BY_PACKETS = {"NumTasks": 1, "Tile": [1, 128], "PacketType": "mscclpp::LL16Packet"}
FLAG = {"Flag": {"UINT32": 1}}


def packet_ring(rank: int, world: int, shape: tuple[int, ...] = (3, 700)) -> dict[str, Any]:
    """The exchange of `ring` by packets. Only the receiver's plan states the tags of
    its packets.
    """
    after, before = (rank + 1) % world, (rank - 1) % world
    dims, nbytes = list(shape), 4 * shape[0] * shape[1]
    x, y, received, total = (tensor(2 * i, i, dims) for i in range(4))
    there = _packets(8, nbytes, Rank=after, RecvTags=[[-1, rank]])
    here = _packets(9, nbytes, RecvTags=[[before, before]])
    source = _on(tensor(10, 10, dims), Rank=before)
    ops = [
        op("ScalarMul", [x], y, {"NumTasks": 1}, {"Factor": {"FLOAT": rank + 1.0}}),
        op("SendPacket", [{**y, "Id": 3}], there, _BY_PACKETS, FLAG),
        op("RecvPacket", [source, here], received, _BY_PACKETS, FLAG),
        op("Add", [{**y, "Id": 3}, {**received, "Id": 5}], total, {"NumTasks": 1}),
    ]
    return _plan_of(rank, world, ops)


def packet_sum(rank: int, world: int, size: int = 96) -> dict[str, Any]:
    """The sum of x over the ranks in y, as in ARK's two-step all-reduce by packets: every rank adds
    up its part of all inputs and sends the sum to all ranks. x has world * size elements and the
    number 0. The numbers of its parts follow, then y and its parts.
    """
    others = [r for r in range(world) if r != rank]

    def part(buffer: int, index: int) -> dict[str, Any]:
        whole = tensor(buffer * (world + 1) + 1 + index, buffer, [world * size])
        return {**whole, "Shape": [size], "Offsets": [index * size], "PaddedShape": [size]}

    def held(number: int, owner: int, sender: int, tag: int) -> dict[str, Any]:
        """The slot of rank `owner`'s packet buffer for data from `sender`. There is one slot for
        each peer.
        """
        slot = sender - (sender > owner)
        tags = [[-1, tag]] if owner != rank else [[r, tag] for r in others]
        at = {"at": slot, "slots": world - 1}
        return _packets(number, 4 * size, **at, Rank=owner if owner != rank else -1, RecvTags=tags)

    ops = [
        op("SendPacket", [part(0, r)], held(20 + r, r, rank, 0), _BY_PACKETS, FLAG) for r in others
    ]
    peers = {"NPeers": {"UINT32": len(others)}, "NElemsPerRank": {"UINT64": size}}
    scattered = [held(10, rank, r, 0) for r in others]
    gathered = [held(30 + r, r, rank, 1) for r in others]
    reduced = op(
        "RecvReduceSendPacket",
        [part(0, rank), *scattered],
        part(1, rank),
        _BY_PACKETS,
        {**FLAG, **peers, "Rank": {"INT": rank}},
    )
    ops.append({**reduced, "WriteTensors": [part(1, rank), *gathered]})
    for r in others:
        source = _on(tensor(40 + r, 40 + r, [size]), Rank=r)
        reads = [source, held(11, rank, r, 1)]
        ops.append(op("RecvPacket", reads, part(1, r), _BY_PACKETS, FLAG))
    return _plan_of(rank, world, ops)


def fused_sum(rank: int, world: int, size: int = 96) -> dict[str, Any]:
    """The sum of x over the ranks in y, and its sum in z, as in ARK's fused all-reduce. x, y and z
    have the tensor numbers 0, 2 and 4. The first sum does not state the bytes of its packets.
    """
    x, y, z = (tensor(2 * i, i, [size], "FP16") for i in range(3))
    scratch = tensor(6, 3, [size * 8], "UINT8")
    peers = [_on(tensor(10 + r, 10 + r, [size * 8], "UINT8"), Rank=r) for r in range(world)]
    args = {**FLAG, "Rank": {"INT": rank}, "RankNum": {"INT": world}}
    first = op("AllReducePacketFused", [x, scratch], y, _BY_PACKETS, args)
    first["WriteTensors"] += [peers[r] for r in range(world) if r != rank]
    second = op("AllReducePacketFused", [{**y, "Id": 3}], z, _BY_PACKETS)
    return _plan_of(rank, world, [first, second])
