"""Mutations of JSON values (in numbers, types and positions) and of bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 64, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 63, 10**30)
ODD: tuple[Any, ...] = (
    *NUMBERS,
    *(-n for n in NUMBERS),
    *(0.5, -0.0, 1e-40, 1e308, float("inf"), float("nan")),
    *("", "1", "²", "\x00", "\x1b[2J", "../../etc/passwd", "a" * 5000, "\udc80", '"; }'),
    *(None, True, False, [], {}, [[]], {"": {}}),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values within a JSON value."""
    paths = [at] if at else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        paths += places(inner, (*at, key))
    return paths


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _near(old: Any, rng: random.Random) -> Any:
    """Returns a value near the old one: a number slightly larger or smaller, or a slightly changed
    text.
    """
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 16, old + 256, 0))
    if isinstance(old, float):
        return rng.choice((old * 2, old / 2, -old, 0.0))
    if isinstance(old, str):
        cut = rng.randrange(len(old) + 1)
        return old[:cut] + rng.choice(("", "x", "\n", "²")) + old[cut:]
    return rng.choice(ODD)


def of_json(value: Any, rng: random.Random, paths: list[tuple[Any, ...]] | None = None) -> Any:
    """Returns a copy with one to three changes: a value is replaced by a near or an odd one,
    dropped, doubled or swapped.
    """
    mutated = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        candidates = paths or places(mutated)
        if not candidates:
            return copy.deepcopy(rng.choice(ODD))
        path = rng.choice(candidates)
        try:
            holder = _at(mutated, path[:-1])
            old = holder[path[-1]]
            move = rng.random()
            if move < 0.45:
                holder[path[-1]] = _near(old, rng)
            elif move < 0.7:
                holder[path[-1]] = copy.deepcopy(rng.choice(ODD))
            elif move < 0.8:
                del holder[path[-1]]
            elif move < 0.9 and isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(old))
            elif isinstance(holder, dict):
                holder[rng.choice(("extra", "", "format", *map(str, holder)))] = copy.deepcopy(old)
            else:
                other = rng.randrange(len(holder))
                holder[path[-1]], holder[other] = holder[other], old
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    return mutated


def text_of(value: Any) -> str:
    """Returns the value as JSON text. NaN and infinities are written as Python's json module writes
    them.
    """
    return json.dumps(value)


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with bits flipped, and bytes dropped, repeated or replaced."""
    mutated = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(mutated) + 1)
        move = rng.randrange(5)
        if move == 0 and at < len(mutated):
            mutated[at] ^= 1 << rng.randrange(8)
        elif move == 1:
            mutated[at : at + rng.choice((1, 4, 64))] = b""
        elif move == 2:
            mutated[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 64))))
        elif move == 3:
            mutated[at:at] = mutated[: rng.randrange(min(len(mutated), 64) + 1)]
        else:
            mutated[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7))
    return bytes(mutated)
