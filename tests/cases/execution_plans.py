"""MSCCL++ execution plans with the fields that its plan language of 2026 publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Op = dict[str, Any]


def local(place: str, index: int, size: int = 1) -> Op:
    return {"type": place, "index": index, "size": size}


def remote(buffer: int, index: int, size: int = 1) -> Op:
    return {"buffer_id": buffer, "index": index, "size": size}


def move(name: str, src: list[Op], dst: list[Op], **more: Any) -> Op:
    kind = {"channel_type": "memory"} if any("buffer_id" in c for c in (*src, *dst)) else {}
    return {"name": name, "src_buff": src, "dst_buff": dst, **kind, **more}


def meet(count: int) -> list[Op]:
    """Returns the ops by which a GPU signals all peers and waits for their signals."""
    channels = {"channel_type": "memory", "channel_ids": list(range(count))}
    return [
        {"name": "nop"},
        {"name": "signal", **channels},
        {"name": "wait", **channels},
        {"name": "nop"},
    ]


def plan(
    collective: str,
    world: int,
    ops: Callable[[int, list[int]], list[list[Op]]],
    chunks: tuple[int, int],
    scratch: int = 0,
    inplace: bool = True,
    protocol: str = "Simple",
    place: str = "s",
    switch: str = "",
) -> str:
    """Returns a plan as JSON. GPU r has one thread block for each list in ops(r, peers). Remote
    buffer i and channel i belong to the i-th peer and refer to its buffer `place`. switch: the
    buffer of a switch channel of all GPUs, or empty.
    """
    gpus = []
    for rank in range(world):
        peers = [p for p in range(world) if p != rank]
        every = list(range(len(peers)))
        blocks = []
        lists = ops(rank, peers)
        for number, own in enumerate(lists):
            ids = [i * len(lists) + number for i in every]
            channels: list[Any] = [{"channel_type": "memory", "channel_ids": ids, "buff": place}]
            if switch:
                channels.append({"channel_type": "switch", "channel_ids": [0]})
            refs = [{"access_channel_type": "memory", "remote_buffer_ids": every}]
            blocks.append(
                {"id": number, "ops": own, "channels": channels, "remote_buffer_refs": refs}
            )
        links: list[Any] = [
            {"channel_type": "memory", "connected_to": [p for p in peers for _ in lists]}
        ]
        if switch:
            group = {"size": world, "ranks": list(range(world))}
            links.append({"channel_type": "switch", "buffer_type": switch, "rank_groups": [group]})
        buffers = [{"rank": p, "type": place, "access_channel_types": ["memory"]} for p in peers]
        gpus.append(
            {
                "id": rank, "input_chunks": chunks[0], "output_chunks": chunks[1],
                "scratch_chunks": scratch, "threadblocks": blocks, "channels": links,
                "remote_buffers": buffers, "semaphores": [],
            }
        )  # fmt: skip
    whole = {
        "name": f"{collective} of {world}", "collective": collective, "protocol": protocol,
        "inplace": inplace, "reuse_resources": False, "gpus": gpus, "num_threads_per_block": 1024,
        "use_double_scratch_buffer": protocol == "LL", "buffer_alignment": 16,
        "min_message_size": 0, "max_message_size": 2**64 - 1,
    }  # fmt: skip
    return json.dumps(whole)


def reduced_by_packets(world: int, reduction: str = "sum") -> str:
    """An all-reduce: each chunk is sent as packets to the rank that reduces it, and sums return as
    packets.
    """

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        sent = [move("ppkt", [local("i", p)], [remote(i, rank)]) for i, p in enumerate(peers)]
        own = local("i", rank)
        targets = [own, *(remote(i, world + rank) for i in range(len(peers)))]
        sources = [own, *(local("s", p) for p in peers)]
        total = move("respkt", sources, targets, reduce_op=reduction)
        taken = [move("upkt", [local("s", world + p)], [local("i", p)]) for p in peers]
        return [[*sent, total], taken]

    return plan("allreduce", world, ops, (world, world), 2 * world, protocol="LL")


def copied_and_reduced_by_packets(world: int) -> str:
    """The same all-reduce, but the reduction also stores the sum as packets, which a second
    operation sends.
    """

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        sent = [move("ppkt", [local("i", p)], [remote(i, rank)]) for i, p in enumerate(peers)]
        sources = [local("i", rank), *(local("s", p) for p in peers)]
        kept = [local("i", rank), local("s", world + rank)]
        total = move("recpkt", sources, kept, reduce_op="sum")
        on = [remote(i, world + rank) for i in range(len(peers))]
        passed_on = move("rppkt", [local("s", world + rank)], on)
        taken = [move("upkt", [local("s", world + p)], [local("i", p)]) for p in peers]
        return [[*sent, total, passed_on, *taken]]

    return plan("allreduce", world, ops, (world, world), 2 * world, protocol="LL")


def gathered_by_packets(world: int) -> str:
    """An all-gather: a rank copies its chunk into packets, then reads the packets and sends
    them.
    """

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        first = move("cpkt", [local("o", rank)], [local("s", rank)])
        on = [remote(i, rank) for i in range(len(peers))]
        sent = move("rppkt", [local("s", rank)], on)
        taken = [move("upkt", [local("s", p)], [local("o", p)]) for p in peers]
        return [[first, sent], taken]

    return plan("allgather", world, ops, (1, world), world, protocol="LL")


def gathered_in_slices(world: int) -> str:
    """An all-gather by two thread blocks, each of which puts one half of every chunk."""

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        return [
            [
                *(
                    move("put", [local("i", 0)], [remote(i, rank)],
                         tbg_info={"tb_id": half, "tbg_size": 2})
                    for i in range(len(peers))
                ),
                move("copy", [local("i", 0)], [local("o", rank)],
                     tbg_info={"tb_id": half, "tbg_size": 2}),
                *meet(len(peers)),
            ]
            for half in range(2)
        ]  # fmt: skip

    return plan("allgather", world, ops, (1, world), inplace=False, place="o")


def reduced_by_the_switch(world: int, reduction: str = "sum") -> str:
    """An all-reduce by one operation: a reducing load through the switch and a store to all
    GPUs.
    """

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        chunk = {"switch_channel_id": 0, "index": rank, "size": 1}
        work = {"name": "glres", "src_buff": [chunk], "dst_buff": [chunk],
                "channel_type": "switch", "reduce_op": reduction}  # fmt: skip
        return [[*meet(len(peers)), work, *meet(len(peers))]]

    return plan("allreduce", world, ops, (world, world), switch="i")


def loaded_then_stored(world: int) -> str:
    """The same all-reduce by two operations, with the sum in scratch between them."""

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        load = {"name": "glre", "buffer_type": "i", "buffer_offset": rank, "size": 1,
                "dst_chunk": {"rank": rank, "type": "s", "index": 0, "size": 1},
                "channel_ids": [0], "channel_type": "switch", "reduce_op": "sum"}  # fmt: skip
        store = {"name": "gstore", "src_buff": [{"rank": rank, **local("s", 0)}],
                 "dst_buff": [{"switch_channel_id": 0, "index": rank, "size": 1}],
                 "channel_type": "switch"}  # fmt: skip
        return [[*meet(len(peers)), load, store, *meet(len(peers))]]

    return plan("allreduce", world, ops, (world, world), 1, switch="i")


def exchanged_in_place(world: int) -> str:
    """An in-place all-to-all. The ranks' parts are copied through scratch memory, because the input
    is also the output.
    """

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        sent = [move("put", [local("i", p)], [remote(i, rank)]) for i, p in enumerate(peers)]
        taken = [move("copy", [local("s", p)], [local("i", p)]) for p in peers]
        return [[*meet(len(peers)), *sent, *meet(len(peers)), *taken]]

    return plan("alltoall", world, ops, (world, world), world)


def shifted(world: int, by: int = 1) -> str:
    """Each GPU puts its input into the output of the GPU `by` ranks after it."""

    def ops(rank: int, peers: list[int]) -> list[list[Op]]:
        to = peers.index((rank + by) % world)
        return [
            [
                *meet(len(peers)),
                move("put", [local("i", 0, 3)], [remote(to, 0, 3)], channel_ids=[to]),
                *meet(len(peers)),
            ]
        ]

    return plan("sendrecv", world, ops, (3, 3), inplace=False, place="o")
