"""Checkpoint compared with transformers' reading of the same directory, and the refusal of every
kind of damage.
"""

from __future__ import annotations

import json
import os
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
from transformers import LlamaForCausalLM

from ark.errors import BaseError, InvalidUsageError, ModelError, UnsupportedError
from ark.models.checkpoint import Checkpoint
from ark.models.shards import INDEX, SINGLE, read_header
from ark.models.tokenizer import Tokenizer
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16-sharded": {"dtype": "float16", "shards": 3},
    "bfloat16-tied": {"dtype": "bfloat16", "tie": True, "rope": LLAMA3_ROPE},
    "bfloat16-sharded-wide-heads": {
        "dtype": "bfloat16",
        "shards": 2,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "hidden": 96,
        "vocab": 331,
    },
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a directory for each variant. Tests that damage one copy it first."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, **how) for name, how in VARIANTS.items()}


@pytest.fixture
def directory(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Returns a copy of the single-file float32 checkpoint."""
    return Path(shutil.copytree(originals["float32"], tmp_path / "single"))


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Returns a copy of the sharded float16 checkpoint."""
    return Path(shutil.copytree(originals["float16-sharded"], tmp_path / "sharded"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(directory / SINGLE)
    change(weights)
    save_file(weights, directory / SINGLE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_transformers(originals: dict[str, Path], variant: str) -> None:
    directory = originals[variant]
    checkpoint = Checkpoint.open(directory)
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
    assert {weight.stored_name for weight in checkpoint.weights.values()} <= set(theirs)
    assert len(checkpoint.weights) == len(theirs)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == ("sharded" in variant)
    for name, weight in checkpoint.weights.items():
        ours = checkpoint.read(name)
        assert ours.dtype == checkpoint.dtype
        expected = theirs[weight.stored_name]
        assert str(expected.dtype) == f"torch.{ours.dtype.name}"
        np.testing.assert_array_equal(ours.astype(np.float32), expected.float().numpy())


def test_names_follow_the_model_from_end_to_end(originals: dict[str, Path]) -> None:
    names = list(Checkpoint.open(originals["float32"]).weights)
    assert names[:4] == ["embedding", "norm", "layers.0.attention_norm", "layers.0.mlp_norm"]
    assert names[4:6] == ["layers.0.attention.query", "layers.0.attention.key"]
    assert names[-2:] == ["layers.1.mlp.down", "head.weight"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_are_cut_from_the_file(originals: dict[str, Path], variant: str) -> None:
    checkpoint = Checkpoint.open(originals[variant])
    for name in ("embedding", "layers.1.mlp.down", "head.weight"):
        whole = np.array(checkpoint.read(name))
        part = checkpoint.read(name, slice(3, 17), slice(8, 40))
        assert part.tobytes() == whole[3:17, 8:40].tobytes()
    norm = checkpoint.read("norm")
    np.testing.assert_array_equal(checkpoint.read("norm", slice(4, 9)), norm[4:9])


@pytest.mark.parametrize("variant", VARIANTS)
def test_iteration_accounts_for_every_byte_once(originals: dict[str, Path], variant: str) -> None:
    checkpoint = Checkpoint.open(originals[variant])
    items = dict(iter(checkpoint))
    assert sum(array.nbytes for array in items.values()) == checkpoint.nbytes
    assert ("head.weight" in items) == ("tied" not in variant)


def test_misaligned_file_reads_the_same(directory: Path) -> None:
    before = {name: array.copy() for name, array in Checkpoint.open(directory)}
    data = (directory / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" "
    (directory / SINGLE).write_bytes(
        len(header).to_bytes(8, "little") + header + data[8 + length :]
    )
    for name, array in Checkpoint.open(directory):
        np.testing.assert_array_equal(array, before[name])


def test_stored_rotary_frequencies_and_a_stored_tied_head_are_ignored(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tied", tie=True)

    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    edit_weights(directory, add)
    Checkpoint.open(directory)


def test_unknown_weight_is_named(originals: dict[str, Path]) -> None:
    with pytest.raises(InvalidUsageError, match=r"layers\.9\.attention\.query"):
        Checkpoint.open(originals["float32"]).read("layers.9.attention.query")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", 3, r"lacks model\.layers\.2.* more tensors.*3 layers"),
        ("num_hidden_layers", 1, r"holds model\.layers\.1.* does not have"),
        ("vocab_size", 321, r"embed_tokens\.weight with shape \[320, 64\].*\[321, 64\]"),
        ("intermediate_size", 97, r"shape \[96, 64\].*\[97, 64\]"),
        ("num_key_value_heads", 4, r"k_proj\.weight with shape \[32, 64\].*\[64, 64\]"),
        ("head_dim", 32, r"q_proj\.weight with shape \[64, 64\].*\[128, 64\]"),
        ("dtype", "bfloat16", r"as float32, but config\.json says bfloat16"),
    ],
)
def test_config_that_contradicts_the_weights(
    directory: Path, field: str, value: object, words: str
) -> None:
    edit_json(directory / "config.json", lambda config: config.update({field: value}))
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(directory)


def test_untied_config_of_tied_weights_lacks_the_head(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tied", tie=True)
    edit_json(directory / "config.json", lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight.*tie_word_embeddings false"):
        Checkpoint.open(directory)


def test_each_missing_tensor_is_named(directory: Path) -> None:
    weights = load_file(directory / SINGLE)
    for name in weights:
        save_file({k: v for k, v in weights.items() if k != name}, directory / SINGLE)
        with pytest.raises(ModelError, match=f"lacks {name}"):
            Checkpoint.open(directory)


def test_unknown_tensor_is_named(directory: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    edit_weights(directory, lambda weights: weights.update(bias))
    with pytest.raises(ModelError, match=r"holds .*q_proj\.bias, which a model"):
        Checkpoint.open(directory)


def test_mixed_and_foreign_types_are_refused(directory: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_json(directory / "config.json", lambda config: config.pop("dtype"))
    edit_weights(directory, lambda weights: weights.update({name: weights[name].half()}))
    with pytest.raises(ModelError, match=r"up_proj\.weight as float16, but the embedding is"):
        Checkpoint.open(directory)
    edit_weights(directory, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight as I8"):
        Checkpoint.open(directory)


def test_missing_and_foreign_weight_files(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "weights.safetensors")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*weights\.safetensors"):
        Checkpoint.open(directory)
    (directory / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin"):
        Checkpoint.open(directory)


def test_git_lfs_pointer_is_recognised(directory: Path) -> None:
    (directory / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        Checkpoint.open(directory)


def test_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of the .* shards .*{shard.name}"):
        Checkpoint.open(sharded)


def test_shards_that_do_not_belong_to_the_index(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(ModelError, match="different checkpoints"):
        Checkpoint.open(sharded)


def test_index_that_points_at_the_wrong_shard(sharded: Path) -> None:
    first, second, *_ = sorted(path.name for path in sharded.glob("*.safetensors"))

    def swap(index: dict[str, Any]) -> None:
        name = next(n for n, shard in index["weight_map"].items() if shard == first)
        index["weight_map"][name] = second

    edit_json(sharded / INDEX, swap)
    with pytest.raises(ModelError, match=f"says that {second} holds .*, but it does not"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, "weight_map should be"),
        ({"norm": 3}, "weight_map should be"),
        ({"norm": "../other/model.safetensors"}, "a shard is a file beside the index"),
        ({"norm": "a" * 256}, "a shard is a file beside the index"),
        ({"norm": ""}, "a shard is a file beside the index"),
    ],
)
def test_broken_index(sharded: Path, weight_map: object, words: str) -> None:
    edit_json(sharded / INDEX, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    ("kept", "words"), [(0, "0 bytes"), (5, "5 bytes"), (200, "truncated"), (-1, "truncated")]
)
def test_truncated_file_is_reported_with_its_expected_size(
    directory: Path, kept: int, words: str
) -> None:
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:kept])
    with pytest.raises(ModelError, match=words) as caught:
        Checkpoint.open(directory)
    assert words != "truncated" or str(len(data[:kept])) in str(caught.value)


def test_file_that_shrinks_after_it_was_opened(directory: Path) -> None:
    """A weights file that was truncated after it was opened is refused. A read through a memory map
    would end the process by SIGBUS.
    """
    checkpoint = Checkpoint.open(directory)
    path = directory / "model.safetensors"
    last = max(checkpoint.stored.values(), key=lambda t: t.offset)
    os.truncate(path, last.offset + last.nbytes // 2)
    with pytest.raises(ModelError, match=f"has been truncated since it was opened: {last.name}"):
        list(checkpoint)
    path.unlink()
    with pytest.raises(ModelError, match="can no longer be read"):
        list(checkpoint)


def test_trailing_bytes_and_a_broken_header_are_damage(directory: Path) -> None:
    data = (directory / SINGLE).read_bytes()
    for damaged in (data + b"\0", data[:8] + b"[" + data[9:], b"\xff" * 8 + data[8:]):
        (directory / SINGLE).write_bytes(damaged)
        with pytest.raises(ModelError, match="not an intact safetensors file"):
            Checkpoint.open(directory)


NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header[NORM].pop("dtype"), "does not describe a tensor"),
        (lambda header: header.update({NORM: 7}), "does not describe a tensor"),
        (lambda header: header[NORM].update(shape="64"), "values out of range"),
        (lambda header: header[NORM].update(shape=[-8, -8]), "values out of range"),
        (lambda header: header[NORM].update(shape=[63]), r"does not match F32 of shape \[63\]"),
        (lambda header: header[NORM].update(dtype="F16"), "256 bytes, which does not match F16"),
        (lambda header: header[NORM].update(header[QUERY]), "do not follow"),
        (lambda header: header.pop(NORM), "do not follow|describes"),
    ],
)
def test_header_that_contradicts_itself(
    directory: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    data = (directory / SINGLE).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    change(header)
    text = json.dumps(header).encode()
    (directory / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(directory)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_of_a_header_escapes_as_another_error(
    originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    intact = (originals["float32"] / SINGLE).read_bytes()
    length = 8 + int.from_bytes(intact[:8], "little")
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(intact), length, length // 2, 8, 3]))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(bytes(damaged[:cut]))
    try:
        tensors = read_header(path)
    except BaseError as error:
        assert str(path) in str(error)
    else:
        assert sum(t.nbytes for t in tensors.values()) == len(intact) - length


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
def test_fifo_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    """A named pipe in place of a file is refused at once. Reading it would wait for a writer."""
    directory = make_checkpoint(tmp_path / "model", layers=1)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ModelError, match=f"{name} is neither a file nor a link"):
        Checkpoint.open(directory)
        Tokenizer.open(directory)


def test_number_of_layers_that_would_take_all_memory(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", layers=1)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2 * 10**9}))
    with pytest.raises(ModelError, match="2000000000 layers"):
        Checkpoint.open(directory)


def rewrite(directory: Path, **changes: torch.Tensor) -> None:
    path = directory / SINGLE
    save_file({**load_file(path), **changes}, path, metadata={"format": "pt"})


def test_head_that_a_tied_config_denies_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output head that differs from the embedding is used although the config ties them, as in
    transformers. An equal one is tied.
    """
    directory = make_checkpoint(tmp_path / "model", tie=True, layers=1)
    embedding = load_file(directory / SINGLE)["model.embed_tokens.weight"]
    rewrite(directory, **{"lm_head.weight": embedding.clone()})
    assert Checkpoint.open(directory).config.tie_word_embeddings
    assert "differs" not in capsys.readouterr().err
    other = embedding.clone()
    other[-1, -1] += 1
    rewrite(directory, **{"lm_head.weight": other})
    checkpoint = Checkpoint.open(directory)
    theirs = LlamaForCausalLM.from_pretrained(directory)
    assert not checkpoint.config.tie_word_embeddings
    np.testing.assert_array_equal(
        checkpoint.read("head.weight"), theirs.lm_head.weight.detach().numpy()
    )
    np.testing.assert_array_equal(checkpoint.read("embedding"), embedding.numpy())
    assert "lm_head.weight that differs from model.embed_tokens.weight" in capsys.readouterr().err


def test_rotary_frequencies_in_the_files_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers uses the frequencies computed from the config, whatever the files hold. ark
    warns if the files differ.
    """
    directory = make_checkpoint(tmp_path / "model", layers=1, rope=LLAMA3_ROPE)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    right = LlamaForCausalLM.from_pretrained(directory).model.rotary_emb.inv_freq
    for good in (right, plain, plain.half(), right.bfloat16()):
        rewrite(directory, **{name: good.contiguous()})
        Checkpoint.open(directory)
        assert "differs" not in capsys.readouterr().err
    for bad in (plain * 2, plain[:4], plain.double()):
        rewrite(directory, **{name: bad.contiguous()})
        Checkpoint.open(directory)
        assert f"holds {name}, which differs from the rotary" in capsys.readouterr().err
