"""Estimates poses (rotation A, position p) in batches, by total least squares: b = A r + p for
points r and b, both with noise, whose full covariances are given.

One launch runs Gauss-Newton iterations until every problem of the batch has converged; the device
decides how many. `algebra.py` has the step, which NumPy arrays and ark's tensors both execute.

    python -m examples.pose.pose
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import ark
from examples.common import dense
from examples.common.plot import Panel, page
from examples.pose import algebra
from examples.pose.status import COLUMN, ROW, Status, after, before, square

MAX_STEPS = 20  # iterations, more than a solvable problem needs
STEP_TOLERANCE = 1e-5  # bound of a step's length, in radians and units of length


@dataclass
class Problems:
    """A batch of problems.

    first, second (3, points, batch): r and b. covariance (21, points, batch): the upper triangle,
    row by row, of the covariance of the noise of (r, b).
    """

    first: np.ndarray
    second: np.ndarray
    covariance: np.ndarray


@dataclass
class Poses:
    """The solutions of a batch.

    rotation (batch, 3, 3): A. position (batch, 3): p. cost (batch,): J, half the sum of squares.
    information (batch, 6, 6): the inverse of the Cramer-Rao bound of (rotation vector, position).
    status (batch,): SOLVED, or why there is no solution; the other fields are then NaN. iterations:
    the number of iterations of the batch.
    """

    rotation: np.ndarray
    position: np.ndarray
    cost: np.ndarray
    information: np.ndarray
    status: np.ndarray
    iterations: int

    def bound(self) -> np.ndarray:
        """The Cramer-Rao bound (batch, 6, 6)."""
        return np.linalg.inv(self.information)


def draw(
    points: int, batch: int, seed: int, sigma: float = 0.01
) -> tuple[Problems, np.ndarray, np.ndarray]:
    """Noisy observations of one scene, and the true A and p.

    Every point has a different covariance, of about sigma squared, with correlations within r,
    within b and between r and b.
    """
    random = np.random.default_rng(seed)
    scene = random.uniform(-1, 1, (points, 3))
    rotation = np.array(algebra.to_matrix(random.normal(size=4)))
    position = random.uniform(-0.5, 0.5, 3)
    mixing = sigma * (np.eye(6) + 0.4 * random.normal(size=(points, 6, 6)))
    noise = np.einsum("nij,bnj->inb", mixing, random.normal(size=(batch, points, 6)))
    first = scene.T[:, :, None] + noise[:3]
    second = (scene @ rotation.T + position).T[:, :, None] + noise[3:]
    triangle = (mixing @ mixing.transpose(0, 2, 1))[:, ROW, COLUMN].T[:, :, None]
    full = np.broadcast_to(triangle, (21, points, batch))
    arrays = (np.ascontiguousarray(a, np.float32) for a in (first, second, full))
    return Problems(*arrays), rotation, position


def kabsch(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Initial poses (7, batch), as quaternion and position: the least-squares solutions for second
    = A first + p without covariances (Kabsch 1976).
    """
    r, b = (np.moveaxis(a, -1, 0).astype(np.float64) for a in (first, second))
    mean_r, mean_b = r.mean(2, keepdims=True), b.mean(2, keepdims=True)
    left, _, right = np.linalg.svd((b - mean_b) @ (r - mean_r).transpose(0, 2, 1))
    left[:, :, 2] *= np.linalg.det(left @ right)[:, None]
    rotation = left @ right
    position = (mean_b - rotation @ mean_r)[:, :, 0]
    return np.concatenate([algebra.to_quaternion(rotation), position], 1).T.astype(np.float32)


def iteration(
    first: ark.Tensor, second: ark.Tensor, covariance: ark.Tensor, pose: ark.Tensor
) -> tuple[list[ark.Tensor], ark.Tensor, ark.Tensor]:
    """Moves all poses by one step, in place. Returns three tensors: the upper triangle of sum H'WH
    and the cost J, both before the step, and the squared lengths of the steps (1, 1, batch).
    """
    parts = [[t[i] for i in range(t.shape()[0])] for t in (first, second, covariance, pose)]
    triangle, gradient, squares = algebra.normal_equations(
        *parts, total=lambda x: ark.reduce_sum(x, 1)
    )
    step = dense.solve(triangle, gradient)
    for new, old in zip(algebra.moved(parts[3], step), parts[3], strict=True):
        ark.copy(new, output=old)
    return triangle, ark.mul(squares, 0.5), dense.dot(step, step)


def usable(problems: Problems, status: np.ndarray) -> Problems:
    """The problems, in which the data of problems without a solution are replaced by numbers with
    which the iterations cannot fail.
    """
    kept = status == Status.SOLVED
    triangle = np.eye(6, dtype=np.float32)[ROW, COLUMN][:, None, None]
    return replace(
        problems,
        first=np.where(kept, problems.first, 0),
        second=np.where(kept, problems.second, 0),
        covariance=np.where(kept, problems.covariance, triangle),
    )


