"""Computes, in NumPy, a status for each problem of a batch: solved, or the reason why there is no
solution.

The device iterates all problems in the same way. The status is determined on the host, before and
after the launch.
"""

from __future__ import annotations

import enum

import numpy as np

from examples.pose import algebra

LEAST_POINTS = 3  # the least number that determines rotation and position
LEAST_SIGNAL = 3.0  # extent of the points across their best line, in sigmas of the noise
MAX_ROUNDING_SHARE = 1e-5  # of the largest variance; smaller pivots of fp32 covariances count as 0
ROW, COLUMN = np.triu_indices(6)


class Status(enum.IntEnum):
    """SOLVED: the pose is the least-squares solution. For every other status the pose is NaN."""

    SOLVED = 0
    NOT_FINITE = 1  # an observation or covariance is infinite or NaN
    TOO_FEW_POINTS = 2
    INDEFINITE_COVARIANCE = 3  # not a covariance, or an observation without noise
    UNOBSERVABLE = 4  # the points are on a line or in one place, within their noise
    NOT_CONVERGED = 5


def square(triangle: np.ndarray) -> np.ndarray:
    """Symmetric matrices (..., 6, 6) in float64 from their upper triangles (21, ...)."""
    whole = np.zeros((*triangle.shape[1:], 6, 6))
    whole[..., ROW, COLUMN] = whole[..., COLUMN, ROW] = np.moveaxis(triangle, 0, -1)
    return whole


def pivots(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors symmetric matrices (..., n, n) as L D L'. Returns for each matrix the least pivot
    divided by the largest diagonal element, and True if the matrix is positive semidefinite.
    """
    rest = matrices.astype(np.float64)
    size = rest.shape[-1]
    largest = np.abs(np.diagonal(rest, axis1=-2, axis2=-1)).max(-1)
    largest = np.where(largest > 0, largest, 1.0)
    rest /= largest[..., None, None]
    least = np.full(rest.shape[:-2], np.inf)
    semidefinite = np.ones(rest.shape[:-2], bool)
    for k in range(size):
        pivot, column = rest[..., k, k], rest[..., k, k + 1 :]
        least = np.minimum(least, pivot)
        flat = pivot <= MAX_ROUNDING_SHARE
        tied = (np.abs(column) > MAX_ROUNDING_SHARE**0.5).any(
            -1
        )  # a zero variance has no covariances
        semidefinite &= (pivot >= -MAX_ROUNDING_SHARE) & ~(flat & tied)
        factor = column / np.where(flat, np.inf, pivot)[..., None]
        rest[..., k + 1 :, k + 1 :] -= factor[..., :, None] * column[..., None, :]
    return least, semidefinite


def before(first: np.ndarray, second: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """The status (batch,) that follows from the observations (3, points, batch) and the covariances
    (21, points, batch).
    """
    points, batch = first.shape[1:]
    status = np.full(batch, Status.SOLVED)
    _, semidefinite = pivots(square(covariance))
    status[~semidefinite.all(0)] = Status.INDEFINITE_COVARIANCE
    if points < LEAST_POINTS:
        status[:] = Status.TOO_FEW_POINTS
    for given in (first, second, covariance):
        status[~np.isfinite(given).all((0, 1))] = Status.NOT_FINITE
    return status


def after(
    status: np.ndarray,
    covariance: np.ndarray,
    start: np.ndarray,
    information: np.ndarray,
    step: np.ndarray,
    tolerance: float,
) -> np.ndarray:
    """The status (batch,) after the iterations.

    start (7, batch): the poses before them. information (batch, 6, 6), step (batch,): of the last
    iteration.
    """
    points = covariance.shape[1]
    finite = np.isfinite(information).all((1, 2))
    known = np.where(finite[:, None, None], information, np.eye(6))
    turns, mixed, places = known[:, :3, :3], known[:, :3, 3:], known[:, 3:, 3:]
    seen = finite & (pivots(places)[0] > 0)
    known = np.where(seen[:, None, None], places, np.eye(3))
    turns = turns - mixed @ np.linalg.solve(known, mixed.transpose(0, 2, 1))
    seen &= np.linalg.eigvalsh(turns)[:, 0] > points * LEAST_SIGNAL**2
    noisy = _spread(covariance, start) > MAX_ROUNDING_SHARE
    open_ = status == Status.SOLVED
    result = status.copy()
    result[open_ & ~(step <= tolerance)] = Status.NOT_CONVERGED
    result[open_ & ~seen] = Status.UNOBSERVABLE
    result[open_ & ~noisy] = Status.INDEFINITE_COVARIANCE
    return result


def _spread(covariance: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """The least pivot (batch,) of the covariances of the points' residuals at a pose."""
    rotation = np.moveaxis(np.array(algebra.to_matrix(pose[:4].astype(np.float64))), -1, 0)
    jacobian = np.concatenate([-rotation, np.broadcast_to(np.eye(3), rotation.shape)], 2)
    return pivots(jacobian @ square(covariance) @ jacobian.transpose(0, 2, 1))[0].min(0)
