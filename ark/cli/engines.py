"""What the commands that open an engine share: its device, a verdict on memory, chat templates."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from ark.backend import registry
from ark.cli.common import errors, progress, read_file
from ark.errors import SystemError
from ark.machine import Machine
from ark.models.build import FULL
from ark.models.chat import DEFAULT, ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.plans import choose_context
from ark.models.sampling import MAX_LOGPROBS
from ark.models.tokenizer import Tokenizer
from ark.serving.engine import PAGE_POSITIONS, Engine


def chat_templates(directory: str, tokenizer: Tokenizer, file: str | None) -> ChatTemplates:
    """The templates of a checkpoint, or the one of `--chat-template FILE`."""
    templates = ChatTemplates.open(directory, tokenizer.special_tokens)
    if not file:
        return templates
    return replace(templates, source=file, texts={DEFAULT: read_file(file, "a chat template")})


@contextmanager
def open_engine(
    args: argparse.Namespace, checkpoint: Checkpoint, slots: int, pages: int | None = None
) -> Iterator[Engine]:
    """An engine on the device that the options name, after a verdict on memory."""
    backend, probe = registry.choose(args.backend)
    if args.backend is None and backend.name == registry.FALLBACK:
        errors.print(f"no accelerator found; running on {probe.devices[0].name}", style="dim")
    for note in probe.notes:
        errors.print(note, style="yellow")
    with closing(backend.open(args.device)) as device:
        length = choose_context(checkpoint, args.context)
        positions = pages * PAGE_POSITIONS if pages else slots * length
        said = check_memory(checkpoint, device.machine, positions)
        errors.print(said, style="dim", soft_wrap=True)
        with progress(False) as tell:
            engine = Engine.open(
                checkpoint,
                backend,
                device,
                slots=slots,
                context=args.context,
                chunk=args.chunk,
                pages=pages,
                sampling=FULL,
                max_logprobs=MAX_LOGPROBS,
                progress=tell,
            )
        with engine:
            yield engine


def check_memory(checkpoint: Checkpoint, machine: Machine, positions: int) -> str:
    """What weights, and keys and values of so many positions, take; SystemError where the device
    does not have as much memory. Nothing is loaded for it.
    """
    config, item = checkpoint.config, checkpoint.dtype.itemsize
    stored = {weight.stored_name: math.prod(weight.shape) for weight in checkpoint.weights.values()}
    weights = item * sum(stored.values())
    position = 2 * item * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    said = (
        f"weights take {weights / 1e9:.2f} GB, keys and values of {positions:,} positions "
        f"{position * positions / 1e9:.2f} GB"
    )
    room = machine.memory_bytes
    if room and weights + position * positions > room:
        most = max(0, room - weights) // position
        raise SystemError(
            f"{said}, but {machine.name} has {room / 1e9:.2f} GB: room for {most:,} positions; "
            "lower --slots or --context, or use a smaller model"
        )
    return said + (f", of {room / 1e9:.2f} GB" if room else "")
