"""The Llama decoder in plain torch with which ark's decoder is compared. It runs eagerly, or
compiled into a replayed graph. It has torch's usual optimisations: fused qkv and gate/up matmuls, a
static cache, scaled_dot_product_attention. With fp32 as its type, it also computes the reference
logits of ark.cli.measure.fidelity. Needs torch; called by ark.cli.measure.decode and
ark.cli.measure.ops.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, SystemError
from ark.models.config import LlamaConfig, rope_inverse_frequencies

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")  # of models that TorchDecoder computes


def import_torch() -> Any:
    """Imports and returns torch. Raises SystemError with the remedy if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise SystemError(
            "the comparison needs torch; install it with `pip install 'ark-gpu[torch]'`"
        ) from error
    return torch


def check_peer(config: LlamaConfig, world: int) -> None:
    """Raises InvalidUsageError if TorchDecoder does not compute the model of a comparison."""
    if world > 1:
        raise InvalidUsageError(
            "--vs and --check need one device; omit them to measure several ranks"
        )
    if config.architecture not in ARCHITECTURES:
        raise InvalidUsageError(
            f"--vs torch and --check compare {' and '.join(ARCHITECTURES)}, but this is "
            f"{config.architecture}; omit them"
        )


def functional() -> Any:
    """torch.nn.functional."""
    return import_torch().nn.functional


def torch_device(accelerated: bool) -> str:
    """torch's name for the device that ark runs on. torch uses one name for the GPUs of all
    vendors.
    """
    return "cuda" if accelerated else "cpu"


def waiting(accelerated: bool) -> Callable[[], None]:
    """Returns a function that waits until torch's device has finished all queued work."""
    if not accelerated:
        return lambda: None
    wait: Callable[[], None] = import_torch().cuda.synchronize
    return wait


def repeated(
    call: Callable[[], Any], accelerated: bool, stack: contextlib.ExitStack, calls: int = 10
) -> Callable[[int], float]:
    """Returns a function that runs `call` about the given number of times and returns the seconds
    of one call.

    accelerated: run the calls in captured CUDA graphs of `calls` calls, timed by the device's
    events.
    """
    if not accelerated:

        def loop(iterations: int) -> float:
            start = time.perf_counter()
            for _ in range(iterations):
                call()
            return (time.perf_counter() - start) / iterations

        return loop
    torch = import_torch()
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
    """A Llama in torch that reads ark's packed weights, in which the rows of a rotary pair are
    neighbours. It has its own caches, for `batch` texts of equal length.

    weights: torch tensors by ark's parameter names. dtype: the type of the computation; None for
    the weights' own. With a wider type, each weight is converted when it is used, so that a second
    copy of the model is not needed.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Any],
        context: int,
        device: str,
        dtype: Any = None,
        batch: int = 1,
    ) -> None:
        torch = import_torch()
        self.config, self.weights, self.device = config, weights, device
        self.dtype, self.batch = dtype or weights["embedding"].dtype, batch
        dims = (batch, config.num_key_value_heads, context, config.head_dim)
        self.caches = [
            tuple(torch.zeros(dims, dtype=self.dtype, device=device) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        angles = np.outer(np.arange(context), rope_inverse_frequencies(config))
        self.cos = torch.tensor(np.cos(angles), dtype=torch.float32, device=device)
        self.sin = torch.tensor(np.sin(angles), dtype=torch.float32, device=device)
        self.places = torch.arange(context, device=device)

    def fill(self, layer: int, keys: Any, values: Any) -> None:
        """Sets a layer's caches. keys, values: (batch * kv_heads, positions, head_dim), with at
        least as many positions as this cache has.
        """
        with import_torch().inference_mode():
            for cache, given in zip(self.caches[layer], (keys, values), strict=True):
                texts = given.to(self.dtype).unflatten(0, cache.shape[:2])
                cache.copy_(texts[:, :, : cache.shape[2]])

    def step(self, tokens: Any, position: Any) -> Any:
        """Computes one step. tokens: int64 (batch * rows,), text after text. position: int64 (1,),
        the position of each text's first token. Returns the next token of each text, (batch,), and
        sets `logits` (batch, vocabulary).
        """
        torch = import_torch()
        c, batch = self.config, self.batch
        rows = tokens.shape[0] // batch
        heads, kv, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        linear = torch.nn.functional.linear

        def weight(name: str) -> Any:
            return self.weights[name].to(self.dtype)

        def norm(x: Any, name: str) -> Any:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)
            return y.to(x.dtype) * weight(name)

        places = position + self.places[:rows]
        cos, sin = self.cos[places], self.sin[places]

        def by_head(x: Any, count: int) -> Any:
            return x.view(batch, rows, count, width).transpose(1, 2)

        def rotate(x: Any) -> Any:
            a, b = x[..., 0::2].float(), x[..., 1::2].float()
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)

        past = self.places[None, :] <= places[:, None]
        h = self.weights["embedding"][tokens].to(self.dtype)
        for i, (keys, values) in enumerate(self.caches):
            at = f"layers.{i}."
            qkv = linear(norm(h, at + "attention_norm"), weight(at + "attention.query+key+value"))
            q, k, v = qkv.split([heads * width, kv * width, kv * width], -1)
            keys.index_copy_(2, places, rotate(by_head(k, kv)))
            values.index_copy_(2, places, by_head(v, kv))
            mask = past
            if window := c.window(i):
                mask = past & (self.places[None, :] > places[:, None] - window)
            a = torch.nn.functional.scaled_dot_product_attention(
                rotate(by_head(q, heads)), keys, values, attn_mask=mask, enable_gqa=heads != kv
            )
            a = a.transpose(1, 2).reshape(batch * rows, heads * width)
            h = h + linear(a, weight(at + "attention.output"))
            gate_up = linear(norm(h, at + "mlp_norm"), weight(at + "mlp.gate+up"))
            gated = torch.nn.functional.silu(gate_up[:, 0::2]) * gate_up[:, 1::2]
            h = h + linear(gated, weight(at + "mlp.down"))
        head = "embedding" if c.tie_word_embeddings else "head.weight"
        self.logits = linear(norm(h.view(batch, rows, -1)[:, -1], "norm"), weight(head))
        return self.logits.argmax(-1)

    def run(self, first: Sequence[int], position: int, steps: int, compiled: bool) -> float:
        """Decodes `steps` tokens of each text, starting from `first`; returns the seconds per
        token. compiled: use torch.compile and replay the step as a CUDA graph.
        """
        torch = import_torch()
        with torch.inference_mode():
            tokens = torch.tensor(first, device=self.device)
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
            tokens.copy_(torch.tensor(first))
            place.fill_(position)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(steps):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            graph.reset()
            return float(begin.elapsed_time(end)) / 1e3 / steps

    def prompt(self, length: int, accelerated: bool) -> float:
        """Seconds from the start of a prompt of this many tokens to the first new token. On a GPU a
        captured graph is replayed.
        """
        torch = import_torch()
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            tokens = torch.arange(length, device=self.device) % self.config.vocab_size
            place = torch.zeros(1, dtype=torch.int64, device=self.device)
            call = repeated(lambda: self.step(tokens, place), accelerated, stack)
            return min(call(2) for _ in range(3))

    def _eager(self, tokens: Any, place: Any, steps: int) -> float:
        torch = import_torch()
        self.step(tokens, place)
        if self.device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            tokens = self.step(tokens, place)
            place = place + 1
            tokens.tolist()
        return (time.perf_counter() - start) / steps
