"""Checks the configurations that users give to a planner context or return from a config rule.

The names of the entries are those of ARK (microsoft/ark), whose planner accepts any configuration.
Here unknown names, wrong types and values out of range are rejected, and so are entries that would
change results instead of speed. The entries Tile, TileShapeMNK, NumTasks, Granularity and ImplType
become hints that the planner follows. The other entries describe ARK's kernels: the warps and the
shared memory of a task, padding, the channel. In ark each task has a whole processor, and its kind
determines its resources. So these entries are only checked, and shown in Plan.task_infos. Called by
ark.runtime.api.planner, ark.runtime.api.context and ark.runtime.api.task_plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ark.errors import InvalidUsageError, UnsupportedError
from ark.ir.hints import Hints

Size = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 30)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """Hints to a planner: how an op is cut into tasks and where these run. They do not change
    results.
    """

    num_warps: Annotated[int, Meta(ge=1, le=64)] | None = None
    sram_bytes: Bytes | None = None
    num_tasks: Size | None = None
    granularity: Size | None = None
    tile: Annotated[list[Size], Meta(min_length=1, max_length=4)] | None = None
    tile_shape_mnk: Annotated[list[Size], Meta(min_length=3, max_length=3)] | None = msgspec.field(
        default=None, name="TileShapeMNK"
    )
    tile_pad_mnk: Annotated[list[Size], Meta(min_length=3, max_length=3)] | None = msgspec.field(
        default=None, name="TilePadMNK"
    )
    impl_type: Literal["Default", "WarpWise", "ElementWise"] | None = None
    channel_type: Literal["Proxy", "SecondaryProxy", "Sm"] | None = None
    signal: bool | None = None
    wait: bool | None = None
    packet_type: Annotated[str, Meta(max_length=64)] | None = None


def check_config(value: Any, subject: str) -> dict[str, Any]:
    """A checked copy of the configuration.

    Raises InvalidUsageError for entries that are not valid, and UnsupportedError for entries that
    change results.
    """
    if not isinstance(value, Mapping):
        raise InvalidUsageError(f"{subject} is {value!r:.80}; it must be a dictionary")
    strides = sorted(str(k) for k in value if str(k).startswith("BatchStride"))
    if strides:
        raise UnsupportedError(
            f"{subject} has {', '.join(strides)}, which changes what the op reads and writes, not "
            "how it is planned; reshape or slice the tensors instead"
        )
    try:
        msgspec.convert(dict(value), Config, strict=True)
    except (msgspec.ValidationError, UnicodeError) as error:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(Config))
        raise InvalidUsageError(f"{subject} is refused: {error}; it may have {known}") from error
    return dict(value)


def hints_of(config: Mapping[str, Any]) -> Hints | None:
    """The hints of a checked configuration; None if the configuration has no hints."""
    tile, product = config.get("Tile"), config.get("TileShapeMNK")
    hints = Hints(
        tile=tuple(tile) if tile else None,
        tasks=config.get("NumTasks"),
        granularity=config.get("Granularity"),
        one_step=config.get("ImplType") in ("WarpWise", "ElementWise"),
        product=(product[0], product[1]) if product else None,
    )
    return None if hints == Hints() else hints


def read_config(text: Any, subject: str) -> dict[str, Any]:
    """The checked configuration from a config rule's result: JSON text or a dictionary; {} for an
    empty text or None.
    """
    if text is None or text == "":
        return {}
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise InvalidUsageError(f"{subject} returned no JSON: {error}") from error
    return check_config(value, subject)
