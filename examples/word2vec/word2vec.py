"""Word vectors by skip-gram with negative sampling, whole epochs in one launch, on any number of
ranks (GraphWord2Vec: Gill et al., 2020).

The corpus lies on the device. An iteration of a rank takes the next chunk of it and does what
word2vec does with a sentence: frequent words are dropped by chance, windows are shrunk by chance,
and every word in a window is to tell the word in its middle from noise. Words are nodes of two
vectors; only the rows that a chunk touches are read, written and sent to other ranks.

    python -m examples.word2vec.word2vec
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.common import wikipedia
from examples.common.plot import Panel, page
from examples.word2vec import corpus
from examples.word2vec.corpus import Corpus

WAYS = ("sum", "average", "combiner")


@dataclass(frozen=True)
class Options:
    """size: of a vector. window: words to either side. negative: noise words for a word and
    neighbour, drawn once for a block. chunk: words of the text in an iteration; block: words that
    share noise. rate falls from its start to almost nothing.
    """

    size: int = 100
    window: int = 5
    negative: int = 5
    chunk: int = 256
    block: int = 16
    noise: int = 32
    rate: float = 0.025
    epochs: int = 5
    seed: int = 1
    way: str = "sum"


def words_of_chunk(given: dict[str, Any], options: Options, at: Any, step: Any) -> tuple[Any, ...]:
    """The chunk's words that are kept, moved together, and the text each is of (chunk + 1, the last
    is nothing's); how many there are.
    """
    n = options.chunk
    places = ark.add(ark.iota([n], 0, ark.int32), at)
    words, texts = (ark.gather(given[name], places) for name in ("words", "texts"))
    drawn = ark.random_uniform([n], options.seed, ark.mul(step, 4))
    kept = ark.less(drawn, ark.gather(given["keep"], words))
    count = ark.cumsum(ark.cast(kept, ark.int32), 0)
    target = ark.where(kept, ark.sub(count, 1), n)
    nothing = ark.constant(0, [n + 1], ark.int32)
    moved = (ark.scatter_elements(nothing, target, t, 0) for t in (words, texts))
    return (*moved, count[n - 1 : n])


def windows(given: dict[str, Any], options: Options, at: Any, step: Any) -> tuple[Any, Any, Any]:
    """The words of the chunk (chunk,), those around each block (blocks, wide), and 0 or 1 for
    which of these are in which window: (blocks, block, wide), wide = block + 2 window.
    """
    b, w, n = options.block, options.window, options.chunk
    blocks, wide = n // b, b + 2 * w
    words, texts, count = words_of_chunk(given, options, at, step)
    first = ark.mul(ark.iota([blocks, 1], 0, ark.int32), b)
    middle = ark.add(ark.iota([1, b], 1, ark.int32), first)
    around = ark.add(ark.iota([1, wide], 1, ark.int32), ark.sub(first, w))
    inside = ark.clip(around, 0, n)
    reach = ark.random_uniform([blocks, b, 1], options.seed, ark.add(ark.mul(step, 4), 1), 1, w + 1)
    rows, columns = [blocks, 1, wide], [blocks, b, 1]
    apart = ark.abs(ark.sub(ark.reshape(around, rows), ark.reshape(middle, columns)))
    alike = [ark.reshape(ark.gather(texts, at), s) for at, s in ((inside, rows), (middle, columns))]
    pairs = ark.logical_and(ark.equal(*alike), ark.greater(apart, 0))
    there = ark.logical_and(ark.greater_equal(around, 0), ark.less(around, count))
    rules = [ark.less_equal(ark.cast(apart, ark.fp32), ark.floor(reach)), ark.reshape(there, rows)]
    for rule in (*rules, ark.reshape(ark.less(middle, count), columns)):
        pairs = ark.logical_and(pairs, rule)
    return words[:n], ark.gather(words, inside), ark.cast(pairs, ark.fp32)


def updates(given: dict[str, Any], options: Options, at: Any, step: Any, rate: Any) -> list[Any]:
    """(rows of the words' table, their steps, rows of the contexts' table, their steps)."""
    size, blocks = options.size, options.chunk // options.block
    own, around, pairs = windows(given, options, at, step)
    shape = [blocks * options.noise]
    bits = ark.random_bits(shape, options.seed, ark.add(ark.mul(step, 4), 2))
    kinds = given["noise"].shape()[0]
    noise = ark.gather(given["noise"], ark.mod(ark.cast(bits, ark.int64), kinds))
    x, y, z = (
        ark.reshape(ark.gather(given[table], ids), [blocks, -1, size])
        for table, ids in (("vectors", around), ("contexts", own), ("contexts", noise))
    )
    unlike = ark.sub(1.0, ark.sigmoid(ark.matmul(y, x, transpose_other=True)))
    seen = ark.mul(ark.mul(pairs, unlike), rate)
    # A neighbour in m windows would meet m times `negative` noise words; it meets all of the
    # block's, each so many times less.
    many = ark.reshape(ark.reduce_sum(pairs, 1), [blocks, -1, 1])
    share = ark.mul(many, ark.mul(rate, -options.negative / options.noise))
    unseen = ark.mul(ark.sigmoid(ark.matmul(x, z, transpose_other=True)), share)
    dx = ark.add(ark.matmul(seen, y, transpose_input=True), ark.matmul(unseen, z))
    dy, dz = ark.matmul(seen, x), ark.matmul(unseen, x, transpose_input=True)
    dx, dy, dz = (ark.reshape(d, [-1, size]) for d in (dx, dy, dz))
    ids = ark.reshape(around, [dx.shape()[0]])
    return [ids, dx, ark.concat([own, noise], 0), ark.concat([dy, dz], 0)]


def combined(way: str, parts: list[Any]) -> Any:
    """The ranks' steps of the same rows as one. The combiner takes of every next step what is not
    along the sum so far: g + h - (g.h / |g|^2) g (GraphWord2Vec, section 3).
    """
    total = parts[0]
    for part in parts[1:]:
        if way == "combiner":
            dot, norm = (ark.reduce_sum(ark.mul(total, t), 1) for t in (part, total))
            along = ark.where(ark.greater(norm, 0.0), ark.div(dot, norm), ark.mul(norm, 0.0))
            part = ark.sub(part, ark.mul(total, along))
        total = ark.add(total, part)
    return ark.mul(total, 1.0 / len(parts)) if way == "average" else total


def synchronised(table: Any, ids: Any, steps: Any, way: str, rank: int, world: int) -> None:
    """Adds all ranks' steps to the table: only rows that one of them touched are sent."""
    size, count = steps.shape()[1], ids.shape()[0]
    if world == 1:
        ark.scatter_elements(table, ark.reshape(ids, [count, 1]), steps, 0, "add", output=table)
        return
    # A row that occurs twice is summed up first, in a table that is nothing but zeros otherwise.
    own, at = ark.tensor(table.shape()), ark.reshape(ids, [count, 1])
    ark.scatter_elements(own, at, steps, 0, "add", output=own)
    every = ark.all_gather(ids, rank, world)
    found = ark.all_gather(ark.gather(own, every), rank, world)
    many = world * count
    parts = [found[r * many : (r + 1) * many] for r in range(world)]
    moved = ark.add(ark.gather(table, every), combined(way, parts))
    ark.scatter_elements(table, ark.reshape(every, [many, 1]), moved, 0, output=table)
    ark.scatter_elements(own, at, ark.zeros([count, size]), 0, output=own)


