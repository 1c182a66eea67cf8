"""The standard set of figures: which benches run on a row's machine, in which order, and how long
each may take. Called by ci/figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ark.cli.measure.cases import cases
from ark.cli.measure.predicted import PROGRAMS
from ark.cli.measure.sweep.cases import SWEEP
from ark.cli.measure.whole_models import STANDARD

LSTM = "lstm-10x100-h256-bf16"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = (16 << 10, 1 << 20, 64 << 20)
OPS_OF_PIECE = 16


@dataclass(frozen=True)
class Piece:
    """One call of `ark bench`, which measures one or several figures. words: the call's arguments.
    names: further arguments, each for one figure; those whose figures have been measured are
    omitted. figures: prefixes of the figures' names, one for each of `names` if there are any.
    peer: the program to compare with, the argument of --vs. kept: True if the peer is slow, so that
    its times are kept and measured again only if its version changes. alone: arguments that replace
    --vs in a run that does not measure the peer. seconds: the time limit.
    """

    name: str
    words: tuple[str, ...]
    figures: tuple[str, ...]
    peer: str
    seconds: float
    names: tuple[str, ...] = ()
    kept: bool = False
    alone: tuple[str, ...] = ()


def _ops(names: tuple[str, ...], seconds: float, name: str = "ops", repeats: int = 5) -> Piece:
    words = ("ops", "--repeats", str(repeats))
    return Piece(name, words, tuple(f"ops/{n}" for n in names), "torch", seconds, names)


def _decode(config: str, seconds: float, *, batch: int = 1, ranks: int = 1) -> Piece:
    words: tuple[str, ...] = ("decode", "--config", config, "--context", "512")
    words += ("--tokens", "100", "--repeats", "3")
    figure = f"decode/{config}"
    if batch > 1:
        words += ("--batch", str(batch))
        figure += f"-batch-{batch}"
    if ranks > 1:
        words += ("--ranks", str(ranks))
        figure += f"-{ranks}-ranks"
    name, figures = figure.replace("/", " "), (f"{figure}-at-512",)
    if ranks > 1:
        return Piece(name, words, figures, "", seconds)
    return Piece(name, words, figures, "torch", seconds, kept=True, alone=("--check",))


def _prompt(config: str, length: int, seconds: float) -> Piece:
    words = ("decode", "--config", config, "--context", "512", "--tokens", "8", "--repeats", "3")
    words += ("--prompt", str(length))
    figure = f"decode/{config}-prompt-{length}"
    name = figure.replace("/", " ")
    return Piece(name, words, (figure,), "torch", seconds, kept=True, alone=("--check",))


def _parts(names: Sequence[str], name: str, repeats: int) -> list[Piece]:
    """Splits a bench of many ops into pieces of a few ops each, which can run side by side."""
    begins = range(0, len(names), OPS_OF_PIECE)
    parts = [tuple(names[begin : begin + OPS_OF_PIECE]) for begin in begins]
    return [_ops(part, 150, f"{name} {i}", repeats) for i, part in enumerate(parts, 1)]


def _models(seconds: float) -> list[Piece]:
    return [
        Piece(f"model {m}", ("models",), (f"torch/{m}",), "inductor", seconds, (m,), kept=True)
        for m in STANDARD
    ]


def _comm(ranks: int, sizes: tuple[int, ...], peer: str, seconds: float) -> list[Piece]:
    pieces_of = []
    for name in COLLECTIVES:
        for size in sizes:
            words = ("comm", name, "--ranks", str(ranks), "--sizes", str(size), "--type", "bf16")
            words += ("--repeats", "3")
            figure = f"comm/{name}-{size}-bf16-{ranks}-ranks"
            pieces_of.append(Piece(f"{name} of {size} bytes", words, (figure,), peer, seconds))
    return pieces_of


def _serve(requests: int, seconds: float) -> Piece:
    """Requests to `ark serve` of the shipped checkpoint: at a few rates per second, and all at
    once.
    """
    words = ("serve", "./examples/noah", "--rate", "8,inf", "--requests", str(requests))
    words += ("--prompt", "40", "--tokens", "32", "--ignore-eos")
    figures = tuple(
        f"serve/noah-rate-{rate}-{time}-{share}"
        for rate in ("8", "inf")
        for time in ("first", "between", "per-token", "whole")
        for share in ("p50", "p90", "p99")
    )
    return Piece("serve noah", words, figures, "", seconds)


def devices_of(row: dict[str, Any]) -> int:
    """The number of devices that a row of ci/matrix.toml needs."""
    return int(row["require"].split(":")[1])


def on_accelerator(devices: int) -> list[Piece]:
    """The pieces to run on a GPU, or on several GPUs of one host, the most important first."""
    if devices > 1:
        shapes = [_decode(c, 100, ranks=devices) for c in ("llama-3.2-1b", "llama-3.1-8b")]
        return [*shapes, *_comm(devices, SIZES, "nccl", 60)]
    table = [c.name for c in cases() if not c.name.startswith(SWEEP) and c.name != LSTM]
    return [
        _ops((LSTM,), 90, "LSTM"),
        _decode("llama-3.2-1b", 90),
        _decode("llama-3.2-1b", 60, batch=8),
        _prompt("llama-3.2-1b", 512, 90),
        _decode("llama-3.1-8b", 150),
        _serve(64, 120),
        *_models(150),
        *_parts(table, "ops", 5),
    ]


def on_cpu(tiny: bool) -> list[Piece]:
    """The pieces to run on a CPU. tiny: only one figure of each kind, to test this script."""
    table = tuple(c.name for c in cases() if c.on_cpu and not c.name.startswith(SWEEP))
    names = ("adds-64x4096-fp32", "matmul-512x512x512-nt-bf16")
    small = tuple(n for n in table if "64m" not in n and "8192" not in n and "16384" not in n)
    networks = ("lstm", "gpt2") if tiny else ("resnet", "mobilenet", "lstm", "bert", "gpt2")
    noah = ("decode", "--config", "./examples/noah", "--context", "128", "--tokens", "16")
    noah += ("--repeats", "1" if tiny else "3")
    collectives = _comm(2, (16 << 10,) if tiny else SIZES[:2], "gloo", 60)
    return [
        _ops(names if tiny else (*names, *(n for n in small if n not in names)), 150, "ops", 3),
        Piece("decode noah", noah, ("decode/noah-at-128",), "torch", 90),
        *(collectives[:1] if tiny else collectives),
        *(() if tiny else (_serve(64, 120),)),
        *(
            Piece(f"network {n}", ("torch",), (f"torch/{n}",), "inductor", 240, (n,), kept=True)
            for n in networks
        ),
    ]


def sweep() -> list[Piece]:
    """Common torch ops in many shapes, and predictions beside measured times. They run apart from
    the standard set.
    """
    forty = tuple(f"fidelity/{name}" for name in PROGRAMS)
    fidelity = Piece("fidelity", ("fidelity",), forty, "", 150, PROGRAMS)
    return [*_parts([c.name for c in cases() if c.name.startswith(SWEEP)], "sweep", 3), fidelity]


def pieces(row: dict[str, Any], tiny: bool) -> list[Piece]:
    """Returns the standard set of measurements for a machine (a row of ci/matrix.toml), in their
    order of execution.
    """
    devices = devices_of(row)
    return on_cpu(tiny) if row["backend"] == "cpu" else on_accelerator(devices)
