"""The bytes of single tokens, which are reported with log probabilities. Used by
ark.serving.http.chats.
"""

from __future__ import annotations

from ark.models.tokenizer import BYTE_PIECE, UNFINISHED, Tokenizer


def _gpt2_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (OpenAI's GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _gpt2_alphabet()


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """The bytes of one token, which may be incomplete UTF-8."""
    text = tokenizer.token_text(token)
    if UNFINISHED not in text:
        return list(text.encode())
    piece = str(tokenizer.backend.id_to_token(token))
    if BYTE_PIECE.fullmatch(piece):
        return [int(piece[3:5], 16)]
    if all(c in BYTE_OF_CHARACTER for c in piece):
        return [BYTE_OF_CHARACTER[c] for c in piece]
    return list(text.encode())