@dataclass
class Trained:
    """vectors: by epoch. words: of the text, before any was dropped, that a second took."""

    vectors: list[np.ndarray]
    words: float


def train(text: Corpus, options: Options) -> Trained:
    """A rank's part of the training; every rank has the same tables in the end."""
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    steps = max(1, len(text.words) // (options.chunk * world))  # of an epoch
    chunks = steps * world
    arrays = {name: getattr(text, name) for name in ("words", "texts", "keep", "noise")}
    given: dict[str, Any] = {
        name: ark.tensor(a.shape, ark.DataType.from_numpy(a.dtype)) for name, a in arrays.items()
    }
    shape = [len(text.vocabulary), options.size]
    given["vectors"], given["contexts"] = (ark.tensor(shape) for _ in range(2))
    step = ark.tensor([1], ark.int64)  # of this rank: its first one, then every world-th
    at = ark.mul(ark.mod(step, chunks), options.chunk)
    done = ark.mul(ark.cast(step, ark.fp32), 1.0 / (chunks * options.epochs))
    rate = ark.mul(ark.maximum(ark.sub(1.0, done), 1e-4), options.rate)
    made = updates(given, options, ark.cast(at, ark.int32), step, rate)
    for name, ids, moved in (("vectors", *made[:2]), ("contexts", *made[2:])):
        synchronised(given[name], ids, moved, options.way, rank, world)
    ark.add(step, world, output=step)
    start = np.random.default_rng(options.seed).uniform(-0.5, 0.5, shape) / options.size
    found, seconds = [], 0.0
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, array in arrays.items():
            given[name].from_numpy(array)
        given["vectors"].from_numpy(start.astype(np.float32))
        step.from_numpy(np.array([rank]))
        runtime.barrier()
        for _ in range(options.epochs):
            begin = time.perf_counter()
            runtime.run(steps)
            seconds += time.perf_counter() - begin
            found.append(given["vectors"].to_numpy())
        runtime.barrier()
    return Trained(found, options.epochs * text.raw / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=Options.chunk, help="words of an iteration")
    parser.add_argument("--ranks", type=int, default=4, help="of the comparison of combinations")
    parser.add_argument("--figure", default=str(Path(__file__).with_name("word2vec.svg")))
    args = parser.parse_args()
    ark.init(backend=args.backend)
    text = Corpus.of(wikipedia.encyclopedia())
    made = train(text, Options(epochs=args.epochs, chunk=args.chunk))
    report = {
        "correlation with people's judgements": round(
            wikipedia.similarity(text.vocabulary, made.vectors[-1]), 3
        ),
        "words/s": round(made.words),
    }
    print(json.dumps(report, indent=1))
    raise SystemExit(ark.launch(args.ranks, compare, args.backend, args.figure))


def compare(backend: str, figure: str) -> None:
    """A rank of the comparison: topics found by epoch, for sums, averages and the combiner."""
    ark.init(backend=backend)
    text, panels = Corpus.of(corpus.topics(), least=1), []
    for rate in (0.025, 0.1, 0.3):
        curves = {}
        for way in WAYS:
            ark.Model.reset()
            options = Options(size=32, chunk=64, rate=rate, epochs=5, way=way)
            found = [corpus.same_topic(text, v) for v in train(text, options).vectors]
            curves[way] = (range(1, len(found) + 1), found)
        panels.append(Panel(f"learning rate {rate}", curves))
    if ark.Model.get_rank() == 0:
        for panel in panels:
            print(panel.title, {w: np.round(y, 3).tolist() for w, (_, y) in panel.curves.items()})
        title = f"Nearest words of the same topic, {ark.Model.get_world_size()} ranks"
        Path(figure).write_text(page(title, panels), encoding="utf-8")


if __name__ == "__main__":
    main()
