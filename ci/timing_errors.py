"""Computes the figures of docs/reference/timing-errors.md: predictions of the AMD timing model
beside published times, predicted times beside their goals, and times of signals between processors
in one and in two levels (all at once, or within each die and then between dies).

`python ci/timing_errors.py` predicts all of these, prints the page and writes
ci/results/emulator/timing.json, from which ci/generate.py makes the page. `python
ci/timing_errors.py NAME...` predicts only the named parts (micro, levels, fleet, 1b, 8b) and keeps
the other predictions. A prediction is the same in each run of the same kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "ci/results/emulator/timing.json"
LAYERS = (1, 3)  # numbers of layers that are run; times of whole models are scaled from these
FLEET = "ROCm/fleet-chiplet-megakernel"


class Predictions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ci/results/emulator/timing.json. predicted: the predicted figures, by the key
    of a row of the page.
    """

    predicted: dict[str, float]


@dataclass(frozen=True)
class Published:
    """A published time, rate or bandwidth: one figure (least equals most), or the two ends of a
    range.
    """

    key: str
    subject: str
    unit: str
    least: float
    most: float
    source: str

    def error(self, predicted: float) -> float:
        """The relative error of a prediction: its difference from the nearest published figure,
        divided by that figure. 0 if the prediction lies between the two published figures.
        """
        nearest = min(max(predicted, self.least), self.most)
        return predicted / nearest - 1.0


@dataclass(frozen=True)
class Goal:
    """A predicted figure and the largest value that it should have."""

    key: str
    subject: str
    unit: str
    most: float


def _one(key: str, subject: str, unit: str, value: float, source: str) -> Published:
    return Published(key, subject, unit, value, value, source)


HAND_OVERS = "published measurements of an MI300X"
READS = "read tests of an MI300X"
CHIPS = "Chips and Cheese, Testing AMD's Giant MI300X (June 2024)"
MICRO = (
    Published("memory", "reading memory, all compute units", "TB/s", 4.0, 4.3, READS),
    _one("cache", "reading the memory-side cache, all compute units", "TB/s", 11.9, CHIPS),
    _one("cache latency", "a load that the memory-side cache answers", "ns", 218, CHIPS),
    _one("near", "a counter handed over within a die", "ns", 642, HAND_OVERS),
    _one("far", "a counter handed over between dies", "ns", 742, HAND_OVERS),
    Published("barrier", "a barrier of all compute units", "us", 3.3, 8.6, HAND_OVERS),
    _one("polled", "the same by polling values (packets)", "us", 0.9, HAND_OVERS),
    _one("matrix", "bf16 on the matrix units", "TFLOP/s", 1307, "AMD Instinct MI300X data sheet"),
)
# The groups of ops into which bench/rocm_gpt_oss.py divides a layer.
OPS = (
    _one("query, key, value", "query, key, value of a layer", "us", 9.0, FLEET),
    _one("attention", "attention of a layer", "us", 4.8, FLEET),
    _one("output, router, top-k", "output, router and top-k of a layer", "us", 14.8, FLEET),
    _one("experts", "experts of a layer", "us", 22.0, FLEET),
    _one("gpt-oss 1", "a token, 1 request", "us", 2130, FLEET),
    _one("gpt-oss 8", "a token of each of 8 requests", "us", 8200, FLEET),
)
GOALS = (
    Goal("gpt-oss 1", "gpt-oss-120B, 1 request, MI355X", "us a token", 1800),
    Goal("gpt-oss 8", "gpt-oss-120B, 8 requests, MI355X", "us an iteration", 5000),
    Goal("1b 1", "Llama 3.2 1B, bf16, MI300X", "us a token", 600),
    Goal("1b rows", "the same, 8 sequences beside one", "ratio", 1.15),
    Goal("8b fp8", "Llama 3.1 8B, fp8 beside bf16, MI300X", "ratio", 0.56),
)
# For each measurement: its name, the key of its time in one level (all compute units), and the key
# of its time in two levels (within each die, then between dies).
LEVELS = (
    ("a barrier of all compute units on one counter", "barrier", "barrier by die"),
    ("the same on a counter for each die", "barrier spread", "barrier by die"),
    ("304 packets, one of each compute unit, to all", "polled", "polled by die"),
    ("2,048 packets (a row of 1B) to all", "row", "row by die"),
)


def micro() -> dict[str, float]:
    """Predictions of published microbenchmarks."""
    import microbenchmarks as m

    return {
        "memory": m.memory_bandwidth(),
        "cache": m.cache_bandwidth(),
        "cache latency": m.cache_latency(),
        "near": m.hand_over(m.DIES),
        "far": m.hand_over(1),
        "barrier": m.barrier(),
        "polled": m.exchange(m.COMPUTE_UNITS),
        "matrix": m.matrix_rate(),
    }


def levels() -> dict[str, float]:
    """Predicted times of synchronisation in two levels (within a die, then between dies) and in one
    level, and of passing a row of values to all processors.
    """
    import microbenchmarks as m

    return {
        "barrier by die": m.barrier("barriers_by_die"),
        "barrier spread": m.barrier("barriers_spread"),
        "polled by die": m.exchange(m.COMPUTE_UNITS, "exchange_by_die"),
        "row": m.exchange(2048),
        "row by die": m.exchange(2048, "exchange_by_die"),
    }


def fleet() -> dict[str, float]:
    """Predictions for gpt-oss-120B on an MI355X."""
    from bench.rocm_gpt_oss import config, predict

    token, groups = predict(config(3))
    return {**groups, "gpt-oss 1": token, "gpt-oss 8": predict(config(3), 8)[0]}


