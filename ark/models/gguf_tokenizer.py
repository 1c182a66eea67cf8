"""Builds the tokenizer of a GGUF file, which gives the same ids as transformers'
AutoTokenizer(gguf_file=). The kind `gpt2` splits words into bytes; in the kind `llama` words begin
with U+2581. Called by ark.models.tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from ark import log
from ark.errors import ModelError, UnsupportedError
from ark.models.gguf_file import GgufFile
from ark.models.tokenizer_classes import CLASSES, QWEN2_SPLIT

LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORD_OF_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O_SPLIT = (
    WORD_OF_LETTERS.replace("SUFFIX", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + REST
)
TEKKEN_SPLIT = WORD_OF_LETTERS.replace("SUFFIX", "") + r"|\p{N}" + REST
SPLITS = {
    LLAMA3_SPLIT: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral dbrx smaug-bpe lfm2",
    QWEN2_SPLIT: "qwen2 deepseek-r1-qwen megrez",
    GPT_4O_SPLIT: "gpt-4o llama4",
    TEKKEN_SPLIT: "tekken",
    "": "default gpt-2",
}
"""For each value of tokenizer.ggml.pre, the pattern that splits a text into words. An empty value
means GPT-2's pattern.
"""
CONTROL, USER_DEFINED = 3, 4
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer, and its special tokens by name. Raises ModelError if the file's tokens
    are not valid, and UnsupportedError for other kinds of tokenizers.
    """

    def given(key: str, usual: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}", usual)

    kind, tokens = given("model"), given("tokens")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{file.path} has a tokenizer of kind {str(kind)[:200]!r}, but ark reads gpt2 and "
            "llama. Use the model's Hugging Face directory."
        )
    try:
        types = list(given("token_type", ()))
        named = {name: tokens[i] for name, key in NAMED.items() if (i := given(key)) is not None}
        tokenizer = _bytes(file, tokens, given) if kind == "gpt2" else _pieces(tokens, given)
        _add(tokenizer, tokens, types, kind == "gpt2", named)
        _frame(tokenizer, named, given, kind == "llama")
    except UnsupportedError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception objects
        raise ModelError(
            f"{file.path} does not have the tokens of a {kind} tokenizer ({error!r:.200}). "
            "Download the file again."
        ) from None
    return tokenizer, named


def _bytes(file: GgufFile, tokens: Sequence[str], given: Callable[..., Any]) -> Tokenizer:
    """Byte-level BPE, with the pattern by which the model family splits words."""
    spelling = _byte_characters()
    alphabet = set(spelling)
    vocab = {
        token if set(token) <= alphabet else "".join(spelling[b] for b in token.encode()): i
        for i, token in enumerate(tokens)
    }
    merges = [tuple(merge.split(" ")) for merge in given("merges")]
    tokenizer = CLASSES["GPT2Tokenizer"].make(vocab, merges, {})
    pre = given("pre", "default")
    split = next((split for split, names in SPLITS.items() if pre in names.split()), None)
    if split is None:
        log.warn(
            f"{file.path} names the pre-tokenizer {str(pre)[:200]!r}, which ark does not support; "
            "ark splits text into words as GPT-2 does, so token ids may differ"
        )
    if split:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    return tokenizer


def _pieces(tokens: Sequence[str], given: Callable[..., Any]) -> Tokenizer:
    """SentencePiece's BPE with byte fallback. If the file has no merges, they are computed from the
    scores: two tokens can be merged if their concatenation is a token, and merges with a better
    score come first.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    if given("merges") is not None:
        merges = [tuple(merge.split(" ")) for merge in given("merges")]
    else:
        merges = _merges(vocab, given("scores"))
    make = CLASSES["LlamaTokenizer"].make
    return make(vocab, [(first, second) for first, second in merges], {})


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    ranked = []
    for token, i in vocab.items():
        cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(scores[i], len(first), len(second), first, second) for first, second in pairs]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(first, second) for *_, first, second in ranked]


def _add(
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    bytes_level: bool,
    named: Mapping[str, str],
) -> None:
    """Adds the tokens that are found in a text before it is split. Special tokens are omitted from
    decoded text.
    """
    alphabet = set(_byte_characters())
    control = [
        token
        for token, kind in zip(tokens, types, strict=False)
        if kind == CONTROL and (not bytes_level or set(token) <= alphabet)
    ]
    control += [token for token in named.values() if token not in control]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    own = [token for token, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    vocab = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in own if t in vocab])


def _frame(
    tokenizer: Tokenizer, named: Mapping[str, str], given: Callable[..., Any], pieces: bool
) -> None:
    """Sets the tokens that are added before and after a text. For SentencePiece tokenizers, the
    begin token is added unless the file disables it. For other tokenizers, it is added only if the
    file enables it.
    """
    begin = named.get("bos_token") if given("add_bos_token", pieces) else None
    end = named.get("eos_token") if given("add_eos_token", False) else None
    parts = [*([begin] if begin else []), "$A", *([end] if end else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
    tokenizer.post_processor = processors.TemplateProcessing(parts, special_tokens=special)


def _byte_characters() -> list[str]:
    """The character that represents each byte in GPT-2's vocabularies. It is the byte's own
    character if that is printable, otherwise one from U+0100 on.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, other = [], 256
    for byte in range(256):
        characters.append(chr(byte if byte in printed else other))
        other += byte not in printed
    return characters
