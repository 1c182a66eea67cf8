"""Checks the results of timed runs. Every row of logits of some greedy steps is compared with the
same row computed in fp32 by torch, which is given the tokens that ark chose.

Timings are reported only with this check, since a kernel that omits work is fast. Called by
ark.bench.decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GREEDY_STEPS = 16
# The largest distance of a row from the reference's, relative to the reference's norm, that
# rounding of activations and caches to the weights' type explains.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Fidelity:
    """Rows of logits compared with the reference's.

    mean, most: of |difference|, over all logits of all rows. distance: the largest norm of a row's
    difference, relative to the reference row's norm. agreed: rows whose best token is the same.
    """

    rows: int
    mean: float
    most: float
    distance: float
    agreed: int

    def passes(self, dtype: str) -> bool:
        """True if rounding to `dtype` explains the distance."""
        return self.distance <= TOLERANCE[dtype]


def compare(rows: np.ndarray, reference: np.ndarray) -> Fidelity:
    """Compares two arrays (rows, vocabulary) of any float type."""
    ours, right = rows.astype(np.float64), reference.astype(np.float64)
    off = np.abs(ours - right)
    distances = np.linalg.norm(ours - right, axis=1) / np.linalg.norm(right, axis=1)
    same = ours.argmax(1) == right.argmax(1)
    # A row with NaN has an infinite distance.
    distance = float(np.nan_to_num(distances, nan=np.inf).max())
    return Fidelity(len(ours), float(off.mean()), float(off.max()), distance, int(same.sum()))


def greedy(
    step: Callable[[list[int], int], np.ndarray], first: list[int], position: int
) -> tuple[list[list[int]], np.ndarray]:
    """Runs GREEDY_STEPS times step(tokens, position) with one token of each text; each step reads
    the best tokens of the one before. Returns the tokens that were read, and the logits
    (GREEDY_STEPS * texts, vocabulary).
    """
    read, rows = [first], []
    for i in range(GREEDY_STEPS):
        rows.append(step(read[-1], position + i))
        read.append(rows[-1].argmax(1).tolist())
    return read[:-1], np.concatenate(rows)
