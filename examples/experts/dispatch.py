"""A mixture of experts whose experts are divided among ranks: custom ops send tokens to the ranks
of their experts, and the results back, within one kernel.

`dispatch` sends a token once to every rank that has one of its experts, as 8-bit numbers with a
scale for each 128 elements. `combine` sends each rank's sums over its experts back and adds them.
Only the device knows which tokens go to which ranks. A rank receives no data for tokens that have
none of its experts. The device code is in dispatch.h; bench/experts.py measures times.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ark

TEXT = Path(__file__).with_name("dispatch.h")
SCALE_ELEMENTS = 128  # elements of a token that share a scale
MAX_E4M3 = 448.0  # the largest number of fp8_e4m3
RANGE = {"first": int, "last": int}  # constants: the experts of the rank that receives


@dataclass(frozen=True)
class Split:
    """How experts are divided among ranks (equally), and work among processors. rows: the number of
    tokens of a task. senders, processors: if given, the first `senders` of the `processors`
    processors store to other ranks, and the others do all other work.
    """

    experts: int
    rank: int
    world: int
    rows: int = 1
    senders: int = 0
    processors: int = 0

    @property
    def each(self) -> int:
        return self.experts // self.world

    def range_of(self, rank: int) -> dict[str, int]:
        return {"first": rank * self.each, "last": (rank + 1) * self.each}

    def on(self, sending: bool) -> AbstractContextManager[Any]:
        """Returns a context that chooses the processors of the ops in it. sending: True for ops
        that store to other ranks, False for other ops.
        """
        if not 0 < self.senders < self.processors:
            return nullcontext()
        first, last = (0, self.senders) if sending else (self.senders, self.processors)
        return ark.PlannerContext(processor_range=[first, last])

    @property
    def peers(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]


@cache
def ops(rows: int, world: int) -> dict[str, Any]:
    """The custom ops whose tasks have `rows` tokens each."""
    tile = {"m": rows}
    got = [f"got{step}" for step in range(world)]
    signatures = {
        "dispatch_put": ("x[m, h], experts[m, s] -> codes[m, h], scales[m, g]", RANGE),
        "dispatch_take": ("codes[m, h], scales[m, g], experts[m, s] -> y[m, h]", RANGE),
        "combine_put": ("x[m, h], experts[m, s] -> there[m, h]", RANGE),
        "combine_add": (
            f"experts[m, s]{''.join(f', {g}[m, h]' for g in got)} -> y[m, h]",
            {"rank": int, "world": int, "each": int},
        ),
    }
    return {
        name: ark.custom_op(name, TEXT, signature, tile, constants=constants)
        for name, (signature, constants) in signatures.items()
    }


def dispatch(x: Any, experts: Any, every: Any, split: Split) -> Any:
    """Sends this rank's tokens to the ranks of their experts. Returns the tokens of all ranks
    (ranks times tokens, width), in which tokens without an expert on this rank are 0.

    x: (tokens, width) bf16 or fp16, this rank's tokens. experts: (tokens, slots) int32, the experts
    that were chosen for each token. every: the chosen experts of all ranks' tokens, (ranks times
    tokens, slots). Tokens without an expert on this rank are 0.
    """
    (tokens, width), own = x.shape(), ops(split.rows, split.world)
    shapes = (([tokens, width], ark.fp8_e4m3), ([tokens, width // SCALE_ELEMENTS], ark.fp32))
    received = [[ark.comm.symmetric(*shape) for shape in shapes] for _ in range(split.world)]
    result = ark.tensor([split.world * tokens, width], x.dtype())
    for rank in (*split.peers, split.rank):
        codes, scales = received[split.rank]
        sending: dict[str, Any] = {}
        if rank != split.rank:
            to = ark.comm.channel(rank)
            codes, scales, sending = to.there(codes), to.there(scales), {"signals": to}
        given = {"codes": codes, "scales": scales, **split.range_of(rank), **sending}
        with split.on(sending=rank != split.rank):
            sent = own["dispatch_put"](x, experts, **given)
        if rank == split.rank:
            received[rank] = list(sent)
    for rank in (split.rank, *split.peers):
        waiting = {} if rank == split.rank else {"waits": ark.comm.channel(rank)}
        codes, scales = received[rank]
        given = {"y": part_of(result, rank, split), **split.range_of(split.rank), **waiting}
        with split.on(sending=False):
            own["dispatch_take"](codes, scales, part_of(every, rank, split), **given)
    return result


def combine(sums: Sequence[Any], experts: Any, every: Any, split: Split) -> Any:
    """Sends results back to the tokens' ranks. Returns the sums over all experts for this rank's
    tokens (tokens, width).

    sums: one tensor (tokens, width) for each rank, with the sums over this rank's experts for that
    rank's tokens. experts, every: as for `dispatch`.
    """
    tokens, width = sums[0].shape()
    own = ops(split.rows, split.world)
    received = [ark.comm.symmetric([tokens, width], sums[0].dtype()) for _ in range(split.world)]
    for rank in split.peers:
        to = ark.comm.channel(rank, tag=1)
        given = {"there": to.there(received[split.rank]), **split.range_of(split.rank)}
        with split.on(sending=True):
            own["combine_put"](sums[rank], part_of(every, rank, split), signals=to, **given)
    got = [sums[split.rank], *(received[rank] for rank in split.peers)]
    waits = [ark.comm.channel(rank, tag=1) for rank in split.peers]
    given: dict[str, Any] = {"rank": split.rank, "world": split.world, "each": split.each}
    given["y"] = ark.tensor([tokens, width], sums[0].dtype())
    with split.on(sending=False):
        return own["combine_add"](experts, *got, waits=waits, **given)


def part_of(every: Any, rank: int, split: Split) -> Any:
    """The rows of a rank's tokens in a tensor of all ranks'."""
    tokens = every.shape()[0] // split.world
    return every[rank * tokens : (rank + 1) * tokens]


def mixture(x: Any, experts: Any, scores: Any, up: Any, down: Any, split: Split) -> Any:
    """A mixture of experts with one hidden layer (relu). up, down: the weights of this rank's
    experts. scores: (tokens, slots), the weights of the chosen experts' results.
    """
    every = ark.all_gather(experts, split.rank, split.world)
    factors = ark.all_gather(scores, split.rank, split.world)
    rows = dispatch(x, experts, every, split)
    held = {"first": split.rank * split.each, "of": split.experts}
    hidden = ark.relu(ark.expert_linear(rows, up, every, **held))
    results = ark.expert_linear(hidden, down, every, **held)
    weighted = ark.mul(results, ark.reshape(factors, [*factors.shape(), 1]))
    sums = ark.reshape(ark.reduce_sum(weighted, 1), rows.shape())
    parts = [part_of(sums, rank, split) for rank in range(split.world)]
    return combine(parts, experts, every, split)


def rounded(x: np.ndarray) -> np.ndarray:
    """x (tokens, width) as `dispatch` sends it: rounded to 8 bits with scales."""
    groups = x.astype(np.float32).reshape(len(x), -1, SCALE_ELEMENTS)
    largest = np.abs(groups).max(-1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(MAX_E4M3), 1).astype(np.float32)
    scaled = np.clip(groups * (np.float32(1) / scale), -MAX_E4M3, MAX_E4M3)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (scale * codes).reshape(x.shape)
