"""Adasum: a way to combine the optimizer steps of several ranks, with which the learning rate need
not be changed when the number of ranks grows.

Every rank takes its optimizer's step on a batch of its own. The steps are combined (the delta
optimizer of Maleki et al., MLSys 2021) by sum, by average, or by Adasum, as a tree or by vector
halving. For each combination of method and optimizer, a perceptron learns scikit-learn's digits.
All perceptrons are trained in one launch of one kernel per rank.

    python -m examples.adasum.adasum --ranks 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.common.plot import Panel, page

HIDDEN, PIXELS, CLASSES, TRAINED_ON = 32, 64, 10, 1500
METHODS = ("sum", "average", "tree", "halving")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: ark.optim.SGD(p, lr=1.0),
    "momentum": lambda p: ark.optim.SGD(p, lr=0.4, momentum=0.9),
    "Adam": lambda p: ark.optim.Adam(p, lr=0.04),
    "LAMB": lambda p: ark.optim.LAMB(p, lr=0.03),
}


def pair(a: Any, b: Any, dots: Any, scales: Any) -> Any:
    """Adasum of two tensors, a - (a.b / 2 a.a) a + b - (a.b / 2 b.b) b; if one is zero, the other
    one. scales (2,): the largest magnitudes of a and b. dots (3,): a.b, a.a and b.b, computed from
    a and b divided by their scales.
    """

    def along(vector: Any, own: Any, other: Any, norm: Any) -> Any:
        """Returns half of the projection of the other vector on this vector."""
        share = ark.div(dots[0:1], ark.mul(norm, 2.0))
        share = ark.where(ark.greater(norm, 0.0), share, ark.mul(norm, 0.0))
        return ark.mul(ark.mul(unit(vector, own), share), other)

    first, second = scales[0:1], scales[1:2]
    parts = along(a, first, second, dots[1:2]), along(b, second, first, dots[2:3])
    return ark.add(ark.sub(a, parts[0]), ark.sub(b, parts[1]))


def unit(vector: Any, scale: Any) -> Any:
    """The vector divided by `scale`, its largest magnitude, so that products of elements neither
    overflow nor vanish.
    """
    return ark.div(vector, ark.where(ark.greater(scale, 0.0), scale, 1.0))


def magnitudes(a: Any, b: Any) -> Any:
    """The largest magnitudes of the elements of two vectors, (2,)."""
    return ark.concat([ark.reduce_max(ark.abs(x), 0) for x in (a, b)], 0)


def products(a: Any, b: Any, scales: Any) -> Any:
    """The dot products a.b, a.a and b.b (3,) of two vectors that are divided by their scales."""
    a, b = unit(a, scales[0:1]), unit(b, scales[1:2])
    return ark.concat([ark.reduce_sum(ark.mul(x, y), 0) for x, y in ((a, b), (a, a), (b, b))], 0)


def tree(every: Sequence[Any]) -> Any:
    """Adasum of all ranks' vectors: neighbours are combined in pairs, then the results in pairs,
    and so on.
    """
    level = list(every)
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2], strict=True))
        scales = [magnitudes(a, b) for a, b in pairs]
        level = [
            pair(a, b, products(a, b, own), own) for (a, b), own in zip(pairs, scales, strict=True)
        ]
    return level[0]


def over_group(own: Any, rank: int, world: int, group: int, reduction: str) -> Any:
    """The reduction of the ranks' values within a group of ranks. All groups are reduced by one
    collective, whose tensor has a row for each group; a rank's rows for other groups are 0.
    """
    count = own.shape()[0]
    rows = [ark.zeros([count], ark.fp32)] * (world // group)
    rows[rank // group] = own
    every = ark.all_reduce(ark.concat(rows, 0), rank, world, reduction=reduction)
    begin = count * (rank // group)
    return every[begin : begin + count]


def halving(own: Any, rank: int, world: int, tag: int) -> Any:
    """Adasum of all ranks' vectors, like `tree`, by vector halving and distance doubling.

    At every level a rank sends half of its vector to its partner. The two combined vectors are then
    spread over several ranks, and the dot products of their parts are summed over these ranks.
    """
    held, pieces = own, [0] * world  # the index at which each rank's part of the result begins
    for level in range(world.bit_length() - 1):
        half, upper = held.shape()[0] // 2, rank >> level & 1
        low, high = held[0:half], held[half : 2 * half]
        kept, given = (high, low) if upper else (low, high)
        ark.send(given, rank ^ 1 << level, tag + level)
        theirs = ark.recv(ark.tensor([half]), rank ^ 1 << level, tag + level)
        first, second = (theirs, kept) if upper else (kept, theirs)
        group = 2 << level
        of = (rank, world, group)
        scales = over_group(magnitudes(first, second), *of, "max")
        dots = over_group(products(first, second, scales), *of, "sum")
        held = pair(first, second, dots, scales)
        pieces = [at + (r >> level & 1) * half for r, at in enumerate(pieces)]
    gathered, size = ark.all_gather(held, rank, world), held.shape()[0]
    order = sorted(range(world), key=pieces.__getitem__)
    return ark.concat([gathered[r * size : (r + 1) * size] for r in order], 0)


class Curves:
    """Records values of every training step on the device, as curves."""

    def __init__(self, steps: int) -> None:
        self.steps, self.at = steps, ark.tensor([1], ark.int32)
        self.here = ark.equal(ark.iota([steps], 0, ark.int32), self.at)
        self.kept: dict[str, Any] = {}

    def record(self, name: str, value: Any) -> None:
        self.kept[name] = ark.tensor([self.steps])
        ark.where(self.here, value, self.kept[name], output=self.kept[name])

    def end_step(self) -> None:
        ark.add(self.at, 1, output=self.at)


def learner(
    method: str, optimizer: str, given: dict[str, Any], curves: Curves, rank: int, world: int
) -> list[Any]:
    """Adds a perceptron that learns with the given method and optimizer. Returns its weights."""
    name = f"{optimizer} {method}"
    weights = [ark.parameter([HIDDEN, PIXELS]), ark.parameter([CLASSES, HIDDEN])]

    def logits(x: Any) -> Any:
        return ark.linear(ark.relu(ark.linear(x, weights[0])), weights[1])

    loss = ark.cross_entropy(logits(given["x"]), given["y"])
    before = [ark.copy(w) for w in weights]
    OPTIMIZERS[optimizer](weights).step(ark.grad(loss, weights))
    for number, (weight, old) in enumerate(zip(weights, before, strict=True)):
        size = int(np.prod(weight.shape()))
        step = ark.reshape(ark.sub(weight, old), [size])
        gathered = ark.all_gather(step, rank, world)
        every = [gathered[r * size : (r + 1) * size] for r in range(world)]
        if method == "tree":
            total = tree(every)
        elif method == "halving":
            total = halving(step, rank, world, 8 * len(curves.kept))
        else:
            total = ark.all_reduce(step, rank, world)
            total = total if method == "sum" else ark.mul(total, 1.0 / world)
        length = ark.reduce_sum(ark.mul(total, total), 0)
        lengths = ark.reduce_sum(ark.mul(gathered, gathered), 0)
        curves.record(f"{name} orthogonality {number}", ark.div(length, lengths))
        ark.copy(ark.add(old, ark.reshape(total, weight.shape())), output=weight)
    drawn = ark.reshape(ark.argmax(logits(given["test x"])), given["test y"].shape())
    right = ark.equal(drawn, given["test y"])
    curves.record(f"{name} accuracy", ark.reduce_mean(ark.cast(right, ark.fp32), 0))
    return weights


def digits() -> dict[str, np.ndarray]:
    """scikit-learn's digits, shuffled: x and y for training, and test x and test y."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    order = np.random.default_rng(0).permutation(len(dataset.data))
    x = (dataset.data[order] / 16).astype(np.float32)
    x[:, 0] = 1.0  # turns a pixel that is always empty into the bias
    y = dataset.target[order].astype(np.int32)
    cut = TRAINED_ON
    return {"x": x[:cut], "y": y[:cut], "test x": x[cut:], "test y": y[cut:]}


