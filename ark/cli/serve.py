"""`ark serve DIR`: serves a checkpoint over HTTP with OpenAI's interface."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from ark import log
from ark.cli.common import to_be_started, visible
from ark.cli.engines import (
    add_memory,
    chat_templates,
    follow_engine,
    open_checkpoint,
    open_embedder,
    open_engine,
)
from ark.cli.parser import (
    CHUNK,
    Subparsers,
    add_backend,
    add_device,
    add_directory,
    add_kv_cache,
    add_quantize,
    option,
    positive,
)
from ark.errors import GpuError, InvalidUsageError, SystemError, UnsupportedError
from ark.models.checkpoint import Checkpoint
from ark.models.generation import sampling_fields
from ark.models.hub import hub_name, local_directory
from ark.models.shard import check_ranks
from ark.models.tokenizer import Tokenizer
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment
from ark.serving.draft_model import DRAFT_TOKENS
from ark.serving.http.calls import FORMATS, format_of
from ark.serving.types import EngineLike

if TYPE_CHECKING:
    from ark.serving.http.model import ServedModel
    from ark.serving.http.run import Options

PACKAGES = ("prometheus_client", "starlette", "uvicorn")

LOCAL = ("127.", "localhost", "::1")
RELEASE_S = 30.0  # the time in which a failed engine must release its device


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "serve",
        help="serve a checkpoint over HTTP, as OpenAI's clients expect",
        description="Serves a checkpoint directory over HTTP with OpenAI's routes.",
    )
    add_directory(p)
    p.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (127.0.0.1: this machine alone; 0.0.0.0: all)",
    )
    option(p, "--port N", "TCP port; 0: any free one", port, 8000)
    option(p, "--served-model-name NAME", "the model's name in requests (default: the directory's)")
    option(
        p,
        "--api-key KEY",
        "requests must have this key, or one of several (default: ARK_API_KEY's, or none)",
        several=True,
    )
    option(
        p,
        "--cors-origin ORIGIN",
        "pages of this origin may use the server from a browser; * is all (default: none)",
        several=True,
    )
    option(
        p,
        "--task",
        "make text, or give embeddings by /v1/embeddings (default: generate)",
        default="generate",
        choices=("generate", "embed"),
    )
    option(p, "--slots N", "requests that run at once", positive, 8)
    option(
        p, "--ranks N", "ranks that share the model (tensor parallel), one device each", positive, 1
    )
    add_memory(
        p, "positions of a request, its answer included (default: the model's, at most 4096)"
    )
    option(p, "--chunk N", CHUNK, positive)
    add_quantize(p)
    add_kv_cache(p)
    option(
        p, "--pages N", "pages of keys and values (default: for all slots, or what fits)", positive
    )
    option(
        p,
        "--draft DIR",
        "a smaller model of the same tokens that guesses next ones, for free slots to verify "
        "(default: none)",
    )
    option(
        p,
        "--draft-tokens N",
        f"tokens of a guess (default: {DRAFT_TOKENS} with --draft; without it, those that "
        "followed where a text repeats itself)",
        positive,
    )
    option(
        p,
        "--lora NAME=DIR",
        "an adapter as PEFT saves it, which requests choose by the model's name; may be given "
        "several times (default: none)",
        named_directory,
        several=True,
    )
    option(p, "--chat-template FILE", "a Jinja template (default: the checkpoint's)")
    option(
        p,
        "--tool-call-parser",
        "how the model writes calls of tools (default: as its chat template shows)",
        default="auto",
        choices=("auto", *FORMATS),
    )
    option(p, "--queue N", "requests that wait at most", positive, 256)
    option(p, "--body-limit MIB", "largest body of a request, in MiB", positive, 16)
    option(p, "--timeout S", "seconds that a request may take, its wait included", seconds, 600.0)
    option(p, "--drain S", "seconds that answers may go on after SIGTERM", seconds, 30.0)
    add_backend(p)
    add_device(p, of_rank=True)
    p.set_defaults(func=run)


def port(text: str) -> int:
    """An argparse type: a TCP port."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """An argparse type: seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 1e6")
    return value


def named_directory(text: str) -> tuple[str, str]:
    """An argparse type: NAME=DIRECTORY."""
    name, equals, directory = text.partition("=")
    if not name or not equals or not directory:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name, =, and a directory")
    return name, directory


def _adapters(args: argparse.Namespace) -> dict[str, str]:
    """The directories of adapters, by name."""
    names = [name for name, _ in args.lora]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidUsageError(
            f"--lora gives the name {twice[0]!r} twice; give each adapter a name of its own"
        )
    if names and args.task == "embed":
        raise UnsupportedError("--task embed does not support adapters; omit --lora")
    return dict(args.lora)


@contextmanager
def _engine(
    args: argparse.Namespace, checkpoint: Checkpoint, ranks: Bootstrap | None
) -> Iterator[EngineLike]:
    """Opens the engine for the task that the options name: generation or embedding."""
    if args.task == "generate":
        draft = None if args.draft is None else Checkpoint.open(local_directory(args.draft))
        asked = args.slots, args.pages, ranks, args.draft_tokens or 0, draft, _adapters(args)
        with open_engine(args, checkpoint, *asked) as engine:
            yield engine
        return
    from ark.serving.http.embeddings import EmbeddingEngine

    with open_embedder(args, checkpoint) as embedder, closing(EmbeddingEngine(embedder)) as engine:
        yield engine


