"""Sampling parameters. Names are vLLM's for fields that mean the same. Used by the generator, the
engine, `ark.LLM`, the server and the command line.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from ark.errors import InvalidUsageError
from ark.ir.values import whole
from ark.models.structured import StructuredOutputsParams, structured_outputs

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5  # logits divided by these stay finite in fp32
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3  # logits stay finite in fp32
MIN_SHARE = 1e-37  # a normal number of fp32; a smaller one becomes 0, which excludes all tokens
MAX_ABS_PENALTY = 2.0  # of presence and frequency, as in OpenAI's interface
MAX_ABS_BIAS = 100.0  # as in OpenAI's interface
MAX_SAMPLES = 128  # as in OpenAI's interface
MAX_LOGPROBS = 20  # as in OpenAI's interface
MAX_STOPS, MAX_STOP_CHARACTERS = 128, 1000
END_INT32 = 1 << 31


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. An InvalidUsageError names a field that is out of range.

    n: the number of texts that continue the prompt. temperature: 0 is greedy. top_k: 0 or -1 for
    all tokens. top_p, min_p, typical_p: 1, 0 and 1, in this order, disable them.
    repetition_penalty: 1 disables it; it applies to tokens of the prompt and of the text.
    presence_penalty, frequency_penalty: 0 disables them; they apply to tokens of the text, not of
    the prompt. logit_bias: by token id, a number that is added to the token's logit. seed: 64 bits,
    -2^63 to 2^64 - 1; None: a random one. max_tokens: the most new tokens; None: up to the
    context's end. min_tokens: the number of new tokens before which no stop token is sampled. stop:
    strings that end the text. logprobs: the number of most probable tokens that are reported in
    addition to the sampled one; None: no report. suppress_tokens: ids that are never sampled.
    structured_outputs: the form that the text must have, for `ark.LLM` and the server.

    Examples:
        >>> ark.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32).max_tokens
        32
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        values = {name: check(name, getattr(self, name)) for name, check in _CHECKS.items()}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidUsageError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise InvalidUsageError(
                f"{name} is given beside structured_outputs, whose text ends where its form is "
                "complete; give one of them"
            )

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always chosen, so that the seed has no effect."""
        return self.temperature == 0

    def beyond(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names of the fields that do not have their default values, except the fields in
        `names`.
        """
        return tuple(
            name
            for name in SAMPLING_FIELDS
            if name not in names and getattr(self, name) != getattr(DEFAULT, name)
        )

    def seeded(self, seed: int | None = None) -> SamplingParams:
        """A copy that has a seed: the seed of this object if it has one, otherwise the argument,
        otherwise a random one.
        """
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63) if seed is None else seed)

    def sample(self, number: int) -> SamplingParams:
        """The parameters of sample `number` out of n. If there is a seed, `number` is added to
        it.
        """
        if self.seed is None:
            return replace(self, n=1)
        seed = (self.seed + number + (1 << 63)) % (1 << 64) - (1 << 63)
        return replace(self, n=1, seed=seed if number else self.seed)


BASIC = ("temperature", "top_k")
"""The fields of SAMPLING_FIELDS that every plan supports. The other fields require a plan that was
made with sampling=FULL (ark.models.build.Shape).
"""
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
    "suppress_tokens",
    "structured_outputs",
)
"""The fields that the device reads, in addition to the seed and the stop tokens."""


def _integer(name: str, value: Any, low: int, high: int, note: str = "") -> int:
    if isinstance(value, bool) or not low <= whole(name, value) <= high:
        raise InvalidUsageError(
            f"{name} is {value!r:.60}; it must be a whole number from {low} to {high}{note}"
        )
    return int(value)


def _written(value: Any) -> str:
    """A value for a message. A whole number is written without a fraction, also if it is a
    float.
    """
    number = isinstance(value, float) and value.is_integer()
    return f"{int(value) if number else value!r:.60}"


def _number(name: str, value: Any, low: float, high: float, also: float | None = None) -> float:
    """Returns the value as a float. Raises InvalidUsageError unless it is between low and high, or
    equals `also`.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not (low <= value <= high or (also is not None and value == also)):
        other = "" if also is None else f"{also:g} or "
        raise InvalidUsageError(
            f"{name} is {_written(value)}; it must be {other}a number from {low:g} to {high:g}"
        )
    return float(value)


def _share(name: str, value: Any) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not MIN_SHARE <= value <= 1:
        raise InvalidUsageError(
            f"{name} is {_written(value)}; it must be a number from {MIN_SHARE:g} to 1 (off)"
        )
    return float(value)


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise InvalidUsageError(f"{name} is {value!r:.60}; it must be a list of token ids")
    return tuple(_integer(f"an id of {name}", token, 0, END_INT32 - 1) for token in value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (tuple, list)) or not all(
        isinstance(text, str) and text for text in strings
    ):
        raise InvalidUsageError(
            f"{name} is {value!r:.60}; it must be a string or a list of strings, none of them empty"
        )
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
        raise InvalidUsageError(
            f"{name} is {value!r:.60}; it may have at most {MAX_STOPS} strings of at most "
            f"{MAX_STOP_CHARACTERS:,} characters"
        )
    return tuple(strings)


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidUsageError(f"{name} is {value!r:.60}; it must map token ids to numbers")
    return {
        _integer(f"an id of {name}", token, 0, END_INT32 - 1): _number(
            f"{name} of token {token}", bias, -MAX_ABS_BIAS, MAX_ABS_BIAS
        )
        for token, bias in value.items()
    }


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidUsageError(f"{name} is {value!r:.60}; it must be True or False")
    return value


def _optional(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high, " or None")


# For each field, a function that checks a value and returns it in the type in which it is stored.
_CHECKS = {
    "n": lambda name, v: _integer(name, v, 1, MAX_SAMPLES),
    "temperature": lambda name, v: _number(name, v, MIN_TEMPERATURE, MAX_TEMPERATURE, 0.0),
    "top_k": lambda name, v: max(_integer(name, v, -1, END_INT32 - 1, " (0 and -1: off)"), 0),
    "top_p": _share,
    "min_p": lambda name, v: _number(name, v, 0.0, 1.0),
    "typical_p": _share,
    "repetition_penalty": lambda name, v: _number(
        name, v, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    ),
    "presence_penalty": lambda name, v: _number(name, v, -MAX_ABS_PENALTY, MAX_ABS_PENALTY),
    "frequency_penalty": lambda name, v: _number(name, v, -MAX_ABS_PENALTY, MAX_ABS_PENALTY),
    "logit_bias": _bias,
    "seed": lambda name, v: _optional(name, v, -(1 << 63), (1 << 64) - 1),
    "max_tokens": lambda name, v: _optional(name, v, 1, END_INT32 - 1),
    "min_tokens": lambda name, v: _integer(name, v, 0, END_INT32 - 1),
    "stop": _strings,
    "stop_token_ids": _tokens,
    "ignore_eos": _flag,
    "logprobs": lambda name, v: _optional(name, v, 0, MAX_LOGPROBS),
    "suppress_tokens": _tokens,
    "structured_outputs": structured_outputs,
}

DEFAULT = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)


def seeded_alike(sampling: SamplingParams, ranks: Any) -> SamplingParams:
    """A copy that has the same seed on all ranks. If no seed was given, it is that of rank 0.
    ranks: an ark.runtime.run.Ranks, or None.
    """
    seeded = sampling.seeded(0 if sampling.greedy else None)
    if ranks is None or sampling.greedy or sampling.seed is not None:
        return seeded
    return sampling.seeded(int(ranks.all_gather(str(seeded.seed).encode())[0]))
