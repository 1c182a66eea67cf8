"""The kernel variant and the tasks that the planner chooses for whole networks on a machine whose
matrix units are used by warpgroups. No GPU is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.backend import registry  # noqa: E402
from ark.interop.torch.graph import build  # noqa: E402
from ark.plan.types import Plan  # noqa: E402
from tests.cases.torch_plans import planned  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def on_the_cpu() -> Generator[None, None, None]:
    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        yield


def plan_of(module: Any, x: Any) -> Plan:
    with torch.no_grad():
        graph = make_fx(module.eval())(x)
    result = build(graph, [x])
    return planned(result.model, [*result.inputs, *result.outputs], registry.machine("h200"))


class Block(nn.Module):
    """A ConvNeXt block: a depthwise convolution, then products over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        result = self.spread(x).permute(0, 2, 3, 1)
        return x + self.outer(nn.functional.gelu(self.inner(result))).permute(0, 3, 1, 2)


def test_channels_by_themselves_read_their_windows_in_place_beside_warpgroups() -> None:
    """In the kernel variant for warpgroups, a depthwise convolution reads its windows in the image.
    A matrix of all windows would have 49 times as many elements.
    """
    for width, size in ((128, 28), (96, 56)):
        plan = plan_of(Block(width).bfloat16(), torch.randn(2, width, size, size).bfloat16())
        kinds = Counter(op.kind for op in plan.ops)
        assert plan.variant == "matrix"
        assert kinds["convolution"] == 1 and kinds["matmul"] == 2
        assert not kinds["remap"]


def test_one_transposed_layer_does_not_prevent_warpgroups() -> None:
    """A network is planned for warpgroups although one layer needs a matrix of windows in memory: a
    convolution of three channels with dilation. Other convolutions, such as a ResNet's first one,
    read the image.
    """
    for dilation in (2, 1):
        first = nn.Conv2d(3, 64, 7, 2, 3 * dilation, dilation, bias=False)
        layers: list[Any] = [first, nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.ReLU()]
        plan = plan_of(nn.Sequential(*layers), torch.randn(16, 3, 112, 112))
        windows = [bool(op.params.get("windows")) for op in plan.ops if op.kind == "matmul"]
        assert plan.variant == "matrix"
        assert windows == [dilation == 1, True, True, True]


def test_layer_that_is_most_of_a_network_decides() -> None:
    """A single layer whose matrix of windows takes longer to build than warpgroups save is planned
    for the variant `block`.
    """
    layer = nn.Conv2d(3, 64, 7, 2, 6, dilation=2, bias=False)
    assert plan_of(layer, torch.randn(16, 3, 112, 112)).variant == "block"


def test_mean_over_images_keeps_channels_last(capfd: pytest.CaptureFixture[str]) -> None:
    """The mean of channels-last images does not split the graph, although torch views the mean with
    other strides: the mean has these strides already.
    """
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, backend="ark")(x), net(x))
    assert "stay in torch" not in capfd.readouterr().err
