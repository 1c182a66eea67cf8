"""Times the examples, and programs of other libraries that do the same work, on this machine.
Prints a line of JSON for each.

    python -m bench.applications pose --backend cuda --batch 250000      torch, NumPy
    python -m bench.applications word2vec --backend cpu --workers 2      gensim
    python -m bench.applications msgemm --backend cuda --rows 12288      torch, int4 weights

Each time is the minimum of several runs, without compilation, copies and start-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ark
from examples.common import dense, wikipedia
from examples.msgemm import msgemm
from examples.pose import algebra
from examples.pose import pose as poses
from examples.word2vec import corpus, word2vec

PROBLEMS_PER_BLOCK = 2000  # problems per NumPy call, so that its arrays stay in cache
LAUNCHES_PER_READING = 50  # products in sequence between two readings of the clock
WEIGHTS_PER_SCALE = 128  # weights that share a scale


def tell(name: str, **figures: Any) -> None:
    print(json.dumps({"what": name, **figures}), flush=True)


def least(run: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def part(problems: poses.Problems, of: slice) -> poses.Problems:
    fields = (problems.first, problems.second, problems.covariance)
    return poses.Problems(*(np.ascontiguousarray(a[:, :, of]) for a in fields))


def by_linalg(problems: poses.Problems, start: np.ndarray) -> np.ndarray:
    """The iterations of examples/pose with einsum and numpy.linalg, on stacks of matrices. start:
    the initial poses (7, batch).
    """
    r, b = (np.ascontiguousarray(a.transpose(2, 1, 0)) for a in (problems.first, problems.second))
    full = np.zeros((*r.shape[:2], 6, 6), np.float32)
    full[..., poses.ROW, poses.COLUMN] = problems.covariance.transpose(2, 1, 0)
    full[..., poses.COLUMN, poses.ROW] = problems.covariance.transpose(2, 1, 0)
    rr, rb, bb = full[..., :3, :3], full[..., :3, 3:], full[..., 3:, 3:]
    pose, largest, done = list(start), np.inf, 0
    h = np.zeros((*r.shape[:2], 3, 6), np.float32)
    h[..., 3:] = np.eye(3)
    while largest > poses.STEP_TOLERANCE and done < poses.MAX_STEPS:
        a = np.moveaxis(np.array(algebra.to_matrix(pose[:4])), -1, 0)[:, None]
        a_rb = a @ rb
        a_rr_a = a @ rr @ a.swapaxes(-1, -2)
        w = np.linalg.inv(bb - a_rb - a_rb.swapaxes(-1, -2) + a_rr_a)
        rotated = np.einsum("nxij,npj->npi", a, r, optimize=True)
        e = b - rotated - np.stack(pose[4:], 1)[:, None]
        pull = np.einsum("npij,npj->npi", w, e)
        q = rotated - np.einsum("npji,npj->npi", a_rb - a_rr_a, pull)
        h[..., 0, 1], h[..., 1, 0] = q[..., 2], -q[..., 2]
        h[..., 1, 2], h[..., 2, 1] = q[..., 0], -q[..., 0]
        h[..., 2, 0], h[..., 0, 2] = q[..., 1], -q[..., 1]
        weighted = h.swapaxes(-1, -2) @ w
        matrix, right = (weighted @ h).sum(1), (weighted @ e[..., None]).sum(1)
        step = np.linalg.solve(matrix, right)[..., 0]
        pose = algebra.moved(pose, list(step.T))
        largest, done = float(np.abs(step).max()), done + 1
    return np.array(pose)


def in_torch(
    problems: poses.Problems, start: np.ndarray, device: str, compiled: bool
) -> Callable[[], Any]:
    """A function that runs the iterations on torch's tensors, either op by op or compiled."""
    import torch

    fields = (problems.first, problems.second, problems.covariance, start[:, None])
    given = [list(torch.tensor(a, device=device)[:, None]) for a in fields]
    given[3] = [t.reshape(1, 1, -1) for t in given[3]]

    def total(x: Any) -> Any:
        return x.sum(1, keepdim=True)

    def iterate(pose: list[Any]) -> tuple[list[Any], Any]:
        equations = algebra.normal_equations(*given[:3], pose, total=total)
        step = dense.solve(*equations[:2])
        return algebra.moved(pose, step), torch.stack(step).abs().max()

    one = torch.compile(iterate) if compiled else iterate

    def run() -> np.ndarray:
        pose, largest, done = given[3], np.inf, 0
        while largest > poses.STEP_TOLERANCE and done < poses.MAX_STEPS:
            pose, size = one(pose)
            largest, done = float(size), done + 1
        return np.array([p.flatten().cpu().numpy() for p in pose])

    return run


