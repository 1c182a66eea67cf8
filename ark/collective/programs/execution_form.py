"""The schema of MSCCL++ execution plans, which are JSON files with the operations of every thread
block of every GPU.

Field names are those of MSCCL++. `ark.collective.programs.execution_write` and `execution_read` use
the schema. References have two levels: an operation refers to channels and remote buffers by their
index in the lists of its thread block, and an entry of these lists is an index into the lists of
the GPU. The n-th channel from GPU a to b and the n-th from b to a are the two ends of one
connection.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ark.collective.programs.types import Collective
from ark.ir.json_reader import Closed

COLLECTIVES = {
    Collective.ALL_GATHER: "allgather",
    Collective.REDUCE_SCATTER: "reducescatter",
    Collective.ALL_REDUCE: "allreduce",
    Collective.BROADCAST: "broadcast",
    Collective.REDUCE: "reduce",
    Collective.ALL_TO_ALL: "alltoall",
}
SEND_RECV = "sendrecv"  # an all-to-all in which each rank sends everything to one rank

# The capacities of MSCCL++'s executor (execution_common.hpp), and the number of thread blocks that
# an A100, with 108 multiprocessors, keeps resident at once. All blocks must be resident, because
# they wait for each other.
MOST_OPS, MOST_CHANNELS, MOST_PER_OP, MOST_SEMAPHORES, MOST_BLOCKS = 64, 16, 8, 16, 108

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 15)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 15)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Place = Literal["i", "o", "s"]
ChannelType = Literal["memory", "port", "none", "switch"]


class _Form(Closed, frozen=True, omit_defaults=True):
    """The base class of all objects in the schema. Reading an object with unknown fields raises an
    error. Fields that have their default value are omitted when an object is written.
    """


class Chunks(_Form, frozen=True):
    """`size` chunks from `index` on. They are in a buffer of this GPU (`type`), in a buffer of a
    peer (`buffer_id`), or in the buffers of all GPUs of a switch channel.
    """

    index: Number
    size: Count
    type: Place | None = None
    buffer_id: Number | None = None
    switch_channel_id: Number | None = None
    rank: Rank | None = None


class Slice(_Form, frozen=True):
    """The part of an operation that one thread block executes, if `tbg_size` thread blocks share
    the operation in equal parts.
    """

    tb_id: Number
    tbg_size: Count


class Pipeline(_Form, frozen=True):
    """The cutting of the data for the operations in a pipeline: into `num_chunks` units of
    `unit_size` bytes.
    """

    unit_size: Bytes
    num_chunks: Number


class Op(_Form, frozen=True):
    """One operation of a thread block. The fields buffer_type, buffer_offset, size and dst_chunk
    are used only by an operation that loads from all GPUs of a switch channel.
    """

    name: str
    channel_type: ChannelType | None = None
    channel_ids: tuple[Number, ...] = ()
    src_buff: tuple[Chunks, ...] = ()
    dst_buff: tuple[Chunks, ...] = ()
    tbg_info: Slice | None = None
    barrier_id: Number | None = None
    num_threadblocks: Number | None = None
    semaphore_ids: tuple[Number, ...] = ()
    reduce_op: Literal["sum", "min", "max"] | None = None
    buffer_type: Place | None = None
    buffer_offset: Number | None = None
    size: Count | None = None
    dst_chunk: Chunks | None = None
    iter_context: Pipeline | None = None
    ops: tuple[Op, ...] = ()


class BlockChannels(_Form, frozen=True):
    """The GPU's channels that a thread block uses."""

    channel_type: ChannelType
    channel_ids: tuple[Number, ...]
    buff: Place | None = None


class BlockBuffers(_Form, frozen=True):
    """The GPU's remote buffers that a thread block uses."""

    access_channel_type: ChannelType
    remote_buffer_ids: tuple[Number, ...]


class Block(_Form, frozen=True):
    """A thread block. Its operations run one after another."""

    id: Number
    ops: tuple[Op, ...]
    channels: tuple[BlockChannels, ...]
    remote_buffer_refs: tuple[BlockBuffers, ...] = ()


class RankGroup(_Form, frozen=True):
    """The ranks of a switch channel."""

    size: Count
    ranks: tuple[Rank, ...]


class Channels(_Form, frozen=True):
    """The GPU's channels of one type, one for each entry of `connected_to`. buff: an older name of
    buffer_type.
    """

    channel_type: ChannelType
    connected_to: tuple[Rank, ...] = ()
    buff: Place | None = None
    buffer_type: Place | None = None
    rank_groups: tuple[RankGroup, ...] = ()


class RemoteBuffer(_Form, frozen=True):
    """A buffer of another GPU."""

    rank: Rank
    type: Place
    access_channel_types: tuple[ChannelType, ...]


class Semaphore(_Form, frozen=True):
    """A counter between the thread blocks of a GPU."""

    init_value: Number


class Gpu(_Form, frozen=True):
    """The buffers, channels and thread blocks of one rank."""

    id: Rank
    input_chunks: Number
    output_chunks: Number
    scratch_chunks: Number
    threadblocks: tuple[Block, ...]
    channels: tuple[Channels, ...]
    remote_buffers: tuple[RemoteBuffer, ...]
    semaphores: tuple[Semaphore, ...] = ()


class ExecutionPlan(_Form, frozen=True):
    """An MSCCL++ execution plan: the content of the whole file."""

    name: str
    collective: str
    inplace: bool
    protocol: Literal["Simple", "LL"]
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(min_length=1, max_length=1024)]
    reuse_resources: bool = False
    use_double_scratch_buffer: bool = False
    num_threads_per_block: Count = 1024
    buffer_alignment: Count = 16
    min_message_size: Bytes = 0
    max_message_size: Bytes = (1 << 64) - 1
