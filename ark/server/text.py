"""The text of one choice as its tokens arrive: whole characters, stop strings, token texts.

Runs on the server's thread, never on the engine's. Used by ark.server.choices.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.models.tokenizer import BYTE_PIECE, UNFINISHED, TextStream, Tokenizer


def _gpt2_alphabet() -> dict[str, int]:
    """By character of byte-level vocabularies the byte that it stands for (OpenAI's GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _gpt2_alphabet()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; the piece itself of a special token."""
    if token in tokenizer.special_ids:
        return str(tokenizer.backend.id_to_token(token))
    return tokenizer.backend.decode([token], skip_special_tokens=False)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """The bytes of one token, which may be a part of a character."""
    text = token_text(tokenizer, token)
    if UNFINISHED not in text:
        return list(text.encode())
    piece = str(tokenizer.backend.id_to_token(token))
    if BYTE_PIECE.fullmatch(piece):
        return [int(piece[3:5], 16)]
    if all(c in BYTE_OF_CHARACTER for c in piece):
        return [BYTE_OF_CHARACTER[c] for c in piece]
    return list(text.encode())


class ChoiceText:
    """Text that may be sent: what cannot be the beginning of a stop string any more.

    ended: a stop string was found; the text ends before it.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._held = ""
        self.ended = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        parts = []
        for token in tokens:
            if self.ended:
                break
            parts.append(self._pass(self._stream.push(token)))
        return "".join(parts)

    def finish(self) -> str:
        """The rest: characters that never became whole, and a begun stop string."""
        if self.ended:
            return ""
        text = self._pass(self._stream.finish())
        if not self.ended:
            text, self._held = text + self._held, ""
        return text

    def _pass(self, new: str) -> str:
        if not self._stops or not new:
            return new
        text = self._held + new
        places = [
            (place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0
        ]
        if places:
            # The one that is complete first, so that the answer does not depend on the pieces.
            self.ended, self._held = True, ""
            return text[: min(places)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
