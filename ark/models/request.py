"""Checks the arguments of a Generator before anything is planned. Called by ark.models.generate and
the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from ark.errors import InvalidUsageError
from ark.ir.values import whole
from ark.machine import Machine
from ark.models.checkpoint import Checkpoint
from ark.plan.types import Plan


def no_room(subject: str, context: int, most: int) -> InvalidUsageError:
    """The error for a prompt that does not fit in the context. subject: the beginning of the
    message, with the number of tokens ("the prompt has 5"). most: the longest context of the model.
    """
    more = "or raise --context" if context < most else "(the model has no more)"
    return InvalidUsageError(
        f"{subject} tokens, but the context holds {context:,} positions and at least one new token "
        f"needs a place; shorten the prompt {more}"
    )


def check_prompt_tokens(prompt: Sequence[int], vocabulary: int) -> None:
    """Raises InvalidUsageError if there are no tokens, or a token is not in the vocabulary."""
    if not prompt:
        raise InvalidUsageError("the prompt has no tokens; give at least one")
    tokens = [whole("a token of the prompt", t) for t in prompt]
    bad = next((t for t in tokens if not 0 <= t < vocabulary), None)
    if bad is not None:
        raise InvalidUsageError(
            f"the prompt has the token {bad}, but the vocabulary has {vocabulary} tokens, 0 to "
            f"{vocabulary - 1}; use the checkpoint's own tokenizer"
        )


def check_stops(stops: Sequence[int]) -> list[int]:
    """Stop tokens as integers. Raises InvalidUsageError for values that are not token ids."""
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise InvalidUsageError(f"the stop tokens are {stops!r:.60}; give a list of tokens")
    tokens = [whole("a stop token", stop) for stop in stops]
    bad = [stop for stop in tokens if not 0 <= stop < 1 << 31]
    if bad:
        raise InvalidUsageError(f"the stop token {bad[0]} is not valid; token ids are at least 0")
    return tokens


def check_arguments(
    batch: Any, rank: Any, world_size: Any, budget_s: Any, trace_records: Any, **others: Any
) -> tuple[int, int, int, int]:
    """Returns the batch, the rank, the number of ranks and the number of trace records as integers.
    Raises InvalidUsageError, which names the argument, if one is invalid.

    Ranges that depend on the model are not checked here.
    """
    for name, value in others.items():
        fits, how = _OTHERS[name]
        if not fits(value):
            raise InvalidUsageError(f"a Generator's {name} is {value!r:.60}; pass {how}")
    if not isinstance(budget_s, Real) or not math.isfinite(budget_s) or budget_s <= 0:
        raise InvalidUsageError(f"the budget of a wait is {budget_s!r:.60}; give seconds above 0")
    numbers = (
        whole("the batch", batch),
        whole("the rank", rank),
        whole("the number of ranks", world_size),
        whole("the number of trace records", trace_records),
    )
    if not 0 <= numbers[1] < numbers[2]:
        raise InvalidUsageError(f"rank={rank} is out of range for {world_size} ranks")
    if not 0 <= numbers[3] < 1 << 31:
        raise InvalidUsageError(
            f"trace_records={trace_records} is out of range; it must be 0 to {(1 << 31) - 1}"
        )
    return numbers


# For each argument of a Generator: a function that tests the value, and the expected values in
# words for the error message.
_OTHERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "checkpoint": (lambda v: isinstance(v, Checkpoint), "one that Checkpoint.open(directory) made"),
    "backend": (lambda v: hasattr(v, "probe"), "one that ark.backend.registry.get(name) gives"),
    "device": (lambda v: hasattr(v, "alloc"), "one that backend.open(index) gives"),
    "sampling": (lambda v: isinstance(v, str), "'full', or nothing"),
    "split": (lambda v: isinstance(v, str), "the name of a parallel plan, or nothing"),
    "machine": (
        lambda v: v is None or isinstance(v, Machine),
        "one that ark.backend.registry.machine(name) gives",
    ),
    "plan": (lambda v: v is None or isinstance(v, Plan), "one that ark.plan.serialize read"),
    "ranks": (lambda v: v is None or hasattr(v, "all_gather"), "the job's ark.runtime.run.Ranks"),
    "progress": (lambda v: v is None or callable(v), "a function"),
}
