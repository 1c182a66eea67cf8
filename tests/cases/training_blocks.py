"""The models of tests/cases/training_models.py. Each is a function of a library of ops (`InArk` or
`InTorch`, passed as `form`), inputs and parameters, and returns a matrix with one row for each
example.

They are a net of convolutions with pooling and concatenation, and models after publications (Swin:
Liu et al. 2021; Evoformer: Jumper et al. 2021; experts: Shazeer et al. 2017; encoder-decoder:
Vaswani et al. 2017; Llama: Touvron et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import ark

WIDTH, HEADS, TEXT, VOCAB, EXPERTS = 12, 6, 4, 16, 12
HEAD = WIDTH // HEADS
SIDE, WINDOW = 4, 2
SEQUENCES, RESIDUES = 3, 4
Shapes = dict[str, tuple[int, ...]]


class InArk:
    """The ops that the models are written with, in ark."""

    reshape = staticmethod(ark.reshape)
    permute = staticmethod(ark.transpose)
    concat = staticmethod(ark.concat)
    relu = staticmethod(ark.relu)
    gelu = staticmethod(ark.gelu)
    silu = staticmethod(ark.silu)
    sigmoid = staticmethod(ark.sigmoid)
    softmax = staticmethod(ark.softmax)
    layernorm = staticmethod(ark.layernorm)

    @staticmethod
    def detach(x: Any) -> Any:
        return ark.detach(x)

    @staticmethod
    def linear(x: Any, weight: Any) -> Any:
        return ark.matmul(x, weight, transpose_other=True)

    @staticmethod
    def total(x: Any, axis: int, keepdims: bool = False) -> Any:
        return ark.reduce_sum(x, axis, keepdims=keepdims)

    @staticmethod
    def rmsnorm(x: Any, weight: Any) -> Any:
        return ark.rmsnorm(x, weight, 1e-5)

    @staticmethod
    def embedding(ids: Any, table: Any) -> Any:
        return ark.embedding(ids, table)

    @staticmethod
    def conv(x: Any, weight: Any, bias: Any, stride: int) -> Any:
        return ark.conv(x, weight, bias, padding=1, stride=stride)

    @staticmethod
    def max_pool(x: Any) -> Any:
        return ark.max_pool(x, 2)

    @staticmethod
    def causal(scores: Any) -> Any:
        """Returns the scores with -1e9 added above the diagonal."""
        return scores + ark.mul(ark.triu(ark.ones(list(scores.shape())[-2:]), 1), -1e9)

    @staticmethod
    def largest(x: Any, count: int) -> Any:
        """Returns a tensor of x's shape: 1 where an element is among the `count` largest of its
        row, else 0.
        """
        smallest = ark.detach(ark.topk(x, count)[0])[:, count - 1 : count]
        return ark.cast(ark.greater_equal(ark.detach(x), smallest), ark.fp32)


class InTorch:
    """The same ops in torch."""

    reshape = staticmethod(torch.reshape)
    concat = staticmethod(torch.cat)
    relu = staticmethod(torch.relu)
    silu = staticmethod(torch.nn.functional.silu)
    sigmoid = staticmethod(torch.sigmoid)
    linear = staticmethod(torch.nn.functional.linear)
    embedding = staticmethod(torch.nn.functional.embedding)

    @staticmethod
    def detach(x: Any) -> Any:
        return x.detach()

    @staticmethod
    def permute(x: Any, order: list[int]) -> Any:
        return x.permute(order)

    @staticmethod
    def gelu(x: Any) -> Any:
        return torch.nn.functional.gelu(x, approximate="tanh")

    @staticmethod
    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    @staticmethod
    def layernorm(x: Any) -> Any:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)

    @staticmethod
    def total(x: Any, axis: int, keepdims: bool = False) -> Any:
        return x.sum(axis, keepdim=keepdims)

    @staticmethod
    def rmsnorm(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)

    @staticmethod
    def conv(x: Any, weight: Any, bias: Any, stride: int) -> Any:
        return torch.nn.functional.conv2d(x, weight, bias, padding=1, stride=stride)

    @staticmethod
    def max_pool(x: Any) -> Any:
        return torch.nn.functional.max_pool2d(x, 2)

    @staticmethod
    def causal(scores: Any) -> Any:
        return scores - 1e9 * torch.triu(torch.ones(scores.shape[-2:]), 1)

    @staticmethod
    def largest(x: Any, count: int) -> Any:
        return (x.detach() >= x.detach().topk(count).values[:, -1:]).to(x.dtype)


Model = Callable[[Any, Mapping[str, Any], Mapping[str, Any], int, int, Any], Any]


def _from(state: list[Any], before: list[Any] | None) -> list[Any]:
    """Returns the values from which a model starts: its initial values, plus the final values of an
    earlier pass if there is one (recycling).
    """
    return state if before is None else [a + b for a, b in zip(state, before, strict=True)]


@dataclass(frozen=True)
class Block:
    """A model and its data. model: a function of a library of ops (InArk or InTorch), inputs,
    parameters, the numbers of layers and of examples, and the final values of an earlier pass or
    None; returns a row for each example and its own final values. inputs: for each input's name, a
    function that draws random contents. parameters: shapes for a number of layers. tables: inputs
    that are the same for all examples.
    """

    model: Model
    inputs: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]]
    parameters: Callable[[int], Shapes]
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)


def _of_layers(own: Shapes, others: Shapes | None = None) -> Callable[[int], Shapes]:
    """Returns a function that maps the number of layers to the shapes of all parameters: each
    layer's, named with its number, and the others.
    """

    def shapes(layers: int) -> Shapes:
        numbered = {f"{i}.{name}": size for i in range(layers) for name, size in own.items()}
        return {**(others or {}), **numbered}

    return shapes


def _own(weights: Mapping[str, Any], layer: int) -> dict[str, Any]:
    begin = f"{layer}."
    return {n.removeprefix(begin): w for n, w in weights.items() if n.startswith(begin)}


def _normal(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda random, batch: random.standard_normal((batch, *shape))


def _tokens(random: np.random.Generator, batch: int) -> np.ndarray:
    return random.integers(0, VOCAB, (batch, TEXT)).astype(np.int32)


def _conv(form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any) -> Any:
    """A network of convolutions with strides and biases, pooling, concatenation and a residual."""
    h = form.max_pool(form.relu(form.conv(given["x"], weights["stem"], weights["bias"], 1)))
    (h,) = _from([h], before)
    for layer in range(layers):
        w = _own(weights, layer)
        inner = form.relu(form.conv(h, w["deep"], w["deep_bias"], 1))
        h = h + form.conv(form.concat([inner, h], 1), w["mixed"], w["mixed_bias"], 1)
    down = form.conv(h, weights["down"], weights["down_bias"], 2)
    means = form.total(form.reshape(down, (batch, WIDTH, 4)), 2)
    return form.linear(form.reshape(means, (batch, WIDTH)), weights["head"]), [h]


def _rolled(form: Any, x: Any, shift: int) -> Any:
    """Returns images x with rows and columns moved cyclically by `shift`."""
    shift %= SIDE
    x = form.concat([x[:, shift:], x[:, :shift]], 1)
    return form.concat([x[:, :, shift:], x[:, :, :shift]], 2)


def _swin(form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any) -> Any:
    """Swin blocks; every second one has shifted windows."""
    (x,), along, rows = _from([given["x"]], before), SIDE // WINDOW, batch * SIDE * SIDE
    image, windows = (batch, SIDE, SIDE, WIDTH), batch * along * along
    for layer in range(layers):
        w = _own(weights, layer)
        h = form.reshape(form.layernorm(form.reshape(x, (rows, WIDTH))), image)
        h = _rolled(form, h, WINDOW // 2) if layer % 2 else h
        h = form.reshape(h, (batch, along, WINDOW, along, WINDOW, WIDTH))
        h = form.reshape(form.permute(h, [0, 1, 3, 2, 4, 5]), (rows, WIDTH))
        heads = (windows, WINDOW * WINDOW, HEADS, HEAD)
        q, k, v = (
            form.permute(form.reshape(form.linear(h, w[n]), heads), [0, 2, 1, 3]) for n in "qkv"
        )
        scores = (q @ form.permute(k, [0, 1, 3, 2])) * HEAD**-0.5
        mixed = form.reshape(form.permute(form.softmax(scores) @ v, [0, 2, 1, 3]), (rows, WIDTH))
        mixed = form.linear(mixed, w["o"])
        mixed = form.reshape(mixed, (batch, along, along, WINDOW, WINDOW, WIDTH))
        mixed = form.reshape(form.permute(mixed, [0, 1, 3, 2, 4, 5]), image)
        x = x + (_rolled(form, mixed, -(WINDOW // 2)) if layer % 2 else mixed)
        h = form.linear(form.layernorm(form.reshape(x, (rows, WIDTH))), w["up"])
        x = x + form.reshape(form.linear(form.gelu(h), w["down"]), image)
    return form.reshape(x, (batch, SIDE * SIDE * WIDTH)), [x]


def _evoformer(form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any) -> Any:
    """Evoformer blocks: row attention with a pair bias, column attention, transition, outer product
    mean, triangle updates, transition.
    """
    msa, pair = _from([given["msa"], given["pair"]], before)
    s, r, c = SEQUENCES, RESIDUES, WIDTH

    def attended(x: Any, w: Any, name: str, bias: Any = None) -> Any:
        """Returns gated attention along the third dimension of (batch, m, n, c)."""
        m, n = (s, r) if bias is not None else (r, s)
        q, k, v = (
            form.permute(
                form.reshape(form.linear(x, w[f"{name}_{kind}"]), (batch, m, n, HEADS, HEAD)),
                [0, 1, 3, 2, 4],
            )
            for kind in "qkv"
        )
        scores = (q @ form.permute(k, [0, 1, 2, 4, 3])) * HEAD**-0.5
        scores = scores if bias is None else scores + bias
        mixed = form.permute(form.softmax(scores) @ v, [0, 1, 3, 2, 4])
        gate = form.sigmoid(form.linear(x, w[f"{name}_g"]))
        return form.linear(gate * form.reshape(mixed, (batch, m, n, c)), w[f"{name}_o"])

    for layer in range(layers):
        w = _own(weights, layer)
        bias = form.permute(form.linear(form.layernorm(pair), w["bias"]), [0, 3, 1, 2])
        bias = form.reshape(bias, (batch, 1, HEADS, r, r))
        msa = msa + attended(form.layernorm(msa), w, "row", bias)
        columns = attended(form.permute(form.layernorm(msa), [0, 2, 1, 3]), w, "column")
        msa = msa + form.permute(columns, [0, 2, 1, 3])
        msa = msa + form.linear(form.relu(form.linear(form.layernorm(msa), w["up"])), w["down"])
        left, right = (
            form.reshape(form.linear(form.layernorm(msa), w[n]), (batch, s, r * 2))
            for n in ("left", "right")
        )
        outer = form.permute(left, [0, 2, 1]) @ right * (1 / s)
        outer = form.permute(form.reshape(outer, (batch, r, 2, r, 2)), [0, 1, 3, 2, 4])
        pair = pair + form.linear(form.reshape(outer, (batch, r, r, 4)), w["outer"])
        h = form.layernorm(pair)
        a, b = (
            form.permute(form.sigmoid(form.linear(h, w[f"{n}_g"])) * form.linear(h, w[n]), order)
            for n, order in (("a", [0, 3, 1, 2]), ("b", [0, 3, 2, 1]))
        )
        product = form.layernorm(form.permute(a @ b, [0, 2, 3, 1]))
        pair = pair + form.linear(product, w["triangle"])
        h = form.relu(form.linear(form.layernorm(pair), w["pair_up"]))
        pair = pair + form.linear(h, w["pair_down"])
    ends = form.reshape(msa, (batch, s * r * c)), form.reshape(pair, (batch, r * r * c))
    return form.concat(list(ends), 1), [msa, pair]


def _attention(form: Any, x: Any, y: Any, w: Any, name: str, batch: int, causal: bool) -> Any:
    """Returns attention with queries of rows x and keys and values of rows y, both (batch * TEXT,
    WIDTH).
    """
    q, k, v = (
        form.permute(
            form.reshape(form.linear(rows, w[f"{name}{kind}"]), (batch, TEXT, HEADS, HEAD)),
            [0, 2, 1, 3],
        )
        for kind, rows in (("q", x), ("k", y), ("v", y))
    )
    scores = (q @ form.permute(k, [0, 1, 3, 2])) * HEAD**-0.5
    weights = form.softmax(form.causal(scores) if causal else scores)
    mixed = form.reshape(form.permute(weights @ v, [0, 2, 1, 3]), (batch * TEXT, WIDTH))
    return form.linear(mixed, w[f"{name}o"])


def _experts(form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any) -> Any:
    """A mixture of experts: attention, then two experts for each row, chosen by its router."""
    rows = batch * TEXT
    (x,) = _from([form.reshape(given["x"], (rows, WIDTH))], before)
    for layer in range(layers):
        w = _own(weights, layer)
        h = form.layernorm(x)
        x = x + _attention(form, h, h, w, "", batch, True)
        h = form.layernorm(x)
        chances = form.softmax(form.linear(h, w["router"]))
        chosen = chances * form.largest(chances, 2)
        chosen = form.reshape(form.permute(chosen, [1, 0]), (EXPERTS, rows, 1))
        inner = form.gelu(form.reshape(h, (1, rows, WIDTH)) @ w["up"])
        mixed = form.total((inner @ w["down"]) * chosen, 0)
        x = x + form.reshape(mixed, (rows, WIDTH))
    return form.reshape(x, (batch, TEXT * WIDTH)), [x]


def _encoder_decoder(
    form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any
) -> Any:
    """An encoder and a decoder with post-norm layers. Every decoder layer reads the encoder's
    result.
    """
    rows = (batch * TEXT, WIDTH)
    y = form.reshape(form.embedding(given["source"], weights["table"]), rows)
    x = form.reshape(form.embedding(given["target"], weights["table"]), rows)
    y, x = _from([y, x], before)

    def fed(h: Any, w: Any, name: str) -> Any:
        inner = form.relu(form.linear(h, w[f"{name}up"]))
        return form.layernorm(h + form.linear(inner, w[f"{name}down"]))

    for layer in range(layers):
        w = _own(weights, layer)
        y = form.layernorm(y + _attention(form, y, y, w, "encoder_", batch, False))
        y = fed(y, w, "encoder_")
    for layer in range(layers):
        w = _own(weights, layer)
        x = form.layernorm(x + _attention(form, x, x, w, "decoder_", batch, True))
        x = form.layernorm(x + _attention(form, x, y, w, "cross_", batch, False))
        x = fed(x, w, "decoder_")
    return form.reshape(form.linear(x, weights["table"]), (batch, TEXT * VOCAB)), [y, x]


def _llama(form: Any, given: Any, weights: Any, layers: int, batch: int, before: Any) -> Any:
    """A Llama: rotary embeddings, two query heads for each key head, gated perceptrons, tied
    embeddings.
    """
    rows, shared = batch * TEXT, HEADS // 2
    h = form.reshape(form.embedding(given["x"], weights["embedding"]), (rows, WIDTH))
    (h,) = _from([h], before)
    cos, sin = given["cos"], given["sin"]

    def heads(x: Any, w: Any, count: int) -> Any:
        split = form.reshape(form.linear(x, w), (batch, TEXT, shared, count // shared, HEAD))
        return form.permute(split, [0, 2, 3, 1, 4])

    def rotated(x: Any) -> Any:
        half = HEAD // 2
        turned = form.concat([x[:, :, :, :, half:] * -1.0, x[:, :, :, :, :half]], 4)
        return x * cos + turned * sin

    for layer in range(layers):
        w = _own(weights, layer)
        x = form.rmsnorm(h, w["attention_norm"])
        q, k = rotated(heads(x, w["q"], HEADS)), rotated(heads(x, w["k"], shared))
        scores = form.causal((q @ form.permute(k, [0, 1, 2, 4, 3])) * HEAD**-0.5)
        mixed = form.permute(form.softmax(scores) @ heads(x, w["v"], shared), [0, 3, 1, 2, 4])
        h = h + form.linear(form.reshape(mixed, (rows, WIDTH)), w["o"])
        x = form.rmsnorm(h, w["mlp_norm"])
        gate = form.silu(form.linear(x, w["gate"]))
        h = h + form.linear(gate * form.linear(x, w["up"]), w["down"])
    x = form.rmsnorm(h, weights["norm"])
    return form.reshape(form.linear(x, weights["embedding"]), (batch, TEXT * VOCAB)), [h]


def _squares(*names: str) -> Shapes:
    return dict.fromkeys(names, (WIDTH, WIDTH))


_ANGLES = np.outer(np.arange(TEXT), [1.0])
_WIDE: Shapes = {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
BLOCKS: dict[str, Block] = {
    "convolution": Block(
        _conv,
        {"x": _normal(3, 8, 8)},
        _of_layers(
            {
                "deep": (WIDTH, WIDTH, 3, 3),
                "deep_bias": (WIDTH,),
                "mixed": (WIDTH, 2 * WIDTH, 3, 3),
                "mixed_bias": (WIDTH,),
            },
            {
                "stem": (WIDTH, 3, 3, 3),
                "bias": (WIDTH,),
                "down": (WIDTH, WIDTH, 3, 3),
                "down_bias": (WIDTH,),
                "head": (VOCAB, WIDTH),
            },
        ),
    ),
    "Swin": Block(
        _swin,
        {"x": _normal(SIDE, SIDE, WIDTH)},
        _of_layers({**_squares("q", "k", "v", "o"), **_WIDE}),
    ),
    "Evoformer": Block(
        _evoformer,
        {"msa": _normal(SEQUENCES, RESIDUES, WIDTH), "pair": _normal(RESIDUES, RESIDUES, WIDTH)},
        _of_layers(
            {
                **_squares(*(f"{n}_{k}" for n in ("row", "column") for k in "qkvog")),
                **_squares("a", "a_g", "b", "b_g", "triangle"),
                **_WIDE,
                "bias": (HEADS, WIDTH),
                "left": (2, WIDTH),
                "right": (2, WIDTH),
                "outer": (WIDTH, 4),
                "pair_up": (2 * WIDTH, WIDTH),
                "pair_down": (WIDTH, 2 * WIDTH),
            }
        ),
    ),
    "experts": Block(
        _experts,
        {"x": _normal(TEXT, WIDTH)},
        _of_layers(
            {
                **_squares("q", "k", "v", "o"),
                "router": (EXPERTS, WIDTH),
                "up": (EXPERTS, WIDTH, WIDTH),
                "down": (EXPERTS, WIDTH, WIDTH),
            }
        ),
    ),
    "encoder-decoder": Block(
        _encoder_decoder,
        {"source": _tokens, "target": _tokens},
        _of_layers(
            {
                **_squares(*(f"{n}_{k}" for n in ("encoder", "decoder", "cross") for k in "qkvo")),
                **{f"{n}_{k}": s for n in ("encoder", "decoder") for k, s in _WIDE.items()},
            },
            {"table": (VOCAB, WIDTH)},
        ),
    ),
    "Llama": Block(
        _llama,
        {"x": _tokens},
        _of_layers(
            {
                **_squares("q", "o"),
                "k": (WIDTH // 2, WIDTH),
                "v": (WIDTH // 2, WIDTH),
                "gate": (2 * WIDTH, WIDTH),
                **_WIDE,
                "attention_norm": (WIDTH,),
                "mlp_norm": (WIDTH,),
            },
            {"embedding": (VOCAB, WIDTH), "norm": (WIDTH,)},
        ),
        {"cos": np.tile(np.cos(_ANGLES), 2), "sin": np.tile(np.sin(_ANGLES), 2)},
    ),
}
