"""What generation_config.json asks for and ark does not do. Called by ark.models.generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ark import log
from ark.models.fields import Fields

FILE = "generation_config.json"
READ = ("eos_token_id",)
WITHOUT_EFFECT = (
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "decoder_start_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
)
"""Fields that change no token of a single sequence."""
SAMPLED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""Fields that transformers reads only where `do_sample` is true."""
NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "early_stopping": False,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "guidance_scale": 1.0,
    "min_length": 0,
    "max_length": 20,
}
"""Values that change nothing (max_length: that of a file that says none)."""
BEAMS = ("early_stopping", "length_penalty", "diversity_penalty")
ASSISTED = ("assistant_", "num_assistant_", "target_lookbehind", "prompt_lookup_")


def ignored(directory: Path) -> dict[str, Any]:
    """The fields of the file that would change the text and that ark does not follow."""
    path = directory / FILE
    if not path.exists():
        return {}
    fields = Fields.read(path).values
    skipped = {*READ, *WITHOUT_EFFECT}
    if fields.get("do_sample") is not True:
        skipped |= set(SAMPLED)
    if fields.get("num_beams") in (None, 1):
        skipped |= set(BEAMS)
    return {
        name: value
        for name, value in fields.items()
        if name not in skipped
        and not name.startswith(ASSISTED)
        and value is not None
        and (name not in NEUTRAL or value != NEUTRAL[name])
    }


def warn_of_ignored(directory: Path) -> None:
    """Says in one line what of the file is not followed, if there is something."""
    found = ignored(directory)
    if found:
        said = ", ".join(f"{name} {json.dumps(value):.60}" for name, value in found.items())
        log.warn(
            f"{directory / FILE} asks for {said}, which ark does not follow: tokens are drawn as "
            "--temperature, --top-k and --max-new-tokens (Sampling) say, greedily without them"
        )
