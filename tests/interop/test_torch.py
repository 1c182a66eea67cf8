"""torch modules by torch.compile and torch.export, on the CPU, compared with torch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark

torch = pytest.importorskip("torch")
from ark.interop.torch import backend, graph  # noqa: E402
from ark.interop.torch.export import export  # noqa: E402
from ark.interop.torch.program import PROGRAMS  # noqa: E402
from tests.interop import graphs, op_samples  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_torch_finds_the_backend_by_its_name() -> None:
    """torch.compile finds the backend "ark" by the package's entry point, also if ark's functions
    for torch were used before.
    """
    assert callable(ark.torch.Module)
    double = torch.compile(lambda x: x * 2.0, backend="ark")
    close(double(torch.ones(3)), torch.full((3,), 2.0))


def test_calls_with_other_memory_and_other_sizes() -> None:
    """Calls with new tensors give torch's results. The second batch size makes torch compile a
    graph with a variable size.
    """
    module, _ = graphs.networks()["mlp"]
    compiled = torch.compile(module.eval(), backend=backend)
    kept = []
    with torch.no_grad():
        for rows in (3, 3, 5, 4, 3):
            x = torch.randn(rows, 16)
            kept.append(x)
            close(compiled(x), module(x))
        strided = torch.randn(16, 3).T
        close(compiled(strided), module(strided))


def test_unsupported_operators_stay_in_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """Results pass between ark and torch; one line names the operator and the reason."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sort(x * 2.0, -1)[0] + 1.0)

    x = torch.randn(4, 6)
    close(torch.compile(function, backend=backend)(x), function(x))
    errors = capsys.readouterr().err
    assert "1 of 5 operators stay in torch: sort.default: sort.default is not supported" in errors
    wide = x.double()
    close(torch.compile(function, backend=backend)(wide), function(wide))
    assert "float64 is not supported" in capsys.readouterr().err


def test_gradients_through_torch_compile() -> None:
    """ark computes the forward and backward graphs of torch.compile, and torch's optimizer gets
    torch's gradients.
    """
    module, x = graphs.networks()["mlp"]
    module.train()
    torch.compile(module, backend=backend)(x).square().sum().backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    for mine, parameter in zip(got, module.parameters(), strict=True):
        close(mine, parameter.grad)


def test_module_from_torch_shares_its_parameters() -> None:
    module, x = graphs.networks()["attention"]
    result = ark.from_torch(module, (x,))
    with torch.no_grad():
        close(result(x), module(x))
        module.out.bias.add_(1.0)
        close(result(x), module(x))
    assert isinstance(result, ark.torch.Module)
    assert result.state_dict().keys() == {f"module.{n}" for n in module.state_dict()}
    with pytest.raises(
        ark.InvalidUsageError,
        match=r"\[2, 7, 32\]; the kernel was compiled for torch.float32 \[\d, 6, 32\]",
    ):
        result(torch.randn(2, 7, 32))


def test_sizes_within_bounds() -> None:
    module, _ = graphs.networks()["mlp"]
    rows = torch.export.Dim("rows", min=2, max=8)
    result = ark.from_torch(module, (torch.randn(3, 16),), dynamic_shapes=({0: rows},))
    for count in (2, 5, 2):
        x = torch.randn(count, 16)
        close(result(x), module(x).detach())
    with pytest.raises(ark.InvalidUsageError, match="to be <= 8"):
        result(torch.randn(9, 16))


