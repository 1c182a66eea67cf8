"""Times a mixture of experts over ranks (examples/experts): the dispatch, which sends tokens to the
ranks of their experts, and the combine, which adds the results. Compares their times with the time
that the link takes for the same bytes:

    python -m bench.experts --ranks 2 --backend cuda

Every op is timed in a chain of such ops, each of which depends on the preceding one, within one
launch. All ranks send at the same time. `link_us` is the time of the bytes that a rank sends to a
peer, computed from the bandwidth of a large put. `put_us` is the measured time of a put of as many
bytes, with its signal. `wrong` counts elements of the first dispatch that differ from NumPy's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import ark
from bench.over_ranks import slowest
from examples.experts import dispatch
from examples.experts.dispatch import SCALE_ELEMENTS, Split

MAX_TASKS = 128  # the most tasks of an op: about as many as a GPU has processors
Inputs = Sequence[tuple[Any, np.ndarray]]


def chosen(tokens: int, args: argparse.Namespace, rank: int) -> np.ndarray:
    """The experts of a rank's tokens: `slots` different ones for each, drawn at random."""
    scores = np.random.default_rng(rank).random((tokens, args.experts))
    return np.argpartition(scores, args.slots, 1)[:, : args.slots].astype(np.int32)


def drawn(tokens: int, width: int, rank: int) -> np.ndarray:
    values = np.random.default_rng(100 + rank).standard_normal((tokens, width), np.float32)
    return values.astype(ml_dtypes.bfloat16)


