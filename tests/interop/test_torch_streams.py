"""ark's kernels between torch's own kernels on a GPU: order on streams, memory that changes,
captured graphs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from ark.interop.torch import backend  # noqa: E402
from ark.interop.torch.program import PROGRAMS  # noqa: E402
from tests.interop import graphs  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch has no GPU here", allow_module_level=True)


@pytest.fixture(autouse=True)
def on_the_gpu() -> None:
    ark.init(backend="cuda")
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def network() -> Any:
    module, _ = graphs.networks()["mlp"]
    return module.eval().cuda()


def test_kernel_is_ordered_with_the_work_on_its_stream(network: Any) -> None:
    """A kernel of ark runs after a long computation of torch that writes its input on the same
    stream, and before one that reads its result.
    """
    compiled = torch.compile(network, backend=backend)
    big = torch.randn(4096, 4096, device="cuda") / 64
    x = torch.randn(8, 16, device="cuda")
    with torch.no_grad():
        compiled(x)
        for _ in range(3):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                slow = big
                for _ in range(20):
                    slow = slow @ big
                given = x + slow[:8, :16] * 0.0 + 1.0
                result = compiled(given) * 2.0
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(result, network(x + 1.0) * 2.0, rtol=2e-4, atol=2e-4)


def test_calls_that_are_not_waited_for(network: Any) -> None:
    """Many calls without waiting, each with another result address and more of them than there are
    tables, give the right results.
    """
    compiled = torch.compile(network, backend=backend)
    inputs = [torch.randn(8, 16, device="cuda") for _ in range(40)]
    with torch.no_grad():
        kept = [compiled(x) for _ in range(3) for x in inputs]
        for got, x in zip(kept, inputs * 3, strict=True):
            torch.testing.assert_close(got, network(x), rtol=2e-4, atol=2e-4)


def test_captured_in_a_graph(network: Any) -> None:
    """Two calls and torch's own work, captured in one graph, are replayed with other inputs, with
    ordinary calls in between.
    """
    compiled = torch.compile(network, backend=backend)
    x = torch.randn(8, 16, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compiled(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = compiled(x * 2.0)
            second = compiled(x + 1.0) + first
        for _ in range(5):
            x.copy_(torch.randn(8, 16, device="cuda"))
            graph.replay()
            want = network(x * 2.0)
            torch.testing.assert_close(first, want, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(second, network(x + 1.0) + want, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(compiled(x), network(x), rtol=2e-4, atol=2e-4)
    assert sum(len(p._captured) for p in PROGRAMS) == 2


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "bindings"])
def test_streams_in_turn_and_other_threads(
    network: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on two streams in turn, then from a thread whose driver has no context yet. In each
    call the parameters are at another address.
    """
    from ark_cuda import again

    if not compiled:
        monkeypatch.setattr(again, "_module", lambda: None)
    call = torch.compile(network, backend=backend)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    first = next(network.parameters())
    x, threads = torch.randn(8, 16, device="cuda"), ThreadPoolExecutor(1)

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(call(x), network(x), rtol=2e-4, atol=2e-4)

    def on(stream: Any) -> None:
        with torch.cuda.stream(stream):
            check()
            check()
        torch.cuda.current_stream().wait_stream(stream)

    for number in range(4):
        on(streams[number % 2])
        first.data = first.data * 1.5
        torch.cuda.synchronize()
        threads.submit(check).result()
    again_of = [p._streamed._again for p in PROGRAMS if p._streamed is not None]
    assert any((a._quick is not None) == compiled for a in again_of)
