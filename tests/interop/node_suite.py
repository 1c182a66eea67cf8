"""onnx's backend node tests, unchanged, as its loader gives them, run by ark on one backend.

As a program: `python -m tests.interop.node_suite [--seconds S] [--every N] [--start PREFIX]` runs
the suite and prints the counts, what was refused by operator or type, and what is wrong.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

import ark
from ark.errors import BaseError, UnsupportedError
from ark.interop.onnx.model import from_proto


@cache
def every() -> tuple[TestCase, ...]:
    """All node tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(load_model_tests(kind="node"))


def selected(names: Sequence[str]) -> list[TestCase]:
    """The tests of these names; KeyError for one that the suite lacks."""
    found = {case.name: case for case in every()}
    return [found[name] for name in names]


def run_case(case: TestCase) -> None:
    """Runs a test's model on its data; AssertionError where a result is not the expected one."""
    model = from_proto(case.model, case.name)
    try:
        for arrays, wanted in case.data_sets:
            names = [port.name for port in model.inputs]
            results = model.run(dict(zip(names, arrays, strict=True)))
            for got, want in zip(results, wanted, strict=True):
                assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
                assert got.dtype == want.dtype, f"{got.dtype}, expected {want.dtype}"
                np.testing.assert_allclose(
                    got.astype(np.float64), want.astype(np.float64), rtol=case.rtol, atol=case.atol
                )
    finally:
        model.close()


def _reason(error: BaseError) -> str:
    """A refusal without what differs from test to test."""
    return re.sub(r"^test_\w+|\(node [^)]*\)|number \d+|\[[^\]]*\]|'[^']*'", "", str(error))[:110]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", default="test_")
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    ark.init(backend=args.backend)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    end = time.monotonic() + args.seconds
    cases = [case for case in every() if case.name.startswith(args.start)][:: args.every]
    for case in cases:
        if time.monotonic() > end:
            break
        try:
            run_case(case)
            counts["passed"] += 1
        except UnsupportedError as error:
            counts["refused"] += 1
            reasons[_reason(error)] += 1
        except BaseError as error:
            counts["refused otherwise"] += 1
            print(f"{case.name}: {str(error)[:200]}", flush=True)
        except AssertionError as error:
            counts["wrong"] += 1
            print(f"{case.name} is wrong: {' '.join(str(error).split())[:300]}", flush=True)
        except Exception as error:
            counts["crashed"] += 1
            print(f"{case.name} crashed: {error!r}"[:300], flush=True)
    for reason, count in reasons.most_common():
        print(f"{count:5d} {reason}")
    print(f"{len(every())} tests, {sum(counts.values())} run: {dict(counts)}")
    return 1 if counts["crashed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
