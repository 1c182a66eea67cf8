"""Runs torch's own samples of its operators (OpInfo) on the CPU by ark, forward only, in fp32.

python -m tests.interop.op_samples [NAMES] [--most 4]

Every sample is traced into ATen operators as torch.compile would do. Samples whose operators ark
supports run, many in one kernel, and are compared with torch's results. The exit code is 1 if one
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import ark
from ark.interop.torch.compile import decompositions
from ark.interop.torch.graph import Built, build, drop_checks, held, why_not
from ark.interop.torch.values import own

SAMPLE_TOLERANCE = 1e-4
SAMPLES_PER_KERNEL = 40  # run in one launch
UNDEFINED = ("empty", "new_empty")  # prefixes of functions with undefined results
SAMPLE = ("add", "nn.functional.gelu", "sum", "nn.functional.conv2d", "cat", "where", "clamp")


@dataclass
class Sample:
    """A call of an operator: the graph, its input tensors, and torch's result."""

    name: str
    graph: Any
    inputs: list[Any]
    wanted: list[Any]
    built: Built | None = None


def samples(name: str, call: Any, given: Any, place: int) -> Sample | str:
    """Returns one sample of an operator as a graph, or the reason why ark does not run it."""
    whole = (given.input, given.args, given.kwargs)
    flat, spec = pytree.tree_flatten(whole)
    tensors = [t.detach() for t in flat if isinstance(t, torch.Tensor)]

    def function(*tensors: Any) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(t, torch.Tensor) else t for t in flat]
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        return pytree.tree_leaves(call(first, *args, **kwargs))

    if not tensors or any(t.numel() == 0 for t in tensors):
        return "no elements"
    try:
        with torch.no_grad():
            wanted = function(*(t.clone() for t in tensors))
            graph = make_fx(function, decompositions())(*tensors)
    except Exception as error:
        return f"torch does not trace it ({type(error).__name__})"
    if not all(isinstance(t, torch.Tensor) for t in wanted):
        return "a result that is no tensor"
    drop_checks(graph)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    if not nodes:
        return "no operators"
    for node in nodes:
        reason = why_not(node)
        if reason is not None:
            return reason.splitlines()[0]
    inputs = [t.contiguous() for t in (*tensors, *(t for _, t in held(graph)))]
    return Sample(f"{name} {place}", graph, inputs, wanted)


def outcomes(names: Sequence[str], most: int) -> Iterator[tuple[str, Sample | str]]:
    """Returns, by operator, the samples that ark runs (at most `most` of each), and the reasons for
    the others.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if (names and info.name not in names) or torch.float32 not in info.dtypes:
            continue
        label = f"{info.name}.{info.variant_test_name}".rstrip(".")
        if info.name.startswith(UNDEFINED):
            yield label, "contents that torch leaves undefined, so there is nothing to compare"
            continue
        taken = 0
        with contextlib.suppress(Exception):
            for place, given in enumerate(info.sample_inputs("cpu", torch.float32)):
                result = samples(label, info.op, given, place)
                taken += isinstance(result, Sample)
                yield label, result
                if taken >= most or place >= 4 * most:
                    break


def check(batch: Sequence[Sample]) -> dict[str, str]:
    """Runs samples in one kernel. Returns the differences by name."""
    wrong: dict[str, str] = {}
    with ark.use_model(ark.Model(0, 1)) as model:
        ready = []
        for sample in batch:
            try:
                sample.built = build(sample.graph, sample.inputs, model)
                taken: set[int] = set()
                sample.built.outputs = [own(v, taken) for v in sample.built.outputs]
                ready.append(sample)
            except ark.BaseError as error:
                wrong[sample.name] = f"it is refused when built: {error}"
        kept = [v for s in ready if s.built for v in s.built.outputs]
        with ark.Runtime() as runtime:
            for sample in ready:
                assert sample.built is not None
                for value, tensor in zip(sample.built.inputs, sample.inputs, strict=True):
                    value.tensor.bind(tensor)
            runtime.launch(ark.Planner(-1, model).plan(), loop_mode=False)
            runtime.run()
            for sample in ready:
                assert sample.built is not None
                for value, want in zip(sample.built.outputs, sample.wanted, strict=True):
                    difference = differs(value, want)
                    if difference:
                        wrong[sample.name] = difference
        del kept
    return wrong


def differs(value: Any, want: Any) -> str:
    """Returns how a result differs from torch's, or ""."""
    got = value.tensor.to_numpy().reshape(value.shape)
    named = str(want.dtype).removeprefix("torch.")
    if got.shape != want.shape or got.dtype.name != named:
        return f"{got.dtype} {list(got.shape)} instead of {named} {list(want.shape)}"
    if want.dtype == torch.bfloat16:  # which NumPy's own functions do not know
        got, want = got.astype(np.float32), want.float()
    want = want.contiguous().numpy()
    if want.dtype.kind != "f":
        return "" if (got == want).all() else f"{int((got != want).sum())} elements differ"
    with np.errstate(all="ignore"):
        close = np.isclose(got, want, rtol=SAMPLE_TOLERANCE, atol=SAMPLE_TOLERANCE, equal_nan=True)
    if close.all():
        return ""
    return (
        f"{int((~close).sum())} of {close.size} differ, as {got[~close][0]} from {want[~close][0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--most", type=int, default=4, help="samples of an operator")
    parser.add_argument("--reasons", action="store_true", help="why samples do not run")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    ark.init(backend="cpu")
    ready: list[Sample] = []
    refused: Counter[str] = Counter()
    operators = set()
    for name, result in outcomes(args.names, args.most):
        if isinstance(result, Sample):
            ready.append(result)
            operators.add(name)
        else:
            refused[f"{name}: {result}" if args.reasons else result.split(" of ")[0]] += 1
    wrong: dict[str, str] = {}
    for begin in range(0, len(ready), SAMPLES_PER_KERNEL):
        wrong |= check(ready[begin : begin + SAMPLES_PER_KERNEL])
        print(f"{min(begin + SAMPLES_PER_KERNEL, len(ready))} of {len(ready)} ran", flush=True)
    for name, difference in wrong.items():
        print(f"wrong: {name}: {difference}")
    for reason, count in refused.most_common(None if args.reasons else 12):
        print(f"not run, {count}: {reason}")
    agreed = len(ready) - len(wrong)
    print(
        f"{agreed} samples of {len(operators)} operators agree, {len(wrong)} differ, "
        f"{sum(refused.values())} were not run"
    )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
