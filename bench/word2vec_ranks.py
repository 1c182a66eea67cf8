"""Trains word vectors (examples/word2vec) on ten million words over 1, 2, 4 and 8 ranks. Prints a
line of JSON for each run: words per second, accuracy by analogy, and the bytes that a rank sends to
each peer per iteration.

    apt-get download dict-gcide sword-text-kjv sword-text-web sword-comm-mhcc sword-comm-scofield \
        sword-comm-tdavid
    python -m bench.word2vec_ranks *.deb --ranks 1 2 4 8

The text is that of examples/word2vec/packages.py and the excerpt of Wikipedia that gensim ships.
Analogies are the 19,544 questions of word2vec (Mikolov et al., 2013), as far as their words are in
the vocabulary. With several --seeds the first number of ranks is trained with each of them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.common import wikipedia
from examples.word2vec import packages, word2vec
from examples.word2vec.corpus import Corpus

QUESTIONS_AT_ONCE = 500  # whose distances to all words are computed together
MOST_AT_ONCE = 1024  # words of all ranks whose steps are computed from the same vectors


def analogies(vocabulary: list[str], vectors: np.ndarray) -> tuple[int, int]:
    """The numbers of questions answered right, and of all questions whose words are known. The
    answer to "a is to b as c is to ..." is the word next to b - a + c other than a, b and c.
    """
    from gensim.test.utils import datapath

    number = {word: i for i, word in enumerate(vocabulary)}
    lines = Path(datapath("questions-words.txt")).read_text().lower().splitlines()
    asked = [line.split() for line in lines if not line.startswith(":")]
    known = np.array([[number[w] for w in words] for words in asked if set(words) <= set(number)])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    right = 0
    for part in np.array_split(known, 1 + len(known) // QUESTIONS_AT_ONCE):
        first, second, third, answer = part.T
        near = (unit[second] - unit[first] + unit[third]) @ unit.T
        for given in (first, second, third):
            near[np.arange(len(part)), given] = -np.inf
        right += int((near.argmax(1) == answer).sum())
    return right, len(known)


def interval(right: int, of: int, z: float = 1.96) -> list[float]:
    """Wilson's interval of a share, 95% by default."""
    share, n = right / of, of
    centre = share + z * z / (2 * n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [round(float((centre + sign * half) / (1 + z * z / n)), 4) for sign in (-1, 1)]


def on_a_rank(folder: str, backend: str, options: word2vec.Options, out: str) -> None:
    ark.init(backend=backend)
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    with open(Path(folder) / "corpus", "rb") as file:
        text = pickle.load(file)
    begun = resource.getrusage(resource.RUSAGE_SELF)
    trained = word2vec.train(text, options)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    np.savez(Path(folder) / f"{out}.{rank}", vectors=trained.vectors[-1], words=trained.words,
             cpu=cpu, world=world)  # fmt: skip


def sent(options: word2vec.Options, world: int) -> int:
    """Bytes that a rank sends to each peer in an iteration: numbers of rows, and their steps."""
    blocks = options.chunk // options.block
    rows = blocks * (options.block + 2 * options.window) + options.chunk + blocks * options.noise
    return options.chunks * rows * (4 + 4 * options.size) if world > 1 else 0


def figures(folder: str, name: str, world: int, text: Corpus) -> dict[str, Any]:
    runs = [np.load(Path(folder) / f"{name}.{rank}.npz") for rank in range(world)]
    equal = all((run["vectors"] == runs[0]["vectors"]).all() for run in runs)
    right, of = analogies(text.vocabulary, runs[0]["vectors"])
    return {
        "words_per_second": round(min(float(run["words"]) for run in runs)),
        "cpu_seconds": round(sum(float(run["cpu"]) for run in runs)),
        "ranks_are_equal": equal,
        "analogies": f"{right} of {of}",
        "accuracy": round(right / of, 4),
        "interval": interval(right, of),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, nargs="+", help="Debian packages")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunk", type=int, default=word2vec.Options.chunk)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--way", choices=word2vec.WAYS, default="sum")
    parser.add_argument("--least", type=int, default=20, help="of a word's occurrences")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    texts = packages.texts(args.packages) + wikipedia.encyclopedia()
    text = Corpus.of(wikipedia.pieces(texts), least=args.least)
    about = {"words": text.raw, "vocabulary": len(text.vocabulary), "epochs": args.epochs}
    print(json.dumps(about), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder) / "corpus", "wb") as file:
            pickle.dump(text, file)
        for world in args.ranks:
            for seed in args.seeds if world == args.ranks[0] else args.seeds[:1]:
                options = word2vec.Options(
                    chunk=min(args.chunk, MOST_AT_ONCE // world),
                    epochs=args.epochs,
                    seed=seed,
                    way=args.way,
                )
                name, given = f"{world}.{seed}", (args.backend, options)
                if ark.launch(world, on_a_rank, folder, *given, name):
                    raise SystemExit(f"{world} ranks failed")
                about = {"ranks": world, "seed": seed, "chunk": options.chunk}
                about |= figures(folder, name, world, text)
                print(json.dumps({**about, "bytes_to_a_peer": sent(options, world)}), flush=True)


if __name__ == "__main__":
    main()
