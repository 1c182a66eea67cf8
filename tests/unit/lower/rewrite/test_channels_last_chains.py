"""Chains of convolutions: an image is transposed once, elementwise ops work on rows of channels,
and results that no op reads in the original order are not transposed back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.rewrite.channels_last import channels_last
from ark.lower.rewrite.context import Context
from tests.windows import in_place

H100 = registry.machine("h100")
SHAPE, WEIGHTS = (4, 64, 32, 32), (64, 64, 3, 3)
NO_OTHER_READERS: frozenset[int] = frozenset()


def weights(*shape: int) -> Any:
    return ark.tensor(shape or WEIGHTS, ark.bf16)


def bias() -> Any:
    return ark.exp(ark.tensor((64,), ark.bf16))


def types(model: ark.Model, kept: frozenset[int] = NO_OTHER_READERS) -> list[str]:
    """Returns the nodes' types after the pass. Transposes of weights (64 channels) are named
    `weights`.
    """
    return [
        "weights" if n.type == "transpose" and n.outputs[0].shape[0] == WEIGHTS[0] else n.type
        for n in channels_last(model.graph, Context(H100, kept=kept)).nodes
    ]


def test_second_convolution_reads_rows() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1)
        ark.conv(ark.relu(x), weights(), padding=1)
    convolution = ["remap", "weights", "matmul"]
    assert types(model) == ["transpose", *convolution, "relu", *convolution]


def test_bias_per_channel_and_a_residual_keep_channels_last() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor(SHAPE, ark.bf16)
        y = ark.conv(x, weights(), bias(), padding=1)
        z = ark.relu(ark.add(y, x))
        ark.conv(z, weights(), padding=1)
    remaining = [t for t in types(model) if t not in ("exp", "remap", "weights")]
    assert remaining == ["transpose", "matmul", "add", "add", "relu", "matmul"]


def test_image_is_turned_once_for_two() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.relu(ark.tensor(SHAPE, ark.bf16))
        ark.conv(x, weights(), padding=1)
        ark.conv(x, weights(), stride=2, padding=1)
    assert types(model).count("transpose") == 1


def test_image_that_was_written_again_is_turned_again() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.relu(ark.tensor(SHAPE, ark.bf16))
        ark.conv(x, weights(), padding=1)
        x = ark.relu(x, x)
        ark.conv(x, weights(), padding=1)
    assert types(model).count("transpose") == 2


def test_channels_read_in_the_original_order_are_transposed_back() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.relu(ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1))
        ark.conv(x, weights(), padding=1)
        ark.reduce_sum(x, axis=3)
    assert types(model)[4:6] == ["relu", "transpose"]


def test_channels_with_another_reader_are_transposed_back() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1)
        ark.conv(x, weights(), padding=1)
    assert types(model).count("transpose") == 1
    assert types(model, frozenset([x.ir.buffer.id])).count("transpose") == 2


def test_windows_of_one_place_between_two_convolutions_are_rows() -> None:
    """Convolutions of 1 x 1 windows become products of rows; without a transposed neighbour they
    are unchanged.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(SHAPE, ark.bf16), weights(64, 64, 1, 1))
        x = ark.conv(ark.relu(x), weights(), padding=1)
        ark.conv(ark.relu(x), weights(64, 64, 1, 1))
    remaining = [t for t in types(model) if t not in ("remap", "weights")]
    assert remaining == ["transpose", "matmul", "relu", "matmul", "relu", "matmul"]
    alone = ark.Model(0, 1)
    with ark.use_model(alone):
        ark.conv(ark.tensor(SHAPE, ark.bf16), weights(64, 64, 1, 1))
    assert types(alone) == ["matmul"]


def test_products_of_images_without_aligned_rows_read_rows_of_channels() -> None:
    """A row of 7 x 7 pixels in 16 bits is not a multiple of 16 bytes; a single pixel is no row."""
    for size, expected in ((7, ["transpose", "matmul", "relu", "matmul", "transpose"]), (1, None)):
        model = ark.Model(0, 1)
        with ark.use_model(model):
            x = ark.conv(ark.tensor((4, 256, size, size), ark.bf16), weights(256, 256, 1, 1))
            ark.conv(ark.relu(x), weights(256, 256, 1, 1))
        assert types(model) == (expected or ["matmul", "relu", "matmul"])


def test_pools_and_means_of_channels_keep_channels_last() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.relu(ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1))
        x = ark.conv(ark.max_pool(x, 3, 2, 1), weights(), padding=1)
        y = ark.avg_pool(ark.conv(ark.relu(x), weights(64, 64, 1, 1)), 2)
        ark.reshape(ark.global_avg_pool(y), (4, 64))
    rows = [t for t in types(model) if t not in ("remap", "weights")]
    assert rows == [
        *["transpose", "matmul", "relu", "pool", "matmul", "relu", "matmul", "pool"],
        "reduce_mean",
    ]


