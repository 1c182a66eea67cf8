"""transformers' KV cache with keys and values rounded to 8-bit codes, as `--kv-cache-dtype` stores
them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

LARGEST = {"fp8": 448.0, "int8": 127.0}


class CacheOfCodes(DynamicCache):
    """A cache whose keys and values are rounded to codes, with a scale for each head and
    position.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST[self.kind]
        if self.kind == "int8":
            return (x / scale).round() * scale
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def update(self, key_states: Any, value_states: Any, *more: Any, **named: Any) -> Any:
        return super().update(self.rounded(key_states), self.rounded(value_states), *more, **named)

    def argument(self) -> dict[str, Any]:
        """Returns the keyword argument that passes the cache to a model in this version of
        transformers.
        """
        newer = "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
        return {"cache" if newer else "past_key_values": self}
