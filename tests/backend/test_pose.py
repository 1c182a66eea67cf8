"""examples/pose: scipy finds the same poses, and their errors are those of the Cramer-Rao bound."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from examples.pose import pose as example
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")


def scipy_pose(
    problems: Any, which: int, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """(A, p, J) by scipy.optimize.least_squares in float64: whitened residuals of b - A r - p."""
    optimize = pytest.importorskip("scipy.optimize")
    Rotation = pytest.importorskip("scipy.spatial.transform").Rotation
    r, b = (a[:, :, which].T.astype(np.float64) for a in (problems.first, problems.second))
    full = np.zeros((len(r), 6, 6))
    full[(slice(None), *np.triu_indices(6))] = problems.covariance[:, :, which].T
    full += np.triu(full, 1).transpose(0, 2, 1)
    first = Rotation.from_quat(start[:4], scalar_first=True)

    def residuals(x: np.ndarray) -> np.ndarray:
        a = (Rotation.from_rotvec(x[:3]) * first).as_matrix()
        both = np.concatenate([-a, np.eye(3)], 1)
        lower = np.linalg.cholesky(both @ full @ both.T)
        return np.linalg.solve(lower, (b - r @ a.T - x[3:])[:, :, None]).ravel()

    found = optimize.least_squares(residuals, [0, 0, 0, *start[4:]], xtol=1e-12, ftol=1e-14)
    a = (Rotation.from_rotvec(found.x[:3]) * first).as_matrix()
    return a, found.x[3:], found.cost


@pytest.mark.parametrize("points", [8, pytest.param(13, marks=slow)])
def test_scipy_finds_the_same_poses(backend: str, points: int) -> None:
    batch = 100 if backend != "rocm" else 8
    problems, *_ = example.draw(points, batch, seed=2, sigma=0.05)
    poses, _ = example.solve(problems)
    start = example.kabsch(problems.first, problems.second)
    assert 2 < poses.iterations < example.STEPS  # the device has seen that all have converged
    assert poses.iterations == example.in_numpy(problems, start)[1]
    for which in range(batch):
        a, p, cost = scipy_pose(problems, which, start[:, which].astype(np.float64))
        np.testing.assert_allclose(poses.rotation[which], a, atol=2e-5)
        np.testing.assert_allclose(poses.position[which], p, atol=2e-5)
        np.testing.assert_allclose(poses.cost[which], cost, rtol=1e-4)


def test_errors_are_those_of_the_bound() -> None:
    example.ark.init(backend="cpu")
    points, batch = 8, 40_000
    problems, rotation, position = example.draw(points, batch, seed=1)
    poses, _ = example.solve(problems)
    found = example.errors(poses, rotation, position)
    bound = poses.bound().mean(0)
    ratio = found.std(0) / np.sqrt(np.diagonal(bound))
    assert (np.abs(ratio - 1) < 0.01).all(), ratio
    assert np.abs(2 * poses.cost.mean() - (3 * points - 6)) < 5 * (36 / batch) ** 0.5
    # The bound's correlations too: an error as long as it says, in all six at once.
    squares = np.einsum("bi,ij,bj->b", found, np.linalg.inv(bound), found)
    assert abs(squares.mean() - 6) < 5 * (12 / batch) ** 0.5


def test_kabsch_takes_no_reflection() -> None:
    """Points of a plane, whose best orthogonal matrix may be a reflection."""
    random = np.random.default_rng(0)
    scene = np.concatenate([random.normal(size=(2, 6)), np.zeros((1, 6))])
    angle = 2.5
    turn = np.array(
        [[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]]
    )
    found = example.kabsch(scene[:, :, None], (turn @ scene)[:, :, None] + 1)
    np.testing.assert_allclose(example.algebra.to_matrix(found[:4, 0]), turn, atol=1e-6)
    np.testing.assert_allclose(found[4:, 0], 1, atol=1e-6)


def test_the_figure_is_an_svg() -> None:
    drawn = example.figure(np.random.default_rng(0).normal(size=(500, 6)))
    assert len(ElementTree.fromstring(drawn)) == 1 + 6 * (6 + 2 * 2)