def train(
    data: dict[str, np.ndarray],
    steps: int,
    batch: int,
    methods: Sequence[str] = METHODS,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
) -> tuple[dict[str, np.ndarray], dict[str, list[np.ndarray]]]:
    """Trains on one rank. Returns the curves by name, and the final weights by optimizer and
    method.
    """
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    whole = {n: ark.tensor(a.shape, ark.DataType.from_numpy(a.dtype)) for n, a in data.items()}
    picks = ark.tensor([steps, batch], ark.int32)
    curves = Curves(steps)
    now = ark.reshape(ark.gather(picks, curves.at), [batch])
    given = {**whole, "x": ark.gather(whole["x"], now), "y": ark.gather(whole["y"], now)}
    weights = {
        f"{o} {m}": learner(m, o, given, curves, rank, world) for o in optimizers for m in methods
    }
    curves.end_step()
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, tensor in whole.items():
            tensor.from_numpy(data[name])
        drawn = np.random.default_rng([1, rank]).integers(0, len(data["x"]), (steps, batch))
        picks.from_numpy(drawn.astype(np.int32))
        for tensors in weights.values():
            start = np.random.default_rng(2)
            for weight in tensors:
                shape = weight.shape()
                weight.from_numpy(start.normal(size=shape) * (2 / shape[1]) ** 0.5)
        runtime.barrier()
        runtime.run(steps)
        curve_values = {name: kept.to_numpy() for name, kept in curves.kept.items()}
        ended = {name: [w.to_numpy() for w in tensors] for name, tensors in weights.items()}
        runtime.barrier()
    return curve_values, ended


