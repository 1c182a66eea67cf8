"""Fidelity: is what was timed also right? Every row of logits of some greedy steps beside the same
row computed in fp32 by torch, which is given the tokens that ark chose.

A time without this is none: a kernel that leaves something out is fast. Called by ark.bench.decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STEPS = 16
# Distance of a row from the reference's, as a part of the reference's norm, that rounding of
# activations and caches to the weights' type explains.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Fidelity:
    """Rows of logits beside the reference's.

    mean, most: of |difference|, over all logits of all rows. distance: the largest of the rows'
    norms of the difference by the reference's norm. agreed: rows whose best token is the same.
    """

    rows: int
    mean: float
    most: float
    distance: float
    agreed: int

    def passes(self, dtype: str) -> bool:
        """Is the distance one that rounding to `dtype` explains?"""
        return self.distance <= TOLERANCE[dtype]


def compare(rows: np.ndarray, reference: np.ndarray) -> Fidelity:
    """Both (rows, vocabulary), of any float type."""
    ours, right = rows.astype(np.float64), reference.astype(np.float64)
    off = np.abs(ours - right)
    distances = np.linalg.norm(ours - right, axis=1) / np.linalg.norm(right, axis=1)
    same = ours.argmax(1) == right.argmax(1)
    # A row that is no number is as far away as can be.
    distance = float(np.nan_to_num(distances, nan=np.inf).max())
    return Fidelity(len(ours), float(off.mean()), float(off.max()), distance, int(same.sum()))


def greedy(
    step: Callable[[list[int], int], np.ndarray], first: list[int], position: int
) -> tuple[list[list[int]], np.ndarray]:
    """The tokens read and the logits, (STEPS * texts, vocabulary), of STEPS steps of
    step(tokens, position), a token of each text, each taking the best tokens of the one before.
    """
    read, rows = [first], []
    for i in range(STEPS):
        rows.append(step(read[-1], position + i))
        read.append(rows[-1].argmax(1).tolist())
    return read[:-1], np.concatenate(rows)
