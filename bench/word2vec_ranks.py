"""Trains word vectors (examples/word2vec) on ten million words over 1, 2, 4 and 8 ranks. Prints a
line of JSON for each run: words per second, accuracy by analogy, and the bytes that a rank sends to
each peer per iteration.

    apt-get download dict-gcide sword-text-kjv sword-text-web sword-comm-mhcc sword-comm-scofield \
        sword-comm-tdavid
    python -m bench.word2vec_ranks *.deb --corpus corpus.npz --ranks 1 2 4 8

The text is that of examples/word2vec/packages.py and the excerpt of Wikipedia that gensim ships.
The accuracy is measured on the 19,544 analogy questions of word2vec (Mikolov et al., 2013), without
questions whose words are not in the vocabulary. With --corpus, text and questions are read from
this file if it exists, otherwise stored there; so a machine without the packages can train. With
several --seeds, the first number of --ranks is trained with each seed.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.common import wikipedia
from examples.word2vec import packages, word2vec
from examples.word2vec.corpus import Corpus

QUESTIONS_AT_ONCE = 500  # questions whose distances to all words are computed together
ARRAYS = ("words", "texts", "keep", "noise")  # of a corpus
MOST_AT_ONCE = 1024  # words of all ranks whose steps are computed from the same vectors


def questions(vocabulary: list[str]) -> np.ndarray:
    """word2vec's questions (count, 4), as indices into the vocabulary. Questions with words that
    are not in the vocabulary are left out. The questions are part of gensim's test data.
    """
    from gensim.test.utils import datapath

    number = {word: i for i, word in enumerate(vocabulary)}
    lines = Path(datapath("questions-words.txt")).read_text().lower().splitlines()
    asked = [line.split() for line in lines if not line.startswith(":")]
    return np.array([[number[w] for w in words] for words in asked if set(words) <= set(number)])


def correct(asked: np.ndarray, vectors: np.ndarray) -> int:
    """The number of questions with the right answer. The answer to "a is to b as c is to ..." is
    the word whose vector is nearest to b - a + c, except a, b and c.
    """
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    right = 0
    for part in np.array_split(asked, 1 + len(asked) // QUESTIONS_AT_ONCE):
        first, second, third, answer = part.T
        near = (unit[second] - unit[first] + unit[third]) @ unit.T
        for given in (first, second, third):
            near[np.arange(len(part)), given] = -np.inf
        right += int((near.argmax(1) == answer).sum())
    return right


def built(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The text and the questions, as arrays by name."""
    texts = packages.texts(args.packages) + wikipedia.encyclopedia()
    text = Corpus.of(wikipedia.pieces(texts), least=args.least)
    arrays = {name: getattr(text, name) for name in ARRAYS}
    return {**arrays, "raw": np.array(text.raw), "kinds": np.array(len(text.vocabulary)),
            "questions": questions(text.vocabulary)}  # fmt: skip


def corpus_in(folder: str) -> tuple[Corpus, np.ndarray]:
    """The text and the questions that `main` has stored in a folder. The vocabulary has numbers in
    place of words.
    """
    with np.load(Path(folder) / "corpus.npz") as file:
        given = {name: file[name] for name in ARRAYS}
        words = list(map(str, range(int(file["kinds"]))))
        return Corpus(vocabulary=words, raw=int(file["raw"]), **given), file["questions"]


def interval(right: int, of: int, z: float = 1.96) -> list[float]:
    """Wilson's interval of a share, 95% by default."""
    share, n = right / of, of
    centre = share + z * z / (2 * n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [round(float((centre + sign * half) / (1 + z * z / n)), 4) for sign in (-1, 1)]


def on_a_rank(folder: str, backend: str, options: word2vec.Options, out: str) -> None:
    ark.init(backend=backend)
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    text, _ = corpus_in(folder)
    begun = resource.getrusage(resource.RUSAGE_SELF)
    trained = word2vec.train(text, options)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    np.savez(Path(folder) / f"{out}.{rank}", vectors=trained.vectors[-1], words=trained.words,
             cpu=cpu, world=world)  # fmt: skip


def sent(options: word2vec.Options, world: int) -> int:
    """Bytes that a rank sends to each peer in an iteration. For each changed row it sends the row's
    number and the change.
    """
    blocks = options.chunk // options.block
    rows = blocks * (options.block + 2 * options.window) + options.chunk + blocks * options.noise
    return options.chunks * rows * (4 + 4 * options.size) if world > 1 else 0


def figures(folder: str, name: str, world: int, asked: np.ndarray) -> dict[str, Any]:
    runs = [np.load(Path(folder) / f"{name}.{rank}.npz") for rank in range(world)]
    equal = all((run["vectors"] == runs[0]["vectors"]).all() for run in runs)
    right, of = correct(asked, runs[0]["vectors"]), len(asked)
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
    parser.add_argument("packages", type=Path, nargs="*", help="Debian packages")
    parser.add_argument("--corpus", type=Path, help="a file for the text")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunk", type=int, default=word2vec.Options.chunk)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--way", choices=word2vec.WAYS, default="sum")
    parser.add_argument("--least", type=int, default=20, help="of a word's occurrences")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stored = args.corpus or Path(folder) / "stored.npz"
        if not stored.exists():
            np.savez_compressed(stored, **built(args))
        shutil.copy(stored, Path(folder) / "corpus.npz")
        text, asked = corpus_in(folder)
        about: dict[str, Any] = {"words": text.raw, "vocabulary": len(text.vocabulary)}
        print(json.dumps({**about, "epochs": args.epochs}), flush=True)
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
                about |= figures(folder, name, world, asked)
                print(json.dumps({**about, "bytes_to_a_peer": sent(options, world)}), flush=True)


if __name__ == "__main__":
    main()
