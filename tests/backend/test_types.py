"""Types and ranks with random shapes, broadcasts, views and values, drawn by hypothesis.

bool, integers of 8 to 64 bits, 4-bit types, up to eight dimensions, compared with NumPy. One model
contains all cases of an example, because compiling takes most of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import ark
from ark.ir.dtype import DataType
from ark.tasks.functions import FUNCTIONS
from tests.cases.types import PACKED, elementwise, held, many, movements, reductions, values
from tests.opcheck import Case, check

pytestmark = pytest.mark.emulated("slow")

# An example takes seconds to compile, so a failing one is shown without shrinking.
PROPERTY = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(drawn=movements())
@PROPERTY
def test_movement(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


@given(drawn=elementwise())
@PROPERTY
def test_elementwise(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


@given(drawn=reductions())
@PROPERTY
def test_reductions(backend: str, drawn: list[Case]) -> None:
    ark.init(backend=backend)
    check(drawn)


def by_torch(name: str, array: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    return getattr(torch, name)(torch.from_numpy(array)).numpy()


UNARY: dict[str, tuple[Callable[..., np.ndarray], float, float]] = {
    "expm1": (np.expm1, -3, 3),
    "ln": (np.log, 1e-3, 50.0),
    "log1p": (np.log1p, -0.9, 50.0),
    "reciprocal": (lambda a: 1 / a, 0.1, 9.0),
    "neg": (np.negative, -3, 3),
    "abs": (np.abs, -3, 3),
    "sign": (np.sign, -3, 3),
    "floor": (np.floor, -9, 9),
    "ceil": (np.ceil, -9, 9),
    "round": (np.round, -9, 9),
    "tanh": (np.tanh, -5, 5),
    "erf": (np.vectorize(__import__("math").erf), -4, 4),
    "sin": (np.sin, -7, 7),
    "cos": (np.cos, -7, 7),
    "tan": (np.tan, -1.4, 1.4),
    "asin": (np.arcsin, -1, 1),
    "acos": (np.arccos, -1, 1),
    "atan": (np.arctan, -9, 9),
    "sinh": (np.sinh, -4, 4),
    "cosh": (np.cosh, -4, 4),
    "asinh": (np.arcsinh, -50, 50),
    "acosh": (np.arccosh, 1, 50),
    "atanh": (np.arctanh, -0.99, 0.99),
}
UNARY |= {
    f.name: (functools.partial(by_torch, f.public.torch), *f.public.between)
    for f in FUNCTIONS.values()
    if f.public and f.name not in UNARY
}


def test_functions(backend: str) -> None:
    """Every function of one tensor, at random values and at the ends of its range, in
    every type.
    """
    rng = np.random.default_rng(7)
    cases = []
    for name, (reference, low, high) in UNARY.items():
        array = np.append(rng.uniform(low, high, 250), [low, high, (low + high) / 2])
        if name in ("round", "floor", "ceil"):
            array = np.append(array, [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 8388609.0, -3e9, -0.0])
        cases.append(Case(name, [(array, ark.fp32)], getattr(ark, name), reference))
        integers = rng.integers(-(2**62), 2**62, 40)
        if name in ("neg", "abs", "sign", "floor"):
            cases.append(Case(name, [(integers, ark.int64)], getattr(ark, name), reference))
    odd = np.array([0.0, np.inf, -np.inf, np.nan, 1.0])
    cases.append(Case("isnan", [(odd, ark.fp32)], ark.isnan, np.isnan))
    cases.append(Case("isinf", [(odd, ark.fp32)], ark.isinf, np.isinf))
    check(cases)


def test_functions_of_two(backend: str) -> None:
    rng = np.random.default_rng(8)
    a, b = rng.uniform(-9, 9, (5, 60)), rng.uniform(-4, 4, (5, 60))
    b = np.where(np.abs(b) < 0.1, 1.5, b)
    pair = [(a, ark.fp32), (b, ark.fp32)]
    positive = [(np.abs(a), ark.fp32), (b, ark.fp32)]
    whole = [(a, ark.fp32), (np.round(b), ark.fp32)]
    wide = rng.integers(-(2**62), 2**62, (3, 40))
    small = rng.integers(-7, 8, (3, 40))
    longs = [(wide, ark.int64), (small, ark.int64)]

    def mod(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(y == 0, 0, np.mod(x, np.where(y == 0, 1, y)))

    def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        safe = np.where(y == 0, 1, y)
        return np.where(y == 0, 0, np.abs(x) // np.abs(safe) * np.sign(x) * np.sign(safe))

    check(
        [
            Case("mod", pair, ark.mod, np.mod, 1e-4),
            Case("fmod", pair, ark.fmod, np.fmod, 1e-4),
            Case("atan2", pair, ark.atan2, np.arctan2, 1e-5),
            Case("hypot", pair, ark.hypot, np.hypot),
            Case("far fmod", pair[1:], lambda t: ark.fmod(2.0**99, t), far_fmod, 1e-4),
            Case("pow", positive, ark.pow, np.power, 1e-4),
            Case("whole pow", whole, ark.pow, np.power, 1e-4),
            Case("square", pair[:1], lambda t: t**2, np.square),
            Case("root", positive[:1], lambda t: t**0.5, np.sqrt),
            Case("base", pair[1:], lambda t: 2**t, np.exp2),
            Case("int div", longs, ark.div, quotient),
            Case("int mod", longs, ark.mod, mod),
            Case("int add", longs, ark.add, np.add),
            Case("int sub", [longs[0], longs[0]], lambda x, y: x - (-y), lambda x, y: x + y),
            Case("int cube", longs[1:], lambda t: t**3, lambda x: x**3),
            Case("int pow", longs[1:], lambda t: ark.pow(t, 5), lambda x: x**5),
            Case("and", longs, ark.bitwise_and, np.bitwise_and),
            Case("xor", longs, ark.bitwise_xor, np.bitwise_xor),
            Case("not", longs[:1], ark.bitwise_not, np.bitwise_not),
            Case("left", longs[1:], lambda t: ark.shift_left(t, 40), lambda x: x << 40),
            Case("right", longs[:1], lambda t: ark.shift_right(t, 3), lambda x: x >> 3),
            Case("clip", pair[:1], lambda t: ark.clip(t, -1, 2), lambda x: np.clip(x, -1, 2)),
            Case("long clip", longs[:1], lambda t: ark.clip(t, 2**40), lambda x: x.clip(2**40)),
            Case("long scalar", longs[1:], lambda t: t * (2**61 + 1), lambda x: x * (2**61 + 1)),
            Case("tril", pair[:1], lambda t: ark.tril(t, -1), lambda x: np.tril(x, -1)),
            Case("triu", longs[:1], lambda t: ark.triu(t, 2), lambda x: np.triu(x, 2)),
            Case(
                "one hot",
                [(small, ark.int64)],
                lambda t: ark.one_hot(t, 5, ark.bf16, axis=1, off=-1, on=2),
                one_hot,
            ),
            Case("iota", [], lambda: ark.iota([3, 4, 5], 1, ark.int64), iota),
            Case("lists", [(a, ark.fp32)], many, lambda x: x * sum(range(1, 15))),
        ]
    )


def far_fmod(y: np.ndarray) -> np.ndarray:
    return np.fmod(2.0**99, y)


def one_hot(x: np.ndarray) -> np.ndarray:
    at = np.where(x < 0, x + 5, x)
    return np.where(at[:, None] == np.arange(5)[:, None], 2.0, -1.0)


def iota() -> np.ndarray:
    return np.broadcast_to(np.arange(4)[:, None], (3, 4, 5))


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_four_bits(backend: str, dtype: DataType) -> None:
    """4-bit tensors: written to memory and read back, cast from and to every type, with odd row
    lengths, and views that start at whole bytes.
    """
    rng = np.random.default_rng(9)
    array = values(rng, (3, 5, 7), dtype)
    floats = np.append(rng.uniform(-9, 9, 200), [0.25, 0.75, -1.25, 2.5, 5.0, 3.5, -0.0])
    integers = np.trunc(np.clip(floats, *((-8, 7) if dtype.name == "int4" else (0, 15))))
    source = floats if dtype.name == "fp4" else integers
    check(
        [
            Case("copy", [(array, dtype)], ark.copy, lambda x: x),
            Case("to fp32", [(array, dtype)], lambda t: ark.cast(t, ark.fp32), lambda x: x),
            Case("to int64", [(array, dtype)], lambda t: ark.cast(t, ark.int64), np.trunc),
            Case("to bool", [(array, dtype)], lambda t: ark.cast(t, ark.bool), lambda x: x != 0),
            Case(
                "from fp32",
                [(source, ark.fp32)],
                lambda t: ark.cast(t, dtype),
                lambda x: x.astype(dtype.numpy).astype(np.float64),
            ),
            Case(
                "rows",
                [(source[:205].reshape(5, 41), ark.fp32)],
                lambda t: ark.cast(ark.cast(t, dtype)[1:4, 2:9], ark.fp32),
                lambda x: x[1:4, 2:9].astype(dtype.numpy).astype(np.float64),
            ),
        ]
    )


def test_unsupported_types_are_refused() -> None:
    t = ark.tensor([4, 6], ark.int4)
    with pytest.raises(ark.ModelError, match="share a byte"):
        t[:, 1:4]
    with pytest.raises(ark.ModelError, match="expected bool"):
        ark.where(ark.tensor([3]), 1.0, ark.tensor([3]))
    with pytest.raises(ark.ModelError, match="out of range for int8"):
        ark.add(ark.tensor([3], ark.int8), 300)
    with pytest.raises(ark.InvalidUsageError, match="at most 8"):
        ark.tensor([1] * 9)


def test_four_bits_are_saved(backend: str, tmp_path: Path) -> None:
    """The 4-bit parameters of a module are saved, two elements per byte, and loaded again. Damaged
    files are refused.
    """
    rng = np.random.default_rng(10)

    class Weights(ark.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = ark.parameter([3, 7], ark.int4)
            self.b = ark.parameter([5, 4], ark.fp4)
            self.c = ark.parameter([2], ark.int64)

    module = Weights()
    given = {n: values(rng, t.shape(), t.dtype()) for n, t in module.params_dict().items()}
    given = {n: a.astype(module.params_dict()[n].dtype().numpy) for n, a in given.items()}
    ark.noop(module.a), ark.noop(module.b), ark.noop(module.c)
    held.append(ark.add(module.c, 1))
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        module.load_state_dict(given)
        ark.save(module.state_dict(), tmp_path / "weights")
    loaded = ark.load(tmp_path / "weights")
    assert list(loaded) == list(given)
    for name, array in given.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    data = (tmp_path / "weights").read_bytes()
    (tmp_path / "weights").write_bytes(data.replace(b"[3, 7]", b"[3, 9]"))
    with pytest.raises(ark.InvalidUsageError, match="12 bytes for int4"):
        ark.load(tmp_path / "weights")


def test_many_operands_are_one_op() -> None:
    """A chain with fifteen inputs is one op, and so is the sum of twenty ranks' inputs, although a
    task's record holds fewer addresses.
    """
    from ark_cpu import machines

    from ark.lower.pipeline import plan
    from ark.plan.verify import verify

    model = ark.Model()
    with ark.use_model(model):
        tensors = [ark.tensor([64]) for _ in range(15)]
        total = tensors[0]
        for other in tensors[1:]:
            total = ark.add(total, other)
        ark.copy(total)
    planned = plan(model.graph, machines.model(2))
    verify([planned])
    assert max(len(op.operands) for op in planned.ops) == 16
    ranks = []
    for rank in range(14):
        model = ark.Model(rank, 14)
        with ark.use_model(model):
            ark.all_reduce(ark.tensor([64]), rank, 14)
        ranks.append(plan(model.graph, machines.model(2)))
    verify(ranks)
    assert max(len(op.operands) for op in ranks[0].ops) == 15
