"""What is asked of a Generator: how tokens are drawn, where they end, on what it runs; all checked
before anything is planned. Called by ark.models.generate and the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ark.errors import InvalidUsageError
from ark.ir.values import whole
from ark.machine import Machine
from ark.models.checkpoint import Checkpoint
from ark.ops.tokens import MAX_STOPS
from ark.plan.types import Plan

COLDEST, HOTTEST = 1e-5, 1e5


def no_room(said: str, context: int, most: int) -> InvalidUsageError:
    """The error for a prompt that a context has no room for. said: how many tokens what has. most:
    the longest context of the model.
    """
    more = "or raise --context" if context < most else "(the model has no more)"
    return InvalidUsageError(
        f"{said} tokens, but the context holds {context:,} positions and at least one new token "
        f"needs a place; shorten the prompt {more}"
    )


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy, top_k 0 considers every token.

    seed: 64 bits, -2^63 to 2^64 - 1; sequence b of a batch draws by a hash of the seed and b
    (ark.tasks.tokens.noise_key).
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        # Logits divided by it must stay numbers of fp32.
        if not isinstance(self.temperature, Real) or (
            self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST
        ):
            raise InvalidUsageError(
                f"the temperature is {self.temperature!r}; it must be 0 (greedy) or from "
                f"{COLDEST:g} to {HOTTEST:g}"
            )
        if not 0 <= whole("top-k", self.top_k) < 1 << 31:
            raise InvalidUsageError(
                f"top-k is {self.top_k}; it must be from 0 (off) to {(1 << 31) - 1}"
            )
        if not -(1 << 63) <= whole("the seed", self.seed) < 1 << 64:
            raise InvalidUsageError(
                f"the seed is {self.seed}; it must be a number of 64 bits, from -2^63 to 2^64 - 1"
            )


def check_stops(stops: Sequence[int]) -> list[int]:
    """Stop tokens as numbers; InvalidUsageError for what are none, or too many."""
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise InvalidUsageError(f"the stop tokens are {stops!r:.60}; give a list of tokens")
    made = [whole("a stop token", stop) for stop in stops]
    if len(made) > MAX_STOPS:
        raise InvalidUsageError(f"{len(made)} stop tokens were given; at most {MAX_STOPS} fit")
    bad = [stop for stop in made if not 0 <= stop < 1 << 31]
    if bad:
        raise InvalidUsageError(f"the stop token {bad[0]} is no token; tokens are from 0")
    return made


def check_arguments(
    batch: Any, rank: Any, world_size: Any, budget_s: Any, trace_records: Any, **others: Any
) -> tuple[int, int, int, int]:
    """The batch, the rank, the number of ranks and of trace records, if a Generator can be given
    all of these; else InvalidUsageError that names what is wrong.

    Ranges that depend on the model are not looked at.
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
        raise InvalidUsageError(f"there is no rank {rank} of {world_size} ranks")
    if not 0 <= numbers[3] < 1 << 31:
        raise InvalidUsageError(f"there cannot be {trace_records} trace records")
    return numbers


# By a Generator's argument: the test, and what is expected.
_OTHERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "checkpoint": (lambda v: isinstance(v, Checkpoint), "one that Checkpoint.open(directory) made"),
    "backend": (lambda v: hasattr(v, "probe"), "one that ark.backend.registry.get(name) gives"),
    "device": (lambda v: hasattr(v, "alloc"), "one that backend.open(index) gives"),
    "split": (lambda v: isinstance(v, str), "the name of a parallel plan, or nothing"),
    "machine": (
        lambda v: v is None or isinstance(v, Machine),
        "one that ark.backend.registry.machine(name) gives",
    ),
    "plan": (lambda v: v is None or isinstance(v, Plan), "one that ark.plan.serialize read"),
    "ranks": (lambda v: v is None or hasattr(v, "all_gather"), "the job's ark.runtime.run.Ranks"),
    "progress": (lambda v: v is None or callable(v), "a function"),
}
