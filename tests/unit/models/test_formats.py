"""Quantised checkpoints that are damaged, contradictory or not supported are refused in one
sentence. They may also contain weights that are not quantised.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ark.cli import main
from ark.cli.parser import add_quantize
from ark.errors import BaseError, InvalidUsageError, ModelError, UnsupportedError
from ark.ir.dtype import bf16
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.formats.base import by_blocks, unpacked
from ark.models.formats.layout import Codes, group_for
from ark.models.formats.on_load import ON_LOAD, on_load
from tests.cases.quantized import ODD, Tensors, quantised_checkpoint
from tests.cases.quantized_words import awq, gptq, words
from tests.checkpoints import make_checkpoint

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FIRST = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns checkpoints of one layer, one in GPTQ's and one in AWQ's format."""
    folder = tmp_path_factory.mktemp("quantised")
    _, first, _ = quantised_checkpoint(folder / "gptq", gptq(4, True, False), GPTQ, layers=1)
    _, second, _ = quantised_checkpoint(folder / "awq", awq, AWQ, layers=1)
    return {"gptq": first, "awq": second}


@pytest.fixture
def copy(intact: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that copies a checkpoint with another config and changed tensors."""

    def copied(kind: str, config: dict[str, Any], change: Callable[[Tensors], object]) -> Path:
        folder = Path(shutil.copytree(intact[kind], tmp_path / "copy"))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        path = folder / "config.json"
        fields = json.loads(path.read_text())
        fields["quantization_config"] |= config
        path.write_text(json.dumps(fields))
        return folder

    return copied


def same(tensors: Tensors) -> None:
    """A change of a checkpoint's tensors that changes nothing."""


def setting(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        tensors[FIRST + name] = change(tensors[FIRST + name])

    return changed


@pytest.mark.parametrize(
    ("kind", "config", "change", "error", "words"),
    [
        ("gptq", {}, lambda t: t.pop(FIRST + "scales"), ModelError, "lacks .*q_proj.scales"),
        ("awq", {}, lambda t: t.pop(FIRST + "qzeros"), ModelError, "lacks .*q_proj.qzeros"),
        ("awq", {}, lambda t: t.pop(FIRST + "qweight"), ModelError, "lacks .*q_proj.qweight"),
        (
            "gptq",
            {},
            setting("scales", lambda t: t[1:]),
            ModelError,
            r"scales as shape \[2, 96\]",
        ),
        ("gptq", {}, setting("scales", lambda t: t.int()), ModelError, "scales as I32"),
        ("awq", {}, setting("qweight", lambda t: t[:, 1:]), ModelError, r"qweight as shape"),
        ("gptq", {}, setting("qzeros", lambda t: t + 1), ModelError, "zeros are not all 8"),
        ("gptq", {}, setting("g_idx", lambda t: t + 9), ModelError, "g_idx names groups"),
        ("gptq", {"group_size": 64}, same, ModelError, "requires shape"),
        ("gptq", {"group_size": "32"}, same, ModelError, "group_size should be"),
        ("gptq", {"bits": 3}, same, UnsupportedError, "bits is '3'"),
        ("gptq", {"checkpoint_format": "marlin"}, same, UnsupportedError, "'marlin'"),
        ("awq", {"version": "gemv"}, same, UnsupportedError, "'gemv'"),
        ("awq", {"quant_method": "hqq"}, same, UnsupportedError, "quant_method is 'hqq'.*awq"),
        (
            "awq",
            {"quant_method": "compressed-tensors"},
            same,
            ModelError,
            "config_groups should be",
        ),
        (
            "awq",
            {},
            lambda t: t.update({FIRST + "weight_scale": torch.ones(1)}),
            ModelError,
            "q_proj.weight_scale, which a model",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(
    copy: Callable[..., Path],
    kind: str,
    config: dict[str, Any],
    change: Callable[[Tensors], object],
    error: type[BaseError],
    words: str,
) -> None:
    folder = copy(kind, config, change)
    with pytest.raises(error, match=words):
        checkpoint = Checkpoint.open(folder)
        for name in dict(checkpoint.config.layouts):
            checkpoint.codes(name)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
}


@pytest.mark.parametrize(
    ("place", "value", "error", "words"),
    [
        ("format", "marlin-24", UnsupportedError, "'marlin-24'"),
        ("kv_cache_scheme", {"num_bits": 8}, UnsupportedError, "kv_cache_scheme"),
        ("config_groups", {"group_0": {"targets": ["Linear"]}}, ModelError, "config_groups"),
        ("config_groups.group_0.targets", ["re:("], ModelError, "targets should be"),
        ("config_groups.group_0.targets", "Linear", ModelError, "targets should be"),
        ("config_groups.group_0.weights.num_bits", 3, UnsupportedError, "num_bits is '3'"),
        ("config_groups.group_0.weights.strategy", "row", UnsupportedError, "strategy is 'row'"),
        ("config_groups.group_0.weights.group_size", 0, ModelError, "group_size|'tensor'|shape"),
        ("config_groups.group_0.weights.actorder", "group", UnsupportedError, "actorder"),
    ],
)
def test_schemes_that_are_not_read(
    intact: dict[str, Path],
    tmp_path: Path,
    place: str,
    value: object,
    error: type[BaseError],
    words: str,
) -> None:
    folder = Path(shutil.copytree(intact["awq"], tmp_path / "copy"))
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = json.loads(json.dumps(COMPRESSED))
    at = fields["quantization_config"]
    *outer, last = place.split(".")
    for name in outer:
        at = at[name]
    at[last] = value
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(error, match=words):
        Checkpoint.open(folder)


def test_command_reports_damage_in_one_line(
    copy: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy("gptq", {}, lambda t: t.pop(FIRST + "scales"))
    assert main(["generate", str(folder), "--prompt", "x", "--backend", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "lacks" in message and "Traceback" not in message


def test_weights_that_are_not_quantised_lie_beside_others(copy: Callable[..., Path]) -> None:
    """A GPTQ checkpoint in which one linear layer is not quantised: that layer is read as floats,
    all other layers as codes.
    """

    def plain(tensors: Tensors) -> None:
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[FIRST + name]
        tensors[FIRST + "weight"] = torch.full((96, 96), 0.5)

    checkpoint = Checkpoint.open(copy("gptq", {}, plain))
    assert len(checkpoint.config.layouts) == 6
    assert (checkpoint.read("layers.0.attention.query") == 0.5).all()


def test_act_order_with_groups_of_different_sizes_is_dequantised(
    copy: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    def uneven(tensors: Tensors) -> None:
        groups = tensors[FIRST + "g_idx"].clone()
        groups[:3] = 1
        tensors[FIRST + "g_idx"] = groups

    checkpoint = Checkpoint.open(copy("gptq", {}, uneven))
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert "layers.0.attention.query" in message and "take as much memory" in message
    tensors = load_file(checkpoint.directory / "model.safetensors")
    words = tensors[FIRST + "qweight"].numpy().view(np.uint32)
    codes = (words[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None]) & 15
    scales = tensors[FIRST + "scales"].float().numpy()[tensors[FIRST + "g_idx"].numpy()]
    expected = (codes.reshape(96, -1).astype(np.float32) - 8) * scales
    np.testing.assert_array_equal(checkpoint.read("layers.0.attention.query"), expected.T)


def test_quantising_twice_is_refused(intact: dict[str, Path]) -> None:
    with pytest.raises(InvalidUsageError, match=r"already quantised \(GPTQ\)"):
        Checkpoint.open(intact["gptq"], "int8")


def test_plans_of_parallelize_refuse_quantised_weights(intact: dict[str, Path]) -> None:
    config = Checkpoint.open(intact["gptq"]).config
    with pytest.raises(InvalidUsageError, match="cannot share quantised weights"):
        Shape(config, bf16, 16, 0, 0, 2, split="megatron")


def test_formats_of_loading(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidUsageError, match="fp8, int8, int4"):
        on_load("int3")
    parser = argparse.ArgumentParser()
    add_quantize(parser)
    for name in ON_LOAD:
        assert parser.parse_args(["--quantize", name]).quantize == name
    folder = make_checkpoint(tmp_path, **{**ODD, "intermediate": 100, "layers": 1})
    checkpoint = Checkpoint.open(folder, "int4")
    assert "layers.0.mlp.down" in capfd.readouterr().err  # no group divides its 100 elements
    assert len(checkpoint.config.layouts) == 6
    assert checkpoint.nbytes < Checkpoint.open(folder).nbytes


def test_groups_divide_rows_and_hold_whole_steps() -> None:
    assert [group_for(128, n) for n in (256, 576, 96, 40, 100)] == [128, 64, 32, 8, 0]


@settings(deadline=None)
@given(st.data(), st.sampled_from([2, 4, 8]), st.integers(1, 3), st.integers(1, 3))
def test_words_hold_codes(data: st.DataObject, bits: int, rows: int, words_of_a_row: int) -> None:
    """`unpacked` returns the codes that the helper `words` has packed one by one in a loop."""
    size = (rows, words_of_a_row * 32 // bits)
    values = st.lists(st.integers(0, 2**bits - 1), min_size=size[1], max_size=size[1])
    codes = np.array([data.draw(values) for _ in range(rows)])
    packed = words(codes, bits, range(32 // bits)).numpy()
    assert (unpacked(packed, bits) == codes).all()


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 9), st.integers(0, 48))
def test_blocks_give_each_element_its_scale(
    outputs: int, inputs: int, rows: int, columns: int
) -> None:
    """Codes with one scale per block: each element gets the scale of its block, also in blocks at
    the edges, which are smaller. rows, columns: the block's size, 0 for the whole dimension.
    """
    size = (rows or outputs, columns or inputs)
    shape = (-(-outputs // size[0]), -(-inputs // size[1]))
    scales = 1.0 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    codes = np.ones((outputs, inputs), np.int8)
    ours = by_blocks(codes, scales, scales + 1, (rows, columns)).floats()
    whole = scales.repeat(size[0], 0).repeat(size[1], 1)[:outputs, :inputs]
    np.testing.assert_array_equal(ours, whole * (1 - (whole + 1)))


def test_codes_of_few_values() -> None:
    """The values of four codes with scales, zero points and reordered inputs, computed by hand."""
    codes = Codes(
        np.array([[1, 2, 3, 4]], np.uint8),
        np.array([[0.5, 2.0]], np.float32),
        np.array([[1, 4]], np.float32),
        np.array([2, 0, 1, 3]),
    )
    assert codes.floats().tolist() == [[0.5, -2.0, 0.0, 0.0]]
