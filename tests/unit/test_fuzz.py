"""The fuzz targets on a few inputs each, and every input that once caused a fault. `nox -s fuzz`
runs them for minutes or hours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ark.backend import registry
from ark.errors import PlanError
from ark.plan import kind, serialize
from ark.plan.verify import verify
from ark.runtime.admission import admit
from tests.fuzz import WrongResultError, exports, plans
from tests.fuzz.__main__ import _sanitizer
from tests.fuzz.targets import CORPUS, REPLAY, TARGETS, run_command_line
from tests.slow import slow

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
CASES = [(kind, path) for kind in sorted(REPLAY) for path in sorted((CORPUS / kind).iterdir())]


COMPILED = ("plan", "ops", "module", "export")


@pytest.mark.parametrize("name", [n for n in sorted(TARGETS) if n not in COMPILED])
@FEW
@given(seed=st.integers(0, 2**32 - 1))
def test_hostile_input_is_accepted_or_refused(name: str, seed: int) -> None:
    TARGETS[name](random.Random(seed), lambda text: None)


# Kinds of tasks between ranks, which do not occur in a plan of one rank.
BETWEEN_RANKS = {
    "arrival",
    "bulk",
    "combine",
    "combine_norm",
    "iteration_end",
    "switch",
    "flag",
    "transfer",
}


def test_mutations_begin_with_every_kind_of_task() -> None:
    """The plans that are mutated are valid, and together have every kind of task of one CPU."""
    seen: set[str] = set()
    for name in plans.NAMES:
        data, _ = plans.base(name)
        result = serialize.from_json(json.dumps(data))
        assert json.loads(serialize.to_json(result)) == data
        admit([result], registry.machine(plans.MACHINE))
        seen |= {op.kind for op in result.ops}
    # Plans for a CPU have no claimed tiles (taken at run time) and no convolutions with channels
    # last; tests/unit/plan/verify/test_claims.py damages plans with claimed tiles.
    absent = {"claimed", "depthwise", "grouped_convolution"}
    assert set(kind.names()) - seen == BETWEEN_RANKS | absent


@pytest.mark.parametrize("name", plans.NAMES)
def test_ops_with_operands_too_few_or_too_many(name: str) -> None:
    """Each op of a plan gets every smaller number of operands, and one or two more."""
    result = serialize.from_json(json.dumps(plans.base(name)[0]))
    for op in {(o.kind, len(o.operands)): o for o in result.ops}.values():
        numbers = (*range(len(op.operands)), *(len(op.operands) + extra for extra in (1, 2)))
        for number in numbers:
            other = dataclasses.replace(op, operands=(op.operands * 3)[:number])
            ops = tuple(other if o.id == op.id else o for o in result.ops)
            with contextlib.suppress(PlanError):  # a few kinds accept one more or one fewer
                verify([dataclasses.replace(result, ops=ops)])


@settings(FEW, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_hostile_plans_are_refused_or_right(seed: int) -> None:
    TARGETS["plan"](random.Random(seed), lambda text: None)


@pytest.mark.parametrize("name", ["module", "export"])
@settings(FEW, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_compiled_programs_are_refused_or_correct(name: str, seed: int) -> None:
    pytest.importorskip("torch")
    TARGETS[name](random.Random(seed), lambda text: None)


def test_indices_of_results_within_a_rounding_error_are_not_compared() -> None:
    """acos(0) and acos(1.2e-7) differ by one unit in the last place, so either may be the larger
    result. The runs of the reference give both indices, and the index is not compared.
    """
    pytest.importorskip("torch")
    from tests.fuzz.programs import REFERENCE_VARIANTS, reference

    steps = [["acos", [0], {}], ["topk", [1], {"k": 1, "largest": True}]]
    given = {"inputs": [[[1, 2], "fp32", "plain", 0]], "steps": steps}
    names = [*[((1, 2), "fp32")] * 2, ((1, 1), "fp32"), ((1, 1), "int32")]
    arrays = [np.array([[0.0, 1.2e-7]], np.float32)]
    variants = range(REFERENCE_VARIANTS)
    assert {int(reference(given, arrays, names, v)[-1][0, 0]) for v in variants} == {0, 1}


def test_module_that_computes_something_else_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If ark is changed to add where torch multiplies, the fuzz target for modules reports a wrong
    result.
    """
    pytest.importorskip("torch")
    from ark.interop.torch import values
    from tests.fuzz.modules import module

    monkeypatch.setitem(values.TABLE, "mul.Tensor", values.TABLE["add.Tensor"])
    with pytest.raises(WrongResultError, match="differs from torch's"):
        module(random.Random(6), lambda text: None)


def test_exported_code_that_a_compiler_refuses_is_a_finding(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.c").write_text('const char *name = "a"; } int b(void) {";\n')
    (tmp_path / "libmodel_loop.so").write_bytes(b"")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    with pytest.raises(WrongResultError, match="the exported C is refused"):
        exports._check(tmp_path)


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{k}-{p.stem}" for k, p in CASES])
def test_earlier_failures_stay_fixed(kind: str, path: Path) -> None:
    REPLAY[kind](path.read_text())


@slow
def test_oracle_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a plan computes something else than its program, the fuzz target for plans reports a
    finding.
    """
    from tests.fuzz import execute

    result = serialize.from_json(json.dumps(plans.base("decoder")[0]))
    assert execute.compare(result) == execute.Outcome(True, "")
    ops = list(result.ops)
    number = next(i for i, o in enumerate(ops) if o.kind == "attention")
    ops[number] = dataclasses.replace(ops[number], params={**ops[number].params, "scale": 9.0})
    other = dataclasses.replace(result, ops=tuple(ops))
    monkeypatch.setattr(execute, "serial", lambda plan: execute.dataclasses.replace(other))
    assert "differs" in execute.compare(result).wrong


def test_command_line_that_ends_in_a_traceback_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ark.cli import cache

    def broken(args: object) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(cache, "run", broken)
    with pytest.raises(RuntimeError):
        run_command_line(["cache"])


READ_BETWEEN_BUFFERS = """
import dataclasses, json
from ark.plan import serialize
from tests.fuzz import execute, plans
execute.sanitize()
made = serialize.from_json(json.dumps(plans.base("decoder")[0]))
assert execute.compare(made) == execute.Outcome(True, "")
print("fine", flush=True)
buffers = tuple(
    dataclasses.replace(b, nbytes=32) if b.name == "norm" else b for b in made.buffers
)
execute.run(dataclasses.replace(made, buffers=buffers))
print("nobody saw it")
"""


def test_sanitizer_sees_a_read_between_buffers(tmp_path: Path) -> None:
    library = _sanitizer()
    if not library:
        pytest.skip("g++ has no AddressSanitizer here")
    environment = {
        **os.environ,
        "ARK_CACHE_DIR": str(tmp_path),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:symbolize=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", READ_BETWEEN_BUFFERS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.stdout == "fine\n" and done.returncode < 0, done.stderr[-2000:]
    assert "AddressSanitizer: use-after-poison" in done.stderr
