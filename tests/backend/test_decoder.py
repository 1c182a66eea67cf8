"""The ops of a decoder compared with torch, transformers and their own NumPy references."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ark
from ark.lower import registry
from ark.ops.tokens import MAX_STOPS
from ark.tasks.tokens import key_halves, noise_key
from tests.cases.decoder_ops import FLOATS, check_swiglu_and_linear_equal_torch, values
from tests.emulated import few_emulated
from tests.opcheck import TOLERANCE, Case, rounded

FREQUENCIES = 10000.0 ** -np.linspace(0.0, 0.9, 8)


def rotated(x: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
    """Returns x (rows, heads * 16) rotated as in transformers, from a position on."""
    rows = len(x)
    heads = torch.tensor(x).view(1, rows, -1, 16).transpose(1, 2)
    if interleaved:  # reorders interleaved pairs as halves, and back
        heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), -1)
    angles = torch.outer(
        torch.arange(position, position + rows).double(), torch.tensor(FREQUENCIES)
    )
    doubled = torch.cat((angles, angles), -1)[None]
    turned, _ = apply_rotary_pos_emb(heads, heads, doubled.cos(), doubled.sin())
    if interleaved:
        turned = torch.stack((turned[..., :8], turned[..., 8:]), -1).flatten(-2)
    return turned.transpose(1, 2).reshape(rows, -1).numpy()


def test_rotary_embedding_turns_as_transformers_do(backend: str) -> None:
    cases = []
    for number, dtype in enumerate(FLOATS):
        for interleaved in (False, True):
            position = 5 * number

            def build(x: Any, p: Any, f: Any, interleaved: bool = interleaved) -> Any:
                return ark.rotary_embedding(x, p, f, interleaved=interleaved)

            def expected(
                x: Any, p: Any, f: Any, at: int = position, pairs: bool = interleaved
            ) -> np.ndarray:
                return rotated(x, at, pairs)

            inputs = [
                (values(3, 48), dtype),
                (np.array([position]), ark.int32),
                (FREQUENCIES, ark.fp32),
            ]
            limit = max(TOLERANCE[dtype.name], 1e-5)
            cases.append(Case(f"{dtype} {interleaved}", inputs, build, expected, limit))
    for case in cases:
        # ark's rotation frequencies are rounded to fp32, so the reference equals torch's only
        # within that rounding.
        tensors = [rounded(a, d) for a, d in case.inputs]
        attrs = {"head_dim": 16, "interleaved": case.name.endswith("True")}
        (got,) = registry.get("rotary_embedding").reference(tensors, attrs)  # type: ignore[misc]
        np.testing.assert_allclose(got, case.expected(*tensors), rtol=1e-6, atol=1e-6)
    run(cases)


def run(cases: list[Case]) -> None:
    """Compares an op's results on the device with its NumPy reference, as tests.opcheck does. The
    reference itself is not compared with torch again.
    """
    for case in cases:
        case.tensors = [ark.tensor(list(a.shape), dtype) for a, dtype in case.inputs]
        case.result = case.build(*case.tensors)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for case in cases:
            for tensor, (array, dtype) in zip(case.tensors, case.inputs, strict=True):
                tensor.from_numpy(array.astype(dtype.numpy))
        runtime.run()
        for case in cases:
            want = case.expected(*(rounded(a, d) for a, d in case.inputs))
            limit = (
                TOLERANCE[case.result.dtype().name] if case.tolerance is None else case.tolerance
            )
            np.testing.assert_allclose(
                case.result.to_numpy().astype(np.float64),
                want,
                rtol=limit,
                atol=limit,
                err_msg=case.name,
            )


def test_swiglu_and_linear_equal_torch(backend: str) -> None:
    check_swiglu_and_linear_equal_torch(backend)


@pytest.mark.parametrize("dtype", few_emulated(FLOATS, ark.fp32), ids=str)
def test_topk_and_expert_linear_equal_torch(backend: str, dtype: ark.DataType) -> None:
    scores = values(4, 70)
    scores[1, 3] = scores[1, 60]  # of equal scores the first wins
    scores[2] = scores[2].round(0)
    x, hidden = values(4, 24, seed=1), values(4, 3, 40, seed=2)
    weight = values(70, 40, 24, seed=3) / 5
    down = values(70, 24, 40, seed=4) / 5
    tensors = [ark.tensor(a.shape, dtype) for a in (scores, x, weight, hidden, down)]
    best, chosen = ark.topk(tensors[0], 3)
    up, last = (ark.expert_linear(tensors[i], tensors[i + 1], chosen) for i in (1, 3))
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        wide = []
        for tensor, array in zip(tensors, (scores, x, weight, hidden, down), strict=True):
            tensor.from_numpy(array.astype(dtype.numpy))
            wide.append(rounded(array, dtype))
        runtime.run()
        results = [t.to_numpy() for t in (best, chosen, up, last)]
    theirs = torch.topk(torch.tensor(wide[0]), 3)
    np.testing.assert_array_equal(results[0].astype(np.float64), theirs.values.numpy())
    order = torch.sort(torch.tensor(wide[0]), descending=True, stable=True).indices[:, :3].numpy()
    np.testing.assert_array_equal(results[1], order)
    want = torch.einsum("rk,rsnk->rsn", torch.tensor(wide[1]), torch.tensor(wide[2])[order])
    limit = TOLERANCE[dtype.name]
    np.testing.assert_allclose(results[2].astype(np.float64), want.numpy(), rtol=limit, atol=limit)
    want = torch.einsum("rsk,rsnk->rsn", torch.tensor(wide[3]), torch.tensor(wide[4])[order])
    np.testing.assert_allclose(results[3].astype(np.float64), want.numpy(), rtol=limit, atol=limit)
    for op, inputs, outputs in (
        ("topk", wide[:1], [theirs.values.numpy(), order]),
        ("expert_linear", [wide[3], wide[4], order], [want.numpy()]),
    ):
        attrs = {"k": 3} if op == "topk" else {}
        references = registry.get(op).reference(inputs, attrs)  # type: ignore[misc]
        for got, expected in zip(references, outputs, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_topk_orders_nan_first_and_equals_by_index(backend: str) -> None:
    nan, inf = float("nan"), float("inf")
    x = ark.tensor((3, 4), ark.fp32)
    best, chosen = ark.topk(x, 3)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        rows = [[nan, 1, nan, 2], [-inf, -inf, 3, -inf], [5, 5, -1, 5]]
        x.from_numpy(np.array(rows, np.float32))
        runtime.run()
        np.testing.assert_array_equal(best.to_numpy(), [[nan, nan, 2], [3, -inf, -inf], [5, 5, 5]])
        assert chosen.to_numpy().tolist() == [[0, 2, 3], [2, 0, 1], [0, 1, 3]]


@pytest.mark.parametrize("position", [4, 7])
def test_rope_kv_is_rotation_and_two_appends(backend: str, position: int) -> None:
    """rope_kv equals transformers' rotation and writes to both caches. Rows beyond the caches' end
    are dropped.
    """
    rows, context = 3, 9
    inside = min(rows, context - position)
    x = values(rows, (4 + 2 * 2) * 16)
    caches = [values(2, context, 16, seed=s) for s in (1, 2)]
    given = [x, np.array([position]), FREQUENCIES, *caches]
    dtypes = [ark.fp32, ark.int32, *[ark.fp32] * 3]
    tensors = [ark.tensor(np.shape(a), d) for a, d in zip(given, dtypes, strict=True)]
    outputs = ark.rope_kv(*tensors)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array, dtype in zip(tensors, given, dtypes, strict=True):
            tensor.from_numpy(np.asarray(array, dtype.numpy))
        runtime.run()
        results = [t.to_numpy() for t in outputs]
    query, key, value = np.split(x, [64, 96], axis=1)
    wanted = [rotated(query, position, True)]
    key = rotated(key, position, True)
    for cache, fresh in zip(caches, (key, value), strict=True):
        after = cache.copy()
        after[:, position:][:, :rows] = fresh.reshape(rows, 2, 16).swapaxes(0, 1)[:, :inside]
        wanted.append(after)
    attrs = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    reference = registry.get("rope_kv").reference(given, attrs)  # type: ignore[misc]
    for got, define, want in zip(results, (reference[0], *reference[2:]), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(define, want, rtol=1e-12, atol=1e-12)
    newest = np.concatenate([key, value], axis=1)
    np.testing.assert_allclose(reference[1], newest, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", [0, 4, 7, 9])
def test_kv_append_equals_torchs_index_copy(backend: str, position: int) -> None:
    """kv_append of three rows to a cache of nine positions equals torch's index_copy. Rows beyond
    the end are dropped.
    """
    rows, cache = values(3, 2 * 16, seed=1), values(2, 9, 16)
    inside = min(3, 9 - position)
    fresh = torch.tensor(rows).view(3, 2, 16).transpose(0, 1)[:, :inside]
    at = torch.arange(position, position + inside)
    want = torch.tensor(cache).index_copy(1, at, fresh).numpy()
    given = [rows, np.array([position]), cache]
    dtypes = [ark.fp32, ark.int32, ark.fp32]
    tensors = [ark.tensor(np.shape(a), d) for a, d in zip(given, dtypes, strict=True)]
    appended = ark.kv_append(tensors[2], tensors[0], tensors[1])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array, dtype in zip(tensors, given, dtypes, strict=True):
            tensor.from_numpy(np.asarray(array, dtype.numpy))
        runtime.run()
        np.testing.assert_array_equal(appended.to_numpy(), want.astype(np.float32))
    (define,) = registry.get("kv_append").reference(given, {})  # type: ignore[misc]
    np.testing.assert_array_equal(define, want)


def loop(
    logits: np.ndarray, steps: int, *, temperature: float = 0.0, top_k: int = 0, seed: int = 0
) -> SimpleNamespace:
    """Runs a model that samples a token from the same logits in each of `steps` iterations, from
    position 2 on.
    """
    state = ark.TokenState.make(steps + 4)
    table = ark.tensor((logits.size, 4))
    given = ark.tensor((1, logits.size))
    rows = ark.embed(state.tokens, table, state.position, rows=2)
    ark.sample(given, state)
    bits = int(np.float32(temperature).view(np.int32))
    low, high = key_halves(noise_key(seed))
    settings = np.array([bits, top_k, low, 1, steps + 4, 0, high], np.int32)
    before = np.arange(steps + 4, dtype=np.int32) % 5
    embedding = values(logits.size, 4).astype(np.float32)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        state.settings.from_numpy(settings)
        state.position.from_numpy(np.array([2]))
        state.tokens.from_numpy(before)
        state.stops.from_numpy(np.full(MAX_STOPS, -1))
        given.from_numpy(logits[None])
        table.from_numpy(embedding)
        runtime.run(steps)
        after = SimpleNamespace(
            tokens=state.tokens.to_numpy(),
            position=int(state.position.to_numpy()[0]),
            rows=rows.to_numpy(),
            settings=settings,
            before=before,
            embedding=embedding,
        )
    ark.Model.reset()
    return after


def referenced(logits: np.ndarray, after: SimpleNamespace, steps: int) -> np.ndarray:
    """Returns the tokens that the op's NumPy reference draws, iteration by iteration."""
    position, tokens = np.array([2]), after.before.astype(np.int64)
    define = registry.get("sample").reference
    assert define is not None
    stops = np.full(MAX_STOPS, -1)
    for _ in range(steps):
        inputs = [logits[None], after.settings, position, tokens, np.zeros_like(tokens), stops]
        position, tokens, output = define(inputs, {})
        assert output[position[0]] == tokens[position[0]]
    return tokens


