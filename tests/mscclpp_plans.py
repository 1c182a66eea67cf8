"""Counts how many execution plans of MSCCL++'s plan language ark reads and executes.

    python -m tests.mscclpp_plans CHECKOUT [--run]

runs every example of the language in a checkout of MSCCL++ (python/mscclpp/language/tests and
python/mscclpp/default_algos) for several numbers of GPUs. Each plan of a collective is read, which
checks that it computes its collective, and executed on NumPy ranks; with --run also on ranks by
`ark.distributed.run_program`. MSCCL++ need not be installed: its language is pure Python.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ark
from ark.collective.programs import CollectiveProgram, execute, reference_result
from ark.collective.programs.files import read_program
from ark.errors import BaseError

Plan = tuple[str, int, str]
"""An example's name, its number of GPUs, and the plan's text, or the error of the example."""


def _options(example: str, gpus: int) -> Iterator[list[str]]:
    """The command lines of an example for a number of GPUs; none if it has no such plan."""
    nodes = ["--gpus_per_node", str(gpus // 2)]
    if gpus % 2 and "gpus_per_node" in example:
        return  # an example of two nodes
    if '"--nnodes"' in example:
        yield ["--nnodes", "2", *nodes]
    elif '"--num_gpus"' in example:
        yield ["--num_gpus", str(gpus), *(nodes * ("gpus_per_node" in example)),
               *(["--tbg_size", "2"] * ("--tbg_size" in example))]  # fmt: skip
    elif '"--gpus_per_node"' in example:
        yield nodes
    elif gpus == 2:
        yield []


def _output(path: Path, options: list[str]) -> str:
    """What an example prints."""
    printed, before = io.StringIO(), sys.argv
    name = ["--name", path.stem] if '"--name"' in path.read_text() else []
    sys.argv = [str(path), *name, *options]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def _defaults(gpus: int) -> Iterator[tuple[str, Any]]:
    """The names of MSCCL++'s default algorithms, and functions that return their plans."""
    from mscclpp import default_algos
    from mscclpp.language import collectives, utils

    for name, kind, more in (
        ("allgather_multi_nodes", collectives.AllGather(gpus, 1, True), ()),
        ("allreduce_multi_nodes", collectives.AllReduce(gpus, 1, True), (1,)),
        ("reducescatter_multi_nodes", collectives.ReduceScatter(gpus, 1, True), ()),
    ):
        spec = utils.AlgoSpec(name, kind, gpus // 2, gpus, True, 1, "LL")
        yield (
            name,
            lambda name=name, spec=spec, more=more: json.dumps(
                json.loads(getattr(default_algos, name)(spec, *more).to_json())
            ),
        )


def plans(checkout: Path, sizes: Sequence[int]) -> Iterator[Plan]:
    """Every plan of the examples in a checkout, for these numbers of GPUs."""
    package = checkout / "python/mscclpp"
    module = types.ModuleType("mscclpp")  # its own __init__ loads the compiled library
    module.__path__ = [str(package)]
    sys.modules["mscclpp"] = module
    for path in sorted((package / "language/tests").rglob("*.py")):
        for gpus in sizes:
            for options in _options(path.read_text(), gpus):
                name = str(path.relative_to(package))
                yield name, gpus, _tried(partial(_output, path, options))
    for gpus in sizes:
        for name, build in () if gpus % 2 else _defaults(gpus):
            yield f"default_algos/{name}", gpus, _tried(build)


def _tried(build: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(build())
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


def _inputs(program: CollectiveProgram) -> list[np.ndarray]:
    random = np.random.default_rng(program.ranks)
    size = 96 * program.ranks * program.chunks
    return list(random.integers(-9, 9, (program.ranks, size)).astype(np.float32))


def _wanted(program: CollectiveProgram) -> list[np.ndarray | None]:
    given = (program.reduction or "sum", program.root, program.counts)
    return reference_result(program.collective, _inputs(program), *given)


def _on_a_rank(backend: str, folder: str) -> None:
    """The body of a rank: runs every plan of a folder."""
    ark.init(backend=backend)
    rank = ark.Model.get_rank()
    for path in sorted(Path(folder).iterdir()):
        program = read_program(path.read_text())
        actual = ark.distributed.run_program(path, _inputs(program)[rank])
        np.testing.assert_array_equal(actual, _wanted(program)[rank], path.name)
        if rank == 0:
            print("ran", path.name, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--run", action="store_true", help="execute on ranks too")
    parser.add_argument("--backend", default="cpu", help="of the ranks")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8], help="of a plan")
    args = parser.parse_args()
    states: dict[str, dict[int, str]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        for name, gpus, text in plans(args.checkout, args.gpus):
            states[name][gpus] = state = _state(text)
            if state == "read" and args.run:
                (Path(folder) / str(gpus)).mkdir(exist_ok=True)
                (Path(folder) / str(gpus) / name.replace("/", "_")).write_text(text)
        if args.run:
            for gpus in args.gpus:
                if ark.launch(gpus, _on_a_rank, args.backend, str(Path(folder) / str(gpus))):
                    states["on ranks"][gpus] = "failed"
    for name, sizes in states.items():
        print(f"{name}: {'; '.join(f'{gpus}: {state}' for gpus, state in sizes.items())}")
    kinds = Counter(
        "read"
        if "read" in sizes.values()
        else "of collective test"
        if all("'test'" in state for state in sizes.values())
        else "other"
        for sizes in states.values()
    )
    print(f"{len(states)} examples: {dict(kinds)}")
    return int("on ranks" in states)


def _state(text: str) -> str:
    """Reads a plan, and executes it on NumPy ranks. Returns "read", or why not."""
    if not text.lstrip().startswith("{"):
        return f"not written by MSCCL++ ({text[:90]})"
    try:
        program = read_program(text)
    except BaseError as error:
        return f"{type(error).__name__}: {error}"
    for actual, want in zip(execute(program, _inputs(program), 7), _wanted(program), strict=True):
        np.testing.assert_array_equal(actual, want)
    return "read"


if __name__ == "__main__":
    sys.exit(main())
