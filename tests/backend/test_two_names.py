"""Two placeholders that are bound to one memory: one to a cache, the other to the row of the cache
that a token writes. ark.identity(deps=) orders the accesses, and both are bound to new addresses
for each token. Results are compared with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.errors import InvalidUsageError
from ark.runtime import session

torch = pytest.importorskip("torch")
HEADS, GROUP, LENGTH, WIDTH = 2, 2, 12, 16


@pytest.fixture(autouse=True)
def _(backend: str) -> None:
    """Skips the test on backends in whose memory torch cannot have tensors."""
    if backend not in ("cpu", "cuda"):
        pytest.skip("torch has no tensors in this device's memory here")


def on_device(values: np.ndarray) -> Any:
    """Returns a torch tensor in the memory of ark's device."""
    return torch.from_numpy(values).to(session.backend().name)


def attend(ordered: bool = True) -> dict[str, list[ark.Tensor]]:
    """Builds a model that, for each head, writes a token's key and value to their rows and computes
    attention over the caches. ordered: attention waits for these writes by `deps`.
    """
    held: dict[str, list[ark.Tensor]] = {}

    def placeholder(name: str, shape: list[int]) -> ark.Tensor:
        input_tensor = ark.placeholder(shape, ark.fp32)
        held.setdefault(name, []).append(input_tensor)
        return input_tensor

    for _ in range(HEADS):
        q, out = placeholder("q", [GROUP, WIDTH]), placeholder("out", [GROUP, WIDTH])
        mask = placeholder("mask", [1, LENGTH])
        after = []
        for part in ("k", "v"):
            row, slot = placeholder(part, [1, WIDTH]), placeholder(f"{part}_slot", [1, WIDTH])
            after.append(ark.copy(row, output=slot))
        caches = [placeholder(f"{part}_cache", [LENGTH, WIDTH]) for part in ("k", "v")]
        k, v = (ark.identity(c, deps=after) for c in caches) if ordered else caches
        scores = ark.add(ark.mul(ark.matmul(q, k, transpose_other=True), 0.25), mask)
        ark.copy(ark.matmul(ark.softmax(scores), v), output=out)
    return held


def test_cache_and_its_row_are_bound_anew_for_each_token() -> None:
    held = attend()
    rng = np.random.default_rng(0)
    caches = {part: on_device(np.zeros((HEADS, LENGTH, WIDTH), np.float32)) for part in "kv"}
    wanted = {part: np.zeros((HEADS, LENGTH, WIDTH), np.float32) for part in "kv"}
    with ark.Runtime() as runtime:
        for position in (0, 1, 2, 7, 3, 3, 11):
            q = rng.standard_normal((HEADS, GROUP, WIDTH)).astype(np.float32)
            rows = {p: rng.standard_normal((HEADS, WIDTH)).astype(np.float32) for p in "kv"}
            mask = np.where(np.arange(LENGTH) <= position, 0, -1e4)[None].astype(np.float32)
            out, given = on_device(np.zeros_like(q)), on_device(mask)
            moved, bound = on_device(q), {p: on_device(rows[p]) for p in "kv"}
            mapping: dict[ark.Tensor, Any] = {}
            for h in range(HEADS):
                mapping |= {held["q"][h]: moved[h], held["out"][h]: out[h], held["mask"][h]: given}
                for p in "kv":
                    mapping[held[p][h]] = bound[p][h : h + 1]
                    mapping[held[f"{p}_slot"][h]] = caches[p][h, position : position + 1]
                    mapping[held[f"{p}_cache"][h]] = caches[p][h]
            if not runtime.launched():
                runtime.launch(loop_mode=False, tensor_mappings=mapping)
                runtime.run()
            else:
                runtime.run(tensor_mappings=mapping)
            for p in "kv":
                wanted[p][:, position] = rows[p]
                np.testing.assert_array_equal(caches[p].cpu().numpy(), wanted[p])
            scores = np.einsum("hgw,hlw->hgl", q, wanted["k"]) * 0.25 + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("hgl,hlw->hgw", weights, wanted["v"])
            np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=2e-5, atol=2e-5)


def bound_to_one_memory(held: dict[str, list[ark.Tensor]]) -> dict[ark.Tensor, Any]:
    """Maps each placeholder of `attend` to its own memory, except those of the rows to write, which
    are mapped into their caches.
    """
    mapping: dict[ark.Tensor, Any] = {}
    for name, tensors in held.items():
        for h, tensor in enumerate(tensors):
            if not name.endswith("_slot"):
                mapping[tensor] = on_device(np.zeros(tensor.shape(), np.float32))
            else:
                cache = mapping.setdefault(
                    held[name.replace("slot", "cache")][h],
                    on_device(np.zeros((LENGTH, WIDTH), np.float32)),
                )
                mapping[tensor] = cache[3:4]
    for part in "kv":
        for h in range(HEADS):
            cache = mapping[held[f"{part}_cache"][h]]
            mapping[held[f"{part}_slot"][h]] = cache[3:4]
    return mapping


def test_overlapping_placeholders_without_an_order_are_refused() -> None:
    mapping = bound_to_one_memory(attend(ordered=False))
    with ark.Runtime() as runtime, pytest.raises(InvalidUsageError, match=r"ark\.identity"):
        runtime.launch(loop_mode=False, tensor_mappings=mapping)


def test_order_for_one_of_two_readers_is_not_enough() -> None:
    cache, slot, row = (ark.placeholder(s) for s in ([8, 4], [1, 4], [1, 4]))
    first, last = ark.placeholder([8, 4]), ark.placeholder([8, 4])
    written = ark.copy(row, output=slot)
    ark.copy(ark.exp(ark.identity(cache, deps=[written])), output=first)
    ark.copy(ark.sqrt(cache), output=last)
    memory = on_device(np.ones((8, 4), np.float32))
    mapping = {t: on_device(np.ones(t.shape(), np.float32)) for t in (row, first, last)}
    mapping |= {cache: memory, slot: memory[2:3]}
    with ark.Runtime() as runtime, pytest.raises(InvalidUsageError, match="overlaps"):
        runtime.launch(loop_mode=False, tensor_mappings=mapping)
