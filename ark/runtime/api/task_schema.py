"""The schema of a plan file in the layout of ARK (microsoft/ark): types, ranges, lengths. Unknown
fields are rejected.

Read by ark.runtime.api.task_plan, which converts it to a plan of ark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark.errors import PlanError
from ark.ir import values as ir

Index = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Dims = Annotated[list[Size], Meta(min_length=1, max_length=ir.MAX_DIMS)]
Name = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*$")]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,64}$")]
Range = Annotated[list[Index], Meta(min_length=2, max_length=3)]
Offsets = Annotated[list[Index], Meta(min_length=1, max_length=ir.MAX_DIMS)]
Tag = Index
Tags = Annotated[list[tuple[Annotated[int, Meta(ge=-1, lt=1 << 12)], Tag]], Meta(max_length=4096)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """The base class of objects in the file, whose field names begin with a capital letter."""


class BufferEntry(_Entry, frozen=True):
    """Memory of a rank; -1 is the plan's own rank. Tags are pairs of a peer (-1: any) and a tag."""

    id: Index
    rank: Annotated[int, Meta(ge=-1, lt=1 << 12)] = -1
    send_tags: Tags = []
    recv_tags: Tags = []
    is_external: bool = False


class TensorEntry(_Entry, frozen=True):
    id: Index
    data_type: Word
    shape: Dims
    strides: Dims
    offsets: Offsets
    padded_shape: Dims
    buffer: BufferEntry


class OpEntry(_Entry, frozen=True):
    type: Word
    name: Name
    is_virtual: bool
    read_tensors: Annotated[list[TensorEntry], Meta(max_length=64)]
    write_tensors: Annotated[list[TensorEntry], Meta(max_length=64)]
    result_tensors: Annotated[list[TensorEntry], Meta(max_length=64)]
    args: dict[Word, Annotated[dict[Word, Any], Meta(min_length=1, max_length=1)]] = {}
    config: dict[str, Any] = {}

    @property
    def works(self) -> bool:
        """True if the op computes or moves data. SendDone does not, because a send is complete when
        its task ends.
        """
        return not self.is_virtual and self.type not in ("Noop", "SendDone")


class TaskEntry(_Entry, frozen=True):
    id: Index
    num_warps: Index
    sram_bytes: Index
    ops: Annotated[list[OpEntry], Meta(min_length=1, max_length=4096)]


class TaskGroup(_Entry, frozen=True):
    task_id: Index
    task_range: Range
    granularity: Size = 1


class ResourceGroup(_Entry, frozen=True):
    processor_range: Range
    warp_range: Range
    sram_range: Range
    task_groups: list[TaskGroup]


class ProcessorGroup(_Entry, frozen=True):
    processor_range: Range
    resource_groups: list[ResourceGroup]


class TaskPlan(_Entry, frozen=True):
    """The plan. Architecture: ANY, or the name of a backend, optionally with an architecture
    (CUDA_90).
    """

    rank: Annotated[int, Meta(ge=0, lt=1 << 12)] = 0
    world_size: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    architecture: Word = "ANY"
    num_processors: Size = 1
    num_warps_per_processor: Size = 1
    task_infos: Annotated[list[TaskEntry], Meta(max_length=1 << 16)] = []
    processor_groups: Annotated[list[ProcessorGroup], Meta(max_length=1 << 16)] = []


def read(data: Mapping[str, Any]) -> TaskPlan:
    """The plan, after its form is checked; raises PlanError if it is not valid."""
    try:
        plan = msgspec.convert(dict(data), TaskPlan, strict=True)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise PlanError(f"not a valid plan in ARK's layout: {error}") from error
    if plan.rank >= plan.world_size:
        raise PlanError(f"the plan is for rank {plan.rank} of {plan.world_size} ranks")
    return plan
