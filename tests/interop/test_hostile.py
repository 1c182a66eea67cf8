"""Invalid input to the torch front ends is refused with a message and not computed with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ark
from ark.interop.torch import Options

X = torch.linspace(-1, 1, 24).reshape(3, 8)


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Divides(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 / 0)


CALLS: dict[str, Callable[[], Any]] = {
    "doubles": X.double,
    "numbers": X.int,
    "another device": lambda: X.to("meta"),
    "a sparse tensor": X.to_sparse,
    "more rows": lambda: torch.cat([X, X]),
    "an array": X.numpy,
    "a word": lambda: "x",
    "nothing": lambda: None,
}


@pytest.mark.parametrize("make", [lambda m: ark.from_torch(m, (X,)), ark.inference_model])
def test_calls_with_other_types_and_layouts_are_refused(make: Callable[[Any], Any]) -> None:
    """A compiled module refuses inputs of another type or layout. If only shapes were checked,
    float64 data would be read as float32.
    """
    ark.init(backend="cpu")
    inner = module()
    outer = make(inner)
    for name, given in CALLS.items():
        torch.testing.assert_close(outer(X), inner(X))
        with pytest.raises(ark.InvalidUsageError):
            outer(given())
            pytest.fail(f"{name} was taken")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: ark.from_torch(3, (X,)), "expected a torch.nn.Module, got int"),
    "no example": (lambda: ark.from_torch(module(), ()), "cannot follow the module"),
    "a tensor for an example": (lambda: ark.from_torch(module(), X), "pass a tuple"),
    "words": (lambda: ark.from_torch(module(), ("a",)), "cannot follow the module"),
    "sizes that do not fit": (
        lambda: ark.from_torch(module(), (torch.ones(3, 9),)),
        "RuntimeError: a and b must have same reduction dim",
    ),
    "dynamic shapes": (lambda: ark.from_torch(module(), (X,), 3), "cannot follow the module"),
    "a branch by data": (lambda: ark.from_torch(Branches(), (X,)), "GuardOnDataDependent"),
    "code that raises": (lambda: ark.from_torch(Divides(), (X,)), "ZeroDivisionError: division"),
    "weights elsewhere": (
        lambda: ark.from_torch(torch.nn.Linear(8, 4, device="meta"), (X,)),
        "cannot follow the module",
    ),
    "no module to iterate": (lambda: ark.inference_model(3), "expected a torch.nn.Module"),
    "no options": (lambda: ark.inference_model(module(), 3), "options has type int"),
    "no optimizer": (
        lambda: ark.training_model(module(), Options(), None),
        "optimizer has type NoneType",
    ),
    "a word for an optimizer": (
        lambda: ark.training_model(module(), Options(), "sgd"),
        "optimizer has type str",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_calls_are_refused(name: str) -> None:
    make, message = WRONG[name]
    ark.init(backend="cpu")
    with pytest.raises(ark.InvalidUsageError, match=message):
        make()


def test_options_of_torch_compile_are_refused() -> None:
    ark.init(backend="cpu")
    for words in ({"options": {"fast": True}}, {"mode": "max-autotune"}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="has no modes and no options"):
            torch.compile(module(), backend="ark", **words)(X)


def test_modules_may_be_traced_in_several_threads() -> None:
    ark.init(backend="cpu")
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            inner = torch.nn.Linear(8, number + 1)
            results[number] = torch.allclose(ark.from_torch(inner, (X,))(X), inner(X), atol=1e-5)
        except Exception as error:
            results[number] = repr(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
