"""How a parameter of a plan is made of a model's parameters: what ark.lower.rewrite.pack decides,
the plan records and ark.models.load follows when it reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.errors import PlanError

KEY = "packing"  # of a plan's meta


@dataclass(frozen=True)
class Part:
    """A parameter (rows, columns) of the model. pairs: 0 for its rows as they are, else a head's
    width: the two halves of each head's rows alternate, so that i and i + pairs / 2 are neighbours.
    """

    name: str
    pairs: int = 0


@dataclass(frozen=True)
class Packing:
    """A parameter that is made of others. interleave: rows of the parts in turn, as many of each;
    else the parts one behind the other.
    """

    name: str
    parts: tuple[Part, ...]
    interleave: bool = False

    def apply(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The packed array; `read` gives a part (rows, columns) by name."""
        arrays = [_paired(read(part.name), part.pairs) for part in self.parts]
        if not self.interleave:
            return np.concatenate(arrays)
        return np.stack(arrays, axis=1).reshape(-1, arrays[0].shape[1])


def _paired(rows: np.ndarray, width: int) -> np.ndarray:
    if not width:
        return rows
    halves = rows.reshape(-1, 2, width // 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def to_meta(packings: Sequence[Packing]) -> dict[str, Any]:
    """What a plan's meta says of them; nothing where there are none."""
    rows = [
        {"name": p.name, "parts": [[q.name, q.pairs] for q in p.parts], "interleave": p.interleave}
        for p in packings
    ]
    return {KEY: rows} if rows else {}


def from_meta(meta: Mapping[str, Any]) -> dict[str, Packing]:
    """The packings of a plan by parameter; PlanError where the entry is not one that ark wrote."""
    found: dict[str, Packing] = {}
    rows = meta.get(KEY, [])
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise PlanError(f"the plan's {KEY!r} is no list; make the plan again with this version")
    for row in rows:
        try:
            name, parts, interleave = row["name"], row["parts"], row["interleave"]
            made = Packing(name, tuple(Part(part, pairs) for part, pairs in parts), interleave)
        except (KeyError, TypeError, ValueError):
            made = None
        if made is None or not _sound(made):
            raise PlanError(
                f"the plan's {KEY!r} has the entry {str(row)[:200]}, which names no parts of a "
                "parameter; make the plan again with this version"
            )
        found[made.name] = made
    return found


def _sound(packing: Packing) -> bool:
    names = (packing.name, *(p.name for p in packing.parts))
    widths = [p.pairs for p in packing.parts]
    return (
        bool(widths)
        and all(type(name) is str for name in names)
        and all(type(w) is int and w >= 0 and w % 2 == 0 for w in widths)
        and type(packing.interleave) is bool
    )
