"""Selects the tokenizer that transformers builds for a directory with a tokenizer.json.

Most classes use the file unchanged. A few build the normaliser, the splitting and the decoder
themselves, and take only the vocabulary, merges and post-processor from the file. `CLASSES` has
those of the few classes that models in ark.models.registry use. The rules are those of transformers
5 (AutoTokenizer.from_pretrained and TokenizersBackend). Called by ark.models.tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ark import log

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerClass:
    """A class of transformers that builds parts of its tokenizer itself. special: its default
    special tokens. make: a function that builds the tokenizer, without added tokens, from
    vocabulary, merges and tokenizer_config. adds_special: True if all special tokens are added
    again. framed: True if the file determines the tokens before and after a text.
    """

    special: Mapping[str, str]
    make: Callable[[dict[str, int], list[tuple[str, str]], Mapping[str, Any]], Tokenizer]
    adds_special: bool = False
    framed: bool = True


def _llama(
    vocab: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]
) -> Tokenizer:
    """Llama's tokenizer, with byte fallback. Words begin with U+2581. With `legacy`, U+2581 also
    follows each added token.
    """
    prefixed = settings.get("add_prefix_space")
    prefixed = True if prefixed is None else bool(prefixed)
    scheme = ("always" if settings.get("legacy", False) else "first") if prefixed else "never"
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bytes(
    vocab: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]
) -> Tokenizer:
    """GPT-2's tokenizer, which splits words into bytes."""
    tokenizer = Tokenizer(
        BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(_prefixed(settings))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _composed_bytes(
    vocab: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]
) -> Tokenizer:
    """GPT-NeoX's tokenizer. It is GPT-2's, applied after Unicode composition."""
    tokenizer = _bytes(vocab, merges, settings)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _qwen2(
    vocab: dict[str, int], merges: list[tuple[str, str]], settings: Mapping[str, Any]
) -> Tokenizer:
    """Qwen2's tokenizer. It differs from GPT-NeoX's only in that each digit is a separate word."""
    tokenizer = _composed_bytes(vocab, merges, settings)
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(_prefixed(settings), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return tokenizer


def _prefixed(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("add_prefix_space"))


CLASSES = {
    "LlamaTokenizer": TokenizerClass(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, _llama
    ),
    "Qwen2Tokenizer": TokenizerClass(
        {"eos_token": END, "unk_token": END, "pad_token": END}, _qwen2, adds_special=True
    ),
    "GPT2Tokenizer": TokenizerClass({"bos_token": END, "eos_token": END, "unk_token": END}, _bytes),
    "GPTNeoXTokenizer": TokenizerClass(
        {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": "<|padding|>"},
        _composed_bytes,
        framed=False,
    ),
}
OTHERS = """
    Albert Barthez Bert BigBird Blenderbot CLIP Camembert CodeLlama Cohere DPRQuestionEncoder
    Deberta DebertaV2 Esmc Funnel Gemma Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MBart
    MBart50 MPNet MarkupLM Nllb Nougat OpenAIGPT Pegasus Qwen3_5 Reformer RemBert RoFormer Roberta
    SeamlessM4T Siglip2 Splinter T5 Udop VideoPrism Whisper XGLM XLMRoberta XLNet
"""
"""Other classes of transformers that build their tokenizers themselves. The names are without
"Tokenizer".
"""
REGISTERED = {
    "mistral": "TokenizersBackend",
    "mixtral": "TokenizersBackend",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "olmo2": "TokenizersBackend",
    "granite": "TokenizersBackend",
    "phi3": "TokenizersBackend",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "glm": "TokenizersBackend",
    "glm4": "TokenizersBackend",
}
"""For each model_type, the default class, which is used if no file names a class."""
CORRECTED = ("qwen2",)
"""Model types for which transformers always uses the registered class, even if the files name
another class.
"""


def class_of(
    settings: Mapping[str, Any], config: Mapping[str, Any], bytes_level: Callable[[], bool]
) -> TokenizerClass | None:
    """The class that builds the directory's tokenizer, or None if tokenizer.json is used unchanged.

    settings: the content of tokenizer_config.json. config: the content of config.json. bytes_level:
    a function that returns True if tokenizer.json splits text into bytes, which a LlamaTokenizer
    does not do.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or ""
    name = str(named).removesuffix("Fast")
    model = str(config.get("model_type"))
    registered = REGISTERED.get(model, "")
    if model in CORRECTED:
        name = registered
    if registered == "TokenizersBackend" or (name == "LlamaTokenizer" and bytes_level()):
        return None
    name = name or registered
    if name.endswith("Tokenizer") and name.removesuffix("Tokenizer") in OTHERS.split():
        log.warn(
            f"the tokenizer's class is {name}, which transformers builds differently from "
            "tokenizer.json; ark uses the file unchanged, so ids may differ"
        )
    return CLASSES.get(name)


def built(
    kind: TokenizerClass, file: Mapping[str, Any], whole: Tokenizer, settings: Mapping[str, Any]
) -> Tokenizer:
    """Builds the tokenizer of the class `kind`, without added tokens. file: the content of
    tokenizer.json. whole: the tokenizer that the tokenizers package reads from this file. Raises
    KeyError, TypeError or ValueError if the file is not valid.
    """
    model = file["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # a unigram model has a list of tokens with scores
        vocab = {piece[0]: place for place, piece in enumerate(vocab)}
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or ())
    tokenizer = kind.make(vocab, [(first, second) for first, second in pairs], settings)
    if kind.framed and whole.post_processor is not None:
        tokenizer.post_processor = whole.post_processor
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer
