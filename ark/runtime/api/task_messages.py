"""Compares the messages of plans in ARK's own layout between ranks, before the plans run.

Each rank reads its own plan file. In this file, a Send identifies the peer by the field Rank of the
buffer that it writes. It identifies the message by a tag that occurs both in SendTags of its input
and in RecvTags of its output. For a Recv, input and output are exchanged. The variants for packets
have the tag only in RecvTags of the memory in which packets arrive. A fused all-reduce has no tags.

Before the plans run, the ranks exchange the lists of their messages. If the lists do not match, all
ranks raise the same error. Called by ark.runtime.api.task_plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ark.errors import BaseError, PlanError
from ark.ir import dtype as dtypes
from ark.runtime.api.task_ops import Arguments
from ark.runtime.api.task_schema import (
    BufferEntry,
    Dims,
    Name,
    Offsets,
    OpEntry,
    Tag,
    TaskPlan,
    TensorEntry,
    Word,
)
from ark.runtime.run import Ranks

FUSED = "AllReducePacketFused"
TYPES = (FUSED, "Recv", "RecvPacket", "RecvReduceSendPacket", "Send", "SendPacket")
FUSED_TAGS = (1 << 31) - (1 << 16)  # a plan's first fused all-reduce has this tag, the next + 1
# Packets take twice the bytes of their data: each value is followed by a flag of the same size.
PACKET_BYTES_PER_BYTE = 2
_Rank = Annotated[int, Meta(ge=0, lt=1 << 12)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Send or Recv in a rank's plan, with the receiver's tensor as this plan describes it.

    sends: True for a Send to the peer, False for a Recv from it. flag: the flag in the message's
    packets; None if it is not sent as packets. With packets, strides and offsets are those of the
    memory in which they arrive.
    """

    op: Name
    sends: bool
    peer: _Rank
    tag: Tag
    data_type: Word
    shape: Dims
    strides: Dims
    offsets: Offsets
    flag: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None


