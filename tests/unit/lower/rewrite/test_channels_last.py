"""Convolutions that are rewritten to have their channels last: which ones, and the
resulting ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify

X, W = (2, 64, 28, 28), (64, 64, 3, 3)
TURNED = ["transpose", "remap", "transpose", "matmul"]
BOXED = ["transpose", "transpose", "matmul"]


def planned(
    machine: str,
    x: Sequence[int] = X,
    w: Sequence[int] = W,
    dtype: ark.DataType = ark.bf16,
    options: Mapping[str, Any] | None = None,
    **conv: Any,
) -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        ark.conv(ark.tensor(x, dtype), ark.tensor(w, dtype), padding=1, **conv)
    task_plan = make_plan(model.graph, registry.machine(machine), options)
    verify([task_plan])
    return task_plan


def kinds(plan: Plan) -> list[str]:
    return [op.kind for op in plan.ops]


@pytest.mark.parametrize("machine", ["h100", "mi300x"])
def test_weights_multiply_rows_of_windows(machine: str) -> None:
    task_plan = planned(machine)
    assert kinds(task_plan) == TURNED
    product = task_plan.ops[-1]
    shapes = [task_plan.tensors[t].shape for t in product.operands]
    assert shapes == [(1, 1, 64, 576), (2, 1, 784, 576), (2, 1, 64, 784)]
    assert product.params["transpose_b"] is True


def test_images_of_any_size_are_loaded_by_boxes() -> None:
    """Images of any size are rewritten to channels last and loaded by box copies. A channel of a 14
    x 14 image in 16 bits is 392 bytes, not a multiple of 16, so the result is computed with
    channels last and then transposed back.
    """
    window_plan = planned("h100", (2, 128, 14, 14), (128, 128, 3, 3))
    assert kinds(window_plan) == [*BOXED, "transpose"]
    assert window_plan.variant_of(0) == "matrix"
    product = window_plan.ops[-2]
    shapes = [window_plan.tensors[t].shape for t in product.operands]
    assert shapes == [(2, 14, 14, 128), (128, 1152), (392, 128)]
    assert product.params["windows"] == {
        "side": 0,
        "size": [3, 3],
        "stride": [1, 1],
        "dilation": [1, 1],
        "before": [1, 1],
        "sizes": [14, 14],
    }


def test_windows_are_boxes_of_the_input() -> None:
    """The windows of a convolution are loaded as boxes of its input. A channel of a 28 x 28 result
    in 16 bits is a multiple of 16 bytes, so the result is written directly in the original order.
    """
    task_plan = planned("h100", (4, 64, 56, 56), (64, 64, 3, 3), stride=2)
    assert kinds(task_plan) == BOXED
    product = task_plan.ops[-1]
    shapes = [task_plan.tensors[t].shape for t in product.operands]
    assert shapes == [(1, 1, 64, 576), (4, 56, 56, 64), (4, 1, 64, 784)]
    assert product.params["windows"]["side"] == 1
    assert product.params["windows"]["stride"] == [2, 2]


@pytest.mark.parametrize(
    ("why", "given"),
    [
        ("channels fill no line", {"x": (4, 72, 56, 56), "w": (64, 72, 3, 3)}),
        ("taps lie far apart", {"x": (4, 64, 300), "w": (512, 64, 3), "dilation": 128}),
        ("steps are long", {"x": (4, 64, 2000), "w": (512, 64, 9), "stride": 9}),
        ("another machine", {"machine": "mi300x", "x": (4, 64, 56, 56)}),
    ],
)
def test_windows_that_are_no_boxes_are_laid_out(why: str, given: dict[str, Any]) -> None:
    window_plan = planned(given.pop("machine", "h100"), **given)
    assert sorted(kinds(window_plan)[:3]) == sorted(TURNED[:3]), why


def test_windows_are_copied_by_packs() -> None:
    task_plan = planned("h100")
    machine = machine_of(task_plan, 0)
    source = write(task_plan, machine, registry.get("cuda").dialect(machine.arch)).source.text
    body = source[source.index("task_1_remap") :]
    assert "ArkHeld<ark_bf16, 8>" in body[: body.index("ARK_BODY")]


@pytest.mark.parametrize(
    ("why", "given"),
    [
        ("one thread has no matrix unit", {"machine": "cpu-2"}),
        ("fp32 is not for matrix units", {"dtype": ark.fp32}),
        ("small", {"x": (1, 64, 8, 8)}),
        ("groups", {"w": (64, 32, 3, 3), "groups": 2}),
        ("channels that fill no pack", {"x": (2, 60, 28, 28), "w": (64, 60, 3, 3)}),
        ("rows of weights that fill none", {"w": (60, 64, 3, 3)}),
        ("ops as they were asked for", {"options": {"fuse": False}}),
    ],
)
def test_other_convolutions_keep_channels_first(why: str, given: dict[str, Any]) -> None:
    assert "transpose" not in kinds(planned(given.pop("machine", "h100"), **given)), why


def test_matrix_with_another_reader_is_kept() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        ark.conv(ark.tensor(X, ark.bf16), ark.tensor(W, ark.bf16), padding=1)
        (windows,) = [n.outputs[0] for n in model.graph.nodes if n.type == "remap"]
        ark.relu(ark.Tensor(windows, model))
    window_plan = make_plan(model.graph, registry.machine("h100"))
    assert "transpose" not in kinds(window_plan)


def block() -> ark.Model:
    """A depthwise convolution after a convolution of single pixels, and a factor for each channel
    of each image.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(X, ark.bf16), ark.tensor((64, 64, 1, 1), ark.bf16))
        y = ark.conv(x, ark.tensor((64, 1, 3, 3), ark.bf16), padding=1, groups=64)
        y = ark.relu(y)
        means = ark.reduce_mean(ark.reshape(y, [2, 64, y.shape()[2] * y.shape()[3]]), 2)
        factor = ark.sigmoid(ark.reshape(means, [2, 64, 1, 1]))
        ark.conv(ark.mul(y, factor), ark.tensor((64, 64, 1, 1), ark.bf16), name="out")
    return model


