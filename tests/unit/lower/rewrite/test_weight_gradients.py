"""Training steps of networks of convolutions with channels last: gradients of weights sum over the
pixels of images, and a step equals torch's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan
from ark.lower.rewrite import channels_last as module
from ark.lower.rewrite import weight_gradients
from ark.lower.rewrite.channels_last import channels_last
from ark.lower.rewrite.context import Context
from ark.plan.verify import verify
from tests.windows import in_place

torch = pytest.importorskip("torch")
H100 = registry.machine("h100")
MAX_UPDATE_ERROR = 1e-4  # of an update, relative to its norm; all is in fp32


def pixel_products(x: list[int], w: list[int], **how: Any) -> list[Any]:
    """The shapes of the operands of products over pixels in the gradient of a convolution."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        image, weight = ark.tensor(x, ark.bf16), ark.tensor(w, ark.bf16)
        y = ark.conv(image, weight, **how)
        ark.grad(ark.reduce_sum(ark.reshape(y * y, [-1]), 0), [image, weight])
    nodes = channels_last(model.graph, Context(H100)).nodes
    return [
        [t.shape for t in n.inputs]
        for n in nodes
        if n.type == "matmul" and n.attrs.get("pixels") is not None
    ]


def test_weights_of_a_convolution_are_summed_over_pixels() -> None:
    shapes = pixel_products([4, 64, 30, 28], [128, 64, 3, 3], padding=1)
    assert shapes == [[(128, 4, 30 * 32), (3 * 64, 4, 30 * 32)]]


def test_rows_of_pixels_end_where_box_copies_can_begin() -> None:
    """A window's rows are 14 rows of 16 pixels apart, of which two are zeros."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        image, weight = ark.tensor((4, 64, 14, 14), ark.bf16), ark.tensor((64, 64, 3, 3), ark.bf16)
        y = ark.conv(image, weight, padding=3, dilation=3)
        ark.grad(ark.reduce_sum(ark.reshape(y * y, [-1]), 0), weight)
    nodes = channels_last(model.graph, Context(H100)).nodes
    (product,) = (n for n in nodes if n.attrs.get("pixels") is not None)
    assert [t.shape for t in product.inputs] == [(64, 4, 14 * 16), (3 * 64, 4, 14 * 16)]
    windows = {"rows": 3, "stride": 1, "dilation": 3, "before": 3}
    assert product.attrs["pixels"] == {**windows, "pitch": 16, "chunk": 64}


def test_rows_of_an_image_are_stored_by_their_remainder_by_the_stride() -> None:
    shapes = pixel_products([4, 64, 31, 32], [64, 64, 3, 3], padding=1, stride=2)
    assert shapes == [[(64, 4, 16 * 16), (2 * 3 * 64, 4, 16 * 16)]]


@pytest.mark.parametrize(
    ("x", "w", "how"),
    [
        ([4, 64, 32, 32], [64, 64, 1, 1], {"stride": 2}),
        ([4, 48, 32, 32], [64, 48, 3, 3], {"padding": 1}),
        ([4, 64, 32, 32], [64, 16, 3, 3], {"padding": 1, "groups": 4}),
        ([4, 64, 32, 32], [64, 64, 1, 1], {}),
        ([16, 16, 64, 64], [64, 16, 3, 1], {"padding": [1, 0]}),
    ],
    ids=["stride", "channels", "groups", "pixels", "tiles"],
)
def test_other_convolutions_keep_their_form(x: list[int], w: list[int], how: Any) -> None:
    """Among them is one of few channels of which no tile has whole boxes."""
    assert not pixel_products(x, w, **how)


def test_gradient_of_weights_without_whole_boxes_in_a_tile_is_planned() -> None:
    with ark.use_model(ark.Model()) as model:
        image = ark.tensor([16, 16, 64, 64], ark.bf16)
        weight = ark.tensor([64, 16, 3, 1], ark.bf16)
        y = ark.conv(image, weight, padding=[1, 0])
        ark.grad(ark.reduce_sum(ark.reshape(y * y, [-1]), 0), weight)
    verify([plan(model.graph, H100)])


def test_parts_of_few_tiles_of_weights_are_added_by_one_op() -> None:
    """Three tiles of a result could have more parts than one expression can add."""
    with ark.use_model(ark.Model()) as model:
        image, weight = ark.tensor([16, 64, 56, 56]), ark.tensor([64, 64, 1, 3])
        y = ark.conv(image, weight, padding=[0, 1], tf32=True)
        ark.grad(ark.reduce_sum(ark.reshape(y * y, [-1]), 0), weight)
    planned = plan(model.graph, H100)
    verify([planned])
    assert any(op.params.get("pixels") for op in planned.ops)


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
    monkeypatch.setattr(weight_gradients, "window_cuts", lambda *_: ["any number of columns"])
    counts: list[int] = []

    def counted(*given: Any) -> Any:
        gradients = weight_gradients.weight_gradients(*given)
        counts.append(len(gradients))
        return gradients

    monkeypatch.setattr(module, "weight_gradients", counted)
    ark.init(backend="cpu")
    step = ark.training_model(module_of, None, torch.optim.SGD(module_of.parameters(), 0.1))
    got = float(step(given, classes))
    step.close()
    assert max(counts) == 6
    assert abs(got - float(loss)) < 1e-5 * abs(float(loss))
    for name, parameter in wanted.named_parameters():
        change = (module_of.get_parameter(name).detach() - before[name]) / -0.1
        apart = (change - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3)
        assert float(apart) < MAX_UPDATE_ERROR, name
    for name, buffer in wanted.named_buffers():
        assert torch.allclose(module_of.get_buffer(name).double(), buffer.double(), 1e-4, 1e-5)
