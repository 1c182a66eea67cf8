"""Training steps of networks of convolutions with channels last: which images are transposed, and
that a step equals torch's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.lower.rewrite.channels_last import channels_last
from ark.lower.rewrite.context import Context
from tests.windows import in_place

torch = pytest.importorskip("torch")
H100 = registry.machine("h100")
MAX_UPDATE_ERROR = 1e-4  # of an update, relative to its norm; all is in fp32


def test_training_steps_transpose_images_only_for_gradients_of_weights() -> None:
    """Between two convolutions, forward and backward, images keep rows of channels. The gradient of
    each convolution's weights reads both of its images with pixels last.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.relu(ark.tensor((4, 64, 16, 16), ark.bf16))
        first, second = (ark.tensor((64, 64, 3, 3), ark.bf16) for _ in range(2))
        y = ark.conv(ark.relu(ark.conv(x, first, padding=1)), second, padding=1)
        ark.grad(y, [first, second], ark.tensor(y.shape(), ark.bf16))
    nodes = channels_last(model.graph, Context(H100)).nodes
    images = [n for n in nodes if n.type == "transpose" and n.outputs[0].elements == 4 * 64 * 256]
    moved = [[t.shape for t in (*n.inputs, *n.outputs)] for n in images]
    pixels = [(1024, 64), (64, 1024)]
    assert moved.count(pixels) == 4
    assert len(moved) == 6  # the first image and the last gradient come with channels first


def network() -> Any:
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, before: int, wide: int, stride: int, dilation: int = 1) -> None:
            super().__init__()
            self.first = nn.Conv2d(before, wide, 3, stride, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])
            self.second = nn.Conv2d(wide, wide, 3, 1, dilation, dilation, bias=False)
            self.short = nn.Conv2d(before, wide, 1, stride, bias=False) if stride > 1 else None

        def forward(self, x: Any) -> Any:
            y = torch.relu(self.norms[0](self.first(x)))
            y = self.norms[1](self.second(y))
            return torch.relu(y + (x if self.short is None else self.short(x)))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stem = [
                nn.Conv2d(3, 16, 5, 2, 2, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
            ]
            blocks = [Block(16, 16, 1, 2), Block(16, 32, 2), Block(32, 32, 1)]
            ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)]
            self.layers = nn.Sequential(*stem, *blocks, *ends)

        def forward(self, x: Any, classes: Any) -> Any:
            return nn.functional.cross_entropy(self.layers(x), classes)

    return Whole().train()


def test_training_step_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, dilation, rows that are not whole boxes, batch norms, a max pool and residuals."""
    torch.manual_seed(0)
    module_of, given = network(), torch.randn(3, 3, 42, 38)
    classes = torch.randint(8, (3,))
    wanted = copy.deepcopy(module_of).double()
    torch.optim.SGD(wanted.parameters(), 0.1).zero_grad()
    loss = wanted(given.double(), classes)
    loss.backward()
    before = {name: p.detach().clone() for name, p in module_of.named_parameters()}
    in_place(monkeypatch)
    ark.init(backend="cpu")
    step = ark.training_model(module_of, None, torch.optim.SGD(module_of.parameters(), 0.1))
    got = float(step(given, classes))
    step.close()
    assert abs(got - float(loss)) < 1e-5 * abs(float(loss))
    for name, parameter in wanted.named_parameters():
        change = (module_of.get_parameter(name).detach() - before[name]) / -0.1
        apart = (change - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3)
        assert float(apart) < MAX_UPDATE_ERROR, name
    for name, buffer in wanted.named_buffers():
        assert torch.allclose(module_of.get_buffer(name).double(), buffer.double(), 1e-4, 1e-5)