class Causal(torch.nn.Module):
    """A module of causal attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        result = torch.nn.functional.scaled_dot_product_attention(
            heads, heads, heads, is_causal=True
        )
        return torch.tanh(result.transpose(1, 2).flatten(2)) + x.mean(-1, keepdim=True)


class Batched(torch.nn.Module):
    """A module with ops of every kind that permits padded batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 8),
            torch.nn.LayerNorm(8),
            torch.nn.Softmax(-1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + x.amax((1, 2, 3), keepdim=True).flatten(1)


SIZED: dict[str, tuple[Any, tuple[int, ...], int]] = {
    # Each case by name: (module, shape of one row, the dimension that varies).
    "batch": (Batched, (2, 4, 4), 0),
    "sequence": (Causal, (2, 16), 1),
}


@pytest.mark.parametrize("name", SIZED)
def test_twenty_sizes_have_few_kernels(name: str) -> None:
    """Sizes are rounded up to powers of two if the padding does not change visible results. If
    torch derives a bound for a size from the code, one more kernel is compiled.
    """
    result, row, dim = SIZED[name]
    module = result().eval()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    before = set(PROGRAMS)
    kept = []
    with torch.no_grad():
        for size in range(2, 22):
            x = torch.randn((size, *row) if dim == 0 else (row[0], size, *row[1:]))
            got = compiled(x)
            assert got.is_contiguous()
            close(got, module(x))
            kept.append(got)
    assert 4 <= len(set(PROGRAMS) - before) <= 6


def test_sizes_that_may_not_be_padded() -> None:
    """Sizes are not padded if the padding would change the result, as in a mean over the batch."""
    cases: dict[str, Any] = {
        "mean": lambda x: x.mean(0),
        "product": lambda x: x.T @ x,
        "flipped": lambda x: x.flip(0) * 2.0,
        "number": lambda x: x * x.shape[0],
        "joined": lambda x: torch.cat([x, x], 0) + 1.0,
        "cut": lambda x: x[-2:] * 2.0,
    }
    for name, function in cases.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, dynamic=True)
        for size in (3, 5, 6):
            x = torch.randn(size, 4)
            torch.testing.assert_close(compiled(x), function(x), rtol=2e-5, atol=2e-5, msg=name)


def test_all_that_a_module_lacks_is_said_at_once() -> None:
    class Lacking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0] + torch.linalg.inv(x)

    with pytest.raises(ark.UnsupportedError, match=r"sort.*\n?.*inv"):
        ark.from_torch(Lacking(), (torch.eye(3),))


def test_numpy_sees_the_results_of_the_kernel() -> None:
    """Results of a kernel are in torch's memory, so NumPy can read them without a copy."""
    result = ark.from_torch(torch.nn.Softmax(-1), (torch.zeros(2, 4),))
    x = torch.randn(2, 4)
    first = result(x)
    second = result(x * 2)
    assert first.data_ptr() != second.data_ptr()
    np.testing.assert_allclose(first.numpy().sum(-1), 1.0, rtol=1e-6)
    close(second, torch.softmax(x * 2, -1))


def test_some_of_torchs_own_samples() -> None:
    """ark gives torch's results for one of torch's own samples (OpInfo) of each of a few operators;
    `nox -s torch_operators` runs the rest.
    """
    ready = [m for _, m in op_samples.outcomes(op_samples.SAMPLE, 1) if not isinstance(m, str)]
    assert len(ready) == len(op_samples.SAMPLE)
    assert op_samples.check(ready) == {}


