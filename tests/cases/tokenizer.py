"""Cases and helpers of tests/unit/models/test_tokenizer.py, which other tests use too."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.checkpoints import BOS, EOS


def byte_fallback_tokenizer() -> Backend:
    """Returns a tokenizer in the form of Llama 2: words begin with U+2581, other text is byte
    tokens.
    """
    pieces = ["<unk>", BOS, EOS, *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "a", "b", "é", "▁a", "ab", "▁ab", "日"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 1)]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", BOS, EOS)])
    return backend