def run(args: argparse.Namespace) -> int:
    check_packages()
    rank_info = rank_from_environment()
    world = max(args.ranks, rank_info.world_size)
    if world > 1 and args.task == "embed":
        raise UnsupportedError(
            "--task embed runs on one device; omit --ranks, or start a server for each device"
        )
    if _adapters(args) and world > 1:
        raise UnsupportedError(f"--lora on {world} ranks is not supported; omit it, or use one")
    if to_be_started(args.ranks, rank_info):
        # Only one process of the ranks prints errors about the checkpoint.
        config = open_checkpoint(args).config
        check_ranks(config, args.ranks)
        argv = [sys.executable, "-m", "ark", *args.words]
        return launch_command(args.ranks, argv, forward=(signal.SIGTERM, signal.SIGINT))
    if world == 1:
        return _serve(args, None)
    with Bootstrap.from_environment(rank_info=rank_info) as ranks:
        if ranks.rank == 0:
            return _serve(args, ranks)
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 handles these signals for all ranks
            signal.signal(number, signal.SIG_IGN)
        checkpoint = open_checkpoint(args)
        follow_engine(args, checkpoint, args.slots, args.pages, ranks, args.draft_tokens or 0)
        return 0


def _serve(args: argparse.Namespace, ranks: Bootstrap | None) -> int:
    """Serves until the process receives a signal to end. Returns the exit code. ranks: the ranks
    that share the model.
    """
    from ark.serving.http.run import bound, serve, url_of

    _check_keys(args)
    with (
        closing(bound(args.host, args.port)) as listener,
        opened(args, ranks) as (engine, model, options),
    ):
        embeds = bool(model.embedding_size)

        def ready() -> None:
            room = "embeddings of up to" if embeds else f"{args.slots} slots of"
            shape = f"{room} {engine.context} positions"
            print(f"{visible(model.name)} is served at {url_of(listener)} ({shape})", flush=True)

        try:
            asyncio.run(serve(engine, model, options, listener, ready))
        except GpuError as error:
            _end_in_any_case(error)
            raise
    return 0


def _end_in_any_case(error: GpuError) -> None:
    """Ends the process with the error if it still runs after RELEASE_S seconds. A failed device may
    never be released, so the process could hang, and a server can be restarted only after its
    process has ended.
    """

    def end() -> None:
        print(visible(f"ark: {error}; its device was not released"), file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(RELEASE_S, end)
    timer.daemon = True
    timer.start()


def check_packages() -> None:
    """Raises SystemError unless the packages of the extra `serve` are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemError(
            f"ark serve needs {', '.join(missing)}, which the extra `serve` installs: "
            "pip install 'ark-gpu[serve]'"
        )


def _keys(args: argparse.Namespace) -> list[str]:
    variable = os.environ.get("ARK_API_KEY")
    return args.api_key or ([] if variable is None else [variable])


def _check_keys(args: argparse.Namespace) -> None:
    keys = _keys(args)
    if not keys and not args.host.startswith(LOCAL):
        log.warn(
            f"the server listens on {args.host} without an API key, so that any client may "
            "use it; give one by --api-key or ARK_API_KEY"
        )
    if not all(keys):
        raise InvalidUsageError(
            "the API key is empty; give one by --api-key or ARK_API_KEY, or none at all"
        )
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise InvalidUsageError("an API key has characters that HTTP headers cannot carry")


@contextmanager
def opened(
    args: argparse.Namespace, ranks: Bootstrap | None = None
) -> Iterator[tuple[EngineLike, ServedModel, Options]]:
    """Opens a server's engine. Yields the engine, the model that it serves and the server's
    options. ranks: the ranks that share the model; this is rank 0.
    """
    from ark.serving.http.app import Limits
    from ark.serving.http.model import ServedModel
    from ark.serving.http.run import Options

    checkpoint = open_checkpoint(args)
    config = checkpoint.config
    tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=config.vocab_size)
    templates = chat_templates(checkpoint.directory, tokenizer, args.chat_template)
    usual_name = hub_name(args.directory) or checkpoint.directory.resolve().name
    defaults = sampling_fields(checkpoint.directory)
    # A generation config with temperature 0 sets no temperature for the server, because clients
    # expect OpenAI's default of 1.
    if defaults.get("temperature") == 0:
        del defaults["temperature"]
    chosen = args.tool_call_parser
    limits = Limits(args.body_limit << 20, request_s=args.timeout, queue=args.queue)
    name = args.served_model_name or usual_name
    adapters = tuple(_adapters(args))
    if name in adapters:
        raise InvalidUsageError(
            f"--lora gives an adapter the model's own name {name!r}; give it another one"
        )
    with _engine(args, checkpoint, ranks) as engine:
        model = ServedModel(
            name,
            tokenizer,
            templates,
            engine.context,
            config.vocab_size,
            frozenset(config.eos_token_ids),
            defaults,
            format_of(templates) if chosen == "auto" else FORMATS[chosen],
            config.hidden_size if args.task == "embed" else 0,
            adapters,
        )
        yield engine, model, Options(_keys(args), args.cors_origin, args.drain, limits)
