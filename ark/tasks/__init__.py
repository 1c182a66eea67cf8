"""Task kinds: what a tile of work touches, costs, and how it is written as source.

One module per family. A vendor may write the source of a kind itself (see the dialect); what a task
touches is always decided here, because the verifier relies on it.
"""

from ark.tasks import (
    along,
    arrival,
    attention,
    attention_tiles,
    combine,
    combine_norm,
    convolution,
    experts,
    fusion,
    iteration,
    linear,
    matmul,
    movement,
    pointwise,
    quantized,
    reduce,
    remap,
    rotary,
    rows,
    sequences,
    token,
    tokens,
    transfer,
    windows,
)

__all__ = [
    "along",
    "arrival",
    "attention",
    "attention_tiles",
    "combine",
    "combine_norm",
    "convolution",
    "experts",
    "fusion",
    "iteration",
    "linear",
    "matmul",
    "movement",
    "pointwise",
    "quantized",
    "reduce",
    "remap",
    "rotary",
    "rows",
    "sequences",
    "token",
    "tokens",
    "transfer",
    "windows",
]
