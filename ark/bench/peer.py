"""The peer: the same Llama decode step in plain torch, eager or compiled into a replayed graph.

Written as one would write it for speed in torch: fused qkv and gate/up products, a static cache,
scaled_dot_product_attention. Needs torch; called by ark.bench.decode and ark.bench.ops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ark.errors import SystemError
from ark.models.config import LlamaConfig, rope_inverse_frequencies


def import_torch() -> Any:
    """torch, or a SystemError that says how to get it."""
    try:
        import torch
    except ImportError as error:
        raise SystemError(
            "the comparison needs torch; install it with `pip install 'ark-gpu[torch]'`"
        ) from error
    return torch


def torch_device(accelerated: bool) -> str:
    """torch's name for the device that ark runs on; it calls every vendor's GPUs the same."""
    return "cuda" if accelerated else "cpu"


def repeated(
    call: Callable[[], Any], accelerated: bool, stack: contextlib.ExitStack
) -> Callable[[int], float]:
    """A function that runs `call` about so many times and gives the seconds of one.

    accelerated: in a CUDA graph of several calls, timed by the device's events.
    """
    if not accelerated:

        def loop(iterations: int) -> float:
            start = time.perf_counter()
            for _ in range(iterations):
                call()
            return (time.perf_counter() - start) / iterations

        return loop
    torch = import_torch()
    calls = 10
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    stack.callback(graph.reset)

    def replay(iterations: int) -> float:
        replays = -(-iterations // calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / (replays * calls)

    return replay


class TorchDecoder:
    """weights: torch tensors by ark's parameter names (neighbouring rotary pairs, as in ark)."""

    def __init__(
        self, config: LlamaConfig, weights: dict[str, Any], context: int, device: str
    ) -> None:
        torch = import_torch()
        self.config, self.weights, self.device = config, weights, device
        dtype = weights["embedding"].dtype
        dims = (1, config.num_key_value_heads, context, config.head_dim)
        self.caches = [
            (
                torch.zeros(dims, dtype=dtype, device=device),
                torch.zeros(dims, dtype=dtype, device=device),
            )
            for _ in range(config.num_hidden_layers)
        ]
        angles = np.outer(np.arange(context), rope_inverse_frequencies(config))
        self.cos = torch.tensor(np.cos(angles), dtype=torch.float32, device=device)
        self.sin = torch.tensor(np.sin(angles), dtype=torch.float32, device=device)
        self.places = torch.arange(context, device=device)

    def step(self, token: Any, position: Any) -> Any:
        """token, position: int64 tensors of shape (1,). Returns the next token, shape (1,)."""
        torch = import_torch()
        c, w = self.config, self.weights
        heads, kv, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        linear = torch.nn.functional.linear

        def norm(x: Any, weight: Any) -> Any:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)
            return y.to(x.dtype) * weight

        def rotate(x: Any) -> Any:
            a, b = x[..., 0::2].float(), x[..., 1::2].float()
            cos, sin = self.cos[position], self.sin[position]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

        mask = (self.places <= position)[None, None, None, :]
        h = w["embedding"][token]
        for i, (keys, values) in enumerate(self.caches):
            at = f"layers.{i}."
            qkv = linear(norm(h, w[at + "attention_norm"]), w[at + "attention.query+key+value"])
            q, k, v = qkv.split([heads * width, kv * width, kv * width], -1)
            q, k = rotate(q.view(1, heads, 1, width)), rotate(k.view(1, kv, 1, width))
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v.view(1, kv, 1, width))
            a = torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=heads != kv
            )
            h = h + linear(a.view(1, heads * width), w[at + "attention.output"])
            gate_up = linear(norm(h, w[at + "mlp_norm"]), w[at + "mlp.gate+up"])
            gated = torch.nn.functional.silu(gate_up[:, 0::2]) * gate_up[:, 1::2]
            h = h + linear(gated, w[at + "mlp.down"])
        head = "embedding" if c.tie_word_embeddings else "head.weight"
        self.logits = linear(norm(h, w["norm"]), w[head])
        return self.logits.argmax(-1)

    def run(self, token: int, position: int, steps: int, compiled: bool) -> tuple[float, list[int]]:
        """Seconds per token over `steps`, and the tokens. compiled: torch.compile + CUDA graph."""
        torch = import_torch()
        with torch.inference_mode():
            tokens = torch.tensor([token], device=self.device)
            place = torch.tensor([position], device=self.device)
            if not compiled:
                return self._eager(tokens, place, steps)
            step = torch.compile(self.step, fullgraph=True)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(tokens, place)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step(tokens, place)
                place_next = place + 1
                tokens.copy_(out)
                place.copy_(place_next)
            tokens.fill_(token)
            place.fill_(position)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            made = []
            torch.cuda.synchronize()
            begin.record()
            for _ in range(steps):
                graph.replay()
                made.append(tokens.clone())
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3 / steps, [int(t) for t in made]

    def _eager(self, tokens: Any, place: Any, steps: int) -> tuple[float, list[int]]:
        torch = import_torch()
        self.step(tokens, place)
        if self.device != "cpu":
            torch.cuda.synchronize()
        made = []
        start = time.perf_counter()
        for _ in range(steps):
            tokens = self.step(tokens, place)
            place = place + 1
            made.append(int(tokens))
        return (time.perf_counter() - start) / steps, made
