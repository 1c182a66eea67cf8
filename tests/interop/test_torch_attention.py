"""Layers with attention that are one operator in torch, compiled, and compared with torch."""

from __future__ import annotations

from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.backend import registry  # noqa: E402
from ark.interop.torch.compile import compile_graph  # noqa: E402
from ark.interop.torch.graph import build, name_of, why_not  # noqa: E402
from tests.cases.torch_plans import planned, planned_as  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("first", [False, True])
def test_encoder_is_one_kernel(first: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A transformer encoder layer in eval mode, for which torch has one operator, becomes one
    kernel.
    """
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, batch_first=True, norm_first=first, activation="gelu" if first else "relu"
    )
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 9, 32)

    with torch.no_grad():
        result = torch.compile(net, backend="ark")(x)
        torch.testing.assert_close(result, net(x), rtol=3e-5, atol=3e-5)
    assert "stay in torch" not in capfd.readouterr().err


def layer_graph(mask: Any, kind: int | None, dtype: Any = torch.float32, sizes: Any = (2, 9, 32)):
    """Returns torch's own operator as a graph, its arguments, and its results."""
    width = sizes[-1]
    net = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True).eval().to(dtype)
    a = net.self_attn
    given = [
        a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias,
        net.norm1.weight, net.norm1.bias, net.norm2.weight, net.norm2.bias,
        net.linear1.weight, net.linear1.bias, net.linear2.weight, net.linear2.bias,
    ]  # fmt: skip
    for p in given:
        nn.init.normal_(p, std=0.3)

    masks = [] if mask is None else [mask]

    def forward(x, *rest):
        p, m = rest[:12], rest[12] if masks else None
        flat = (*p[:4], False, False, 1e-5, *p[4:])
        return torch._transformer_encoder_layer_fwd(x, width, 4, *flat, m, kind)

    arguments = [torch.randn(sizes).to(dtype), *given, *masks]
    with torch.no_grad():
        return make_fx(forward)(*arguments), arguments, forward(*arguments)


