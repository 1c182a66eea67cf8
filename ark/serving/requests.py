"""Checks the requests and the step sizes that callers give to an engine. Called by
ark.serving.engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.errors import InvalidUsageError
from ark.ir.values import whole
from ark.models.build import FULL, Shape
from ark.models.options import check_tokens
from ark.models.request import check_prompt_tokens, no_room
from ark.models.sampling import BASIC
from ark.serving.types import Request
from ark.tasks.sequences import MAX_BATCH

MAX_LAUNCH_ITERATIONS = 1 << 16


def check_steps(iterations: int, draft: int) -> None:
    """Raises InvalidUsageError if the number of a launch's iterations or of a draft's tokens is out
    of range.
    """
    if not 1 <= whole("the number of iterations", iterations) <= MAX_LAUNCH_ITERATIONS:
        raise InvalidUsageError(
            f"iterations={iterations} is out of range; expected 1 to {MAX_LAUNCH_ITERATIONS}"
        )
    if not 0 <= whole("the draft", draft) < MAX_BATCH:
        raise InvalidUsageError(
            f"draft={draft} is out of range; expected 0 (none) to {MAX_BATCH - 1}"
        )


def check_request(request: Request, shape: Shape, adapters: Sequence[str] = ()) -> None:
    """Raises InvalidUsageError if an engine of the given shape cannot serve the request."""
    prompt, sampling = request.prompt, request.sampling
    vocabulary, context = shape.config.vocab_size, shape.context
    check_prompt_tokens(prompt, vocabulary)
    if len(prompt) >= context:
        raise no_room(f"the prompt has {len(prompt):,}", context, context)
    if sampling.n != 1:
        raise InvalidUsageError(f"n={sampling.n} is out of range; submit a request for each sample")
    if request.grammar is None and sampling.structured_outputs is not None:
        raise InvalidUsageError(
            "a request with structured_outputs needs a grammar; create it by "
            "ark.serving.grammar.Grammars, or use ark.LLM"
        )
    others = () if shape.sampling else sampling.beyond(BASIC)
    if others:
        raise InvalidUsageError(
            f"this engine does not support {', '.join(others)} of the sampling; leave "
            f"these fields at their defaults, or open it with sampling={FULL!r}"
        )
    if (sampling.logprobs or 0) > shape.logprobs:
        raise InvalidUsageError(
            f"logprobs is {sampling.logprobs}, but this engine reports at most "
            f"{shape.logprobs}; ask for fewer, or open it with more max_logprobs"
        )
    if request.adapter and request.adapter not in adapters:
        raise InvalidUsageError(
            f"the adapter {request.adapter!r:.60} does not exist; this engine has "
            f"{', '.join(adapters) or 'none'}"
        )
    check_tokens(sampling, vocabulary, request.stop_token_ids)