def decoded(name: str, quantize: str | None = None, batch: int = 1) -> float:
    """Microseconds of a token of each sequence, as `ark bench decode --layers` predicts it."""
    import contextlib
    import dataclasses

    import ark_rocm_emulator
    from ark_rocm import backend

    from ark.cli.measure.decode import decode
    from ark.cli.measure.scaled import scaled
    from ark.ir.dtype import bf16
    from ark.models.build import Shape
    from ark.models.config import builtin_config
    from ark.models.holding import quantised_config

    figures = []
    for layers in LAYERS:
        config = dataclasses.replace(builtin_config(name), num_hidden_layers=layers)
        shape = Shape(quantised_config(config, quantize, name), bf16, 514, 0, batch=batch)
        with (
            ark_rocm_emulator.emulated("mi300x"),
            contextlib.closing(backend.open(0)) as device,
        ):
            options = {"contexts": [512], "tokens": 1, "repeats": 1, "warm_up": 0}
            figures.append(decode(shape, backend, device, **options))
    whole = builtin_config(name).num_hidden_layers
    return scaled(*figures, LAYERS, whole).contexts[0].per_token * 1e6


def one_b() -> dict[str, float]:
    """Predictions for Llama 3.2 1B on an MI300X."""
    one, eight = (decoded("llama-3.2-1b", batch=n) for n in (1, 8))
    return {"1b 1": one, "1b rows": eight / one}


def eight_b() -> dict[str, float]:
    """Predictions for Llama 3.1 8B on an MI300X."""
    plain, codes = (decoded("llama-3.1-8b", quantize=q) for q in (None, "fp8"))
    return {"8b 1": plain, "8b fp8": codes / plain}


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "micro": micro,
    "levels": levels,
    "fleet": fleet,
    "1b": one_b,
    "8b": eight_b,
}


def read(path: Path = FILE) -> Predictions:
    """Reads timing.json; raises ValueError with the file's name if it is not valid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Predictions)
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path.name} is not a file of predictions: {error}") from error


def number(value: float) -> str:
    """A number as text, with three or four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def compared(rows: tuple[Published, ...], predicted: dict[str, float]) -> list[str]:
    """A table of predictions, published figures and errors."""
    lines = ["| | predicted | published | error | source |", "|---|---|---|---|---|"]
    for row in rows:
        between = "" if row.least == row.most else f" to {number(row.most)}"
        lines.append(
            f"| {row.subject} | {number(predicted[row.key])} {row.unit} | "
            f"{number(row.least)}{between} | {row.error(predicted[row.key]):+.0%} | {row.source} |"
        )
    return lines


def table(predicted: dict[str, float]) -> str:
    """The text of the page timing-errors.md. Raises ValueError if a prediction is missing."""
    keys = [r.key for r in (*MICRO, *OPS, *GOALS)] + [key for _, *each in LEVELS for key in each]
    missing = sorted(set(keys) - set(predicted))
    if missing:
        raise ValueError(f"{FILE.name} lacks {missing}; run `python ci/timing_errors.py`")
    lines = [
        "# Predicted and published times on AMD GPUs",
        "",
        "This page is for those who judge predictions of the AMD timing model "
        "([rocm-timing.md](../rocm-timing.md)).",
        "",
        "Generated by `python ci/generate.py` from `ci/results/emulator/timing.json`, which "
        "`python ci/timing_errors.py` writes. Everything predicted was computed by the emulator "
        "with its timing model; nothing was measured on AMD hardware.",
        "",
        "## Microbenchmarks",
        "",
        "The same operation as published, on an MI300X. Bandwidths and matrix rates are constants "
        "of the model, and latencies were fitted to the hand-overs and the barrier "
        "([timing-constants.md](timing-constants.md)); only the barrier by packets was not used.",
        "",
        *compared(MICRO, predicted),
        "",
        "## gpt-oss-120B on an MI355X",
        "",
        "Here the kernels differ: ark's are predicted and AMD's were measured, so the last column "
        "is the difference between two programs and the model's error together. Experts are MXFP4 "
        "in both; ark's activations are fp32, AMD's fp8. 512 positions.",
        "",
        *compared(OPS, predicted),
        "",
        "## Goals",
        "",
        "| | predicted | at most | reached |",
        "|---|---|---|---|",
    ]
    for goal in GOALS:
        value = predicted[goal.key]
        reached = "yes" if value <= goal.most else "no"
        lines.append(
            f"| {goal.subject} | {number(value)} {goal.unit} | {number(goal.most)} | {reached} |"
        )
    lines += [
        "",
        "## One level or two",
        "",
        "An MI300X has eight dies. In two levels the compute units of a die hand over to one of "
        "them, and these to each other; a value comes back the same way. Microseconds.",
        "",
        "| | one level | two levels |",
        "|---|---|---|",
    ]
    for subject, one, two in LEVELS:
        lines.append(f"| {subject} | {number(predicted[one])} | {number(predicted[two])} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The text of timing-errors.md from the stored predictions."""
    return table(read().predicted)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="NAME")
    chosen = parser.parse_args(words).parts or list(PARTS)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/rocm_emulator")]
    predicted = dict(read().predicted) if FILE.is_file() else {}
    for name in chosen:
        predicted |= {key: round(value, 4) for key, value in PARTS[name]().items()}
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(Predictions(predicted))) + b"\n")
        print(f"{name}: predicted", file=sys.stderr, flush=True)
    try:
        print(page())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