def test_results_of_16_bits_and_undefined_ones_among_the_samples() -> None:
    """Of torch's operator samples in bfloat16, results are compared as bfloat16, and undefined
    values are not compared.
    """
    ready = [m for _, m in op_samples.outcomes(("bfloat16",), 2) if not isinstance(m, str)]
    assert len(ready) == 2
    assert op_samples.check(ready) == {}
    for sample in ready:
        sample.wanted = [w + 1 for w in sample.wanted]
    assert len(op_samples.check(ready)) == 2
    reasons = [m for _, m in op_samples.outcomes(("empty_like", "new_empty"), 2)]
    assert len(reasons) == 2 and all("undefined" in str(m) for m in reasons)


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_of_nothing_is_nothing(dim: int) -> None:
    """_safe_softmax gives 0 for rows of -inf only, and softmax gives NaN. NaN in the input stays
    NaN. Both are as in torch.
    """

    class Softmaxes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ops.aten._safe_softmax(x, dim), torch.softmax(x, dim)

    x = torch.randn(4, 4)
    x[1], x[:, 2], x[3, 3], x[0, 0] = -torch.inf, -torch.inf, torch.nan, -3.4e38
    got, want = ark.from_torch(Softmaxes(), (x,))(x), Softmaxes()(x)
    assert (want[0].sum(dim) == 0).any() and want[1].isnan().any()
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_sign_of_nan_is_kept() -> None:
    x = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 0.25, torch.inf, torch.nan])

    class Signs(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x.sign(), x.half().sgn() * 2.0, y.sign(), x.trunc()

    given = x, torch.arange(-3, 4)
    got, want = ark.from_torch(Signs(), given)(*given), Signs()(*given)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


class Counting(torch.nn.Module):
    """A module that writes to a buffer and to its input, and that takes a number as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, power: int = 1, **more: Any) -> dict[str, Any]:
        self.calls.add_(1.0)
        x.mul_(self.scale)
        return {"made": [x**power + self.calls, more["y"]], "calls": self.calls * 1.0}


def test_calls_of_any_form() -> None:
    """A module's kernel writes the module's buffers, accepts arguments by name and numbers, and
    returns the module's structure of results.
    """
    ours, theirs = Counting(), Counting()
    x, y = torch.randn(4, 3), torch.randn(2)
    result = ark.from_torch(Wrapped(ours), (x.clone(), 2, y))
    for _ in range(3):
        left, right = x.clone(), x.clone()
        torch.testing.assert_close(result(left, 2, y), Wrapped(theirs)(right, 2, y))
        torch.testing.assert_close(left, right)
        torch.testing.assert_close(ours.calls, theirs.calls)
    with pytest.raises(ark.InvalidUsageError, match="to be equal to 2, but got 3"):
        result(x, 3, y)


class Wrapped(torch.nn.Module):
    def __init__(self, inner: Counting) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, power: int, y: torch.Tensor) -> Any:
        return self.inner(x, power, y=y)


def test_module_that_is_moved_is_found() -> None:
    """After a module's parameters have moved to other addresses, its kernel uses the new ones. A
    strided parameter is copied in every call, so its changes are seen as well.
    """
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    module[1].weight = torch.nn.Parameter(torch.randn(3, 3).T)
    result = ark.from_torch(module, (x := torch.randn(2, 4),))
    for _ in range(3):
        for part in module:
            part.weight.data.add_(1.0)
        close(result(x), module(x).detach())
        for part in module:
            part.weight.data, part.bias.data = part.weight * 2.0, part.bias + 1.0
        close(result(x), module(x).detach())
    module.double()
    with pytest.raises(ark.InvalidUsageError, match=r"torch\.float64"):
        result(x)


def test_parameters_that_move_under_torch_compile_are_found() -> None:
    """Under torch.compile, parameters that move to other addresses are used there: Dynamo checks
    shapes and types, ark the addresses.
    """
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    compiled, x = torch.compile(module, backend=backend), torch.randn(2, 4)
    with torch.no_grad():
        for number in range(4):
            close(compiled(x), module(x))
            part = module[2 * (number % 2)]
            part.weight.data, part.bias.data = part.weight * 2.0, part.bias + 1.0
        close(compiled(x), module(x))
        module.double()
        close(compiled(x.double()), module(x.double()))  # other guards, so another graph
    assert sum(p._guarded for p in PROGRAMS) >= 1


class Parts(torch.nn.Module):
    """A module that splits a tensor, reads only some of the parts, and normalises their rows to
    length 1.
    """

    def forward(self, x: torch.Tensor) -> Any:
        _, second, _ = x.split((2, 5, 1), -1)
        last = x.split(3, -1)[2]
        one = torch.linalg.vector_norm(x, 1, (0, 1)) + torch.linalg.vector_norm(x, float("inf"))
        return second * 2.0, last, torch.nn.functional.normalize(x, dim=-1), one


def test_unread_parts_and_norms_of_vectors_equal_torch() -> None:
    x = torch.randn(3, 4, 8)
    for got, want in zip(ark.from_torch(Parts(), (x,))(x), Parts()(x), strict=True):
        close(got, want)


@pytest.mark.parametrize(
    "norm",
    [
        lambda: torch.nn.LayerNorm(24),
        lambda: torch.nn.GroupNorm(2, 4),
        lambda: torch.nn.RMSNorm(24),
        lambda: torch.nn.BatchNorm2d(4),
    ],
    ids=["layer", "group", "rms", "batch"],
)
def test_gradients_of_norms_under_autocast(norm: Callable[[], torch.nn.Module]) -> None:
    """Gradients of norms under autocast agree with torch within some steps of bfloat16. On a CPU
    the statistics of 16-bit norms are fp32, although torch's shape propagation says that they have
    16 bits.
    """
    torch.manual_seed(3)
    first = torch.nn.Conv2d(3, 4, 1, bias=False)  # a norm's input has no use for one
    plain = torch.nn.Sequential(first, norm(), torch.nn.Conv2d(4, 2, 1))
    compiled = copy.deepcopy(plain)
    x = torch.randn(2, 3, 6, 24)
    for _ in range(2):
        for module, call in ((plain, plain), (compiled, torch.compile(compiled, backend=backend))):
            module.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = call(x)
            assert y.dtype == torch.bfloat16
            y.float().square().sum().backward()
        for got, want in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert got.grad is not None and want.grad is not None
            span = float(want.grad.abs().max())
            assert float((got.grad - want.grad).abs().max()) < 0.03 * span + 0.05


def test_kernel_that_several_threads_call() -> None:
    """Each of several threads that call one kernel gets its own results, although a kernel has one
    launch and one address table at a time.
    """
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).requires_grad_(False)
    kernel = ark.from_torch(module, (torch.randn(4, 8),))
    given = [torch.randn(4, 8) for _ in range(6)]
    wrong: list[Any] = []

    def call(x: torch.Tensor) -> None:
        want = module(x)
        try:
            wrong.extend(i for i in range(30) if not torch.allclose(kernel(x), want, atol=1e-5))
        except ark.BaseError as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(x,)) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copying_a_kernel_is_refused_with_the_alternative() -> None:
    kernel = ark.from_torch(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ark.InvalidUsageError, match=r"call ark\.from_torch on that"):
            way(kernel)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.as_strided(x.t() + 1, (3,), (1,)) * 2,
        lambda x: torch.as_strided((x.t() + 1)[1:], (4,), (2,), 0) * 2,
        lambda x: torch.as_strided((x.t() + 1)[1:].t(), (4,), (2,)) * 2,
        lambda x: torch.as_strided_scatter(x.t() * 3, torch.ones(4), (4,), (2,)) + x.t(),
    ],
    ids=["whole", "part", "part transposed", "scatter"],
)
def test_strides_of_results_equal_torch(function: Any) -> None:
    """Results have the strides of eager torch: `x.t() + 1` is not contiguous."""
    x = torch.randn(3, 5)
    close(torch.compile(function, backend=backend)(x), function(x))


class ConvolutionAndLayer(torch.nn.Module):
    """A convolution, followed by a layer and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.conv(x))
        return y @ y.transpose(-1, -2)


def test_precisions_of_fp32_are_those_that_torch_is_set_to() -> None:
    """fp32 is computed as tf32 where torch's settings say so: in convolutions by default, in
    products if enabled. For 16-bit types the settings have no effect.
    """

    def kinds(dtype: torch.dtype) -> list[bool]:
        """Returns, for the convolution, the layer and the matmul, True if computed as tf32."""
        module, x = ConvolutionAndLayer().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
        exported = export(module, (x,), False)
        actual = graph.build(exported.graph_module, [*exported.state_dict.values(), x])
        nodes = [n for n in actual.model.graph.nodes if n.type == "matmul"]
        return [bool(n.attrs.get("tf32")) for n in nodes]

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert kinds(torch.float32) == [True, False, False]
        assert kinds(torch.bfloat16) == [False, False, False]
        torch.set_float32_matmul_precision("high")
        assert kinds(torch.float32) == [True, True, True]
        # If torch's own test helpers were imported, these settings can be changed only within this
        # context manager.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            assert kinds(torch.float32) == [False, True, True]
    finally:
        torch.set_float32_matmul_precision(before)