class Bench:
    """The measurements of a rank. All ranks make the same calls."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = ark.Model.get_rank(), ark.Model.get_world_size()
        self.after = (self.rank + 1) % self.world

    def seconds(self, chain: int, build: Callable[[], tuple[Inputs, Any]]) -> tuple[float, Any]:
        """Seconds of an op, on the slowest rank: the median of the repeats. build: adds a chain of
        ops to the model; returns its inputs and the tensor to read.
        """
        ark.Model.reset()
        inputs, wanted = build()
        with ark.Runtime() as runtime:
            runtime.launch(loop_mode=False)
            for tensor, values in inputs:
                tensor.from_numpy(values)
            runtime.barrier()
            runtime.run(1)
            result = wanted.to_numpy()
            times = [self._run(runtime, 10)]
            iterations = int(np.clip(self.args.seconds / slowest(times[0]), 5, 5000))
            times = [self._run(runtime, iterations) for _ in range(self.args.repeats)]
            runtime.barrier()
        return slowest(float(np.median(times))) / chain, result

    def _run(self, runtime: ark.Runtime, iterations: int) -> float:
        runtime.barrier()
        begun = time.perf_counter()
        runtime.run(iterations)
        return (time.perf_counter() - begun) / iterations

    def put(self, nbytes: int, chain: int) -> float:
        """Seconds of a put to the next rank with its signal and the wait for it."""

        def build() -> tuple[Inputs, Any]:
            x = first = ark.tensor([nbytes // 4])
            to = ark.comm.channel(self.after)
            before = ark.comm.channel((self.rank - 1) % self.world)
            for _ in range(chain):
                inbox = ark.comm.symmetric([nbytes // 4])
                to.put(x, inbox, signal=True)
                (x,) = before.wait(inbox)
            return [(first, np.ones(nbytes // 4, np.float32))], ark.copy(x[:4])

        return self.seconds(chain, build)[0]

    def split(self, tokens: int) -> Split:
        tasks = self.args.tasks or MAX_TASKS
        how = max(1, tokens // tasks), self.args.senders, self.args.processors
        return Split(self.args.experts, self.rank, self.world, *how)

    def dispatched(self, tokens: int, chain: int) -> tuple[float, int]:
        """Seconds of a dispatch, and how many elements of the first dispatch are wrong."""
        split, width, kept = self.split(tokens), self.args.width, []

        def build() -> tuple[Inputs, Any]:
            x = first = ark.tensor([tokens, width], ark.bf16)
            experts = ark.tensor([tokens, self.args.slots], ark.int32)
            every = ark.tensor([self.world * tokens, self.args.slots], ark.int32)
            for _ in range(chain):
                rows = dispatch.dispatch(x, experts, every, split)
                kept.append(rows)
                x = dispatch.part_of(rows, self.after, split)
            all_chosen = [chosen(tokens, self.args, r) for r in range(self.world)]
            inputs = [
                (first, drawn(tokens, width, self.rank)),
                (experts, all_chosen[self.rank]),
                (every, np.concatenate(all_chosen)),
            ]
            return inputs, kept[0]

        seconds, actual = self.seconds(chain, build)
        wrong = 0
        for source, rows in enumerate(actual.reshape(self.world, tokens, width)):
            own = chosen(tokens, self.args, source) // split.each == self.rank
            want = dispatch.rounded(drawn(tokens, width, source)).astype(rows.dtype)
            wrong += int((rows != want * own.any(1)[:, None].astype(rows.dtype)).sum())
        return seconds, wrong

    def combined(self, tokens: int, chain: int) -> float:
        """Seconds of a combine."""
        split, width = self.split(tokens), self.args.width

        def build() -> tuple[Inputs, Any]:
            shape = [tokens, width]
            x, own = (ark.tensor(shape, ark.bf16) for _ in range(2))
            experts = ark.tensor([tokens, self.args.slots], ark.int32)
            every = ark.tensor([self.world * tokens, self.args.slots], ark.int32)
            inputs = [(x, drawn(tokens, width, 0)), (own, drawn(tokens, width, 1))]
            for _ in range(chain):
                sums = [own if r == self.rank else x for r in range(self.world)]
                x = dispatch.combine(sums, experts, every, split)
            all_chosen = [chosen(tokens, self.args, r) for r in range(self.world)]
            inputs += [(experts, all_chosen[self.rank]), (every, np.concatenate(all_chosen))]
            return inputs, x

        return self.seconds(chain, build)[0]

    def sent(self, tokens: int) -> int:
        """The most tokens that a rank sends to a peer."""
        each = self.args.experts // self.world
        of = (chosen(tokens, self.args, r) // each for r in range(self.world))
        return max(
            int((experts == peer).any(1).sum())
            for rank, experts in enumerate(of)
            for peer in range(self.world)
            if peer != rank
        )


def on_a_rank(args: argparse.Namespace) -> None:
    ark.init(backend=args.backend)
    bench = Bench(args)
    large = args.large << 20
    bandwidth = large / bench.put(large, 2)
    for tokens in args.tokens:
        chain = args.chain or (16 if tokens <= 1024 else 4)
        row = {
            "dispatch": args.width + 4 * (args.width // SCALE_ELEMENTS),
            "combine": 2 * args.width,
        }
        seconds, wrong = bench.dispatched(tokens, chain)
        measured = {"dispatch": seconds, "combine": bench.combined(tokens, chain)}
        for op, nbytes in row.items():
            nbytes *= bench.sent(tokens)
            line: dict[str, Any] = {"op": op, "tokens": tokens, "bytes": nbytes}
            line |= {"us": measured[op], "link_us": nbytes / bandwidth}
            line["put_us"] = bench.put(nbytes // 16 * 16, chain)
            line = {k: round(1e6 * v, 2) if k.endswith("us") else v for k, v in line.items()}
            line["gbps"] = round(bandwidth / 1e9, 1)
            if op == "dispatch":
                line["wrong"] = round(slowest(wrong))
            if bench.rank == 0:
                print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096], help="of a rank")
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--slots", type=int, default=8, help="experts of a token")
    parser.add_argument("--tasks", type=int, default=0, help="of an op (default: about a GPU's)")
    parser.add_argument(
        "--senders", type=int, default=0, help="processors that only store to peers"
    )
    parser.add_argument("--processors", type=int, default=132, help="of the GPU, with --senders")
    parser.add_argument("--chain", type=int, default=0, help="ops in a launch's iteration")
    parser.add_argument("--large", type=int, default=256, help="MB of the bandwidth's put")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    raise SystemExit(ark.launch(args.ranks, on_a_rank, args))


if __name__ == "__main__":
    main()