class _Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data about a rank's plan that ranks exchange. refused: the reason why the rank cannot run
    its own plan; empty if it can.
    """

    rank: _Rank
    world_size: Annotated[int, Meta(ge=1, le=1 << 12)]
    refused: Annotated[str, Meta(max_length=1 << 16)]
    messages: Annotated[list[Message], Meta(max_length=1 << 20)]


def is_far(buffer: BufferEntry, rank: int) -> bool:
    """True if the buffer is in the memory of another rank."""
    return buffer.rank not in (-1, rank)


def messages(op: OpEntry, plan: TaskPlan, before: int) -> list[Message]:
    """The messages of an op of TYPES, first those received, then those sent, by peer.

    Raises PlanError unless the op names one peer and one tag for each message. before: the number
    of fused all-reduces that the plan runs before this op.
    """
    result = _messages(op, plan, before)
    above = [m.tag for m in result if m.tag >= FUSED_TAGS]
    if above and op.type != FUSED:
        raise PlanError(
            f"op {op.name!r} of type {op.type} has the tag {above[0]}; tags from {FUSED_TAGS} on "
            f"are reserved for {FUSED}; give this op a smaller tag"
        )
    return result


def _messages(op: OpEntry, plan: TaskPlan, before: int) -> list[Message]:
    if "Packet" not in op.type:
        return [_message(op, plan)]
    subject = f"op {op.name!r} of type {op.type}"
    reads, writes = op.read_tensors, op.write_tensors
    fits, expected = _FORMS[op.type]
    if not fits(len(reads), len(writes)):
        raise PlanError(
            f"{subject} reads {len(reads)} tensors and writes {len(writes)}; it must {expected}"
        )
    if op.type == "SendPacket":
        return [_packets(op, plan, reads[0], writes[0].buffer.rank, writes[0], sends=True)]
    if op.type == "RecvPacket":
        return [_packets(op, plan, writes[0], reads[0].buffer.rank, reads[1], sends=False)]
    args = Arguments(op)
    if op.type == FUSED:
        return _all_to_all(op, plan, args, FUSED_TAGS + before)
    if (args(int, "NPeers"), args(int, "Rank")) != (len(writes) - 1, plan.rank):
        raise PlanError(
            f"{subject} has NPeers {args(int, 'NPeers')} and Rank {args(int, 'Rank')}, but it "
            f"writes to {len(writes) - 1} peers in the plan of rank {plan.rank}"
        )
    _check_same(op)
    pairs = list(zip(reads[1:], writes[1:], strict=True))
    return [
        *(_packets(op, plan, writes[0], to.buffer.rank, own, sends=False) for own, to in pairs),
        *(_packets(op, plan, writes[0], to.buffer.rank, to, sends=True) for _, to in pairs),
    ]


def _check_same(op: OpEntry) -> None:
    read, written = op.read_tensors[0], op.write_tensors[0]
    if (read.data_type, read.shape) != (written.data_type, written.shape):
        raise PlanError(
            f"op {op.name!r} of type {op.type} reads {_type(read)} and writes {_type(written)}; "
            "both must be the same"
        )


def _all_to_all(op: OpEntry, plan: TaskPlan, args: Arguments, tag: int) -> list[Message]:
    """The messages of a fused all-reduce: every rank sends its share to all others.

    Besides its input and its output, the op names memory for packets, here and on every peer, or
    none at all.
    """
    subject = f"op {op.name!r} of type {op.type}"
    if tag > (1 << 31) - 1:
        raise PlanError(
            f"{subject} exceeds the limit of {(1 << 31) - FUSED_TAGS} such ops per plan"
        )

    _check_same(op)
    own, written = op.read_tensors[0], op.write_tensors[0]
    held = [*op.read_tensors[1:], *op.write_tensors[1:]]
    if any(is_far(t.buffer, plan.rank) for t in (own, written)):
        raise PlanError(f"{subject} reads or writes a tensor of another rank than {plan.rank}")
    if any(t.data_type not in ("UINT8", "BYTE") for t in held):
        raise PlanError(
            f"{subject} has, besides its input and its output, tensors of the types "
            f"{', '.join(map(_type, held))}; these tensors hold packets and must be of UINT8"
        )
    others = [rank for rank in range(plan.world_size) if rank != plan.rank]
    far = sorted(t.buffer.rank for t in held if is_far(t.buffer, plan.rank))
    if far not in ([], others):
        raise PlanError(
            f"{subject} writes packets to the ranks {far}; on rank {plan.rank} of "
            f"{plan.world_size} it must write to {others}"
        )
    for names, expected in (
        (("Rank",), plan.rank),
        (("RankNum", "NRanks", "WorldSize"), plan.world_size),
        (("NPeers",), len(others)),
    ):
        if args.has(*names) and args(int, *names) != expected:
            raise PlanError(
                f"{subject} has {names[0]} {args(int, *names)} in the plan of rank {plan.rank} of "
                f"{plan.world_size} ranks; expected {expected}"
            )
    flag = args(Annotated[int, Meta(ge=0, lt=1 << 32)], "Flag") if args.has("Flag") else 0
    dense = [0] * len(own.shape)
    return [
        Message(op.name, sends, r, tag, own.data_type, own.shape, own.shape, dense, flag)
        for sends in (False, True)
        for r in others
    ]


_FORMS: dict[str, tuple[Callable[[int, int], bool], str]] = {
    FUSED: (
        lambda reads, writes: min(reads, writes) > 0,
        "read its input and write its output",
    ),
    "SendPacket": (
        lambda reads, writes: (reads, writes) == (1, 1),
        "read one and write one, which holds the packets on the peer",
    ),
    "RecvPacket": (
        lambda reads, writes: (reads, writes) == (2, 1),
        "read the peer's and one that holds the packets, and write one",
    ),
    "RecvReduceSendPacket": (
        lambda reads, writes: reads == writes > 1,
        "read its own and one that holds packets for each peer, and write its own and one that "
        "holds packets on each peer",
    ),
}


def _packets(
    op: OpEntry, plan: TaskPlan, own: TensorEntry, peer: int, held: TensorEntry, sends: bool
) -> Message:
    """The message of an op that sends or receives packets; raises PlanError for mistakes. own: the
    tensor that is sent or received into. held: the memory in which packets arrive.
    """
    subject = f"op {op.name!r} of type {op.type}"
    where = held.buffer.rank if sends else own.buffer.rank
    if peer in (-1, plan.rank) or is_far(own.buffer, plan.rank) or is_far(held.buffer, where):
        raise PlanError(
            f"{subject} passes packets between rank {plan.rank} and rank {peer} through a buffer "
            f"of Rank {held.buffer.rank}; the buffer must be on the receiving rank, and the peer "
            "another rank"
        )
    nbytes = math.prod(own.shape) * dtypes.by_name(own.data_type.lower()).itemsize
    if (
        held.data_type not in ("UINT8", "BYTE")
        or math.prod(held.shape) < PACKET_BYTES_PER_BYTE * nbytes
    ):
        raise PlanError(
            f"{subject} passes packets of {_type(own)} through {_type(held)}; packets need "
            f"{PACKET_BYTES_PER_BYTE} bytes for each byte of data, so the buffer must be "
            f"UINT8[{PACKET_BYTES_PER_BYTE * nbytes}]"
        )
    whose = (-1, plan.rank) if sends else (peer,)
    tags = {tag for rank, tag in held.buffer.recv_tags if rank in whose}
    if len(tags) != 1:
        raise PlanError(
            f"{subject}: RecvTags of the buffer that holds packets from rank "
            f"{plan.rank if sends else peer} has the tags {sorted(tags)} for it; it must have "
            "exactly one, so give each message buffers of its own"
        )
    flag = Arguments(op)(Annotated[int, Meta(ge=0, lt=1 << 32)], "Flag")
    (tag,) = tags
    layout = (own.data_type, own.shape, held.strides, held.offsets)
    return Message(op.name, sends, peer, tag, *layout, flag)


def _message(op: OpEntry, plan: TaskPlan) -> Message:
    """The message of a Send or Recv; raises PlanError unless it names one peer and one tag."""
    sends = op.type == "Send"
    subject = f"op {op.name!r} of type {op.type}"
    if len(op.read_tensors) != 1 or len(op.write_tensors) != 1:
        raise PlanError(
            f"{subject} reads {len(op.read_tensors)} tensors and writes {len(op.write_tensors)}; "
            "it must read one and write one, of which one lies on the peer"
        )
    read, written = op.read_tensors[0], op.write_tensors[0]
    own, far = (read, written) if sends else (written, read)
    if is_far(own.buffer, plan.rank) or not is_far(far.buffer, plan.rank):
        raise PlanError(
            f"{subject} reads a buffer of Rank {read.buffer.rank} and writes one of Rank "
            f"{written.buffer.rank}; on rank {plan.rank} it must "
            + ("write to another rank" if sends else "read from another rank")
        )
    if (read.data_type, read.shape) != (written.data_type, written.shape):
        raise PlanError(
            f"{subject} reads {_type(read)} and writes {_type(written)}; both must be the same"
        )
    peer = far.buffer.rank
    buffer = own.buffer
    ours = {tag for rank, tag in (buffer.send_tags if sends else buffer.recv_tags) if rank == peer}
    buffer = far.buffer
    theirs = {
        tag
        for rank, tag in (buffer.recv_tags if sends else buffer.send_tags)
        if rank in (-1, plan.rank)
    }
    if len(ours & theirs) != 1:
        mine, other = ("SendTags", "RecvTags") if sends else ("RecvTags", "SendTags")
        raise PlanError(
            f"{subject} on rank {plan.rank} has rank {peer} as its peer; the field {mine} of the "
            f"buffer on rank {plan.rank} lists the tags {sorted(ours)} for rank {peer}, and the "
            f"field {other} of the buffer on rank {peer} lists {sorted(theirs)}; they must have "
            "exactly one in common, so give each message buffers of its own"
        )
    (tag,) = ours & theirs
    return Message(
        op.name,
        sends,
        peer,
        tag,
        written.data_type,
        written.shape,
        written.strides,
        written.offsets,
    )


def _type(entry: TensorEntry | Message) -> str:
    return f"{entry.data_type}{entry.shape}"


def tell(
    plan: TaskPlan, messages: Sequence[Message], refused: BaseError | None, ranks: Ranks
) -> None:
    """Exchanges the ranks' messages, in the order in which their ops run, and compares them.

    Raises PlanError on every rank if a rank refuses its plan, or if messages do not match.

    refused: the error for which this rank refuses its own plan, or None.
    """
    words = str(refused)[:2000] if refused else ""
    statement = _Statement(plan.rank, plan.world_size, words, list(messages))
    check(ranks.all_gather(msgspec.json.encode(statement)))


def check(texts: Sequence[bytes]) -> None:
    """Raises PlanError, which names the ranks, unless the data of all ranks describe plans of one
    job.
    """
    everyone = [_read(rank, text) for rank, text in enumerate(texts)]
    for rank, statement in enumerate(everyone):
        if (statement.rank, statement.world_size) != (rank, len(texts)):
            raise PlanError(
                f"rank {rank} of {len(texts)} was given the plan of rank {statement.rank} of "
                f"{statement.world_size}; each rank reads the plan file that was made for it"
            )
    for rank, statement in enumerate(everyone):
        if statement.refused:
            raise PlanError(f"rank {rank} cannot run its plan: {statement.refused}")
    sent: dict[tuple[int, int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[Message]] = defaultdict(list)
    for rank, statement in enumerate(everyone):
        for one in statement.messages:
            if one.sends:
                sent[rank, one.peer, one.tag].append(one)
            else:
                received[one.peer, rank, one.tag].append(one)
    for key in sorted({*sent, *received}):
        _check_pairs(key, sent[key], received[key])


def _read(rank: int, text: bytes) -> _Statement:
    try:
        return msgspec.json.decode(text, type=_Statement, strict=True)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise PlanError(
            f"rank {rank} did not describe its messages as ARK's plan layout requires ({error}); "
            "start every rank with its own file of one plan, and with the same version of ark"
        ) from error


def _check_pairs(
    key: tuple[int, int, int], sent: Sequence[Message], received: Sequence[Message]
) -> None:
    source, target, tag = key
    for one, other in zip(sent, received, strict=False):
        if (one.data_type, one.shape) != (other.data_type, other.shape):
            raise PlanError(
                f"under tag {tag}, rank {source} sends {_type(one)} to rank {target} (op "
                f"{one.op!r}), but rank {target} receives {_type(other)} (op {other.op!r}); both "
                "plans must give the same type and shape"
            )
        if one.flag != other.flag:
            raise PlanError(
                f"under tag {tag}, rank {source} sends {_form(one)} to rank {target} (op "
                f"{one.op!r}), but rank {target} receives {_form(other)} (op {other.op!r}); both "
                "plans must agree"
            )
        if (one.strides, one.offsets) != (other.strides, other.offsets):
            raise PlanError(
                f"under tag {tag}, rank {source} sends to a tensor of Strides {one.strides} and "
                f"Offsets {one.offsets} on rank {target} (op {one.op!r}), but rank {target} "
                f"receives into Strides {other.strides} and Offsets {other.offsets} (op "
                f"{other.op!r}); both plans must describe that tensor equally"
            )
    if len(sent) != len(received):
        raise PlanError(
            f"under tag {tag}, rank {source} sends {_count(sent)} to rank {target}, but rank "
            f"{target} receives {_count(received)} from rank {source}; each Send needs a Recv of "
            "the same tag on the other rank"
        )


def _form(message: Message) -> str:
    return "without packets" if message.flag is None else f"packets of Flag {message.flag}"


def _count(messages: Sequence[Message]) -> str:
    names = ", ".join(repr(m.op) for m in messages[:4])
    number = f"{len(messages)} message{'s' * (len(messages) != 1)}" if messages else "nothing"
    return f"{number} ({names})" if names else number
