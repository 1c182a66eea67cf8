"""examples/pose: scipy finds the same poses, and their errors agree with the Cramer-Rao bound."""

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
    """Returns (A, p, J) by scipy.optimize.least_squares in float64, of the whitened residuals b - A
    r - p.
    """
    optimize = pytest.importorskip("scipy.optimize")
    rotation = pytest.importorskip("scipy.spatial.transform").Rotation
    r, b = (a[:, :, which].T.astype(np.float64) for a in (problems.first, problems.second))
    full = np.zeros((len(r), 6, 6))
    full[(slice(None), *np.triu_indices(6))] = problems.covariance[:, :, which].T
    full += np.triu(full, 1).transpose(0, 2, 1)
    first = rotation.from_quat(start[:4], scalar_first=True)

    def residuals(x: np.ndarray) -> np.ndarray:
        a = (rotation.from_rotvec(x[:3]) * first).as_matrix()
        jacobian = np.concatenate([-a, np.eye(3)], 1)
        lower = np.linalg.cholesky(jacobian @ full @ jacobian.T)
        return np.linalg.solve(lower, (b - r @ a.T - x[3:])[:, :, None]).ravel()

    solution = optimize.least_squares(residuals, [0, 0, 0, *start[4:]], xtol=1e-12, ftol=1e-14)
    a = (rotation.from_rotvec(solution.x[:3]) * first).as_matrix()
    return a, solution.x[3:], solution.cost


@pytest.mark.parametrize("points", [8, pytest.param(13, marks=slow)])
def test_scipy_finds_the_same_poses(backend: str, points: int) -> None:
    batch = 100 if backend != "rocm" else 8
    problems, *_ = example.draw(points, batch, seed=2, sigma=0.05)
    poses, _ = example.solve(problems)
    start = example.kabsch(problems.first, problems.second)
    assert 2 < poses.iterations < example.MAX_STEPS  # the device stops once all have converged
    assert poses.iterations == example.in_numpy(problems, start)[1]
    for which in range(batch):
        a, p, cost = scipy_pose(problems, which, start[:, which].astype(np.float64))
        np.testing.assert_allclose(poses.rotation[which], a, atol=2e-5)
        np.testing.assert_allclose(poses.position[which], p, atol=2e-5)
        np.testing.assert_allclose(poses.cost[which], cost, rtol=1e-4)


def unusual() -> tuple[Any, list[Any]]:
    """Returns a batch of problems, some of which have no solution, and the expected statuses."""
    status = example.Status
    expected = [status.SOLVED] * 9
    problems, *_ = example.draw(8, len(expected), seed=3)
    first, second, covariance = (
        a.copy() for a in (problems.first, problems.second, problems.covariance)
    )
    random = np.random.default_rng(4)
    line = random.normal(size=(3, 1)) * np.linspace(-1, 1, 8)
    for which, noise in ((1, 0.0), (2, 0.01)):  # points on a line, up to noise
        for side in (first, second):
            side[:, :, which] = line + noise * random.normal(size=(3, 8))
        expected[which] = status.UNOBSERVABLE
    first[:, :, 3] = second[:, :, 3] = 0.5  # all points at one place
    expected[3] = status.UNOBSERVABLE
    covariance[1, 5, 4] *= 40  # a correlation above 1
    covariance[0, 2, 5] *= -1  # a negative variance
    covariance[:, 0, 6] = 0  # a point without noise
    expected[4:7] = [status.INDEFINITE_COVARIANCE] * 3
    second[1, 1, 7] = np.nan
    expected[7] = status.NOT_FINITE
    return example.Problems(first, second, covariance), expected


def test_unsolvable_problems_have_a_status(backend: str) -> None:
    problems, expected = unusual()
    poses, _ = example.solve(problems)
    assert list(poses.status) == expected
    solved = poses.status == example.Status.SOLVED
    assert np.isfinite(poses.position[solved]).all() and np.isnan(poses.position[~solved]).all()
    start = example.kabsch(problems.first[:, :, :1], problems.second[:, :, :1])
    a, p, _ = scipy_pose(problems, 0, start[:, 0].astype(np.float64))
    np.testing.assert_allclose(poses.rotation[0], a, atol=2e-5)
    np.testing.assert_allclose(poses.position[0], p, atol=2e-5)


def test_problems_that_did_not_converge_have_a_status(backend: str) -> None:
    problems, *_ = example.draw(8, 9, seed=2, sigma=0.05)
    poses, _ = example.solve(problems, steps=1)
    assert set(poses.status) == {example.Status.NOT_CONVERGED}
    assert np.isnan(poses.rotation).all()


def test_two_points_are_too_few() -> None:
    problems, *_ = example.draw(2, 3, seed=2)
    status = example.before(problems.first, problems.second, problems.covariance)
    assert list(status) == [example.Status.TOO_FEW_POINTS] * 3


@pytest.mark.parametrize("seed", range(3))
def test_invalid_covariances_are_those_that_numpy_refuses(seed: int) -> None:
    """The accepted covariances are those that are positive semidefinite by NumPy's eigenvalues, for
    random matrices of every rank.
    """
    from examples.pose import status

    random = np.random.default_rng(seed)
    root = random.normal(size=(300, 6, 6)) * (np.arange(6) < random.integers(1, 7, (300, 1, 1)))
    signs = np.where(random.random((300, 1, 6)) < 0.1, -1.0, 1.0)
    matrices = (root * signs) @ root.transpose(0, 2, 1)
    least = np.linalg.eigvalsh(matrices)[:, 0] / np.abs(matrices).max((1, 2))
    clear = (least > -1e-9) | (least < -1e-2)
    want = least > -1e-9
    assert 50 < want.sum() < 280
    np.testing.assert_array_equal(status.pivots(matrices)[1][clear], want[clear])


def test_errors_are_distributed_as_the_bound_predicts() -> None:
    example.ark.init(backend="cpu")
    points, batch = 8, 40_000
    problems, rotation, position = example.draw(points, batch, seed=1)
    poses, _ = example.solve(problems)
    errors = example.errors(poses, rotation, position)
    bound = poses.bound().mean(0)
    ratio = errors.std(0) / np.sqrt(np.diagonal(bound))
    assert (np.abs(ratio - 1) < 0.01).all(), ratio
    assert np.abs(2 * poses.cost.mean() - (3 * points - 6)) < 5 * (36 / batch) ** 0.5
    # Tests the bound's correlations, too: the mean squared error in all six parameters, weighted by
    # the bound.
    squares = np.einsum("bi,ij,bj->b", errors, np.linalg.inv(bound), errors)
    assert abs(squares.mean() - 6) < 5 * (12 / batch) ** 0.5


def test_kabsch_returns_rotations_only() -> None:
    """The start value of a pose is a rotation also for points in a plane, where the best orthogonal
    matrix may be a reflection.
    """
    random = np.random.default_rng(0)
    scene = np.concatenate([random.normal(size=(2, 6)), np.zeros((1, 6))])
    angle = 2.5
    turn = np.array(
        [[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]]
    )
    estimate = example.kabsch(scene[:, :, None], (turn @ scene)[:, :, None] + 1)
    np.testing.assert_allclose(example.algebra.to_matrix(estimate[:4, 0]), turn, atol=1e-6)
    np.testing.assert_allclose(estimate[4:, 0], 1, atol=1e-6)


def test_figure_is_an_svg() -> None:
    drawn = example.figure(np.random.default_rng(0).normal(size=(500, 6)))
    assert len(ElementTree.fromstring(drawn)) == 1 + 6 * (6 + 2 * 2)