def test_greedy_sample_takes_the_largest_logit_and_embed_its_row(backend: str) -> None:
    logits = values(600).astype(np.float32)
    logits[[17, 400]] = 9.0  # the first of two equal logits wins
    after = loop(logits, 3)
    assert after.position == 5
    assert after.tokens[3:6].tolist() == [17] * 3 == referenced(logits, after, 3)[3:6].tolist()
    # The last iteration, at position 4, embedded the token that was drawn for position 4, and the
    # initial token of position 5, for which it drew a token only afterwards.
    table = torch.tensor(after.embedding)
    ids = torch.tensor([17, int(after.before[5])])
    np.testing.assert_array_equal(after.rows, torch.nn.functional.embedding(ids, table).numpy())
    define = registry.get("embed").reference
    assert define is not None
    (rows,) = define([after.tokens, after.embedding, np.array([6])], {"rows": 2})
    beyond = torch.tensor([int(after.tokens[6]), 0])  # past the end of the text: token 0
    np.testing.assert_array_equal(rows, torch.nn.functional.embedding(beyond, table).numpy())


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.3, 0), (0.9, 3)])
def test_samples_are_distributed_as_the_softmax(
    backend: str, temperature: float, top_k: int
) -> None:
    """The tokens equal the reference's, and their frequencies match torch's softmax."""
    steps = 2000 if backend == "cpu" else 200
    logits = values(8, seed=3).astype(np.float32)
    after = loop(logits, steps, temperature=temperature, top_k=top_k, seed=7)
    ours = after.tokens[3 : 3 + steps]
    np.testing.assert_array_equal(ours, referenced(logits, after, steps)[3 : 3 + steps])
    kept = torch.tensor(logits, dtype=torch.float64) / temperature
    if top_k:
        kept[kept < torch.topk(kept, top_k).values[-1]] = -torch.inf
    want = torch.softmax(kept, 0).numpy()
    counts = np.bincount(ours, minlength=8) / steps
    # Five standard deviations of a binomial share. A token of probability 0 must not occur.
    assert (np.abs(counts - want) <= 5 * np.sqrt(want * (1 - want) / steps)).all(), (counts, want)


def test_advance_stops_at_the_last_token(backend: str) -> None:
    state = ark.TokenState.make(40)
    ark.advance(state, 7)
    settings = np.array([0, 0, 0, 16, 40, 0, 0], np.int32)
    define = registry.get("advance").reference
    assert define is not None
    results, position = [], np.array([0])
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        state.settings.from_numpy(settings)
        for _ in range(4):
            runtime.run()
            (position,) = define([settings, position], {"rows": 7})
            results.append(int(state.position.to_numpy()[0]))
            assert results[-1] == position[0]
    assert results == [7, 14, 16, 16]


def test_every_op_of_one_rank_has_a_reference() -> None:
    """Every op has a NumPy reference, except ops between ranks, whose results are defined by the
    tests of collectives.
    """
    ops = [registry.get(name) for name in registry.names()]
    without = [op for op in ops if op.reference is None]
    assert without and all(op.names_ranks or op.all_ranks for op in without)
