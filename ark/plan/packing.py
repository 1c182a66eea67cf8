"""Stores in a plan's metadata how parameters are packed from several others (ark.ir.packing), and
reads it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ark.errors import PlanError
from ark.ir.packing import Packing, Part

KEY = "packing"  # the key in a plan's metadata


def to_meta(packings: Sequence[Packing]) -> dict[str, Any]:
    """The metadata entry of a plan that describes how parameters are packed from others; {} if none
    are.
    """
    rows = [
        {"name": p.name, "parts": [[q.name, q.pairs] for q in p.parts], "interleave": p.interleave}
        for p in packings
    ]
    return {KEY: rows} if rows else {}


def from_meta(meta: Mapping[str, Any]) -> dict[str, Packing]:
    """The packed parameters that a plan's metadata describe, by name. Raises PlanError if the entry
    is malformed.
    """
    packings: dict[str, Packing] = {}
    rows = meta.get(KEY, [])
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise PlanError(
            f"the plan's {KEY!r} is of type {type(rows).__name__}, expected a list; make the plan "
            "again with this version"
        )
    for row in rows:
        try:
            name, parts, interleave = row["name"], row["parts"], row["interleave"]
            packing = Packing(name, tuple(Part(part, pairs) for part, pairs in parts), interleave)
        except (KeyError, TypeError, ValueError):
            packing = None
        if packing is None or not _sound(packing):
            raise PlanError(
                f"the plan's {KEY!r} has the entry {str(row)[:200]}; expected an object with "
                "the fields name, parts (a list) and interleave (true or false); make the plan "
                "again with this version"
            )
        packings[packing.name] = packing
    return packings


def _sound(packing: Packing) -> bool:
    names = (packing.name, *(p.name for p in packing.parts))
    widths = [p.pairs for p in packing.parts]
    return (
        bool(widths)
        and all(type(name) is str for name in names)
        and all(type(w) is int and w >= 0 and w % 2 == 0 for w in widths)
        and type(packing.interleave) is bool
    )
