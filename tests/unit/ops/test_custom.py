"""Custom ops: declarations, refusals and their messages, and the op's text in every cache key that
must depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError, PlanError, UnsupportedError
from ark.frontend.model import Model, use_model
from ark.lower import registry as ops
from ark.lower.pipeline import plan as make_plan
from ark.plan import kind as kinds
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import program
from ark.tasks import custom_form
from tests import custom

ROOT = Path(__file__).resolve().parents[3]
CPU_2 = registry.machine("cpu-2")
COPY = """template <class Task, class X, class Y>
ARK_DEVICE void copied(ArkCtx& c, const Task& task, X x, Y y) {
  for (int m = task.m.begin; m < task.m.end; ++m) ark_store(c, y, ark_load(c, x, m), m);
}
"""


def copied(text: str = COPY, signature: str = "x[m] -> y[m]", **options: Any) -> Any:
    return ark.custom_op("copied", text, signature, **options)


def plan(build: Callable[[], object]) -> Plan:
    with use_model(Model()) as model:
        build()
    custom_plan = make_plan(model.graph, CPU_2)
    verify([custom_plan])
    return custom_plan


def accesses(build: Callable[[], object], coord: tuple[int, ...]) -> list[tuple[Any, ...]]:
    custom_plan = plan(build)
    (op,) = (op for op in custom_plan.ops if op.kind == "custom")
    declared = kinds.get("custom").accesses(kinds.signature(custom_plan, op), coord)
    return [(a.operand, a.lo, a.hi, a.write) for a in declared]


def test_accesses_equal_the_signature() -> None:
    assert accesses(lambda: custom.blur()(ark.tensor([8, 9])), (3, 7)) == [
        (0, (2, 7), (7, 9), False),
        (1, (3, 7), (6, 9), True),
    ]
    assert accesses(lambda: custom.blur()(ark.tensor([8, 9])), (6, 0)) == [
        (0, (5, 0), (8, 7), False),
        (1, (6, 0), (8, 7), True),
    ]
    text = COPY.replace("class X,", "class X, class W,").replace("X x,", "X x, W w,")
    op = copied(text, "x[all m], w[m, 2] -> y[m], x[m]".replace(", x[m]", ""), tile={"m": 4})
    assert accesses(lambda: op(ark.tensor([6]), ark.tensor([6, 2])), (4,)) == [
        (0, (0,), (6,), False),
        (1, (4, 0), (6, 2), False),
        (2, (4,), (6,), True),
    ]
    read_and_write = [(1, (64,), (70,), False), (1, (64,), (70,), True)]
    x = ark.int32
    touched = accesses(
        lambda: custom.count_up()(ark.tensor([70], x), ark.tensor([70], x), twice=True), (64,)
    )
    assert touched == [(0, (64,), (70,), False), *read_and_write]


def test_tiles_and_shapes() -> None:
    def tiles(op: Any, *shape: int) -> list[tuple[int, ...]]:
        custom_plan = plan(lambda: op(ark.tensor(shape)))
        return sorted(
            t.coord for tasks in custom_plan.phases[0].processors for t in tasks if t.op == 0
        )

    assert tiles(copied(), 70) == [(0,)]
    assert tiles(copied(tile={"m": 32}), 70) == [(0,), (32,), (64,)]
    assert tiles(copied(tile={"m": None}), 70) == [(0,), (35,)]
    assert tiles(copied(tile={"m": 100}), 70) == [(0,)]
    assert len(tiles(custom.blur(), 8, 9)) == 6
    wider = copied(signature="x[m] -> y[m, n]", sizes=lambda m: {"n": 3 * m})
    with use_model(Model()):
        assert wider(ark.tensor([5])).shape() == [5, 15]
        named = copied(signature="x[m] -> y[n]", dtypes={"y": ark.fp16})(ark.tensor([5]), n=7)
        assert (named.shape(), named.dtype()) == ([7], ark.fp16)
        first, second = custom.shares()(ark.tensor([4, 6], ark.bf16))
        assert (first.dtype(), second.dtype()) == (ark.bf16, ark.fp32)
        assert second.shape() == [4]


DECLARATIONS = {
    "no '->'": {"signature": "x[m]"},
    "no result": {"signature": "x[m] ->"},
    "'x' is not an operand": {"signature": "x -> y[m]"},
    "is not a dimension of x": {"signature": "x[m*2] -> y[m]"},
    "appears twice": {"signature": "x[m], x[m] -> y[m]"},
    "dimensions differ on either side": {"signature": "x[m, k] -> x[m]"},
    "has 5 dimensions": {"signature": "x[a, b, d, e, f] -> y[a]"},
    "each task needs a tile of its own": {"signature": "x[m] -> y[all m]", "tile": {"m": 4}},
    "without `all` or neighbours": {"signature": "x[m] -> y[m+-1]"},
    "would write the same elements": {"signature": "x[m, k] -> y[k]", "tile": {"m": 4}},
    "an axis twice": {"signature": "x[m] -> y[m, m]"},
    "no axis 'n'": {"tile": {"n": 4}},
    "give 1 or more": {"tile": {"m": 0}},
    "dtypes names 'z'": {"dtypes": {"z": ark.fp16}},
    "not a data type": {"dtypes": {"x": "float"}},
    "elements share bytes": {"dtypes": {"x": ark.int4}},
    "expected a bool, an int": {"constants": {"by": "two"}},
    "of 32 bits": {"constants": {"by": 1 << 40}},
    "a C\\+\\+ keyword": {"constants": {"while": 1}},
    "of an operand or axis": {"constants": {"m": 1}},
    "expected a custom op": {"backward": len},
    "packets names 'z'": {"packets": ["z"]},
    "packets are written once": {"signature": "x[m] -> x[m]", "packets": ["x"]},
    "has no function of that name": {"text": COPY.replace("copied", "copier")},
    r"copied.h:5 has #include": {"text": COPY + "#include <cuda.h>\n"},
    r"copied.h:5 has a lone surrogate \(U\+D800\)": {"text": COPY + "// \ud800\n"},
}


@pytest.mark.parametrize("words", DECLARATIONS)
def test_invalid_declarations_are_refused(words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        copied(**DECLARATIONS[words])


def test_comments_and_strings_are_no_code() -> None:
    copied(COPY + '/*\n#include <a.h>\n*/ static const char* word = "a";\n')


@pytest.mark.parametrize(
    "text",
    [
        'void f() { asm("nop"); }',
        '#define as_m(a, b) a##b\nvoid f() { as_m(as, m)("nop"); }',
        "void f() { volatile int v = 0; v = 1; }",
    ],
)
def test_source_is_not_filtered(text: str) -> None:
    """A custom op's text may contain any code. ark does not filter it: a filter of words could not
    make an untrusted author's code safe.
    """
    op = copied(COPY + text + "\n")
    plan(lambda: op(ark.tensor([4])))


def test_error_within_arks_templates_is_passed_on() -> None:
    """If a custom op's text calls one of ark's templates wrongly, the error contains the compiler's
    reason and the line of the text.
    """
    wrong = copied(COPY.replace("ark_load(c, x, m)", 'ark_load(c, x, m, "column")'))
    with use_model(Model()) as model:
        wrong(ark.tensor([8]))
    cpu = registry.with_kernels(registry.get("cpu"))
    with pytest.raises(ModelError, match=r"error: no matching function.*ark_at") as refused:
        program.build(make_plan(model.graph, CPU_2), CPU_2, cpu, CPU_2.arch)
    assert "copied.h:3" in str(refused.value) and "loop.cpp" not in str(refused.value)


@pytest.mark.parametrize(
    "log",
    [
        # The same error as printed by GCC, Clang and NVCC.
        "/tmp/x/loop.cpp: In instantiation of 'f':\ncopied.h:4:50:   required from 'g'\n"
        "/tmp/x/loop.cpp:19:24: error: no match\n 19 | f(x);",
        "loop.cpp:19:24: error: no match\n 19 | f(x);\ncopied.h:4:50: note: requested here",
        "loop.cu(19): error: no match\n  f(x);\n  detected during instantiation at line 4 of\n"
        "copied.h(4): here",
    ],
)
def test_error_of_a_header_is_kept(log: str) -> None:
    digest = custom_form.register(copied()._form)
    kept = custom_form.complaints(log, [("copied", digest)])
    assert "error: no match" in kept and "copied.h" in kept and "loop" not in kept
    assert not custom_form.complaints("loop.cpp:19:24: error: no match", [("copied", digest)])


def test_invalid_calls_are_refused() -> None:
    scale, two = custom.scale(), custom.shares()
    with use_model(Model()):
        x, w = ark.tensor([4, 6]), ark.tensor([6])
        with pytest.raises(InvalidUsageError, match=r"2 inputs \(x, w\), and 1 were given"):
            scale(x)
        with pytest.raises(ModelError, match="k is 7; in x it is 6"):
            scale(x, ark.tensor([7]))
        with pytest.raises(ModelError, match=r"shape \[6\]; expected x\[m, k\]"):
            scale(w, w)
        with pytest.raises(InvalidUsageError, match=r"has no argument 'with_'.*by, y, m, k"):
            scale(x, w, with_=3)
        with pytest.raises(InvalidUsageError, match="constant by is 'three'; expected float"):
            scale(x, w, by="three")
        with pytest.raises(InvalidUsageError, match="m is 5, but the operands' shapes give 4"):
            scale(x, w, m=5)
        with pytest.raises(ModelError, match="y would overwrite x"):
            scale(x, w, y=x)
        with pytest.raises(ModelError, match="x is fp32; expected int32 or int64"):
            custom.count_up()(w, ark.tensor([6]), twice=True)
        with pytest.raises(InvalidUsageError, match="give a value for the constant twice"):
            custom.count_up()(*(ark.tensor([3], ark.int32) for _ in "xy"))
        with pytest.raises(ModelError, match="sums is fp16; expected fp32"):
            two(x, sums=ark.tensor([4], ark.fp16))
        with pytest.raises(InvalidUsageError, match="no input determines the size of n"):
            copied(signature="x[m] -> y[n]")(w)


def _with_params(custom_plan: Plan, **params: Any) -> str:
    entry = next(op for op in custom_plan.ops if op.kind == "custom")
    assert isinstance(entry.params, dict)
    entry.params.update(params)
    return to_json(custom_plan)


def test_plan_with_unregistered_ops_is_refused() -> None:
    """A plan is data. It can run only ops that the process has registered with exactly the same
    text.
    """
    custom_plan = plan(lambda: copied(constants={"by": 1.0})(ark.tensor([8])))
    text = to_json(custom_plan)
    assert "ark_store" not in text
    verify([from_json(text)])
    with pytest.raises(PlanError, match=r"no custom op|has none"):
        verify([from_json(text.replace('"copied"', '"pasted"'))])
    digest = copied(constants={"by": 1.0}).digest
    with pytest.raises(PlanError, match="has another text or declaration of it"):
        verify([from_json(text.replace(digest, "0" * 64))])
    custom_form._FORMS.pop(digest)
    with pytest.raises(PlanError, match=r"register the same op by ark.custom_op"):
        verify([from_json(text)])
    copied(constants={"by": 1.0})
    verify([from_json(text)])
    for wrong, words in (
        ({"tile": {"m": 4}}, "the tile is"),
        ({"constants": {"by": 1}}, "the constants are"),
        ({"constants": {}}, "the constants are"),
        ({"code": "int main() {}"}, "unknown field"),
    ):
        changed = plan(lambda: copied(constants={"by": 1.0})(ark.tensor([8])))
        with pytest.raises(PlanError, match=words):
            verify([from_json(_with_params(changed, **wrong))])


def test_everything_of_a_declaration_is_in_its_digest() -> None:
    digests = {
        copied().digest,
        copied(COPY + "\n").digest,
        copied(tile={"m": 4}).digest,
        copied(signature="x[all m] -> y[m]").digest,
        copied(dtypes={"x": ark.fp16}).digest,
        copied(constants={"by": 1}).digest,
        copied(constants={"by": 1.0}).digest,
        copied(scratch=16).digest,
        copied(scratch_each={"m": 16}).digest,
        copied(packets=["x"]).digest,
    }
    assert len(digests) == 10
    assert copied().digest == copied(constants={}).digest


def _name_in_cache(custom_plan: Plan) -> tuple[str, str]:
    backend = registry.with_kernels(registry.get("cpu"))
    emitted, _, name = program._emitted(
        custom_plan, machine_of(custom_plan), backend, CPU_2.arch, None
    )
    return emitted.source.text, name


def test_text_is_in_the_caches_key_and_in_the_source_once() -> None:
    def twice(text: str) -> Plan:
        op = copied(text, tile={"m": 8})
        return plan(lambda: [op(ark.tensor([n])) for n in (16, 40)])

    changed = COPY.replace("ark_load(c, x, m)", "ark_load(c, x, m) + 1.0f")
    (one, first), (repeated, second) = _name_in_cache(twice(COPY)), _name_in_cache(twice(COPY))
    other = _name_in_cache(twice(changed))[1]
    assert (one, first) == (repeated, second) and other != first
    assert one.count(COPY) == 1 and one.count("copied(\n") == 2


def test_two_texts_may_use_one_name() -> None:
    doubled = COPY.replace("ark_load(c, x, m)", "2.0f * ark_load(c, x, m)")
    ark.init(backend="cpu")
    x = ark.tensor([9])
    first, second = copied()(x), copied(doubled)(x)
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(np.arange(9, dtype=np.float32))
        runtime.run()
        np.testing.assert_array_equal(first.to_numpy(), np.arange(9))
        np.testing.assert_array_equal(second.to_numpy(), 2 * np.arange(9))
    ark.init(backend="cpu")


@pytest.mark.parametrize(
    "backend, machine", [("cpu", "cpu-2"), ("cuda", "h100"), ("rocm", "mi300x")]
)
def test_compiler_messages_are_passed_on(backend: str, machine: str) -> None:
    """If a custom op does not compile, the error has the file, the line and the compiler's message,
    and no lines of ark's own source.
    """
    pytest.importorskip({"cuda": "cuda.bindings.nvrtc", "rocm": "ziglang"}.get(backend, "ark"))
    wrong = copied(COPY.replace("ark_load(c, x, m)", "ark_load(c, x, m) * nowhere"))
    with use_model(Model()) as model:
        wrong(ark.tensor([8]))
    target = registry.machine(machine)
    with pytest.raises(ModelError) as refused:
        chosen = registry.with_kernels(registry.get(backend))
        program.build(make_plan(model.graph, target), target, chosen, target.arch)
    message = str(refused.value)
    assert f"custom op (copied) does not compile for {target.arch}" in message
    assert re.search(r"copied\.h[:(]3\)?(:\d+)?: error: .*nowhere", message), message
    assert "task_" not in message and refused.value.__suppress_context__


def test_function_of_other_operands_is_said_at_its_call() -> None:
    """If the function of a custom op takes other operands than its signature states, the error
    lists the operands of the call.
    """
    wrong = copied(COPY.replace("class Y>", "class Y, class Z>").replace("Y y)", "Y y, Z z)"))
    with use_model(Model()) as model:
        wrong(ark.tensor([8]))
    cpu = registry.with_kernels(registry.get("cpu"))
    with pytest.raises(ModelError, match=r"copied\.call:\d.* no matching function") as refused:
        program.build(make_plan(model.graph, CPU_2), CPU_2, cpu, CPU_2.arch)
    assert "ArkOperand" in str(refused.value) and "copied.h:2" in str(refused.value)


def test_source_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my text.h"
    path.write_text(COPY.replace("copied", "filed"))
    op = ark.custom_op("filed", path, "x[m] -> y[m]")
    source, _ = _name_in_cache(plan(lambda: op(ark.tensor([4]))))
    assert '#line 1 "my_text.h"' in source and str(tmp_path) not in source
    with pytest.raises(InvalidUsageError, match=r"none\.h cannot be read"):
        ark.custom_op("filed", tmp_path / "none.h", "x[m] -> y[m]")
    with pytest.raises(InvalidUsageError, match=r"expected the text or a pathlib.Path"):
        ark.custom_op("filed", 3, "x[m] -> y[m]")


def test_reference_is_the_users_function() -> None:
    with use_model(Model()) as model:
        custom.scale()(ark.tensor([2, 3]), ark.tensor([3]), by=4)
        copied()(ark.tensor([2]))
        assert "copied" in model.serialize()
    define = ops.get("custom").reference
    assert define is not None
    first, second = model.graph.nodes
    (result,) = define([np.ones((2, 3)), np.arange(3)], first.attrs)
    np.testing.assert_array_equal(result, [[0, 4, 8]] * 2)
    with pytest.raises(UnsupportedError, match="'copied' has no reference"):
        define([np.ones(2)], second.attrs)
    with use_model(Model()) as model:
        copied(reference=lambda x: (x, x))(ark.tensor([2]))
    with pytest.raises(ModelError, match="makes 2 arrays; its signature has 1 results"):
        define([np.ones(2)], model.graph.nodes[0].attrs)


SLOPE = """template <class Task, class X, class W, class G, class Y, class Z>
ARK_DEVICE void slope(ArkCtx& c, const Task& task, X x, W w, G g, Y dx, Z dw) {
  for (int k = task.k.begin + ark_tid(); k < task.k.end; k += ARK_THREADS) {
    float total = 0.0f;
    for (int m = 0; m < task.m.size; ++m) {
      const float given = ark_load(c, g, m, k) * Task::by;
      ark_store(c, dx, given * ark_load(c, w, k), m, k);
      total += given * ark_load(c, x, m, k);
    }
    ark_store(c, dw, total, k);
  }
}
"""


def test_gradients_are_refused_by_name_or_another_custom_op() -> None:
    torch = pytest.importorskip("torch")
    slope = ark.custom_op(
        "slope",
        SLOPE,
        "x[m, k], w[k], g[m, k] -> dx[m, k], dw[k]",
        tile={"k": 5},
        constants={"by": float},
    )
    scale = ark.custom_op(
        "scale",
        custom.SCALE,
        "x[m, k], w[k] -> y[m, k]",
        tile={"m": 4},
        constants={"by": 2.0},
        backward=slope,
    )
    ark.init(backend="cpu")
    x, w = ark.tensor([7, 12]), ark.tensor([12])
    words = r"custom op 'scale' .* has no gradient: pass its gradient op as custom_op\(backward="
    with pytest.raises(UnsupportedError, match=words):
        ark.grad(ark.reduce_sum(custom.scale()(x, w), 0), [x], ark.tensor([1, 12]))
    ark.init(backend="cpu")
    x, w = ark.tensor([7, 12]), ark.tensor([12])
    loss = ark.reduce_sum(ark.reshape(ark.mul(scale(x, w, by=3.0), x), [84]), 0)
    gradients = ark.grad(loss, [x, w])
    random = np.random.default_rng(0)
    xs, ws = (random.standard_normal(n).astype(np.float32) for n in ((7, 12), 12))
    tx, tw = (torch.tensor(a, requires_grad=True) for a in (xs, ws))
    (tx * tw * 3.0 * tx).sum().backward()
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(xs)
        w.from_numpy(ws)
        runtime.run()
        for got, want in zip(gradients, (tx.grad, tw.grad), strict=True):
            np.testing.assert_allclose(got.to_numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    ark.init(backend="cpu")


def test_names_on_the_page_exist() -> None:
    section = (
        (ROOT / "docs/custom-ops.md").read_text().split("## Names for a body")[1].split("`#if")[0]
    )
    named = {
        w
        for part in re.findall(r"`([^`]+)`", section)
        for w in re.findall(r"\b[aA][rR][kK]_?\w+", part)
    }
    texts = "".join(
        path.read_text()
        for folder in ("ark/backend/codegen/device", "ark/tasks", "backends/cpu/ark_cpu")
        for path in (ROOT / folder).rglob("*.h")
    )
    missing = {word for word in named if not re.search(rf"\b{word}\b", texts)}
    assert len(named) > 50 and not missing
    described = (ROOT / "docs/device-abi.md").read_text()
    assert not {word for word in named if not re.search(rf"\b{word}\b", described)}
