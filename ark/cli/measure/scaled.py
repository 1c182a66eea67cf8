"""Extrapolates the figures of a whole model from those of two truncated models, because predicting
each layer takes a while. Called by ark.cli.bench.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ark.cli.measure.decode import ContextFigures, Figures


def scaled(fewer: Figures, more: Figures, layers: Sequence[int], whole: int) -> Figures:
    """Figures of a model of `whole` layers, extrapolated from `fewer` and `more`, the figures of
    the same model with layers[0] and layers[1] layers. Every layer is assumed to add the same.
    Tokens are omitted, because those of a truncated model are meaningless.
    """
    few, many = layers

    def at(a: float, b: float) -> float:
        return b + (b - a) * (whole - many) / (many - few)

    contexts = []
    for a, b in zip(fewer.contexts, more.contexts, strict=True):
        runs = [at(x, y) for x, y in zip(a.runs, b.runs, strict=True)]
        read = round(at(a.read_bytes, b.read_bytes))
        row = ContextFigures(b.context, at(a.per_token, b.per_token), runs, [], read)
        if a.further is not None and b.further is not None:
            row.further = at(a.further, b.further)
        contexts.append(row)
    return dataclasses.replace(
        more,
        weight_bytes=round(at(fewer.weight_bytes, more.weight_bytes)),
        device_bytes=round(at(fewer.device_bytes, more.device_bytes)),
        needed_bytes=round(at(fewer.needed_bytes, more.needed_bytes)),
        contexts=contexts,
    )
