"""Converts the operations of an MSCCL++ execution plan that move or reduce data to operations of a
program.

A packet consists of data and a flag, and a reader of the packet waits for the flag. So an operation
that reads packets depends on the operations that wrote the packets. A switch channel loads from,
and stores to, all GPUs of its group at once; it is converted to one put (one-sided write) for each
GPU. Called by ark.collective.programs.execution_read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from ark.collective.programs import execution_form as form
from ark.collective.programs.builder import IN, OUT
from ark.collective.programs.types import Collective, Kind, Operation, OpRef, Span
from ark.errors import ModelError, UnsupportedError

PUTS = ("put", "pws", "pwsf", "ppkt", "rppkt")
REDUCES = ("copy", "re", "res", "rre", "rres", "cpkt", "upkt", "repkt", "recpkt", "respkt",
           "recspkt")  # fmt: skip
GROUPS = ("gstore", "gstorepkt", "glre", "glres")
MOVES = (*PUTS, "get", *REDUCES, *GROUPS)
# For each operation that reads packets, the index of the first source that consists of packets.
# PACKETS_WRITTEN has, for each operation that writes packets, the index of its first such target.
PACKETS_READ = {"rppkt": 0, "upkt": 0, "gstorepkt": 0, "repkt": 1, "recpkt": 1, "respkt": 1,
                "recspkt": 1}  # fmt: skip
PACKETS_WRITTEN = {"ppkt": 0, "rppkt": 0, "cpkt": 0, "gstorepkt": 0, "recpkt": 1, "respkt": 1,
                   "recspkt": 1}  # fmt: skip
After = set[OpRef]


def slices(plan: form.ExecutionPlan) -> int:
    """The number of parts into which every chunk is cut. It is chosen so that, if several blocks
    execute an operation together, each block's share is a whole number of parts.
    """
    infos = [op.tbg_info for gpu in plan.gpus for block in gpu.threadblocks for op in flat(block)]
    parts = math.lcm(*(info.tbg_size for info in infos if info is not None))
    if parts > 64:
        raise UnsupportedError(
            f"the plan needs chunks to be cut into {parts} parts, so that all groups of thread "
            "blocks can share them equally; at most 64 are supported"
        )
    return parts


def flat(block: form.Block) -> list[form.Op]:
    """The operations of a thread block as a flat list, in which the operations of a pipeline take
    the pipeline's place.
    """
    return [each for op in block.ops for each in (op.ops if op.name == "pipeline" else (op,))]


def share(op: form.Op, parts: int) -> form.Op:
    """The part of an operation that this thread block executes, on chunks that are cut into `parts`
    parts.
    """
    info = op.tbg_info or form.Slice(0, 1)
    if info.tb_id >= info.tbg_size:
        raise ModelError(
            f"{op.name}: thread block {info.tb_id} is out of range in a group of {info.tbg_size}"
        )

    def cut(chunks: form.Chunks) -> form.Chunks:
        size = chunks.size * parts // info.tbg_size
        begin = chunks.index * parts + info.tb_id * size
        return msgspec.structs.replace(chunks, index=begin, size=size)

    changed: dict[str, object] = {}
    if op.dst_chunk is not None and op.size is not None and op.buffer_offset is not None:
        whole = cut(form.Chunks(op.buffer_offset, op.size))
        changed = {"dst_chunk": cut(op.dst_chunk), "size": whole.size, "buffer_offset": whole.index}
    return msgspec.structs.replace(
        op,
        src_buff=tuple(map(cut, op.src_buff)),
        dst_buff=tuple(map(cut, op.dst_buff)),
        **changed,
    )


class Mover:
    """Converts operations of an execution plan and collects the operations of the program.
    operations: the operations of each rank so far. wire: for each rank, the number of scratch slots
    in use for copies of peers' data.
    """

    def __init__(
        self, plan: form.ExecutionPlan, collective: Collective, reduction: str | None, parts: int
    ) -> None:
        self.plan, self.gpus, self.ranks = plan, plan.gpus, len(plan.gpus)
        self.collective, self.reduction = collective, reduction
        first = plan.gpus[0]
        chunks = max(1, first.input_chunks, first.output_chunks)
        if collective is Collective.ALL_GATHER and not first.output_chunks:
            chunks = first.input_chunks * (1 if plan.inplace else self.ranks)
        self.chunks = parts * chunks
        self.shard = max(1, self.chunks // self.ranks)
        self.operations: list[list[Operation]] = [[] for _ in plan.gpus]
        self.wire = [0] * self.ranks
        self.packets: dict[tuple[int, int], OpRef] = {}  # writers, by rank and scratch slot
        self.groups = [
            [(group.ranks, channels.buffer_type or channels.buff) for channels in gpu.channels
             if channels.channel_type == "switch" for group in channels.rank_groups]
            for gpu in plan.gpus
        ]  # fmt: skip

    @property
    def works(self) -> bool:
        """True if the plan is a reduce-scatter in place, which overwrites its input. The program
        then works on a copy of the input in scratch memory.
        """
        return self.plan.inplace and self.collective is Collective.REDUCE_SCATTER

    def begin(self, rank: int) -> After:
        """Prepares a plan that works in place, in which the input buffer is also the output buffer.
        Returns the operations that all later operations of the rank must wait for.
        """
        if not self.plan.inplace:
            return set()
        source = Span(IN, 0, self.chunks)
        if self.works:
            target = Span("work", 0, self.chunks)
        elif self.collective is Collective.ALL_GATHER:
            source, target = Span(IN, 0, self.shard), Span(OUT, rank * self.shard, self.shard)
        elif self.collective is Collective.BROADCAST:
            raise UnsupportedError("broadcast in place is not supported.")
        else:
            target = Span(OUT, 0, self.chunks)
        return {self.add(rank, Kind.COPY, target, (source,), set())}

    def _span(self, rank: int, place: str, chunks: form.Chunks) -> Span:
        """The slots that `chunks`, chunks of a GPU's buffer in the execution plan, have in the
        program. If the plan works in place, input and output are the same buffer.
        """
        at = chunks.index
        if place == "s":
            return Span("s", at, chunks.size)
        if not self.plan.inplace:
            return Span(IN if place == "i" else OUT, at, chunks.size)
        own = rank * self.shard
        if self.works:
            return Span("work", at + (own if place == "o" else 0), chunks.size)
        gathers = self.collective is Collective.ALL_GATHER
        shift = own if gathers and place == "i" and self.gpus[rank].output_chunks else 0
        return Span(OUT, at + shift, chunks.size)

    def _there(self, rank: int, number: int, op: form.Op, chunks: form.Chunks) -> tuple[int, Span]:
        """Looks up chunks of a remote buffer. Returns the peer to which the buffer belongs, and the
        peer's slots.
        """
        gpu, kind = self.gpus[rank], op.channel_type
        ids = [
            each
            for refs in gpu.threadblocks[number].remote_buffer_refs
            if refs.access_channel_type == kind
            for each in refs.remote_buffer_ids
        ]
        if chunks.buffer_id is None or chunks.buffer_id >= len(ids):
            raise ModelError(
                f"an operation of gpu {rank} names remote buffer {chunks.buffer_id}, but "
                f"its thread block {number} has only {len(ids)} remote buffers of that type"
            )
        if ids[chunks.buffer_id] >= len(gpu.remote_buffers):
            raise ModelError(f"gpu {rank} has no remote buffer {ids[chunks.buffer_id]}")
        buffer = gpu.remote_buffers[ids[chunks.buffer_id]]
        if buffer.rank >= self.ranks:
            raise ModelError(
                f"a remote buffer of gpu {rank} is on gpu {buffer.rank}, but the plan has "
                f"{self.ranks} gpus"
            )
        return buffer.rank, self._span(buffer.rank, buffer.type, chunks)

    def _here(self, rank: int, chunks: form.Chunks) -> Span:
        if chunks.type is None:
            raise ModelError(f"an operation of gpu {rank} names no local buffer")
        return self._span(rank, chunks.type, chunks)

    def _group(
        self, rank: int, number: int, channel: int | None, chunks: form.Chunks
    ) -> list[tuple[int, Span]]:
        """The slots that an operation on a switch channel accesses, for each GPU in the channel's
        group.
        """
        ids = [
            each
            for channels in self.gpus[rank].threadblocks[number].channels
            if channels.channel_type == "switch"
            for each in channels.channel_ids
        ]
        if channel is None or channel >= len(ids) or ids[channel] >= len(self.groups[rank]):
            raise ModelError(
                f"an operation of thread block {number} on gpu {rank} names switch channel "
                f"{channel}, which its block does not have"
            )
        members, place = self.groups[rank][ids[channel]]
        if place is None or rank not in members or max(members) >= self.ranks:
            raise ModelError(
                f"a switch channel of gpu {rank} has the gpus {list(members)} and the buffer "
                f"{place}; expected gpus of the plan, this one among them, and a buffer"
            )
        return [(peer, self._span(peer, place, chunks)) for peer in sorted(members)]

    def add(
        self, rank: int, kind: Kind, dst: Span, srcs: tuple[Span, ...], after: After,
        peer: int | None = None,
    ) -> OpRef:  # fmt: skip
        """Appends an operation to the program and returns its position. peer: the receiving rank of
        a put.
        """
        reduce = None
        if kind is Kind.REDUCE:
            reduce = "sum" if self.reduction == "mean" else self.reduction or "sum"
        ref = OpRef(rank, len(self.operations[rank]))
        self.operations[rank].append(
            Operation(kind, dst, srcs, peer, tuple(sorted(after)), reduce, 1)
        )
        return ref

    def _put(self, rank: int, peer: int, src: Span, dst: Span, after: After) -> OpRef:
        if peer == rank:
            return self.add(rank, Kind.COPY, dst, (src,), after)
        return self.add(rank, Kind.PUT, dst, (src,), after, peer)

    def _fetched(self, rank: int, peer: int, there: Span, after: After) -> tuple[Span, After]:
        """Appends an operation that copies a peer's slots to new slots of this rank. Returns the
        new slots, and the operation on which their readers depend.
        """
        if peer == rank:
            return there, set()
        slots = Span("wire", self.wire[rank], there.count)
        self.wire[rank] += there.count
        return slots, {self._put(peer, rank, there, slots, after)}

    def arrived(self, rank: int, op: form.Op) -> After | None:
        """The operations that wrote the packets that this operation reads. None if an operation
        that writes some of these packets has not been converted yet.
        """
        first = PACKETS_READ.get(op.name)
        if first is None:
            return set()
        slots = [
            (rank, self._here(rank, c).start + i)
            for c in op.src_buff[first:]
            for i in range(c.size)
        ]
        if any(slot not in self.packets for slot in slots):
            return None
        return {self.packets[slot] for slot in slots}

    def _sent(self, rank: int, span: Span, ref: OpRef) -> None:
        """Records the packets that an operation writes. Raises an error if a slot is written twice,
        because its flag cannot distinguish the two writes.
        """
        if span.buffer != "s":
            raise ModelError(
                f"packets are written to the buffer {span.buffer!r} of gpu {rank}; packets must be "
                "written to scratch"
            )
        for slot in range(span.start, span.start + span.count):
            if (rank, slot) in self.packets:
                raise UnsupportedError(
                    f"packets are written twice to chunk {slot} of gpu {rank}'s scratch; give "
                    "each its own place"
                )
            self.packets[rank, slot] = ref

    def move(self, rank: int, number: int, op: form.Op, after: After) -> After:
        """Converts one operation. Returns the operations that the next operation of the block must
        wait for.
        """
        self._check(rank, number, op)
        packets = self.arrived(rank, op)
        assert packets is not None
        after = after | packets
        if op.name in GROUPS:
            return self._grouped(rank, number, op, after)
        if op.name in PUTS or op.name == "get":
            return self._moved(rank, number, op, after)
        return self._reduced(rank, number, op, after)

    def _check(self, rank: int, number: int, op: form.Op) -> None:
        """Raises ModelError if the operation lacks buffers that it needs."""
        if op.name == "glre":
            return
        if not op.src_buff or not op.dst_buff:
            raise ModelError(
                f"{op.name} of thread block {number} on gpu {rank} needs a source buffer and a "
                "target buffer"
            )
        pairs = op.name == "glres" or (op.name in (*PUTS, "get") and op.name != "rppkt")
        if pairs and len(op.src_buff) != len(op.dst_buff):
            raise ModelError(
                f"{op.name} on gpu {rank} has {len(op.src_buff)} sources and "
                f"{len(op.dst_buff)} targets; expected equal numbers"
            )

    def _moved(self, rank: int, number: int, op: form.Op, after: After) -> After:
        refs = set()
        sources: Sequence[form.Chunks] = op.src_buff
        if op.name == "rppkt":
            sources = [op.src_buff[0]] * len(op.dst_buff)
        for src, dst in zip(sources, op.dst_buff, strict=True):
            far, near = (src, dst) if op.name == "get" else (dst, src)
            peer, there = self._there(rank, number, op, far)
            here = self._here(rank, near)
            if op.name == "get":
                refs.add(self._put(peer, rank, there, here, after))
                continue
            ref = self._put(rank, peer, here, there, after)
            refs.add(ref)
            if op.name in PACKETS_WRITTEN:
                self._sent(peer, there, ref)
        return refs

    def _reduced(self, rank: int, number: int, op: form.Op, after: After) -> After:
        target = self._here(rank, op.dst_buff[0])
        srcs = [self._here(rank, op.src_buff[0])]
        for src in op.src_buff[1:]:
            if op.name in ("rre", "rres"):
                slots, fetched = self._fetched(rank, *self._there(rank, number, op, src), after)
                after = after | fetched
                srcs.append(slots)
            else:
                srcs.append(self._here(rank, src))
        first = PACKETS_WRITTEN.get(op.name)
        if srcs != [target]:
            ref = self.add(
                rank, Kind.COPY if len(srcs) == 1 else Kind.REDUCE, target, tuple(srcs), after
            )
            after = {ref}
            if first == 0:
                self._sent(rank, target, ref)
        following = set(after)
        for dst in op.dst_buff[1:]:
            if dst.buffer_id is None:
                peer, there = rank, self._here(rank, dst)
            else:
                peer, there = self._there(rank, number, op, dst)
            ref = self._put(rank, peer, target, there, after)
            following.add(ref)
            if first is not None:
                self._sent(peer, there, ref)
        return following

    def _grouped(self, rank: int, number: int, op: form.Op, after: After) -> After:
        """Converts an operation that loads from, or stores to, all GPUs of a switch channel."""
        if op.name == "glre":
            if op.dst_chunk is None or op.size is None or op.buffer_offset is None:
                raise ModelError(f"a glre of gpu {rank} lacks dst_chunk, size or buffer_offset")
            chunks = form.Chunks(op.buffer_offset, op.size)
            channel = op.channel_ids[0] if op.channel_ids else None
            members = self._group(rank, number, channel, chunks)
            return {self._summed(rank, members, self._here(rank, op.dst_chunk), after)}
        refs: After = set()
        for src, dst in zip(op.src_buff, op.dst_buff, strict=False):
            targets = self._group(rank, number, dst.switch_channel_id, dst)
            before = after
            if op.name == "glres":
                loaded = Span("wire", self.wire[rank], src.size)
                self.wire[rank] += src.size
                members = self._group(rank, number, src.switch_channel_id, src)
                before = {self._summed(rank, members, loaded, after)}
            else:
                loaded = self._here(rank, src)
            for peer, there in targets:
                if (peer, there) == (rank, loaded):
                    continue
                ref = self._put(rank, peer, loaded, there, before)
                refs.add(ref)
                if op.name == "gstorepkt":
                    self._sent(peer, there, ref)
        return refs | after

    def _summed(
        self, rank: int, members: Iterable[tuple[int, Span]], target: Span, after: After
    ) -> OpRef:
        spans, fetched = [], set(after)
        for peer, there in members:
            slots, brought = self._fetched(rank, peer, there, after)
            spans.append(slots)
            fetched |= brought
        kind = Kind.REDUCE if len(spans) > 1 else Kind.COPY
        return self.add(rank, kind, target, tuple(spans), fetched)
