"""Models from checkpoint directories: their configs, weights and tokenizers.

`register` adds a decoder that is not a part of ark.
"""

from ark.models.registry import register

__all__ = ["register"]
