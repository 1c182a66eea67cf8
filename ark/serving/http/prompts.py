"""Converts the texts and token ids of a body to token ids. Used by completions and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ark.serving.http.errors import ApiError
from ark.serving.http.model import ServedModel
from ark.serving.http.schema import Prompts


async def prompt_ids(
    model: ServedModel,
    given: Prompts,
    name: str,
    check_count: Callable[[int], None],
    check_length: Callable[[int, str], None],
) -> tuple[list[list[int]], list[str]]:
    """The token ids of every prompt of a body, and their texts.

    name: the body's field that has the prompts. check_count: called with the number of prompts
    before any prompt is encoded; it raises an error if there are too many. check_length: called
    with a prompt's number of tokens and its place in the body; it raises an error if the prompt is
    too long.
    """
    one_only = isinstance(given, str) or (given and isinstance(given[0], int))
    several: list[Any] = [given] if one_only else list(given)
    if not several:
        raise ApiError(400, f"the {name} is empty; give a text or token ids", param=name)
    check_count(len(several))
    params = [name if one_only else f"{name}[{place}]" for place in range(len(several))]
    written = [place for place, one in enumerate(several) if isinstance(one, str)]
    encoded = await model.encoded([several[i] for i in written], [params[i] for i in written])
    ids = dict(zip(written, encoded, strict=True))
    texts = []
    for place, (one, param) in enumerate(zip(several, params, strict=True)):
        if isinstance(one, int):
            raise ApiError(
                400, f"the {name} mixes token ids with texts; send lists of ids", param=param
            )
        check_length(len(ids.get(place, one)), param)
        if place not in ids:
            model.check_tokens(one, param)
            ids[place] = list(one)
        texts.append(one if isinstance(one, str) else model.tokenizer.decode(one))
    return [ids[place] for place in range(len(several))], texts
