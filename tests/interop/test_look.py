"""How a compiled module detects tensors that have changed since the previous call, with the check
in compiled C and, as without a compiler, in Python. The old memory is filled with NaN, so that a
kernel which still reads it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from ark.interop.torch import backend, look  # noqa: E402
from ark.interop.torch.program import PROGRAMS, Program  # noqa: E402


@pytest.fixture(autouse=True, params=["native", "without a compiler"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "native":
        monkeypatch.setattr(look, "_module", lambda: None)
    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)
    return str(request.param)


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def _data(module: Any) -> None:
    module[2].weight.data = torch.randn(3, 3)


def _set(module: Any) -> None:
    module[0].bias.set_(torch.randn(3))


def _set_into_a_storage(module: Any) -> None:
    """Sets the tensor to another offset in the same storage."""
    weight = module[2].weight
    wide = torch.randn(2, 3, 3)
    weight.set_(wide.untyped_storage(), 0, (3, 3), (3, 1))
    module(torch.randn(2, 4))
    weight.set_(wide.untyped_storage(), 9, (3, 3), (3, 1))


def _assign(module: Any) -> None:
    module.load_state_dict(network().state_dict(), assign=True)


def _another(module: Any) -> None:
    module[2].bias = torch.nn.Parameter(torch.randn(3))


def _storage(module: Any) -> None:
    """Replaces the memory of the tensor's storage, as sharded training does."""
    weight = module[0].weight
    values, memory = torch.randn_like(weight), weight.untyped_storage()
    size, kept = memory.size(), []
    memory.resize_(0)
    kept += [torch.randn(3, 4) for _ in range(4)]  # takes the place
    memory.resize_(size)
    weight.copy_(values)


def _strided(module: Any) -> None:
    module[2].weight.data = torch.randn(3, 3).T


def _written(module: Any) -> None:
    module[2].weight.copy_(torch.randn(3, 3))


def _swapped(module: Any) -> None:
    module[0], module[2] = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)


CHANGES = (
    _data, _set, _set_into_a_storage, _assign, _another, _storage, _strided, _written, _swapped
)  # fmt: skip
# The changes after which the module has the same parameter objects, with new contiguous memory or
# contents.
HELD = (_data, _set, _set_into_a_storage, _storage, _written)


@pytest.mark.parametrize("way", ["torch.compile", "from_torch"])
def test_changed_parameters_are_seen(way: str) -> None:
    """A compiled module uses the new values of parameters that change between calls, by whatever
    kind of change. Each change is made several times.
    """
    module, x = network(), torch.randn(2, 4)
    if way == "torch.compile":
        compiled, changes = torch.compile(module, backend=backend), CHANGES
    else:
        compiled, changes = ark.from_torch(module, (x,)), HELD
    with torch.no_grad():
        for _ in range(3):
            close(compiled(x), module(x))
        for change in (c for c in changes for _ in range(3)):
            before = [(p.detach(), p.data_ptr()) for p in module.parameters()]
            change(module)
            now = {p.data_ptr() for p in module.parameters()}
            for tensor, address in before:
                if address not in now and tensor.data_ptr() == address:
                    tensor.fill_(float("nan"))
            want = module(x)
            assert not want.isnan().any()
            for _ in range(2):
                torch.testing.assert_close(compiled(x), want, msg=change.__name__)


def test_inputs_of_other_memory_and_strides() -> None:
    """A kernel gives torch's results for contiguous and strided inputs in turn."""
    module = network()
    result = ark.from_torch(module, (torch.randn(2, 4),))
    compiled = torch.compile(module, backend=backend)
    wide = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(2):
            for x in (torch.randn(2, 4), wide[:, ::2], wide[:, 4:], torch.randn(4, 2).T):
                for _ in range(2):
                    close(result(x), module(x))
                    close(compiled(x), module(x))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rows": (lambda x: x[:1], r"\[1, 4\]; the kernel was compiled for"),
    "as many in another shape": (lambda x: x.reshape(4, 2), r"\[4, 2\]; the kernel was"),
    "dimensions": (lambda x: x[None], r"\[1, 2, 4\]; the kernel was compiled for"),
    "one more behind": (lambda x: x[..., None], r"\[2, 4, 1\]; the kernel was compiled for"),
    "dtype": (lambda x: x.int(), r"torch.int32 \[2, 4\]; the kernel was compiled for"),
    "device": (lambda x: x.to("meta"), "is on meta, but ark runs on cpu"),
    "sparse": (lambda x: x.to_sparse(), "call to_dense"),
    "no tensor": (lambda x: x.numpy(), "expected tensors, got ndarray"),
    "a number": (lambda x: 3, "expected tensors, got int"),
}


def test_changed_inputs_are_refused_after_valid_calls(capfd: pytest.CaptureFixture[str]) -> None:
    """After valid calls, a kernel refuses inputs of other shapes, types or devices, which torch's
    own module accepts.
    """
    module, x = network(), torch.randn(2, 4)
    result = ark.from_torch(module, (x,))
    for change, message in REFUSED.values():
        for _ in range(2):
            close(result(x), module(x).detach())
        for _ in range(2):
            with pytest.raises(ark.InvalidUsageError, match=message):
                result(change(x))
    assert "aoti" not in capfd.readouterr().err


def test_tensor_subclasses_are_not_checked_natively() -> None:
    class Own(torch.Tensor):
        pass

    x = torch.ones(3)
    assert look.looker([x.as_subclass(Own)], [0]) is look.nothing


def test_equal_calls_are_checked_once(looking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with inputs in other memory and the same parameters: with the compiled check, only the
    first call of each kernel examines all tensors in Python.
    """
    module, before = network(), set(PROGRAMS)
    compiled, x = torch.compile(module, backend=backend), torch.randn(2, 4)
    taken = []
    seen = Program._seen
    monkeypatch.setattr(Program, "_seen", lambda *given: taken.append(1) or seen(*given))
    with torch.no_grad():
        result = ark.from_torch(module, (x,))
        for _ in range(3):
            x = torch.randn(2, 4)
            close(compiled(x), module(x))
            close(result(x), module(x))
    assert len(set(PROGRAMS) - before) == 2
    assert len(taken) == (2 if looking == "native" else 6)