def test_depthwise_convolutions_read_rows_of_channels() -> None:
    """Depthwise convolutions next to other convolutions are rewritten to channels last. Only the
    image, the depthwise weights and the result are transposed.
    """
    task_plan = make_plan(block().graph, registry.machine("h100"))
    verify([task_plan])
    (node,) = (op for op in task_plan.ops if op.kind == "depthwise")
    shapes = [task_plan.tensors[t].shape for t in node.operands]
    assert shapes == [(9, 64), (2, 28, 28, 64), (2, 28, 28, 64)]
    assert node.params["expr"] is not None  # the activation
    assert kinds(task_plan).count("transpose") <= 3


def groups(each: int, rows: int) -> ark.Model:
    """A convolution in groups after a convolution of single pixels."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        many = max(8, 64 // each)
        image, pixel = ark.tensor(X, ark.bf16), (many * each, 64, 1, 1)
        x = ark.conv(image, ark.tensor(pixel, ark.bf16))
        weight = ark.tensor((many * rows, each, 3, 3), ark.bf16)
        x = ark.relu(ark.conv(x, weight, padding=1, groups=many))
        x = ark.conv(x, ark.tensor((64, many * rows, 1, 1), ark.bf16))
        ark.add(x, image, name="out")
    return model


@pytest.mark.parametrize(("each", "rows"), [(4, 4), (8, 8), (8, 16), (24, 24), (64, 64)])
def test_convolutions_in_groups_of_few_channels_read_rows_of_channels(each: int, rows: int) -> None:
    task_plan = make_plan(groups(each, rows).graph, registry.machine("h100"))
    verify([task_plan])
    (node,) = (op for op in task_plan.ops if op.kind == "grouped_convolution")
    shapes = [task_plan.tensors[t].shape for t in node.operands]
    many = max(8, 64 // each)
    image, result = (2, 28, 28, many * each), (2, 28, 28, many * rows)
    assert shapes[:3] == [(9 * each, many * rows), image, result]
    assert node.params["expr"] is not None  # the activation
    assert kinds(task_plan).count("transpose") <= 3  # the image, weights, and the result


def test_groups_beside_products_of_few_columns_read_rows_of_channels() -> None:
    """Products of 48 columns are computed by warpgroups with channels last, too, so that the kernel
    variant for these is chosen, and with it the convolution in groups.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        pixel = (48, 48, 1, 1)
        x = ark.conv(ark.tensor((16, 48, 56, 56), ark.bf16), ark.tensor(pixel, ark.bf16))
        x = ark.conv(x, ark.tensor((48, 8, 3, 3), ark.bf16), padding=1, groups=6)
        ark.conv(x, ark.tensor(pixel, ark.bf16), name="out")
    task_plan = make_plan(model.graph, registry.machine("h100"))
    verify([task_plan])
    assert kinds(task_plan).count("grouped_convolution") == 1
    assert machine_of(task_plan).variant.name == "matrix"