def work(
    backend: str, steps: int, batch: int, optimizers: list[str], path: str, figure: str
) -> None:
    """The process of a rank. Rank 0 writes the results."""
    ark.init(backend=backend)
    kept, ended = train(digits(), steps, batch, optimizers=optimizers)
    if ark.Model.get_rank() != 0:
        return
    accuracy = {n: kept[f"{n} accuracy"] for n in ended}
    apart = max(
        float(np.abs(a - b).max())
        for o in optimizers
        for a, b in zip(ended[f"{o} tree"], ended[f"{o} halving"], strict=True)
    )
    report = {
        "accuracy in the end": {n: round(float(a[-1]), 4) for n, a in accuracy.items()},
        "steps to 90%": {n: 1 + int(np.argmax(a >= 0.9)) if a.max() >= 0.9 else None
                         for n, a in accuracy.items()},
        "largest difference of weights, tree and halving": apart,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if path:
        Path(path).write_text(json.dumps({n: c.tolist() for n, c in kept.items()}))
    if figure:
        world = ark.Model.get_world_size()
        Path(figure).write_text(drawn(kept, world, optimizers), encoding="utf-8")


def drawn(kept: dict[str, np.ndarray], world: int, optimizers: Sequence[str]) -> str:
    """An SVG with plots of the accuracy by method and of how orthogonal the ranks' steps are, for
    each layer.
    """
    at = range(len(next(iter(kept.values()))))
    panels = [
        Panel(f"{o}: accuracy", {m: (at, kept[f"{o} {m} accuracy"]) for m in METHODS[:3]})
        for o in optimizers
    ]
    for o in optimizers:
        layers = {f"layer {i}": (at, kept[f"{o} tree orthogonality {i}"]) for i in (0, 1)}
        panels.append(Panel(f"{o}: orthogonality", layers))
    return page(f"Digits on {world} ranks: 1 is orthogonal, {1 / world:g} is parallel", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--ranks", type=int, default=4, help="a power of two")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128, help="of a rank")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--curves", default="", help="a file to write all curves to, as JSON")
    parser.add_argument("--figure", default=str(Path(__file__).with_name("adasum.svg")))
    args = parser.parse_args()
    given = (args.backend, args.steps, args.batch, args.optimizers, args.curves, args.figure)
    raise SystemExit(ark.launch(args.ranks, work, *given))


if __name__ == "__main__":
    main()
