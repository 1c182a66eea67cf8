"""What the commands that open an engine share: its device, a verdict on memory, chat templates."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from ark.backend import registry
from ark.cli.common import errors, progress, read_file, tell_backend
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
    tell_backend(args.backend, backend, probe)
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
    weights, position = checkpoint.nbytes, checkpoint.position_nbytes
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
