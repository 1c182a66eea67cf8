"""`ark generate DIR --prompt TEXT`: continues a prompt with a checkpoint and streams the text."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack, closing

from ark.backend import machine_files, registry
from ark.cli.common import (
    device_index,
    errors,
    progress,
    read_plan,
    share,
    tell_backend,
    to_be_started,
    visible,
)
from ark.cli.parser import (
    CHUNK,
    CONTEXT,
    Subparsers,
    add_backend,
    add_device,
    add_directory,
    add_kv_cache,
    add_quantize,
    flag,
    option,
    positive,
)
from ark.cli.sampling import add_sampling, given_sampling
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.models.build import FULL, Shape
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.generation import default_sampling
from ark.models.hub import local_directory
from ark.models.plans import choose_context
from ark.models.request import no_room
from ark.models.sampling import BASIC, SamplingParams
from ark.models.stops import StoppedText
from ark.models.tokenizer import Tokenizer
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S, MOST_BUDGET_S
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment

# Before a prompt is tokenised, it is cut to this number of characters per token position. The
# number is an upper estimate, several times the average length of a token.
HEAD_CHARACTERS_PER_POSITION = 16
FEWEST_OF_A_RATE = 16
"""A rate is printed only for at least this many tokens."""


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "generate",
        help="generate text from a checkpoint directory",
        description="Generates text with a Hugging Face Llama directory, in one kernel launch.",
    )
    add_directory(p)
    p.add_argument(
        "--prompt",
        required=True,
        action="append",
        help="TEXT to continue; - reads standard input; several are decoded together",
    )
    flag(p, "--chat", "the prompt is a user's message, put into the checkpoint's chat template")
    option(p, "--system TEXT", "with --chat: a system message before it (default: none)")
    add_sampling(p)
    option(p, "--seed N", "seed of the sampler's random numbers", int, 0)
    option(p, "--context N", CONTEXT, positive)
    option(p, "--chunk N", CHUNK, positive)
    add_quantize(p)
    add_kv_cache(p)
    add_backend(p)
    add_device(p, of_rank=True)
    option(p, "--ranks N", "tensor parallel ranks, one device each", positive, 1)
    option(
        p,
        "--split NAME",
        "share the model by this plan of `ark parallelize`: megatron, sequence, expert, auto "
        "(default: as the decoder's modules say)",
    )
    option(p, "--machine NAME", "machine model to plan for (default: the device's own)")
    option(p, "--plan FILE", "run this plan, of one rank (default: one is made)")
    option(p, "--budget S", "seconds that a wait inside the kernel may take", float, BUDGET_S)
    flag(p, "--json", 'print one line {"text": ..., "tokens": [...]} instead of streaming')
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    args.directory = str(local_directory(args.directory))
    rank_info = rank_from_environment()
    if to_be_started(args.ranks, rank_info):
        # Only one process of the ranks prints errors about the checkpoint and the model.
        checkpoint = Checkpoint.open(args.directory, args.quantize, args.kv_cache_dtype)
        check_ranks(checkpoint, args.ranks, len(args.prompt), args.split or "")
        argv = [sys.executable, "-m", "ark", *args.words]
        return launch_command(args.ranks, argv, stdin="-" in args.prompt)
    if args.system is not None and not args.chat:
        raise InvalidUsageError("--system gives a message of a chat; add --chat")
    if args.prompt.count("-") > 1:
        raise InvalidUsageError("--prompt - was given twice, but standard input is one text")
    if not 0 < args.budget <= MOST_BUDGET_S:
        raise InvalidUsageError(
            f"the budget is {args.budget} s; it must be above 0 and at most {MOST_BUDGET_S:g}"
        )
    given = given_sampling(args)
    checkpoint = Checkpoint.open(args.directory, args.quantize, args.kv_cache_dtype)
    tokenizer = Tokenizer.open(args.directory, vocab_size=checkpoint.config.vocab_size)
    backend, probe = registry.choose(args.backend)
    leader = rank_info.rank == 0
    sampling = default_sampling(checkpoint.directory, leader, **given)
    if leader:
        tell_backend(args.backend, backend, probe)
    with ExitStack() as stack:
        ranks = stack.enter_context(Bootstrap.from_environment(rank_info=rank_info))
        most = checkpoint.config.max_position_embeddings
        context = args.context or most if args.plan else choose_context(checkpoint, args.context)
        texts = [prompt_text(text, ranks) for text in args.prompt]
        if args.chat:
            texts = rendered(args.directory, tokenizer, texts, args.system)
        prompts = [encoded(tokenizer, text, context, most, not args.chat) for text in texts]
        device = backend.open(device_index(args.device, rank_info, len(probe.devices)))
        try:
            machine = machine_files.machine(args.machine) if args.machine else device.machine
            machine = share(machine, backend.name, rank_info.world_size, len(probe.devices))
            plan = None
            if args.plan:
                plan = read_plan(args.plan)
            with progress(args.json or not leader) as tell:
                generator = Generator(
                    checkpoint,
                    backend,
                    device,
                    context=args.context,
                    chunk=args.chunk,
                    batch=len(prompts),
                    split=args.split or "",
                    sampling=FULL if sampling.beyond(BASIC) else "",
                    ranks=ranks,
                    rank=rank_info.rank,
                    world_size=rank_info.world_size,
                    machine=machine,
                    plan=plan,
                    budget_s=args.budget,
                    progress=tell,
                )
            with generator:
                if len(prompts) > 1:
                    return answer_batch(args, generator, tokenizer, prompts, sampling)
                return answer(args, generator, tokenizer, prompts[0], sampling, leader)
        finally:
            device.close()


def rendered(
    directory: str, tokenizer: Tokenizer, texts: list[str], system: str | None
) -> list[str]:
    """Renders each text with the checkpoint's chat template, as one message of a user. Returns the
    prompts.
    """
    templates = ChatTemplates.open(directory, tokenizer.special_tokens)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [templates.render([*before, {"role": "user", "content": text}]) for text in texts]


def encoded(
    tokenizer: Tokenizer, text: str, context: int, most: int, framed: bool = True
) -> list[int]:
    """The prompt's tokens. Raises InvalidUsageError, before planning, if the context cannot hold
    them.

    If a text is far too long, only its beginning is encoded. most: the model's longest context.
    framed: see Tokenizer.encode.
    """
    head = text[: HEAD_CHARACTERS_PER_POSITION * context]
    if len(head) < len(text) and (count := len(tokenizer.encode(head, framed))) > 2 * context:
        counted = f"the first {len(head):,} of {len(text):,} characters of the prompt are {count:,}"
        raise no_room(counted, context, most)
    tokens = tokenizer.encode(text, framed)
    if len(tokens) >= context:
        raise no_room(f"the prompt has {len(tokens):,}", context, most)
    return tokens


def prompt_text(asked: str, ranks: Bootstrap) -> str:
    """The given prompt. For `-` it is the standard input of rank 0, because launchers pass standard
    input to rank 0 only.
    """
    if asked != "-":
        try:
            asked.encode()
        # If the locale is not UTF-8, Python represents bytes of an argument that it cannot decode
        # as surrogates. The original bytes are decoded again as UTF-8 here.
        except UnicodeEncodeError:
            return os.fsencode(asked).decode("utf-8", "surrogateescape")
        return asked
    text, reason = b"", b""
    if ranks.rank == 0:
        try:
            text = sys.stdin.read().encode()
        except (OSError, ValueError) as error:
            reason = str(error).encode()
    text, reason = (ranks.all_gather(part, "standard input")[0] for part in (text, reason))
    if reason:
        raise InvalidUsageError(
            f"the prompt cannot be read from standard input: {reason.decode()}; give it as UTF-8"
        )
    return text.decode()


def check_ranks(checkpoint: Checkpoint, ranks: int, batch: int, split: str) -> None:
    """Raises an error, before any rank starts, if this number of ranks cannot share the model."""
    Shape(checkpoint.config, DataType.from_numpy(checkpoint.dtype), 1, 0, 0, ranks, batch, split)


def answer(
    args: argparse.Namespace,
    generator: Generator,
    tokenizer: Tokenizer,
    prompt: list[int],
    sampling: SamplingParams,
    leader: bool,
) -> int:
    """Generates the text. leader: True on rank 0, which streams the text, or prints it with its
    tokens as one JSON line; other ranks print nothing. After an interrupt or an error the text so
    far is printed too.
    """
    tokens: list[int] = []
    text = StoppedText.sampled(tokenizer.stream(prompt), sampling)
    most = sampling.max_tokens or generator.context
    pieces: list[str] = []
    show = leader and not args.json
    finish = "error"
    begin = first = time.monotonic()
    try:
        # `closing` stops the device before any exception leaves this block.
        with closing(generator.stream(prompt, most, sampling)) as stream:
            for token in stream:
                first = first if tokens else time.monotonic()
                tokens.append(token)
                pieces.append(text.push(token))
                if show:
                    print(visible(pieces[-1]), end="", flush=True)
                if text.stopped is not None:
                    break
        finish = "stop"
        if text.stopped is None:
            finish = generator.finish_reason(len(prompt), tokens)
    except BrokenPipeError:
        show = leader = False
        raise
    except (KeyboardInterrupt, SystemExit):
        finish = "interrupted"
        raise
    finally:
        end = time.monotonic()
        pieces.append(text.finish())
        if show and (tokens or finish != "error"):
            print(visible(pieces[-1]), flush=True)
        if leader and args.json and (tokens or finish != "error"):
            print(json.dumps({"text": "".join(pieces), "tokens": tokens}), flush=True)
    if show:
        errors.print(
            f"{len(prompt)} prompt tokens and the first new one in {1e3 * (first - begin):.1f} ms"
            f"{_rate(len(tokens) - 1, end - first)}",
            style="dim",
        )
    if leader and finish == "context":
        most = generator.checkpoint.config.max_position_embeddings
        more = "raise --context for more" if generator.context < most else "the model has no more"
        errors.print(
            f"the context is full: {generator.context} positions hold {len(prompt)} tokens of the "
            f"prompt and {len(tokens)} new ones; {more}",
            style="yellow",
        )
    return 0


def answer_batch(
    args: argparse.Namespace,
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    sampling: SamplingParams,
) -> int:
    """Generates all texts, then prints them, or their JSON lines, in the order of the prompts.
    After an interrupt or an error the texts so far are printed.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    texts = [StoppedText.sampled(tokenizer.stream(prompt), sampling) for prompt in prompts]
    pieces: list[list[str]] = [[] for _ in prompts]
    most = sampling.max_tokens or generator.context
    begin = time.monotonic()
    try:
        with closing(generator.stream_batch(prompts, most, sampling)) as stream:
            for sequence, token in stream:
                if texts[sequence].stopped is None:
                    answers[sequence].append(token)
                    pieces[sequence].append(texts[sequence].push(token))
                if all(text.stopped is not None for text in texts):
                    break
    finally:
        seconds = time.monotonic() - begin
        for number, tokens in enumerate(answers, 1):
            text = "".join([*pieces[number - 1], texts[number - 1].finish()])
            if args.json and any(answers):
                print(json.dumps({"text": text, "tokens": tokens}), flush=True)
            elif any(answers):
                print(f"[{number}] {visible(text)}", flush=True)
    total = sum(map(len, answers))
    if not args.json:
        errors.print(
            f"{total} new tokens of {len(prompts)} prompts in {seconds:.2f} s"
            f"{_per_second(total, seconds)}",
            style="dim",
        )
    return 0


def _rate(after: int, seconds: float) -> str:
    """The number and the rate of the tokens after the first one, in words; empty if there are
    none.
    """
    if after < 1:
        return ""
    return f"; {after} more in {seconds:.2f} s{_per_second(after, seconds)}"


def _per_second(tokens: int, seconds: float) -> str:
    """The rate of tokens, in words; empty if they are too few for a meaningful rate."""
    few = tokens < FEWEST_OF_A_RATE
    return "" if few else f", {tokens / max(seconds, 1e-9):.1f} tokens/s"
