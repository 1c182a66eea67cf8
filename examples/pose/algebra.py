"""A Gauss-Newton step for poses. A number may be a NumPy array or a tensor of ark.

Every number is an array with one element per point and problem (1, points, batch), or one element
per problem (1, 1, batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from examples.common.dense import AXES, Number, at, cross, dot, inverse


def to_matrix(quaternion: Sequence[Number]) -> list[list[Number]]:
    """The rotation (3, 3) of a quaternion of any length, the real part first."""
    w, x, y, z = quaternion
    double = 2.0 / (w * w + x * x + y * y + z * z)
    return [
        [1.0 - double * (y * y + z * z), double * (x * y - w * z), double * (x * z + w * y)],
        [double * (x * y + w * z), 1.0 - double * (x * x + z * z), double * (y * z - w * x)],
        [double * (x * z - w * y), double * (y * z + w * x), 1.0 - double * (x * x + y * y)],
    ]


def to_quaternion(rotation: np.ndarray) -> np.ndarray:
    """Quaternions (batch, 4) of rotations (batch, 3, 3): the largest column of 4 q q',
    normalised.
    """
    r = rotation
    signs = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    products = np.zeros((len(r), 4, 4))
    products[:, range(4), range(4)] = 1 + r[:, range(3), range(3)] @ signs.T
    for i, (j, k) in enumerate(AXES, 1):
        products[:, 0, i] = products[:, i, 0] = r[:, k, j] - r[:, j, k]
        products[:, j + 1, k + 1] = products[:, k + 1, j + 1] = r[:, j, k] + r[:, k, j]
    largest = np.diagonal(products, axis1=1, axis2=2).argmax(1)
    columns = products[np.arange(len(r)), :, largest]
    return columns / np.linalg.norm(columns, axis=1, keepdims=True)


def normal_equations(
    first: Sequence[Number],
    second: Sequence[Number],
    covariance: Sequence[Number],
    pose: Sequence[Number],
    *,
    total: Callable[[Number], Number],
) -> tuple[list[Number], list[Number], Number]:
    """The linearised problem at a pose (quaternion, position), for residuals e with Jacobian H and
    weights W: sum H'WH (21 elements of its triangle), sum H'We (6) and sum e'We.

    total: the function that sums over the points.
    """
    three = range(3)
    a, p = to_matrix(pose[:4]), pose[4:]
    rr = [[covariance[at(6, i, j)] for j in three] for i in three]
    rb = [[covariance[at(6, i, j + 3)] for j in three] for i in three]
    a_rr = [[dot(a[i], [rr[k][j] for k in three]) for j in three] for i in three]
    a_rr_a = [dot(a_rr[i], a[j]) for i in three for j in range(i, 3)]
    a_rb = [[dot(a[i], [rb[k][j] for k in three]) for j in three] for i in three]
    spread = [  # the covariance of e
        covariance[at(6, i + 3, j + 3)] - a_rb[i][j] - a_rb[j][i] + a_rr_a[at(3, i, j)]
        for i in three
        for j in range(i, 3)
    ]
    weight = inverse(spread)
    rows = [[weight[at(3, i, j)] for j in three] for i in three]
    rotated = [dot(a[i], first) for i in three]
    e = [second[i] - rotated[i] - p[i] for i in three]
    pull = [dot(rows[i], e) for i in three]
    # A r^, where r^ = r - (R_rb - R_rr A') W e is the best estimate of the true r.
    q = [rotated[i] - dot([a_rb[i][j] - a_rr_a[at(3, i, j)] for j in three], pull) for i in three]
    # H = [-[q]x, I], so H'W = [[q]x W, W], and [q]x W has the columns q x (columns of W).
    columns = [cross(q, rows[j]) for j in three]
    mixed = [[columns[j][i] for j in three] for i in three]
    angular = [cross(q, mixed[i]) for i in three]  # [q]x W [q]x', which is symmetric
    information = []
    for i in three:
        information += [angular[i][j] for j in range(i, 3)] + mixed[i]
    information += weight
    gradient = [*cross(q, pull), *pull]
    return [total(x) for x in information], [total(x) for x in gradient], total(dot(e, pull))


def moved(pose: Sequence[Number], step: Sequence[Number]) -> list[Number]:
    """The pose after a step (rotation vector, position): A <- C A, C the Cayley transform."""
    w, x, y, z = pose[:4]
    a, b, c = (0.5 * s for s in step[:3])
    rotated = [w - a * x - b * y - c * z, x + a * w + b * z - c * y]
    rotated += [y + b * w + c * x - a * z, z + c * w + a * y - b * x]
    return rotated + [p + s for p, s in zip(pose[4:], step[3:], strict=True)]
