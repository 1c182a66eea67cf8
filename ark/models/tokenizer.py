"""Converts text to token ids and back, with the tokenizer files of a checkpoint directory.

`ark generate` encodes the prompt with it, to the same ids as `transformers`' AutoTokenizer. It
decodes tokens as they appear: `TextStream` holds back incomplete characters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers.models import BPE

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.models.fields import Fields, check_directory, check_file
from ark.models.gguf_file import is_gguf, read_gguf
from ark.models.gguf_tokenizer import read_tokenizer
from ark.models.tokenizer_classes import built, class_of
from ark.models.tokenizer_tokens import add, declared

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How single-byte tokens are written in vocabularies with byte fallback."""
UNFINISHED = "\ufffd"


@contextlib.contextmanager
def _without_panics(file: str) -> Iterator[None]:
    """Converts a panic of the tokenizers package (an abort in its Rust code, which Python does not
    report as an Exception) to a ModelError. The Rust code has then already printed the place of the
    panic on standard error.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{file} makes the tokenizers package fail ({error}); it is damaged or made for "
            "another version. Download it again, or update the package (pip install -U tokenizers)."
        ) from None


def _completed(
    folder: Path, whole: tokenizers.Tokenizer
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer that transformers builds for the directory, and the texts of its named special
    tokens. whole: the tokenizer that tokenizer.json alone describes.
    """
    path = folder / "tokenizer.json"
    settings, config = (
        Fields.read(folder / name) if (folder / name).exists() else Fields(name, {})
        for name in ("tokenizer_config.json", "config.json")
    )
    for name in ("fix_mistral_regex", "clean_up_tokenization_spaces"):
        changes = name == "fix_mistral_regex" or not isinstance(whole.model, BPE)
        if changes and settings.flag(name, False):
            raise UnsupportedError(
                f"{settings.source}: {name} is true, but ark does not support that. Use a "
                "checkpoint without it."
            )

    def bytes_level() -> bool:
        return b'"ByteLevel"' in path.read_bytes()

    kind = class_of(settings.values, config.values, bytes_level)
    added = declared(
        folder, settings, whole.get_added_tokens_decoder(), kind.special if kind else {}
    )
    completed = whole
    if kind is not None:
        try:
            completed = built(kind, Fields.read(path).values, whole, settings.values)
        except ModelError:
            raise
        except Exception as error:  # the tokenizers package raises bare Exception objects
            raise ModelError(
                f"{path} does not have the vocabulary and merges of a "
                f"{settings.get('tokenizer_class')} ({error!r:.200}). Download the tokenizer's "
                "files again."
            ) from None
    add(completed, added, kind)
    completed.encode_special_tokens = settings.flag("split_special_tokens", False)
    return completed, {name: str(token) for name, token in added.named.items()}


def _of_gguf(
    path: Path, vocab_size: int | None
) -> tuple[tokenizers.Tokenizer, int | None, dict[str, str]]:
    backend, special_tokens = read_tokenizer(read_gguf(path))
    return backend, vocab_size, special_tokens


class Tokenizer:
    """Encodes and decodes text. vocab_size: the size of the model's vocabulary, against which
    prompts are checked.

    special_tokens: the texts of special tokens by name (bos_token, eos_token, ...), for chat
    templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def open(cls, directory: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """Reads tokenizer.json and the files that extend it (ark.models.tokenizer_classes,
        ark.models.tokenizer_tokens). Only the post-processor in tokenizer.json determines the
        tokens before and after a text.

        `add_bos_token` in tokenizer_config.json has no effect, as in transformers: it applies to
        tokenizers without tokenizer.json.

        A GGUF file contains its own tokenizer (ark.models.gguf_tokenizer).

        Raises ModelError if a file is missing or damaged, UnsupportedError if the tokenizer is in
        another format.
        """
        folder = Path(directory)
        if is_gguf(folder):
            with _without_panics(str(folder)):
                return cls(*_of_gguf(folder, vocab_size))
        check_directory(folder)
        path = folder / "tokenizer.json"
        other = next((n for n in ("tokenizer.model", "vocab.json") if (folder / n).exists()), None)
        if not path.exists() and other:
            raise UnsupportedError(
                f"{folder} holds its tokenizer in {other}, but ark reads tokenizer.json. Convert "
                "it: load it with transformers' AutoTokenizer and save it by save_pretrained."
            )
        check_file(path)
        try:
            with _without_panics(str(path)):
                backend = tokenizers.Tokenizer.from_file(str(path))
        except ModelError:
            raise
        except Exception as error:  # the tokenizers package raises bare Exception objects
            Fields.read(path)  # reports a missing file or invalid JSON
            raise ModelError(
                f"{path} cannot be read by the tokenizers package ({error}). Download it again, "
                "or update the package (pip install -U tokenizers)."
            ) from None
        with _without_panics(str(path)):
            backend, special_tokens = _completed(folder, backend)
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, vocab_size, special_tokens)

    def encode(self, text: str, framed: bool = True) -> list[int]:
        """The ids of `text`, with the tokens that tokenizer.json adds before and after it (the
        frame). No frame is added if the text begins with the begin token, or if framed is False, as
        for chat templates.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidUsageError(
                "The prompt holds bytes that are not UTF-8 text. Give it as UTF-8."
            ) from None
        with _without_panics("its tokenizer.json"):
            ids = self.backend.encode(text, add_special_tokens=framed).ids
            if ids[:1] == ids[1:2] and ids[:1] and ids[0] in self.special_ids:
                plain = self.backend.encode(text, add_special_tokens=False).ids
                ids = plain if len(plain) < len(ids) else ids
        top = max(ids, default=0)
        if self.vocab_size is not None and top >= self.vocab_size:
            raise ModelError(
                f"The tokenizer gives the prompt the token {top} "
                f"({self.backend.id_to_token(top)!r}), but the model has {self.vocab_size} tokens, "
                f"0 to {self.vocab_size - 1}. tokenizer.json and config.json are of different "
                "checkpoints: download them again."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without begin tokens, end tokens and other special tokens."""
        with _without_panics("its tokenizer.json"):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """The text of one token. The text of a special token is the token as it is written in the
        vocabulary.
        """
        if token in self.special_ids:
            return str(self.backend.id_to_token(token))
        with _without_panics("its tokenizer.json"):
            return self.backend.decode([token], skip_special_tokens=False)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Returns an object that converts the tokens after `prompt` to text, one at a time."""
        return TextStream(self, prompt)


class TextStream:
    """Decodes tokens as they arrive. The concatenated pieces are the text of all tokens.

    A piece ends with a complete character. For each new token, only the tokens of the last piece
    are decoded again, so each token takes constant time. This is correct for decoders in which a
    token's text depends only on the token before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._shown = len(self._ids)
        self._text = tokenizer.decode(self._ids).rstrip(UNFINISHED)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        piece = self._tokenizer.backend.id_to_token(token)
        if piece is None or token in self._tokenizer.special_ids:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNFINISHED) or BYTE_PIECE.fullmatch(piece):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """The remaining text. Incomplete characters become U+FFFD."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._text) :]
        if new:
            del self._ids[: self._shown]
            self._shown = len(self._ids)
            self._text = self._tokenizer.decode(self._ids)
        return new