def test_small_products_together_are_worth_channels_last() -> None:
    """No single product has enough multiplications for the variant with warpgroups to be the faster
    one, but all of them together have.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((16, 80, 14, 14), ark.bf16)
        for _ in range(2):
            y = ark.conv(x, ark.tensor((184, 80, 1, 1), ark.bf16))
            y = ark.relu(ark.conv(y, ark.tensor((184, 1, 3, 3), ark.bf16), padding=1, groups=184))
            x = ark.add(ark.conv(y, ark.tensor((80, 184, 1, 1), ark.bf16)), x)
        ark.copy(x, name="out")
    task_plan = make_plan(model.graph, registry.machine("h200"))
    verify([task_plan])
    assert machine_of(task_plan).variant.name == "matrix"
    assert kinds(task_plan).count("depthwise") == 2 and "convolution" not in kinds(task_plan)


def test_first_convolution_of_few_outputs_reads_the_image_in_place() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((16, 3, 128, 128), ark.bf16)
        x = ark.relu(ark.conv(x, ark.tensor((16, 3, 3, 3), ark.bf16), stride=2, padding=1))
        x = ark.conv(x, ark.tensor((16, 1, 3, 3), ark.bf16), padding=1, groups=16)
        ark.conv(x, ark.tensor((64, 16, 1, 1), ark.bf16), name="out")
    task_plan = make_plan(model.graph, registry.machine("h200"), {"variant": "matrix"})
    verify([task_plan])
    (node,) = (op for op in task_plan.ops if op.kind == "grouped_convolution")
    shapes = [task_plan.tensors[t].shape for t in node.operands]
    assert shapes == [(27, 16), (16, 3, 128, 128), (16, 64, 64, 16)]
    assert node.params["channels_first"] and node.params["expr"] is not None
    assert "remap" not in kinds(task_plan)


@pytest.mark.parametrize("width", [6, 128])
def test_convolutions_in_other_groups_keep_channels_first(width: int) -> None:
    """Convolutions in groups stay products if a group's channels are no multiple of a vector, or if
    groups are wide.
    """
    task_plan = make_plan(groups(width, width).graph, registry.machine("h100"))
    assert "grouped_convolution" not in kinds(task_plan)
    others = kinds(make_plan(groups(8, 8).graph, registry.machine("mi300x")))
    assert "grouped_convolution" not in others


def test_depthwise_convolutions_alone_keep_channels_first() -> None:
    """Depthwise convolutions without such a neighbour keep channels first, also on machines whose
    box copies load no windows.
    """
    task_plan = planned("h100", w=(64, 1, 3, 3), groups=64)
    assert kinds(task_plan) == ["convolution"]
    others = kinds(make_plan(block().graph, registry.machine("mi300x")))
    assert "convolution" in others and "depthwise" not in others


def test_no_transposes_surround_layers_over_channels() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.conv(ark.tensor(X, ark.bf16), ark.tensor(W, ark.bf16), padding=1)
        for _ in range(2):
            y = ark.conv(x, ark.tensor((64, 1, 3, 3), ark.bf16), padding=1, groups=64)
            y = ark.layernorm(ark.transpose(y, [0, 2, 3, 1]))
            y = ark.matmul(y, ark.tensor((64, 64), ark.bf16), transpose_other=True)
            x = ark.add(ark.transpose(y, [0, 3, 1, 2]), x)
        ark.conv(x, ark.tensor(W, ark.bf16), padding=1, name="out")
    task_plan = make_plan(model.graph, registry.machine("h100"), {"variant": "matrix"})
    verify([task_plan])
    images = [op for op in task_plan.ops if op.kind == "transpose"]
    sizes = [task_plan.tensors[op.operands[0]].shape[0] for op in images]
    # Transposes whose operand has a first dimension of 2 transpose the image or the result, whose
    # rows are not multiples of 16 bytes. All other transposes are of weights.
    assert sizes.count(2) <= 2
