"""Perplexity of the trained checkpoint in the repository, whose widths are not multiples of 128:
for each weight format and cache type, compared with transformers with the format's own values.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ark.backend import registry
from ark.cli import main
from ark.cli.measure.perplexity import perplexity
from ark.errors import InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.tokenizer import Tokenizer
from tests.cases.caches import CacheOfCodes
from tests.cases.quantized import quantise_files
from tests.cases.quantized_schemes import COMPRESSED, compressed
from tests.cases.quantized_words import awq, gptq
from tests.cells import compared
from tests.checkpoints import reference
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")

NOAH = Path("examples/noah")
TEXT = (
    "God said, Let the waters under the sky be gathered together to one place, and let the dry "
    "land appear, and it was so. God called the dry land Earth, and the gathering together of the "
    "waters he called Seas. God saw that it was good. And the king said to the people of the city."
)
# The permitted relative difference of the perplexity. ark dequantises to bf16 and transformers to
# fp32. An fp8 cache has three bits of mantissa, so a small difference may become one of a sixteenth
# of the number.
MAX_RELATIVE_DIFFERENCE = {"auto": 0.01, "int8": 0.01, "fp8": 0.02}
ON_LOAD = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def ark_perplexity(backend: str, checkpoint: Checkpoint, ids: list[int], **how: Any) -> float:
    chosen, _ = registry.choose(backend)
    with closing(chosen.open(0)) as device:
        result = perplexity(checkpoint, chosen, device, ids, **how).value
    compared(checkpoint, backend)
    return result


def tokens() -> list[int]:
    return Tokenizer.open(NOAH, vocab_size=2048).encode(TEXT)


def transformers_perplexity(
    ids: list[int], values: Mapping[str, torch.Tensor], cache: str = "", context: int = 512
) -> float:
    """Returns the checkpoint's perplexity by transformers, with `values` as the weights of these
    names.
    """
    model, total = reference(NOAH), 0.0
    with torch.inference_mode():
        parameters = dict(model.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
        for first in range(0, len(ids), context):
            window = torch.tensor([ids[first : first + context]])
            kept = CacheOfCodes(cache).argument() if cache else {}
            logits = model(window, **kept).logits[0, :-1].double()
            total += float(
                torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum")
            )
    return math.exp(total / (len(ids) - -(-len(ids) // context)))


def values_on_load(name: str) -> dict[str, torch.Tensor]:
    """Returns the values that `--quantize NAME` gives the checkpoint's linear layers, by torch."""
    values = {}
    for key, weight in reference(NOAH).named_parameters():
        if not key.endswith("_proj.weight"):
            continue
        # For int4: the largest group that divides 128 and the row.
        group = math.gcd(128, weight.shape[1]) if name == "int4" else weight.shape[1]
        wide = weight.detach().reshape(len(weight), -1, group)
        scale = wide.abs().amax(-1, keepdim=True) / ON_LOAD[name]
        if name == "int4":
            scale = scale.to(torch.bfloat16).float()
        codes = wide / scale
        coded = codes.to(torch.float8_e4m3fn).float() if name == "fp8" else codes.round()
        values[key] = (coded * scale).reshape(weight.shape)
    return values


@pytest.mark.parametrize(
    ("cache", "chunk"),
    [
        pytest.param("auto", 32, marks=slow),
        ("int8", 32),
        ("fp8", 1),
        pytest.param("int8", 1, marks=slow),
        pytest.param("fp8", 32, marks=slow),
    ],
)
def test_caches(backend: str, cache: str, chunk: int) -> None:
    """Compared with transformers with a cache of the same codes; the loss against a cache of floats
    is small.
    """
    ids, codes = tokens(), "" if cache == "auto" else cache
    checkpoint = Checkpoint.open(NOAH, kv_cache_dtype=cache)
    ours = ark_perplexity(backend, checkpoint, ids, chunk=chunk, context=64)
    theirs = transformers_perplexity(ids, {}, codes, context=64)
    assert ours == pytest.approx(theirs, rel=MAX_RELATIVE_DIFFERENCE[cache])
    assert ours == pytest.approx(transformers_perplexity(ids, {}, context=64), rel=0.02)


@pytest.mark.parametrize(
    "name", ["int4", *(pytest.param(name, marks=slow) for name in ("int8", "fp8"))]
)
@pytest.mark.parametrize("cache", ["auto", pytest.param("int8", marks=slow)])
def test_weights_quantised_on_load(backend: str, name: str, cache: str) -> None:
    ids = tokens()
    checkpoint = Checkpoint.open(NOAH, name, cache)
    theirs = transformers_perplexity(ids, values_on_load(name), "" if cache == "auto" else cache)
    assert ark_perplexity(backend, checkpoint, ids) == pytest.approx(
        theirs, rel=MAX_RELATIVE_DIFFERENCE[cache]
    )


FORMATS = (*COMPRESSED, "awq", "gptq", "gptq-act-order")


@slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cache", ["auto", "fp8", "int8"])
def test_formats_of_other_packages(backend: str, name: str, cache: str, tmp_path: Path) -> None:
    """Perplexity in the formats of other packages: the package compresses the checkpoint, and
    dequantises it for the reference.
    """
    if name in COMPRESSED:
        quantise, config = compressed(name)
    elif name == "awq":
        quantise = awq
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
        config["version"] = "gemm"
    else:
        ordered = name.endswith("order")
        quantise = gptq(4, not ordered, ordered)
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": not ordered}
        config["desc_act"] = ordered
    there = tmp_path / "noah"
    shutil.copytree(NOAH, there)
    values = quantise_files(there, quantise, config)
    ids = tokens()
    checkpoint = Checkpoint.open(there, kv_cache_dtype=cache)
    assert len(checkpoint.config.layouts) == len(values) == 6 * 7
    theirs = transformers_perplexity(ids, values, "" if cache == "auto" else cache)
    assert ark_perplexity(backend, checkpoint, ids) == pytest.approx(
        theirs, rel=MAX_RELATIVE_DIFFERENCE[cache]
    )


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text(TEXT)
    command = ["bench", "perplexity", str(NOAH), "--text", str(text), "--backend", "cpu"]
    status = main([*command, "--context", "64", "--json", str(out)])
    assert status == 0
    figures, ids = json.loads(out.read_text()), tokens()
    assert figures["tokens"] == len(ids) - -(-len(ids) // 64)
    assert figures["perplexity"] == pytest.approx(
        transformers_perplexity(ids, {}, context=64), rel=0.01
    )
    assert f"perplexity {figures['perplexity']:.4f} of" in capsys.readouterr().out


def test_text_without_a_second_token_is_refused() -> None:
    backend, _ = registry.choose("cpu")
    with closing(backend.open(0)) as device, pytest.raises(InvalidUsageError, match="at least 2"):
        perplexity(Checkpoint.open(NOAH), backend, device, [1])
