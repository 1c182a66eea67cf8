"""Checks memory before an engine loads anything: weights, keys and values must fit in the device's
free memory. Used by `ark.LLM`, `ark serve` and `ark chat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ark.errors import InvalidUsageError, SystemError
from ark.models.adapters import AdapterSet
from ark.models.checkpoint import Checkpoint
from ark.serving.loading import PAGE_POSITIONS

MEMORY_SHARE = 0.9
"""The default share of the device's free memory that is used. The rest is for a plan's other
buffers.
"""


def checked_share(share: Any) -> float:
    """Returns the share. Raises InvalidUsageError unless it is above 0 and at most 1."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise InvalidUsageError(f"memory_share is {share!r:.60}; it must be above 0 and at most 1")
    return float(share)


def beside_nbytes(
    checkpoint: Checkpoint,
    slots: int,
    context: int,
    draft: Checkpoint | None,
    adapters: Mapping[str, Path | str] | None,
) -> int:
    """The device memory, in bytes, that is needed in addition to the model's: for adapters, and for
    the weights, keys and values of the draft model.
    """
    nbytes = AdapterSet.open(adapters or {}, checkpoint).nbytes
    if draft is None:
        return nbytes
    pages = slots * -(-context // PAGE_POSITIONS) + slots + 1
    return nbytes + draft.nbytes + pages * PAGE_POSITIONS * draft.position_nbytes


def choose_pages(
    checkpoint: Checkpoint,
    free: int,
    context: int,
    slots: int,
    share: float,
    asked: int | None,
    ranks: int = 1,
    beside: int = 0,
) -> tuple[int, str]:
    """Returns the number of pages to allocate, and a line of text that states what fits. asked: the
    requested number of pages; None for enough pages for all slots, or as many as fit. free: the
    device's free bytes. share: the part of these bytes that may be used. ranks: the number of ranks
    that share weights, keys and values; each is assumed to hold the whole embedding. beside: bytes
    of a draft model and of adapters (`beside_nbytes`).

    Raises SystemError if the weights and the `asked` pages do not fit, or without `asked`, if the
    weights and the pages of one request do not fit.
    """
    config = checkpoint.config
    embedding = config.vocab_size * config.hidden_size * checkpoint.dtype.itemsize
    weights = (checkpoint.nbytes + (ranks - 1) * embedding) // ranks + beside
    page = checkpoint.position_nbytes * PAGE_POSITIONS // ranks
    each = -(-context // PAGE_POSITIONS)
    # One page for each row of the batch, and one for prompts, cannot be used by requests.
    fitting = int((free * share - weights) // page) - slots - 1
    verdict = (
        f"weights take {weights / 1e9:.2f} GB and a request of {context:,} positions "
        f"{each * page / 1e9:.2f} GB of keys and values, of {free / 1e9:.2f} GB free on the device"
    )
    least = each if asked is None else asked
    if fitting < least:
        raise SystemError(
            f"{verdict}, of which the share {share:g} is used: room for "
            f"{max(0, fitting) * PAGE_POSITIONS:,} positions, and "
            f"{least * PAGE_POSITIONS:,} are needed; lower the context (max_model_len, --context) "
            "or the pages, raise the share (memory_share, --memory-share), or use another device"
        )
    count = min(slots * each, fitting) if asked is None else asked
    return count, f"{verdict}; {count // each} such requests fit at once"
