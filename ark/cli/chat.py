"""`ark chat DIR`: a conversation with a checkpoint in the terminal.

The engine caches keys and values of the conversation, so only the new message is computed before an
answer begins.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ark.cli.common import errors, visible
from ark.cli.engines import add_memory, chat_templates, open_checkpoint, open_engine
from ark.cli.parser import (
    CHUNK,
    CONTEXT,
    Subparsers,
    add_backend,
    add_device,
    add_directory,
    add_kv_cache,
    add_quantize,
    option,
    positive,
)
from ark.cli.sampling import add_sampling, given_sampling
from ark.errors import BaseError, GpuError, InvalidUsageError
from ark.models.chat import ChatTemplates
from ark.models.generation import sampling_fields
from ark.models.sampling import SamplingParams
from ark.models.stops import StoppedText
from ark.models.tokenizer import Tokenizer
from ark.serving.types import EngineLike, Event, FinishReason, Request

HELP = """\
/reset         forget the conversation
/system TEXT   begin anew with this system message; without TEXT, with none
/help          show this
/exit          end, as Ctrl-D does
A line that ends with a backslash goes on in the next line.
Ctrl-C stops an answer."""
CONTINUED = "\\"
FULL = "context"
"""Why an answer ended: the context is full."""


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "chat",
        help="talk with a checkpoint in the terminal",
        description="Talks with a checkpoint in the terminal.\n\n" + HELP,
    )
    add_directory(p)
    option(p, "--system TEXT", "the system message (default: none)")
    option(p, "--chat-template FILE", "a Jinja template (default: the checkpoint's)")
    add_sampling(p)
    option(p, "--seed N", "seed of the sampler's random numbers (default: random)", int)
    add_memory(p, CONTEXT)
    option(p, "--chunk N", CHUNK, positive)
    add_quantize(p)
    add_kv_cache(p)
    add_backend(p)
    add_device(p)
    p.set_defaults(func=run)


@dataclass
class Talk:
    """A conversation of a user with a model that the engine runs. say: a function that prints text
    as it arrives.
    """

    engine: EngineLike
    tokenizer: Tokenizer
    templates: ChatTemplates
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    say: Callable[[str], None]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def reset(self, system: str | None = None) -> None:
        """Clears the conversation and sets the system message."""
        self.messages.clear()
        self.system = system

    def answer(self, text: str) -> str:
        """Answers a message and adds both to the conversation. An interrupt stops the answer, and
        its text so far stays in the conversation. Returns the reason why the answer ended: a value
        of FinishReason, or FULL.

        Raises InvalidUsageError, and adds nothing, if the message cannot be answered.
        """
        begin = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = {"role": "user", "content": text}
        rendered = self.templates.render([*begin, *self.messages, asked])
        prompt = self.tokenizer.encode(rendered, framed=False)
        if len(prompt) >= self.engine.context:
            raise InvalidUsageError(
                f"the conversation has {len(prompt):,} tokens with this message, but the context "
                f"holds {self.engine.context:,}, so that the message was left out; send a shorter "
                "one"
            )
        request = Request(
            f"chat-{next(self._numbers)}", tuple(prompt), self.sampling, self.stop_token_ids
        )
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(request, events.put)
        stream = StoppedText.sampled(self.tokenizer.stream(prompt), self.sampling)
        pieces: list[str] = []
        places = len(prompt)

        def show(piece: str) -> None:
            pieces.append(piece)
            self.say(piece)

        event = Event(request.id)
        with _interrupts(lambda: self.engine.cancel(request.id)):
            while event.finish is None:
                event = events.get()
                places += len(event.tokens)
                stopped = event.finish is FinishReason.STOP
                for token in event.tokens[:-1] if stopped else event.tokens:
                    show(stream.push(token))
                if stream.stopped is not None and event.finish is None:
                    self.engine.cancel(request.id)
            show(stream.finish())
        if event.finish is FinishReason.ERROR:
            raise GpuError(event.error)
        self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]
        if event.finish is FinishReason.LENGTH and places >= self.engine.context:
            return FULL
        return FinishReason.STOP.value if stream.stopped is not None else event.finish.value


@contextlib.contextmanager
def _interrupts(then: Callable[[], None]) -> Iterator[None]:
    """While this context is active, an interrupt calls `then` and raises no exception, so that no
    event is lost.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: then())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(args: argparse.Namespace) -> int:
    given = given_sampling(args)
    checkpoint = open_checkpoint(args)
    tokenizer = Tokenizer.open(checkpoint.directory, vocab_size=checkpoint.config.vocab_size)
    templates = chat_templates(checkpoint.directory, tokenizer, args.chat_template)
    templates.render([{"role": "user", "content": "Hello"}])  # reports a faulty template early
    sampling = SamplingParams(
        **{"max_tokens": None, **sampling_fields(checkpoint.directory), **given}
    )
    with open_engine(args, checkpoint, slots=1) as engine:
        ends = frozenset(checkpoint.config.eos_token_ids)
        talk = Talk(engine, tokenizer, templates, sampling, ends, _print, args.system)
        return converse(talk, ask_of(sys.stdin.isatty()))


def ask_of(terminal: bool) -> Callable[[str], str]:
    """Returns a function that reads a line and raises EOFError at the end of input. On a terminal
    the function shows its argument as the prompt and offers a history of lines.
    """
    if not terminal:

        def read(prompt: str) -> str:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\n")

        return read
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() has history and editing with it
    errors.print("/help shows the commands; Ctrl-D ends", style="dim")
    return input


def converse(talk: Talk, ask: Callable[[str], str]) -> int:
    """Reads messages and commands until the end of input; returns the exit code."""
    while True:
        try:
            text = message(ask)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        word, _, rest = text.strip().partition(" ")
        if not text.strip():
            continue
        if word == "/exit":
            return 0
        if word in ("/reset", "/system"):
            talk.reset((rest.strip() or None) if word == "/system" else talk.system)
        elif word == "/help":
            print(HELP)
        elif word.startswith("/"):
            errors.print(f"{visible(word)} is not a command; /help shows them", style="yellow")
        else:
            _answer(talk, text)


def message(ask: Callable[[str], str]) -> str:
    """Reads the next message: a line, and further lines while the last line ends with a
    backslash.
    """
    lines = [ask("> ")]
    while lines[-1].endswith(CONTINUED):
        lines[-1] = lines[-1][: -len(CONTINUED)]
        lines.append(ask(". "))
    return "\n".join(lines)


def _answer(talk: Talk, text: str) -> None:
    try:
        finish = talk.answer(text)
    except InvalidUsageError as error:
        errors.print(visible(f"{error}, or /reset to begin anew"), soft_wrap=True)
        return
    except BaseError:
        print()
        raise
    print(flush=True)
    if finish == FinishReason.LENGTH.value:
        errors.print(
            f"(the answer has reached {talk.sampling.max_tokens:,} tokens; --max-new-tokens N "
            "allows more)",
            style="dim",
        )
    elif finish == FULL:
        errors.print(
            f"(the answer was cut: the context of {talk.engine.context:,} tokens is full; /reset "
            "begins anew, --context N makes it larger)",
            style="dim",
        )
    elif finish == FinishReason.CANCELLED.value:
        errors.print("(stopped)", style="dim")


def _print(text: str) -> None:
    print(visible(text), end="", flush=True)
