"""onnx's backend node tests, unchanged, as its loader gives them, run by ark on one backend.

As a program: `python -m tests.interop.node_suite [--seconds S] [--every N] [--start PREFIX]` runs
the suite and prints the counts, refusals by operator or type, and wrong results; `--write
ci/results/suites/onnx-cpu.json` stores the counts for ci/coverage.md. Compiling dominates the time,
so the graphs of many tests share a kernel; where that fails, each has its own.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto
from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

import ark
from ark.errors import BaseError, UnsupportedError
from ark.interop.onnx.model import OnnxModel, fill, from_proto
from ark.interop.onnx.stages import StagesNeededError
from ci import evidence

# One test for each of 40 operators, for backends on which the whole suite takes long.
SAMPLE = tuple(
    f"test_{name}"
    for name in [
        "abs",
        "and2d",
        "add_bcast",
        "argmax_default_axis_random",
        "averagepool_2d_precomputed_pads",
        "castlike_BFLOAT16_to_FLOAT",
        "ceil",
        "clip_default_int8_max",
        "concat_3d_axis_0",
        "conv_with_strides_and_asymmetric_padding",
        "convtranspose_group_2",
        "cumsum_2d_int32",
        "div_bcast",
        "equal_bcast",
        "exp",
        "expand_dim_changed",
        "gather_negative_indices",
        "gather_elements_1",
        "gelu_default_2",
        "gemm_transposeA",
        "globalaveragepool_precomputed",
        "instancenorm_example",
        "layer_normalization_3d_axis2_epsilon",
        "logsoftmax_axis_0",
        "matmul_3d",
        "maxpool_2d_precomputed_pads",
        "bitwise_xor_i32_2d",
        "constant_pad_axes",
        "pow_bcast_array",
        "reduce_mean_do_not_keepdims_example",
        "reduce_prod_do_not_keepdims_example",
        "reshape_negative_dim",
        "rms_normalization_3d_axis1_epsilon",
        "simple_rnn_batchwise",
        "scatter_elements_without_axis",
        "sigmoid",
        "slice_neg_steps",
        "softmax_axis_0",
        "top_k",
        "where_example",
    ]
)


@cache
def every() -> tuple[TestCase, ...]:
    """Returns all of onnx's node tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(load_model_tests(kind="node"))


def selected(names: Sequence[str]) -> list[TestCase]:
    """Returns the tests of these names. Raises KeyError for one that the suite lacks.

    Importing one of onnx's modules computes all of its tests. So only modules with which a test's
    name begins are imported, or all of them if that does not find every test.
    """
    called = [name.removeprefix("test_").replace("_", "").lower() for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node.__path__, f"{node.__name__}."):
            if any(name.startswith(module.name.rpartition(".")[2]) for name in called):
                importlib.import_module(module.name)
    actual = {case.name: case for case in node._NodeTestCases}
    if not all(name in actual for name in names):
        actual = {case.name: case for case in every()}
    return [actual[name] for name in names]


def run_case(case: TestCase) -> None:
    """Runs a test's model on its data. Raises AssertionError if a result is not the
    expected one.
    """
    model = from_proto(case.model, case.name)
    try:
        for arrays, wanted in case.data_sets:
            compare(case, model.run(by_name(model, arrays)), wanted)
    finally:
        model.close()


def by_name(model: OnnxModel, arrays: Sequence[Any]) -> dict[str, Any]:
    """Returns the arrays of a test's data set by the name of the model's input, without omitted
    optional inputs.
    """
    names = [port.name for port in model.inputs]
    return dict(zip(names, map(plain, arrays), strict=True))


def plain(data: Any) -> Any:
    """Returns an entry of a data set as an array. Some tests give it as a TensorProto (the protobuf
    message of ONNX).
    """
    return onnx.numpy_helper.to_array(data) if isinstance(data, onnx.TensorProto) else data


def compare(case: TestCase, results: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Raises AssertionError unless shapes and types equal the expected ones, and values are within
    the test's own tolerance.
    """
    for got, want in zip(results, map(plain, wanted), strict=True):
        assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
        assert got.dtype == want.dtype, f"{got.dtype}, expected {want.dtype}"
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=case.rtol, atol=case.atol
        )


def in_float64(case: TestCase, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Returns the results of onnx's reference evaluator for the test's model in float64: every
    float type of its inputs, weights and casts is replaced.
    """
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    model = onnx.ModelProto.FromString(case.model.SerializeToString())

    def widen(tensor: Any) -> None:
        if tensor.data_type in floats:
            wide = onnx.numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))

    def widen_graph(graph: Any) -> None:
        for tensor in graph.initializer:
            widen(tensor)
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.elem_type in floats:
                info.type.tensor_type.elem_type = TensorProto.DOUBLE
        for one in graph.node:
            for attribute in one.attribute:
                widen(attribute.t)
                if attribute.name == "to" and attribute.i in floats:
                    attribute.i = TensorProto.DOUBLE
                if attribute.type == onnx.AttributeProto.GRAPH:
                    widen_graph(attribute.g)

    widen_graph(model.graph)
    names = [info.name for info in model.graph.input]
    given = [a.astype(np.float64) if a.dtype in SHORT else a for a in map(plain, arrays)]
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True))))


