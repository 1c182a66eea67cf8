"""Models from checkpoint directories: their config, weights and tokenizer.

`register` adds a decoder from outside of ark.
"""

from ark.models.registry import register

__all__ = ["register"]
