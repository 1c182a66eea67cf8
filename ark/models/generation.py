"""Reads the default sampling parameters of a checkpoint from generation_config.json, as
transformers does. Used by the command line, `ark.LLM` and the server; settings of the user take
precedence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ark import log
from ark.errors import InvalidUsageError, ModelError
from ark.models.fields import Fields
from ark.models.sampling import SamplingParams

FILE = "generation_config.json"
USUAL_NEW_TOKENS = 128
RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "suppress_tokens": "suppress_tokens",
}
"""The fields of SamplingParams that have another name in the file. Maps a field to its name in the
file.
"""
SAMPLED_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""The values that transformers uses for fields that the file omits, if `do_sample` is true."""
READ = ("eos_token_id", "do_sample", *RENAMED, *SAMPLED_DEFAULTS)
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
"""Fields that do not change the tokens of a single sequence."""
SAMPLED = (*SAMPLED_DEFAULTS, "top_h", "epsilon_cutoff", "eta_cutoff")
"""Fields that transformers reads only if `do_sample` is true."""
NEUTRAL: dict[str, Any] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
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
"""For each field, the value that has no effect on the text. (For max_length it is transformers'
default.)
"""
BEAMS = ("early_stopping", "length_penalty", "diversity_penalty")
ASSISTED = ("assistant_", "num_assistant_", "target_lookbehind", "prompt_lookup_")


def sampling_fields(directory: Path, warn: bool = True) -> dict[str, Any]:
    """The fields of SamplingParams that the file sets. Sampling is greedy unless `do_sample` is
    true.

    warn: True to log a warning with the fields that ark does not support although they would change
    the text. Raises ModelError if the file is damaged or a value is out of range.
    """
    path = directory / FILE
    fields = Fields.read(path) if path.exists() else Fields(str(path), {})
    sampled = fields.flag("do_sample", False)
    values: dict[str, Any] = {"temperature": 0.0}
    if sampled:
        values = {
            name: usual if fields.get(name) is None else fields.get(name)
            for name, usual in SAMPLED_DEFAULTS.items()
        }
    for name, own in RENAMED.items():
        if fields.get(name) is not None:
            values[own] = fields.get(name)
    try:
        SamplingParams(**{"max_tokens": None, **values})
    except InvalidUsageError as error:
        raise ModelError(f"{path}: {error}. Correct the field, or remove it.") from None
    if warn:
        warn_of_ignored(directory)
    return values


def default_sampling(directory: Path, warn: bool = True, **given: Any) -> SamplingParams:
    """The sampling parameters of the file; fields in `given` take precedence. max_tokens is
    USUAL_NEW_TOKENS if neither sets it. warn: see sampling_fields.
    """
    fields = {"max_tokens": USUAL_NEW_TOKENS, **sampling_fields(directory, warn), **given}
    return SamplingParams(**fields)


def ignored(directory: Path) -> dict[str, Any]:
    """The fields of the file that ark does not support although they would change the text."""
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
    """Logs one line with the fields that ark does not support, if there are any."""
    fields = ignored(directory)
    if fields:
        listed = ", ".join(f"{name} {json.dumps(value):.60}" for name, value in fields.items())
        log.warn(
            f"{directory / FILE} sets {listed}, which ark does not support; the text may "
            "differ from that of transformers"
        )
