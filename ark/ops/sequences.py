"""The ops that sample the next token of each sequence of a batch: sample_each, choose_each.

Their task kind is in ark.tasks.sequences; `ark.sample` and the pass fuse_sampling add them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.lower.ops.sequences import lower_choose_each, lower_sample_each
from ark.lower.registry import register
from ark.ops.tokens import sample_reference
from ark.tasks.tokens import SETTINGS


def _sample_each(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of sample_each. Returns the new positions, tokens and outputs of all
    sequences.
    """
    logits, settings, positions, tokens, output, stops, *_ = inputs
    batch = len(logits)
    rows = [np.array_split(t, batch) for t in (settings, positions, tokens, output)]
    chosen = []
    for logit, setting, position, text, shown in zip(logits, *rows, strict=True):
        at, own = int(position[0]), dict(zip(SETTINGS, map(int, setting), strict=True))
        last, limit, known = own["last"], own["limit"], stops[: own["stops"]]
        if at < last:
            chosen.append([position + 1, text, shown])
        elif at > last and (max(at + 1, 0) >= min(limit, len(text)) or text[at] in known):
            chosen.append([position, text, shown])
        else:
            one = [logit[None], setting, position, text, shown, stops]
            chosen.append(sample_reference(one, {}))
    return [np.concatenate(parts) for parts in zip(*chosen, strict=True)]


def _choose_each(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of choose_each. It searches the logits itself and ignores input 3, the
    candidates.
    """
    return _sample_each([*inputs[:3], *inputs[4:]], attrs)


register("sample_each", _sample_each, lower_sample_each)
register("choose_each", _choose_each, lower_choose_each)