SHORT = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def nearer(case: TestCase, results: Sequence[Any], number: int = 0) -> bool:
    """True if every result is at least as near to the float64 result as the expected one is, by the
    largest and the mean distance. The expected results are themselves rounded step by step.
    """
    arrays, wanted = case.data_sets[number]
    try:
        exact = in_float64(case, arrays)
    except Exception:  # the model has no form in float64
        return False
    for got, want, true in zip(results, map(plain, wanted), exact, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype or got.dtype not in SHORT:
            return False
        own, other = (np.abs(a.astype(np.float64) - true) for a in (got, want))
        if not (own.max() <= other.max() and own.mean() <= other.mean()):
            return False
    return True


class Suite:
    """Runs tests in groups and counts the outcomes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.nearer: list[str] = []  # not within the tolerance, but nearer to float64's results

    def run(self, cases: Sequence[TestCase]) -> None:
        """Runs all cases that ark accepts in one kernel, each with its first data set, and counts
        the outcomes.
        """
        taken, staged = list[TestCase](), list[TestCase]()

        def graph(case: TestCase) -> None:
            try:
                self._graph(case, None)
                taken.append(case)
            except StagesNeededError:
                staged.append(case)

        for case in cases:
            self._tried(case, graph)
        for case in staged:
            self.counts["passed"] += self._tried(case, run_case)
        try:
            with ark.use_model(ark.Model(0, 1)) as shared, ark.Runtime() as runtime:
                graphs = [self._graph(case, shared) for case in taken]
                runtime.launch(ark.Planner(-1, shared).plan(), loop_mode=False)
                for model, built, inputs in graphs:
                    fill(built)
                    model.write(built, inputs)
                runtime.run()
                results = [model.read(built) for model, built, _ in graphs]
        except Exception as error:
            print(f"one by one, because together: {' '.join(str(error).split())[:200]}", flush=True)
            for case in taken:
                self.counts["passed"] += self._tried(case, run_case)
            return
        for case, actual in zip(taken, results, strict=True):
            checked = self._tried(case, lambda c, f=actual: self._judged(c, f))
            self.counts["passed"] += checked

    def _judged(self, case: TestCase, results: Sequence[Any]) -> None:
        """Raises AssertionError if the results are neither within the tolerance nor nearer to the
        float64 results than the expected values are.
        """
        try:
            compare(case, results, case.data_sets[0][1])
        except AssertionError:
            if not nearer(case, results):
                raise
            self.nearer.append(case.name)

    def _graph(self, case: TestCase, into: ark.Model | None) -> Any:
        model = from_proto(case.model, case.name)
        inputs = by_name(model, case.data_sets[0][0])
        return model, model.graph(inputs, into), inputs

    def _tried(self, case: TestCase, function: Callable[[TestCase], Any]) -> bool:
        """Calls the function for a test. If it fails, counts and prints the failure; returns True
        if it does not.
        """
        try:
            function(case)
            return True
        except UnsupportedError as error:
            self.counts["refused"] += 1
            self.reasons[_reason(error)] += 1
        except BaseError as error:
            self.counts["refused otherwise"] += 1
            print(f"{case.name}: {str(error)[:200]}", flush=True)
        except AssertionError as error:
            self.counts["wrong"] += 1
            print(f"{case.name} is wrong: {' '.join(str(error).split())[:300]}", flush=True)
        except Exception as error:
            self.counts["crashed"] += 1
            print(f"{case.name} crashed: {error!r}"[:300], flush=True)
        return False


def _reason(error: BaseError) -> str:
    """Returns a refusal's message without the parts that differ between tests."""
    return re.sub(r"^test_\w+|\(node [^)]*\)|number \d+|\[[^\]]*\]|'[^']*'", "", str(error))[:110]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", default="test_")
    parser.add_argument("--sample", action="store_true", help="SAMPLE only, which must pass")
    parser.add_argument("--group", type=int, default=48, metavar="N", help="tests of one kernel")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a result file of the run")
    args = parser.parse_args()
    ark.init(backend=args.backend)
    suite = Suite()
    end = time.monotonic() + args.seconds
    chosen = selected(SAMPLE) if args.sample else every()
    cases = [case for case in chosen if case.name.startswith(args.start)][:: args.every]
    for at in range(0, len(cases), args.group):
        if time.monotonic() > end:
            break
        suite.run(cases[at : at + args.group])
    for reason, count in suite.reasons.most_common():
        print(f"{count:5d} {reason}")
    for name in suite.nearer:
        print(f"{name} is nearer to the result in float64 than what it expects")
    counts = suite.counts
    print(f"{len(every())} tests, {counts.total()} run: {dict(counts)}")
    if args.write:
        of = evidence.SuiteCounts(
            *(counts[name.replace("_", " ")] for name in evidence.SuiteCounts.__struct_fields__)
        )
        whole = counts.total() == len(every())
        selection = "all" if whole else f"{counts.total()} tests"
        evidence.write_suite(args.write, "onnx", args.backend, len(every()), selection, of)
    return 1 if counts["crashed"] or (args.sample and counts["passed"] < len(cases)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