def pose(args: argparse.Namespace) -> None:
    problems, _, _ = poses.draw(args.points, args.batch, 1)
    start = poses.kabsch(problems.first, problems.second)
    solution, seconds = poses.solve(problems, args.repeats)
    tell(
        "pose, ark", problems_per_second=round(args.batch / seconds), iterations=solution.iterations
    )
    device = "cuda" if args.backend == "cuda" else "cpu"
    for compiled in (False, True)[: 1 + args.compile]:
        run = in_torch(problems, start, device, compiled)
        apart = np.abs(run()[4:].T - solution.position).max()
        rate = round(args.batch / least(run, args.repeats))
        name = f"pose, torch on {device}{', compiled' * compiled}"
        tell(name, problems_per_second=rate, largest_difference=float(apart))
    if not args.numpy:
        return
    few = part(problems, slice(0, min(args.batch, 20_000)))
    begins = start[:, : few.first.shape[2]]
    cuts = [slice(i, i + PROBLEMS_PER_BLOCK) for i in range(0, begins.shape[1], PROBLEMS_PER_BLOCK)]
    blocks = [(part(few, cut), np.ascontiguousarray(begins[:, cut])) for cut in cuts]
    for name, run in {
        "elementwise": lambda: poses.in_numpy(few, begins),
        f"elementwise, {PROBLEMS_PER_BLOCK} at once": lambda: [
            poses.in_numpy(*block) for block in blocks
        ],
        "einsum and linalg": lambda: by_linalg(few, begins),
        f"einsum and linalg, {PROBLEMS_PER_BLOCK} at once": lambda: [
            by_linalg(*block) for block in blocks
        ],
    }.items():
        rate = round(begins.shape[1] / least(run, args.repeats))
        tell(f"pose, NumPy, {name}", problems_per_second=rate)


def words(args: argparse.Namespace) -> None:
    texts = wikipedia.encyclopedia()
    given = {s: wikipedia.pieces(texts, seed=s) if args.shuffle else texts for s in args.seeds}
    for chunk, seed in itertools.product(args.chunks, args.seeds):
        ark.Model.reset()
        text = corpus.Corpus.of(given[seed])
        trained = word2vec.train(text, word2vec.Options(chunk=chunk, seed=seed))
        score = wikipedia.similarity(text.vocabulary, trained.vectors[-1])
        figures = {"words_per_second": round(trained.words), "wordsim": round(score, 4)}
        tell("word2vec, ark", chunk=chunk, seed=seed, **figures)
    for workers, seed in itertools.product(args.workers, args.seeds):
        from gensim.models import Word2Vec

        size = {"vector_size": 100, "window": 5, "negative": 5, "sg": 1, "epochs": 5}
        other = Word2Vec(**size, workers=workers, seed=seed)
        other.build_vocab(given[seed])
        begin = time.perf_counter()
        other.train(given[seed], total_examples=other.corpus_count, epochs=other.epochs)
        rate = 5 * sum(map(len, texts)) / (time.perf_counter() - begin)
        score = wikipedia.similarity(other.wv.index_to_key, other.wv.vectors)
        figures = {"words_per_second": round(rate), "wordsim": round(score, 4)}
        tell("word2vec, gensim", workers=workers, seed=seed, **figures)


def products(args: argparse.Namespace) -> None:
    for rows in args.rows:
        weight, x, scales = msgemm.draw(rows, args.k, args.columns, WEIGHTS_PER_SCALE)
        product, seconds = msgemm.run(
            msgemm.by_multiplying(weight, x, scales), args.repeats, LAUNCHES_PER_READING
        )
        want = product.T
        times = {"multiplied": seconds}
        for d in (1, 2):
            ways = msgemm.by_tables(weight, x, d, scales)
            computed, seconds = msgemm.run(ways, args.repeats, LAUNCHES_PER_READING)
            times[f"tables, d = {d}"] = seconds
            assert np.abs(computed - want).max() < 1e-3 * np.abs(want).max()
        times["torch"] = torch_int4(weight, x, scales, want, args)
        microseconds = {name: round(1e6 * s, 1) for name, s in times.items()}
        tell("msgemm", rows=rows, k=args.k, columns=args.columns, microseconds=microseconds)


def torch_int4(
    weight: np.ndarray, x: np.ndarray, scales: np.ndarray, want: np.ndarray, args: Any
) -> float:
    """Seconds of torch's product of a bf16 matrix and int4 weights, whose groups have a scale each.
    The result is checked against `want`.
    """
    import torch

    aten = torch.ops.aten
    cuda = args.backend == "cuda"
    device = "cuda" if cuda else "cpu"
    codes = torch.tensor(weight + 8, dtype=torch.int32)
    if cuda:
        bytes_of = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).cuda()
        packed = aten._convert_weight_to_int4pack(bytes_of, 8)
        product = aten._weight_int4pack_mm
    else:
        packed = aten._convert_weight_to_int4pack_for_cpu(codes, 8)
        product = aten._weight_int4pack_mm_for_cpu
    factors = torch.tensor(scales.T.copy())
    scales_and_zeros = torch.stack([factors, torch.zeros_like(factors)], 2).to(
        device, torch.bfloat16
    )
    held = torch.tensor(x.T.copy()).to(device, torch.bfloat16)
    result = product(held, packed, WEIGHTS_PER_SCALE, scales_and_zeros).float().cpu().numpy().T
    assert np.abs(result - want).max() < 0.05 * np.abs(want).max()

    def run() -> None:
        for _ in range(LAUNCHES_PER_READING):
            product(held, packed, WEIGHTS_PER_SCALE, scales_and_zeros)
        if cuda:
            torch.cuda.synchronize()

    run()
    return least(run, args.repeats) / LAUNCHES_PER_READING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("example", choices=["pose", "word2vec", "msgemm"])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--numpy", action="store_true", help="NumPy too")
    parser.add_argument("--chunks", type=int, nargs="*", default=[word2vec.Options.chunk])
    parser.add_argument("--workers", type=int, nargs="*", default=[1], help="of gensim")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="a run for each")
    parser.add_argument("--in-order", dest="shuffle", action="store_false", help="text as it is")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=8)
    args = parser.parse_args()
    ark.init(backend=args.backend)
    {"pose": pose, "word2vec": words, "msgemm": products}[args.example](args)


if __name__ == "__main__":
    main()
