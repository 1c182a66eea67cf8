"""Functions that the commands with an engine (continuous batching of requests) share. They open the
engine's device, check memory and load chat templates. Called by ark.cli.chat, ark.cli.serve and
ark.cli.bench_perplexity.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.common import device_index, errors, progress, read_file, tell_backend
from ark.cli.common import share as rank_machine
from ark.cli.parser import option, positive
from ark.errors import InvalidUsageError
from ark.models.build import FULL
from ark.models.chat import DEFAULT, ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.hub import local_directory
from ark.models.plans import choose_context
from ark.models.sampling import MAX_LOGPROBS
from ark.models.tokenizer import Tokenizer
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.rank_info import rank_from_environment
from ark.serving.embedder import Embedder
from ark.serving.engine import Engine
from ark.serving.loading import load_model
from ark.serving.memory import MEMORY_SHARE, beside_nbytes, checked_share, choose_pages
from ark.serving.ranks import follow


def open_checkpoint(args: argparse.Namespace) -> Checkpoint:
    """Opens the checkpoint in `directory`, with the types that `--quantize` and `--kv-cache-dtype`
    name.
    """
    return Checkpoint.open(local_directory(args.directory), args.quantize, args.kv_cache_dtype)


def chat_templates(directory: Path, tokenizer: Tokenizer, file: str | None) -> ChatTemplates:
    """The chat templates of a checkpoint, or the template in the file of `--chat-template FILE`."""
    templates = ChatTemplates.open(directory, tokenizer.special_tokens)
    if not file:
        return templates
    return replace(templates, source=file, texts={DEFAULT: read_file(file, "a chat template")})


def add_memory(parser: argparse.ArgumentParser, help_context: str) -> None:
    """Adds `--context` and `--memory-share`."""
    option(parser, "--context --max-model-len N", help_context, positive)
    option(
        parser,
        "--memory-share X",
        "of the device's free memory, for weights, keys and values",
        share,
        MEMORY_SHARE,
    )


def share(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    try:
        return checked_share(float(text))
    except (ValueError, InvalidUsageError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0 and at most 1"
        ) from None


@contextmanager
def _engine_options(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    slots: int,
    pages: int | None,
    ranks: Bootstrap | None,
    draft_tokens: int,
    draft: Checkpoint | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Iterator[tuple[Backend, Device, dict[str, Any]]]:
    """Opens the device that the options name and checks its memory. Returns the backend, the
    device, and further arguments of Engine.open and load_model.
    """
    world, leads = (1, True) if ranks is None else (ranks.world_size, ranks.rank == 0)
    backend, probe = registry.choose(args.backend)
    devices = len(probe.devices)
    if leads:
        tell_backend(args.backend, backend, probe)
    index = device_index(args.device, rank_from_environment(), devices)
    with closing(backend.open(index)) as device:
        length = choose_context(checkpoint, args.context)
        free = device.free_bytes()
        beside = beside_nbytes(checkpoint, slots, length, draft, adapters)
        share = args.memory_share
        count, verdict = choose_pages(checkpoint, free, length, slots, share, pages, world, beside)
        if leads:
            errors.print(verdict, style="dim", soft_wrap=True)
        if ranks is not None:
            count = min(int(each) for each in ranks.all_gather(b"%d" % count, "pages"))
        with progress(not leads) as tell:
            yield (
                backend,
                device,
                {
                    "slots": slots,
                    "context": args.context,
                    "chunk": args.chunk,
                    "pages": count,
                    "draft": draft_tokens,
                    "adapters": adapters,
                    "sampling": FULL,
                    "max_logprobs": MAX_LOGPROBS,
                    "progress": tell,
                    "ranks": ranks,
                    "machine": rank_machine(device.machine, backend.name, world, devices),
                },
            )


@contextmanager
def open_engine(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    slots: int,
    pages: int | None = None,
    ranks: Bootstrap | None = None,
    draft_tokens: int = 0,
    draft: Checkpoint | None = None,
    adapters: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """Opens an engine on the device that the options name. ranks: the ranks that share the model;
    this is rank 0. draft_tokens, draft: the arguments `draft` and `draft_model` of Engine.open.
    """
    asked = _engine_options(args, checkpoint, slots, pages, ranks, draft_tokens, draft, adapters)
    with (
        asked as (backend, device, options),
        Engine.open(checkpoint, backend, device, draft_model=draft, **options) as engine,
    ):
        yield engine


def follow_engine(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    slots: int,
    pages: int | None,
    ranks: Bootstrap,
    draft_tokens: int,
) -> None:
    """Runs a rank other than rank 0 of an engine that several ranks share. Rank 0 decides what the
    ranks compute. Returns when its engine ends.
    """
    asked = _engine_options(args, checkpoint, slots, pages, ranks, draft_tokens)
    with asked as (backend, device, options):
        model = load_model(checkpoint, backend, device, **options)
        try:
            follow(model.executor, ranks)
        finally:
            model.close()


@contextmanager
def open_embedder(args: argparse.Namespace, checkpoint: Checkpoint) -> Iterator[Embedder]:
    """Opens an embedder on the device that the options name, after checking that the model fits its
    memory.
    """
    backend, probe = registry.choose(args.backend)
    tell_backend(args.backend, backend, probe)
    with closing(backend.open(args.device or 0)) as device:
        length = choose_context(checkpoint, args.context)
        free = device.free_bytes()
        _, verdict = choose_pages(checkpoint, free, length, 1, args.memory_share, None)
        errors.print(verdict, style="dim", soft_wrap=True)
        with progress(False) as tell:
            embedder = Embedder.open(
                checkpoint,
                backend,
                device,
                context=args.context,
                chunk=args.chunk,
                progress=tell,
            )
        with embedder:
            yield embedder
