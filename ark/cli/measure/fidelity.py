"""Checks the results of timed runs. The logits of some steps of greedy decoding are compared with
logits that torch computes in fp32 from the tokens that ark chose.

Timings are reported only with this check, because a kernel that omits work would be fast. Called by
ark.cli.measure.decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

GREEDY_STEPS = 16
# For each type of weights, the largest relative error of a row of logits that rounding can cause. A
# larger error counts as a wrong result.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Fidelity:
    """The result of comparing rows of logits with the reference's.

    mean, most: the mean and the largest absolute difference over all logits of all rows. distance:
    the largest norm of a row's difference, relative to the norm of the reference's row. agreed: the
    number of rows in which both have their largest logit at the same token.
    """

    rows: int
    mean: float
    most: float
    distance: float
    agreed: int

    def passes(self, dtype: str) -> bool:
        """True if rounding to `dtype` can explain the distance."""
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
    """Calls step(tokens, position) GREEDY_STEPS times, with one token of each text. Each step reads
    the best tokens of the previous step. Returns the tokens that were read, and the logits
    (GREEDY_STEPS * texts, vocabulary).
    """
    read, rows = [first], []
    for i in range(GREEDY_STEPS):
        rows.append(step(read[-1], position + i))
        read.append(rows[-1].argmax(1).tolist())
    return read[:-1], np.concatenate(rows)
