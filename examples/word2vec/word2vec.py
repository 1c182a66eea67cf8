"""Word vectors by skip-gram with negative sampling, whole epochs in one launch, on several ranks.

The corpus is in device memory. In an iteration, a rank takes the next chunks of the corpus and
treats them like word2vec's sentences: frequent words are dropped at random, windows are shrunk at
random, and every word in a window learns to distinguish the word in the window's middle from noise
words. On several ranks (GraphWord2Vec: Gill et al., 2020), a rank sends the others only the rows of
the two tables of vectors that it has changed.

    python -m examples.word2vec.word2vec
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
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
    """Options of the training.

    size: elements of a vector. window: neighbours of a word on either side. negative: noise words
    for each pair of a word and a neighbour. chunk: words of the text whose updates are computed
    from the same vectors. block: words of a chunk that share noise words. noise: noise words of a
    block. chunks: the number of chunks of an iteration, which are processed one after another.
    rate: the initial learning rate, which falls to almost 0.
    """

    size: int = 100
    window: int = 5
    negative: int = 5
    chunk: int = 256
    chunks: int = 4
    block: int = 16
    noise: int = 32
    rate: float = 0.025
    epochs: int = 5
    seed: int = 1
    way: str = "sum"


def words_of_chunks(given: dict[str, Any], o: Options, at: Any, step: Any) -> tuple[Any, ...]:
    """Returns three tensors: the words of each chunk that are kept, moved to the chunk's front; the
    text number of each; and the number of kept words (chunks, 1, 1, 1). The first two have chunk +
    1 elements per chunk, of which the last one is unused.
    """
    shape, size = [o.chunks, o.chunk], o.chunks * o.chunk
    places = ark.add(ark.iota([size], 0, ark.int32), at)
    words, texts = (ark.gather(given[name], places) for name in ("words", "texts"))
    drawn = ark.random_uniform([size], o.seed, ark.mul(step, 3))
    kept = ark.reshape(ark.less(drawn, ark.gather(given["keep"], words)), shape)
    count = ark.cumsum(ark.cast(kept, ark.int32), 1)
    first = ark.mul(ark.iota([o.chunks, 1], 0, ark.int32), o.chunk + 1)
    target = ark.add(ark.where(kept, ark.sub(count, 1), o.chunk), first)
    # Fills unused elements with different words, whose updates are 0. If all had the same word, the
    # many updates of its row would wait for each other.
    nothing = ark.mod(ark.iota([size + o.chunks], 0, ark.int32), given["keep"].shape()[0])
    moved = (ark.scatter_elements(nothing, ark.reshape(target, [size]), t) for t in (words, texts))
    return (*moved, ark.reshape(count[:, o.chunk - 1 :], [o.chunks, 1, 1, 1]))


def windows(given: dict[str, Any], o: Options, at: Any, step: Any) -> tuple[Any, Any, Any]:
    """The words of each chunk (chunks, chunk); the words around each block (chunks, blocks, 1,
    wide), where wide = block + 2 window; and 1 for each word that is in a word's window, else 0
    (chunks, blocks, block, wide).
    """
    blocks, wide = o.chunk // o.block, o.block + 2 * o.window
    words, texts, count = words_of_chunks(given, o, at, step)
    begin = ark.mul(ark.iota([o.chunks, 1, 1, 1], 0, ark.int32), o.chunk + 1)
    first = ark.mul(ark.iota([1, blocks, 1, 1], 1, ark.int32), o.block)
    middle = ark.add(ark.iota([1, 1, o.block, 1], 2, ark.int32), first)
    around = ark.add(ark.iota([1, 1, 1, wide], 3, ark.int32), ark.sub(first, o.window))
    inside = ark.add(ark.clip(around, 0, o.chunk), begin)
    shape, chance = [o.chunks, blocks, o.block, 1], ark.add(ark.mul(step, 3), 1)
    reach = ark.floor(ark.random_uniform(shape, o.seed, chance, 1, o.window + 1))
    apart = ark.abs(ark.sub(around, middle))
    alike = (ark.gather(texts, at) for at in (inside, ark.add(middle, begin)))
    pairs = ark.logical_and(ark.equal(*alike), ark.greater(apart, 0))
    there = ark.logical_and(ark.greater_equal(around, 0), ark.less(around, count))
    for rule in (ark.less_equal(ark.cast(apart, ark.fp32), reach), there, ark.less(middle, count)):
        pairs = ark.logical_and(pairs, rule)
    own = ark.reshape(words, [o.chunks, -1])[:, : o.chunk]
    return own, ark.gather(words, inside), ark.cast(pairs, ark.fp32)


def updates(given: dict[str, Any], o: Options, at: Any, step: Any, rate: Any) -> Iterator[Any]:
    """Yields for each chunk: rows of the words' table, the steps (changes) to add to these rows,
    rows of the contexts' table, and the steps to add to those. The caller must add the steps of a
    chunk to the tables before it takes the next chunk.
    """
    n, blocks = o.chunk, o.chunk // o.block
    own, around, pairs = windows(given, o, at, step)
    bits = ark.random_bits([o.chunks, blocks * o.noise], o.seed, ark.add(ark.mul(step, 3), 2))
    kinds = given["noise"].shape()[0]
    noise = ark.gather(given["noise"], ark.mod(ark.cast(bits, ark.int64), kinds))
    targets = ark.concat([own, noise], 1)
    # In word2vec, a neighbour in m windows is paired with m * `negative` noise words. Here it is
    # paired with all noise words of the block, each with the weight m * negative / noise.
    many = ark.reshape(ark.reduce_sum(pairs, 2), [o.chunks, blocks, -1, 1])
    shares, pairs = ark.mul(many, ark.mul(rate, -o.negative / o.noise)), ark.mul(pairs, rate)
    for chunk in range(o.chunks):
        heard, known = (ark.reshape(t[chunk], [-1]) for t in (around, targets))
        share, pair = (ark.reshape(t[chunk], t.shape()[1:]) for t in (shares, pairs))
        x = ark.reshape(ark.gather(given["vectors"], heard), [blocks, -1, o.size])
        vectors, moved = ark.gather(given["contexts"], known), ark.tensor([*known.shape(), o.size])
        y, dy = (ark.reshape(t[:n], [blocks, o.block, o.size]) for t in (vectors, moved))
        z, dz = (ark.reshape(t[n:], [blocks, o.noise, o.size]) for t in (vectors, moved))
        seen = ark.mul(pair, ark.sub(1.0, ark.sigmoid(ark.matmul(y, x, transpose_other=True))))
        unseen = ark.mul(ark.sigmoid(ark.matmul(x, z, transpose_other=True)), share)
        dx = ark.add(ark.matmul(seen, y, transpose_input=True), ark.matmul(unseen, z))
        ark.matmul(seen, x, output=dy)
        ark.matmul(unseen, x, output=dz, transpose_input=True)
        yield heard, ark.reshape(dx, [-1, o.size]), known, moved


def combined(parts: list[Any]) -> Any:
    """Combines the ranks' steps of the same rows (GraphWord2Vec, section 3): adds the part of each
    further step that is orthogonal to the sum so far, g + h - (g.h / |g|^2) g.
    """
    total = parts[0]
    for part in parts[1:]:
        dot, norm = (ark.reduce_sum(ark.mul(total, t), 1) for t in (part, total))
        along = ark.where(ark.greater(norm, 0.0), ark.div(dot, norm), ark.mul(norm, 0.0))
        total = ark.add(total, ark.sub(part, ark.mul(total, along)))
    return total


def synchronised(table: Any, ids: Any, steps: Any, way: str, rank: int, world: int) -> None:
    """Adds all ranks' steps to the table. A rank sends only the rows that it has changed, as the
    words' numbers `ids` and the `steps` to add to their rows.
    """
    size, count = steps.shape()[1], ids.shape()[0]
    if world > 1:
        ids, steps = (ark.all_gather(t, rank, world) for t in (ids, steps))
    at = ark.reshape(ids, [-1, 1])
    if way != "combiner" or world == 1:
        scaled = ark.mul(steps, 1.0 / world) if way == "average" else steps
        ark.scatter_elements(table, at, scaled, 0, "add", output=table)
        return
    # The steps of one rank for the same row are summed up first, in a table that is zero elsewhere.
    sums, parts = ark.tensor(table.shape()), []
    for sender in range(world):
        own, moved = (t[sender * count : (sender + 1) * count] for t in (at, steps))
        ark.scatter_elements(sums, own, moved, 0, "add", output=sums)
        parts.append(ark.gather(sums, ids))
        ark.scatter_elements(sums, own, ark.zeros([count, size]), 0, output=sums)
    total = ark.add(ark.gather(table, ids), combined(parts))
    ark.scatter_elements(table, at, total, 0, output=table)


@dataclass
class Trained:
    """The result of a training. vectors: those after each epoch. words: words per second, counted
    before any were dropped.
    """

    vectors: list[np.ndarray]
    words: float


def train(text: Corpus, options: Options) -> Trained:
    """Trains on one rank. At the end every rank has the same tables."""
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    size = options.chunk * options.chunks  # words per iteration
    steps = max(1, len(text.words) // (size * world))  # iterations per epoch
    total, share = steps * world, steps * world * size / len(text.words)
    arrays = {name: getattr(text, name) for name in ("words", "texts", "keep", "noise")}
    given: dict[str, Any] = {
        name: ark.tensor(a.shape, ark.DataType.from_numpy(a.dtype)) for name, a in arrays.items()
    }
    shape = [len(text.vocabulary), options.size]
    given |= {name: ark.tensor(shape) for name in ("vectors", "contexts")}
    step = ark.tensor([1], ark.int64)  # this rank's next iteration, numbered over all ranks
    at = ark.mul(ark.mod(step, total), size)
    done = ark.mul(ark.cast(step, ark.fp32), 1.0 / (total * options.epochs))
    rate = ark.mul(ark.maximum(ark.sub(1.0, done), 1e-4), options.rate)
    for heard, dx, known, moved in updates(given, options, ark.cast(at, ark.int32), step, rate):
        synchronised(given["vectors"], heard, dx, options.way, rank, world)
        synchronised(given["contexts"], known, moved, options.way, rank, world)
    ark.add(step, world, output=step)
    start = np.random.default_rng(options.seed).uniform(-0.5, 0.5, shape) / options.size
    vectors, seconds = [], 0.0
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
            vectors.append(given["vectors"].to_numpy())
        runtime.barrier()
    return Trained(vectors, options.epochs * text.raw * share / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--chunk", type=int, default=Options.chunk, help="words side by side")
    parser.add_argument("--ranks", type=int, default=4, help="of the comparison of combinations")
    parser.add_argument("--figure", default=str(Path(__file__).with_name("word2vec.svg")))
    args = parser.parse_args()
    ark.init(backend=args.backend)
    text = Corpus.of(wikipedia.pieces(wikipedia.encyclopedia()))
    trained = train(text, Options(chunk=args.chunk))
    score = wikipedia.similarity(text.vocabulary, trained.vectors[-1])
    print(json.dumps({"rank correlation": round(score, 3), "words/s": round(trained.words)}))
    raise SystemExit(ark.launch(args.ranks, compare, args.backend, args.figure))


def compare(backend: str, figure: str) -> None:
    """Runs one rank of the comparison. Measures the score after each epoch for three ways to
    combine the ranks' steps: sum, average, and `combined`.
    """
    ark.init(backend=backend)
    text, panels = Corpus.of(corpus.topics(), least=1), []
    for rate in (0.025, 0.1, 0.3):
        curves = {}
        for way in WAYS:
            ark.Model.reset()
            options = Options(size=32, chunk=64, chunks=1, rate=rate, way=way)
            scores = [corpus.same_topic(text, v) for v in train(text, options).vectors]
            curves[way] = (range(1, len(scores) + 1), scores)
        panels.append(Panel(f"learning rate {rate}", curves))
    if ark.Model.get_rank() == 0:
        for panel in panels:
            print(panel.title, {w: np.round(y, 3).tolist() for w, (_, y) in panel.curves.items()})
        title = f"Nearest words of the same topic, {ark.Model.get_world_size()} ranks"
        Path(figure).write_text(page(title, panels), encoding="utf-8")


if __name__ == "__main__":
    main()