def solve(problems: Problems, repeats: int = 1, steps: int = MAX_STEPS) -> tuple[Poses, float]:
    """The poses after at most `steps` iterations, and the seconds of the fastest of `repeats`
    launches. The time does not include compilation and the computation of the initial poses.
    """
    _, points, batch = problems.first.shape
    status = before(problems.first, problems.second, problems.covariance)
    problems = usable(problems, status)
    ark.Model.reset()
    first, second = ark.tensor([3, points, batch]), ark.tensor([3, points, batch])
    covariance = ark.tensor([21, points, batch])
    pose = ark.tensor([7, 1, batch])
    triangle, cost, lengths = iteration(first, second, covariance, pose)
    # An infinite or NaN step belongs to a problem without a solution. It counts as 0, so that the
    # batch does not wait for this problem.
    finite = ark.where(ark.less(lengths, float(np.finfo(np.float32).max)), lengths, 0.0)
    longest = ark.reduce_max(finite, [0, 1, 2])
    # The launch is ended by sampling: of two logits, the longest step and the tolerance, the second
    # is larger when no step exceeds the tolerance. Then the stop token 1 is sampled.
    limit = ark.constant(STEP_TOLERANCE**2, [1, 1], ark.fp32)
    state = ark.TokenState.make(MAX_STEPS + 2)
    ark.sample(ark.concat([ark.reshape(longest, [1, 1]), limit], 1), state)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        first.from_numpy(problems.first)
        second.from_numpy(problems.second)
        covariance.from_numpy(problems.covariance)
        start = kabsch(problems.first, problems.second)
        state.settings.from_numpy(np.array([0, 0, 0, 0, MAX_STEPS + 2, 1, 0], np.int32))
        state.stops.from_numpy(np.array([1] + [-1] * 15, np.int32))
        seconds = np.inf
        for _ in range(repeats):
            pose.from_numpy(start.reshape(7, 1, batch))
            state.position.from_numpy(np.zeros(1, np.int32))
            begin = time.perf_counter()
            runtime.run(steps)
            seconds = min(seconds, time.perf_counter() - begin)
        result = pose.to_numpy().reshape(7, batch).astype(np.float64)
        information = square(np.stack([t.to_numpy().reshape(batch) for t in triangle]))
        length = np.sqrt(lengths.to_numpy().reshape(batch))
        status = after(status, problems.covariance, start, information, length, STEP_TOLERANCE)
        answers = [
            np.moveaxis(np.array(algebra.to_matrix(result[:4])), -1, 0),
            result[4:].T,
            cost.to_numpy().reshape(batch),
            information,
        ]
        for answer in answers:
            answer[status != Status.SOLVED] = np.nan
        poses = Poses(*answers, status, int(state.position.to_numpy()[0]))
    return poses, seconds


def in_numpy(problems: Problems, start: np.ndarray) -> tuple[np.ndarray, int]:
    """The same iterations on NumPy arrays: the poses (7, batch) and the number of iterations."""
    pose = list(start[:, None])
    given = [list(a) for a in (problems.first, problems.second, problems.covariance)]
    done, longest = 0, np.inf
    while longest > STEP_TOLERANCE and done < MAX_STEPS:
        equations = algebra.normal_equations(*given, pose, total=lambda x: x.sum(0, keepdims=True))
        step = dense.solve(*equations[:2])
        pose = algebra.moved(pose, step)
        done, longest = done + 1, float(dense.dot(step, step).max()) ** 0.5
    return np.concatenate(pose), done


def errors(poses: Poses, rotation: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Errors of the poses (batch, 6): a small rotation's vector, and the position."""
    between = poses.rotation @ rotation.T
    turn = np.stack([between[:, k, j] - between[:, j, k] for j, k in dense.AXES], 1) / 2
    return np.concatenate([turn, poses.position - position], 1)


def figure(scaled: np.ndarray) -> str:
    """An SVG: the distribution of the six errors, divided by their bounds, and the normal
    density.
    """
    names = [f"{quantity} {axis}" for quantity in ("turn about", "position") for axis in "xyz"]
    edges = np.linspace(-4, 4, 41)
    middle = (edges[1:] + edges[:-1]) / 2
    normal = np.exp(-(middle**2) / 2) / np.sqrt(2 * np.pi)
    panels = []
    for name, values in zip(names, scaled.T, strict=True):
        density = np.histogram(values, edges, density=True)[0]
        curves = {"found": (middle, density), "N(0, 1)": (middle, normal)}
        panels.append(Panel(f"{name}: sigma {values.std():.3f}", curves, high=0.5))
    return page("Errors over their Cramer-Rao bounds", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="launches to time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figure", type=Path, default=Path(__file__).with_name("pose.svg"))
    args = parser.parse_args()
    ark.init(backend=args.backend)
    problems, rotation, position = draw(args.points, args.batch, args.seed)
    poses, seconds = solve(problems, args.repeats)
    scaled = errors(poses, rotation, position)
    scaled /= np.sqrt(np.diagonal(poses.bound(), axis1=1, axis2=2))
    scaled = scaled[poses.status == Status.SOLVED]
    start = kabsch(problems.first, problems.second)
    begin = time.perf_counter()
    _, iterations = in_numpy(problems, start)
    numpy_seconds = time.perf_counter() - begin
    args.figure.write_text(figure(scaled), encoding="utf-8")
    report = {
        "iterations": poses.iterations,
        "status": {s.name: int((poses.status == s).sum()) for s in Status},
        "sigma_over_bound": scaled.std(0).round(4).tolist(),
        "twice_cost_mean": round(2 * float(np.nanmean(poses.cost)), 3),
        "expected": 3 * args.points - 6,
        "problems_per_second": round(args.batch / seconds),
        "numpy_iterations": iterations,
        "numpy_problems_per_second": round(args.batch / numpy_seconds),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