def test_parameters_per_channel_keep_channels_last_unless_read_by_name() -> None:
    def network(*shape: int) -> ark.Model:
        model = ark.Model(0, 1)
        with ark.use_model(model):
            x = ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1)
            shift = ark.parameter(shape, ark.bf16, name="shift")
            x = ark.add(x, shift if len(shape) > 1 else ark.reshape(shift, (1, 64, 1, 1)))
            ark.conv(ark.relu(x), weights(), padding=1)
        return model

    assert types(network(64)).count("transpose") == 1
    assert types(network(1, 64, 1, 1)).count("transpose") == 3


def test_shape_of_a_mean_that_is_read_by_name_stays() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(SHAPE, ark.bf16), weights(), padding=1)
        named = ark.tensor((4, 64, 1), ark.bf16, name="means")
        ark.reduce_mean(ark.reshape(x, (4, 64, 1024)), 2, output=named)
    (mean,) = (
        n for n in channels_last(model.graph, Context(H100)).nodes if n.type == "reduce_mean"
    )
    assert mean.outputs[0].shape == (4, 64, 1)


def test_network_of_residual_blocks_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, wide: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(64, wide, 3, stride, 1, bias=False)
            self.norm = nn.BatchNorm2d(wide)
            self.second = nn.Conv2d(wide, wide, 3, padding=1)
            self.short = nn.Conv2d(64, wide, 1, stride, bias=False) if stride > 1 else None
            self.last = nn.Conv2d(wide, wide, 1)

        def forward(self, x: Any) -> Any:
            y = self.second(torch.relu(self.norm(self.first(x))))
            return self.last(torch.relu(y + (x if self.short is None else self.short(x))))

    stem = [nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    pools = [nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d(1)]
    network = nn.Sequential(*stem, Block(64, 1), Block(128, 2), *pools).eval()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-0.3, 0.3)
            part.running_var.uniform_(0.5, 2.0)
    network = network.bfloat16()
    given = torch.randn(2, 3, 24, 28).bfloat16()
    in_place(monkeypatch)
    ark.init(backend="cpu")
    with torch.no_grad():
        got = ark.from_torch(network, (given,))(given).float().numpy()
        want = network.float()(given.float()).numpy()
    assert np.linalg.norm(got - want) < 8e-3 * np.linalg.norm(want)


def test_concatenated_channels_are_slices_of_one_buffer() -> None:
    """Each layer reads the channels of all earlier ones. Products write slices of rows, and only
    the first image is transposed.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        images = [ark.tensor(SHAPE, ark.bf16)]
        for number in range(3):
            joined = ark.relu(ark.concat(images, 1))
            y = ark.conv(joined, weights(64, 64 * (number + 1), 1, 1))
            images.append(ark.conv(ark.relu(y), weights(), padding=1))
        ark.conv(ark.relu(ark.concat(images, 1)), weights(64, 256, 1, 1))
        ark.conv(ark.relu(ark.concat(images, 1)), weights(64, 256, 3, 3), padding=1)
    layer = ["relu", "matmul", "relu", "matmul"]
    nodes = [t for t in types(model) if t not in ("remap", "weights")]
    assert nodes == ["transpose", *layer * 3, "relu", "matmul", "relu", "matmul"]
    turned = channels_last(model.graph, Context(H100)).nodes
    slices = [n.outputs[0] for n in turned if n.outputs[0].extents[-1] == 256]
    assert [t.offsets[-1] for t in slices if t.shape[-1] < 256] == [0, 64, 128, 192]
    assert len({t.buffer.id for t in slices if t.shape[-1] < 256}) == 1


def test_network_of_concatenating_blocks_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn

    class Layer(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(64)
            self.narrow = nn.Conv2d(channels, 64, 1, bias=False)
            self.last = nn.Conv2d(64, 32, 3, padding=1, bias=False)

        def forward(self, images: Any) -> Any:
            x = self.narrow(torch.relu(self.norm(torch.cat(images, 1))))
            return self.last(torch.relu(self.second_norm(x)))

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(channels + 32 * i) for i in range(3)])

        def forward(self, x: Any) -> Any:
            images = [x]
            for layer in self.layers:
                images.append(layer(images))
            return torch.cat(images, 1)

    stem = [nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    between = [nn.BatchNorm2d(160), nn.ReLU(), nn.Conv2d(160, 64, 1), nn.AvgPool2d(2, 2)]
    ends = [nn.BatchNorm2d(160), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    network = nn.Sequential(*stem, Block(64), *between, Block(64), *ends).eval()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-0.3, 0.3)
            part.running_var.uniform_(0.5, 2.0)
    network = network.bfloat16()
    given = torch.randn(2, 3, 24, 28).bfloat16()
    in_place(monkeypatch)
    ark.init(backend="cpu")
    with torch.no_grad():
        got = ark.from_torch(network, (given,))(given).float().numpy()
        want = network.float()(given.float()).numpy()
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
