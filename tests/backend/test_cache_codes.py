"""KV caches of 8-bit codes: codes and scales equal torch's, and attention over them equals torch's
over the dequantised values.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError
from ark.ir.dtype import by_name, cache_type
from ark.lower.registry import get
from ark.models.build import Shape, build
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.cases.caches import CacheOfCodes
from tests.cases.decoders import CASES
from tests.cells import compared
from tests.checkpoints import make_checkpoint, reference
from tests.slow import slow

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 24, 8
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}
TORCH_CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def quantised(rows: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of rows (..., width) as numbers, and their scales (..., 1), by torch."""
    x = torch.from_numpy(rows)
    most = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled = x * (LARGEST[codes] / most)
    numbers = scaled.round() if codes == "int8" else scaled
    return numbers.to(TORCH_CODES[codes]).float().numpy(), (most / LARGEST[codes]).numpy()


def stored(cache: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes that are stored in a cache as numbers, and the scales that follow them in
    each row. cache: bytes, (..., bytes of a row).
    """
    numbers = np.ascontiguousarray(cache[..., :WIDTH]).view(by_name(codes).numpy)
    scales = np.ascontiguousarray(cache[..., WIDTH : WIDTH + 4]).view(np.float32)
    return numbers.astype(np.float32), scales


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """Returns causal attention by torch, of rows (n, heads * width) from position `first` on, over
    keys and values (kv_heads, positions, width).
    """
    n = len(query)
    q = torch.from_numpy(query).reshape(n, HEADS, WIDTH).transpose(0, 1)
    k, v = (torch.from_numpy(x).repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
    seen = torch.arange(k.shape[1])[None] <= first + torch.arange(n)[:, None]
    result = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return result.transpose(0, 1).reshape(n, -1).numpy()


def heads_of(rows: np.ndarray) -> np.ndarray:
    """Returns rows (n, kv_heads * width) as (kv_heads, n, width)."""
    return rows.reshape(len(rows), KV_HEADS, WIDTH).swapaxes(0, 1)


@pytest.mark.parametrize("codes", ["int8", "fp8_e4m3"])
def test_codes_and_attention_over_codes_equal_torch(backend: str, codes: str) -> None:
    """The codes of quantised caches, and attention over them, equal torch's: for several rows at
    once and for a single row, in contiguous and in paged caches.
    """
    rng, dtype = np.random.default_rng(0), cache_type(codes, WIDTH, ark.fp32)
    many, context, numbers = 11, 40, np.array([[2, 0, 1, 4, 3]], np.int32)
    inputs = {
        rows: [rng.standard_normal((rows, n * WIDTH)).astype(np.float32) for n in (4, 2, 2)]
        for rows in (many, 1)
    }
    inputs[many][1][5] = 0.0
    inputs[many][2][:, ::7] *= 1e4
    table = ark.tensor((1, 5), ark.int32)
    caches = [ark.tensor((KV_HEADS, context, WIDTH), dtype) for _ in range(2)]
    pools = [ark.tensor((5, KV_HEADS, PAGE, WIDTH), dtype) for _ in range(2)]
    given, results = [], []
    for rows in (many, 1):
        query, key, value = (ark.tensor(list(x.shape), ark.fp32) for x in inputs[rows])
        position = ark.tensor((1,), ark.int32)
        given.append((query, key, value, position))
        caches = [ark.kv_append(c, x, position) for c, x in zip(caches, (key, value), strict=True)]
        pools = [
            ark.paged_append(c, x, table, position)
            for c, x in zip(pools, (key, value), strict=True)
        ]
        results.append(
            (
                ark.attention(query, *caches, position),
                ark.paged_attention(query, *pools, table, position),
            )
        )
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        table.from_numpy(numbers)
        for tensors, rows in zip(given, (many, 1), strict=True):
            for tensor, array in zip(tensors, inputs[rows], strict=False):
                tensor.from_numpy(array)
            tensors[3].from_numpy(np.array([0 if rows > 1 else many], np.int32))
        runtime.run(1)
        outputs = [[t.to_numpy() for t in pair] for pair in results]
        held = [t.to_numpy() for t in (*caches, *pools)]
    values = []
    for n in (1, 2):
        heads = heads_of(np.concatenate([inputs[many][n], inputs[1][n]]))
        want, scales = quantised(heads, codes)
        values.append(want * scales)
        pages = held[n + 1][numbers[0]].swapaxes(0, 1).reshape(KV_HEADS, context, -1)
        for cache in (held[n - 1], pages):
            got, got_scales = stored(cache[:, : many + 1], codes)
            np.testing.assert_allclose(got_scales, scales, rtol=3e-7)
            # Where a value lies midway between two codes, the last bit of the scale decides which
            # one it gets.
            near = np.abs(got - want) > 0
            assert near.mean() < 1e-3
            assert (np.abs(got - want) <= np.maximum(1.0, np.abs(want) / 8)).all()
            assert not cache[:, many + 1 :].any()
    for pair, first, rows in zip(outputs, (0, many), (many, 1), strict=True):
        want = attended(inputs[rows][0], *values, first)
        for got in pair:
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("codes", ["int8", "fp8_e4m3"])
def test_rows_that_are_not_finite_stay_not_finite(backend: str, codes: str) -> None:
    rows = np.ones((3, WIDTH), np.float32)
    rows[0, 3], rows[1, 5] = np.nan, np.inf
    cache = ark.tensor((1, 4, WIDTH), cache_type(codes, WIDTH, ark.bf16))
    x, position = ark.tensor(list(rows.shape), ark.fp32), ark.tensor((1,), ark.int32)
    updated = ark.kv_append(cache, x, position)
    query = ark.tensor((3, WIDTH), ark.fp32)
    result = ark.attention(query, updated, updated, position)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(rows)
        query.from_numpy(np.ones_like(rows))
        position.from_numpy(np.zeros(1, np.int32))
        runtime.run(1)
        _, scales = stored(updated.to_numpy(), codes)
        assert np.isnan(result.to_numpy()).all()
    assert np.isnan(scales[0, :2]).all()
    assert scales[0, 2] == np.float32(1 / LARGEST[codes])


@pytest.mark.parametrize("codes", ["int8", "fp8_e4m3"])
def test_registered_reference_rounds_to_codes(codes: str) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((3, KV_HEADS * WIDTH)).astype(np.float32)
    cache, at = np.zeros((KV_HEADS, 6, WIDTH), np.float32), np.array([2])
    kept = get("kv_append").reference
    paged = get("paged_append").reference
    assert kept is not None and paged is not None
    numbers, scales = quantised(heads_of(rows), codes)
    (got,) = kept([rows, at, cache], {"codes": codes})
    np.testing.assert_allclose(got[:, 2:5], numbers * scales, rtol=1e-6)
    pool = cache.reshape(KV_HEADS, 1, 6, WIDTH).swapaxes(0, 1)
    (got,) = paged([rows, np.array([[0]]), at, pool], {"codes": codes, "apart": False})
    np.testing.assert_allclose(got[0, :, 2:5], numbers * scales, rtol=1e-6)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_memory_is_counted_in_codes(kind: str) -> None:
    """The bytes per position of a quantised cache, from which the memory check and the number of
    pages are computed, equal those of the caches in the plan.
    """
    checkpoint = Checkpoint.open("examples/noah", kv_cache_dtype=kind)
    shape = Shape(checkpoint.config, ark.bf16, 64, 0)
    tensors = build(shape).lasting
    caches = [t for name, t in tensors.items() if name.endswith((".keys", ".values"))]
    assert len(caches) == 2 * 6
    assert sum(t.buffer.nbytes for t in caches) == 64 * checkpoint.position_nbytes
    assert checkpoint.position_nbytes == 6 * 4 * 48  # 32 codes, a scale and padding
    assert Checkpoint.open("examples/noah").position_nbytes == 6 * 4 * 64


DECODERS = ("gemma2", "gemma3", "gpt-oss", "qwen3", "phi4-mini", "glm4")


@pytest.mark.emulated("slow")
@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=slow), "int8"])
@pytest.mark.parametrize(
    "case", [c if c == "gemma2" else pytest.param(c, marks=slow) for c in DECODERS]
)
def test_decoders_over_codes(backend: str, case: str, kind: str, tmp_path: Path) -> None:
    """Decoders with windows, soft caps, sinks, head norms or partial rotation, compared with
    transformers with the same kind of cache.
    """
    fields = {"head_dim": 24, **CASES[case]}
    directory = make_checkpoint(tmp_path, **fields)
    checkpoint = Checkpoint.open(directory, kv_cache_dtype=kind)
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 258, 21)]
    chosen, _ = registry.choose(backend)
    with (
        closing(chosen.open(0)) as device,
        Generator(checkpoint, chosen, device, chunk=8) as generator,
    ):
        ours = list(generator.stream(prompt, 6, stop_tokens=()))
        last = generator.executor.read("decode.head.logits").ravel()
    model = reference(directory)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + ours[:-1]])
        rounded = model(tokens, **CacheOfCodes(kind).argument()).logits[0, -1].numpy()
        plain = model(tokens).logits[0, -1].numpy()
    off = np.abs(last - rounded).max()
    assert off < 0.25 * np.abs(plain - rounded).max()  # nearer to the model with codes
    assert off < 0.02 * np.abs(rounded).max()
    compared(checkpoint, backend)


@slow
@pytest.mark.emulated("slow")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_latent_attention_over_codes(backend: str, kind: str, tmp_path: Path) -> None:
    """DeepSeek's cache has one latent row for all heads. transformers' cache stores other numbers,
    so the result is compared with that of ark's own cache of floats.
    """
    directory = make_checkpoint(tmp_path, **CASES["deepseek-v2-lite"])
    chosen, _ = registry.choose(backend)
    last = []
    for held in ("auto", kind):
        checkpoint = Checkpoint.open(directory, kv_cache_dtype=held)
        with (
            closing(chosen.open(0)) as device,
            Generator(checkpoint, chosen, device, chunk=8) as generator,
        ):
            list(generator.stream(list(range(5, 20)), 1, stop_tokens=()))
            last.append(generator.executor.read("decode.head.logits").ravel())
    off = np.abs(last[0] - last[1]).max() / np.abs(last[0]).max()
    assert 0 < off < (0.02 if kind == "int8" else 0.1)


def test_unsupported_cache_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsageError, match="give one of auto, fp8, int8"):
        Checkpoint.open("examples/noah", kv_cache_dtype="int4")
    directory = make_checkpoint(tmp_path, head_dim=12)
    with pytest.raises(InvalidUsageError, match="multiple of 8 elements, got 12"):
        Checkpoint.open(directory, kv_cache_dtype="int8")
    config = Checkpoint.open("examples/noah", kv_cache_dtype="int8").config
    with pytest.raises(InvalidUsageError, match="cannot share keys and values of int8"):
        Shape(config, ark.bf16, 64, 0, world_size=2, split="megatron")


def test_unsupported_caches_are_refused_with_a_reason() -> None:
    with pytest.raises(InvalidUsageError, match="rows of a multiple of 8 elements, got 20"):
        cache_type("int8", 20, ark.bf16)
    x, position = ark.tensor((1, 16), ark.fp32), ark.tensor((1,), ark.int32)
    for dtype in (cache_type("uint8", 16, ark.fp32), cache_type("int8", 8, ark.fp32)):
        cache = ark.tensor((1, 4, 16), dtype)
        with pytest.raises(ModelError, match="expected floats, or rows of int8 or fp8_e4m3"):
            ark.kv_append(cache, x, position)