HIDDEN = {
    None: None,
    0: torch.ones(9, 9).triu(1).bool(),
    1: torch.arange(9)[None] >= torch.tensor([[9], [6]]),
    2: torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(3)) > 0.7,
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_masks_of_an_encoder_layer(kind: int | None) -> None:
    mask = HIDDEN[kind]
    module, arguments, right = layer_graph(mask, kind)
    names = [name_of(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert names == ["_transformer_encoder_layer_fwd.default"]
    with torch.no_grad():
        result = compile_graph(module, arguments)(*arguments)
    torch.testing.assert_close(result, right, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("other", [False, True])
def test_attention_of_several_heads(other: bool) -> None:
    """Calls _native_multi_head_attention with one tensor or with two, with and without attention
    weights.
    """
    mha = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 32)
    y = torch.randn(2, 9, 32) if other else x
    parameters = [mha.in_proj_weight, mha.in_proj_bias, mha.out_proj.weight, mha.out_proj.bias]
    for p in parameters:
        nn.init.normal_(p, std=0.3)
    with torch.no_grad():
        right, weights = mha(x, y, y)

    def forward(x, y, *p):
        return torch._native_multi_head_attention(x, y, y, 32, 4, *p, None, True, True)

    def same(x, *p):
        return torch._native_multi_head_attention(x, x, x, 32, 4, *p, None, True, True)

    given = [x, *([y] if other else []), *parameters]
    with torch.no_grad():
        module = make_fx(forward if other else same)(*given)
        result = compile_graph(module, given)(*given)
    assert not any(why_not(n) for n in module.graph.nodes if n.op == "call_function")
    torch.testing.assert_close(result[0], right, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(result[1], weights, rtol=3e-5, atol=3e-5)


def test_encoder_layer_on_matrix_units_reads_its_heads_in_place() -> None:
    """An encoder layer planned for matrix units has no transposes and stores no scores."""
    module, arguments, _ = layer_graph(None, None, torch.bfloat16, (2, 256, 256))
    result = build(module, arguments)
    plan = planned(result.model, [*result.inputs, *result.outputs], registry.machine("h100"))
    kinds = [op.kind for op in plan.ops]
    assert plan.variant == "matrix"
    assert kinds.count("attention_tiles") == 1 and kinds.count("matmul") == 4
    assert not {"transpose", "softmax"} & set(kinds)
    assert not any(op.params.get("function") == "softmax" for op in plan.ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bool", "numbers", "padded causal"])
def test_row_whose_keys_are_all_masked_is_zero(dtype: Any, kind: str) -> None:
    """Attention of a row whose keys are all masked, as in prompts padded on the left, gives zeros
    as in torch, not NaN.
    """
    q, k, v = (torch.randn(2, 3, 6, 8).to(dtype) for _ in "qkv")
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    seen[0, :, :4], seen[1, :, 2] = False, False
    if kind == "padded causal":
        seen[1] = True
        seen[0, :, :, :4] = False
        seen[0, :, 4:, 4:] = True
        seen = seen & torch.ones(6, 6, dtype=torch.bool).tril()
    mask = seen if kind != "numbers" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    mask = mask if kind != "numbers" else mask.to(dtype)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with torch.no_grad():
        result = torch.compile(attend, backend="ark")(q, k, v, mask)
        want = attend(q, k, v, mask)
    assert (want[0, :, 0] == 0).all()
    limit = 3e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(result, want, rtol=limit, atol=limit)


FORMS = {
    "all keys": lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: nn.functional.scaled_dot_product_attention(
        q, k, v, None, 0.0, True, scale=0.2
    ),
    "a mask of all keys": lambda q, k, v: nn.functional.scaled_dot_product_attention(
        q, k, v, (torch.arange(256) >= 0)[None, None, :, None].expand(2, 1, 256, 256)
    ),
    "a mask by key": lambda q, k, v: nn.functional.scaled_dot_product_attention(
        q, k, v, torch.ones(2, 256, dtype=torch.int64).bool()[:, None, None]
    ),
    "numbers that mask no key": lambda q, k, v: nn.functional.scaled_dot_product_attention(
        q, k, v, torch.zeros(2, 1, 1, 256, dtype=torch.bfloat16)
    ),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_torch_does_not_decompose_attention(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of torch's attention stay one operator until ark lowers them. torch's decomposition
    would convert to fp32 before the products, which matrix units then could not compute.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(256, 768), nn.Linear(256, 256)

        def forward(self, x: Any) -> Any:
            parts = self.inner(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in parts)
            result = FORMS[form](q, k, v)
            return self.outer(result.transpose(1, 2).flatten(2))

    module = Net().eval().to(torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (plan,) = planned_as(module, torch.randn(2, 256, 256).bfloat16(), "h200", monkeypatch)
    kinds = [op.kind for op in plan.ops]
    assert plan.variant == "matrix" and kinds.count("attention_tiles") == 1
    assert not {"transpose", "elementwise"} & set(kinds)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_groups_of_query_heads_read_their_keys_once(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enable_gqa, keys and values have fewer heads than queries and are not repeated in
    memory.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(256, 256 + 128 * heads), nn.Linear(256, 256)

        def forward(self, x: Any) -> Any:
            parts = self.inner(x).split((256, 64 * heads, 64 * heads), -1)
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in parts)
            result = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return self.outer(result.transpose(1, 2).flatten(2))

    module = Net().eval().to(torch.bfloat16)
    (plan,) = planned_as(module, torch.randn(2, 256, 256).bfloat16(), "h200", monkeypatch)
    (op,) = (op for op in plan.ops if op.kind == "attention_tiles")
    assert (op.params["heads"], op.params["kv_heads"]) == (4, heads)
    assert sorted({op.kind for op in plan.ops}) == ["attention_tiles", "matmul"]


def test_sequences_before_batches_are_not_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.MultiheadAttention on (sequence, batch, columns), as in torchvision's vision transformers,
    is planned without transposes.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mha = nn.LayerNorm(256), nn.MultiheadAttention(256, 4, batch_first=True)
            self.wide = nn.Linear(256, 256)

        def forward(self, x: Any) -> Any:
            inner = self.norm(x)
            mixed, _ = nn.functional.multi_head_attention_forward(
                *[inner.transpose(0, 1)] * 3, 256, 4, self.mha.in_proj_weight,
                self.mha.in_proj_bias, None, None, False, 0.0, self.mha.out_proj.weight,
                self.mha.out_proj.bias, training=False, need_weights=False,
            )  # fmt: skip
            return self.wide(x + mixed.transpose(0, 1))

    module = Net().eval().to(torch.bfloat16)
    (plan,) = planned_as(module, torch.randn(2, 197, 256).bfloat16(), "h200", monkeypatch)
    kinds = [op.kind for op in plan.ops]
    assert plan.variant == "matrix" and kinds.count("attention_tiles") == 1
    assert sorted(kinds) == ["attention_tiles", "matmul", "matmul", "matmul", "row_norm"]


def test_attention_that_ark_lacks_stays_in_torch(capfd: pytest.CaptureFixture[str]) -> None:
    """Attention in float64, which ark does not have, stays torch's call on torch's memory."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)

    def function(x: Any) -> Any:
        result = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return result, result.transpose(1, 2)

    with torch.no_grad():
        got, want = torch.compile(function, backend="ark")(x), function(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    assert "stay in torch" in capfd.readouterr().err
