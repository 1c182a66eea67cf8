"""Loads and checks collective programs (lists of the puts and reduces of each rank) that a caller
gives as a file, and computes the shapes of their results. Called by ark.distributed.group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ark.collective.programs import Collective, CollectiveProgram, read_program, to_json
from ark.errors import InvalidUsageError


def load(path: str | os.PathLike[str], kept: dict[str, CollectiveProgram]) -> CollectiveProgram:
    """The program in a file. kept: a cache of programs by the content of their files, so that each
    content is parsed once.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise InvalidUsageError(
            f"run_program: {str(path)[:200]!r} cannot be read ({error}); give the path of a program"
        ) from None
    if text not in kept:
        kept[text] = read_program(text)
    return kept[text]


def check_ranks(program: CollectiveProgram, world: int) -> None:
    """Raises InvalidUsageError unless the program is for `world` ranks and parts of equal
    length.
    """
    unequal = program.counts is not None and not program.permutes
    if program.ranks != world or unequal:
        raise InvalidUsageError(
            f"run_program: {program.name[:60]!r} is for {program.ranks} ranks"
            f"{' and parts of unequal length' if unequal else ''}; expected equal parts "
            f"for the group's {world} ranks"
        )


def result_shape(program: CollectiveProgram, shape: Sequence[int], world: int) -> tuple[int, ...]:
    """The shape of a rank's result. Raises InvalidUsageError if the first dimension is not
    divisible as the collective requires.
    """
    first, *others = shape or (1,)
    if program.collective is Collective.ALL_GATHER:
        return (first * world, *others)
    if program.permutes:
        return tuple(shape)
    if program.collective.sharded and first % world:
        raise InvalidUsageError(
            f"run_program: the first dimension of {list(shape)} is not divisible by {world} ranks"
        )
    scatters = program.collective is Collective.REDUCE_SCATTER
    return (first // world, *others) if scatters else tuple(shape)


def title(program: CollectiveProgram) -> str:
    """A text that identifies a program, by which ranks check that they run the same one: its name
    and a digest of its content.
    """
    digest = hashlib.sha256(to_json(program).encode()).hexdigest()
    return f"{program.name[:60]!r} {digest[:16]}"
