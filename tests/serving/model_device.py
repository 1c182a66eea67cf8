"""A device in plain Python that runs a scheduler's steps. A page holds, for each position, a hash
of the text up to it, and the next token is a function of that hash. A page that another request has
overwritten, or that was shared wrongly, is noticed, because it holds the hash of another text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.serving.progress import Done, Outcome, Progress, Step
from ark.serving.scheduler import Scheduler
from ark.serving.types import FinishReason, Request

VOCABULARY_TOKENS = 5


def chained(tokens: Sequence[int], adapter: int = 0) -> list[int]:
    """Returns, for each position, a hash of the text up to it and of its adapter."""
    chain, before = [], adapter
    for token in tokens:
        before = hash((before, token))
        chain.append(before)
    return chain


def next_token(chain: int) -> int:
    return chain % 1009 % VOCABULARY_TOKENS


def solo(request: Request, context: int) -> tuple[list[int], FinishReason]:
    """Returns the new tokens of a request that is served alone, and the reason why it ends."""
    tokens = list(request.prompt)
    most = request.sampling.max_tokens
    total = context if most is None else min(context, len(tokens) + most)
    while len(tokens) < total:
        tokens.append(next_token(chained(tokens, int(request.adapter or 0))[-1]))
        if tokens[-1] in request.stop_token_ids:
            return tokens[len(request.prompt) :], FinishReason.STOP
    return tokens[len(request.prompt) :], FinishReason.LENGTH


class ModelDevice:
    """Executes the scheduler's steps. chunk: the number of prompt tokens that an iteration reads.
    size: the number of positions in a page.
    """

    def __init__(self, chunk: int, size: int) -> None:
        self.chunk, self.size = chunk, size
        self._cells: dict[tuple[int, int], int] = {}

    def run(self, step: Step, done: Done) -> list[list[int]]:
        """Returns, by row, the tokens that the step generates. done: the part of the step after
        which the launch ends.
        """
        if step.chunks is not None:
            progress, start = step.chunks.progress, step.chunks.start
            end = min(start + step.chunks.count * self.chunk, progress.last)
            assert step.chunks.count * self.chunk < end - start + self.chunk, "an empty chunk"
            for place in range(start, min(start + done.chunks * self.chunk, end)):
                self._compute(progress, progress.tokens, place)
        tokens = [self._decode(progress, done.iterations) for progress in step.rows]
        assert step.iterations == 1 or not any(step.drafts)
        if not done.iterations:
            return tokens
        for row, draft in enumerate(step.drafts):
            progress = step.rows[row]
            for end in range(1, len(draft) + 1):
                text = [*progress.tokens, *draft[:end]]
                chain = self._compute(progress, text, len(text) - 1)
                tokens[row].append(next_token(chain))
        return tokens

    def _compute(self, progress: Progress, tokens: Sequence[int], place: int) -> int:
        """Computes the hash of a position from those of all positions before it, stores it in the
        request's page, and returns it.
        """
        chain, pages = chained(tokens[: place + 1], progress.adapter), progress.pages
        self._cells[pages[place // self.size], place % self.size] = chain[place]
        for before in range(place):
            seen = self._cells.get((pages[before // self.size], before % self.size))
            assert seen == chain[before], f"position {before} holds another text"
        return chain[place]

    def _decode(self, progress: Progress, iterations: int) -> list[int]:
        """Decodes like the device function ark_choose_each: in each iteration a row that has not
        reached its limit advances by a token; a row at its limit stays.
        """
        tokens, at = list(progress.tokens), progress.computed
        limit = progress.end(self.size)
        for _ in range(iterations):
            if at > progress.last and at + 1 >= limit:
                break
            chain = self._compute(progress, tokens, at)
            if at >= progress.last:
                if at + 1 >= limit:
                    break
                tokens.append(next_token(chain))
            at += 1
        return tokens[len(progress.tokens) :]


def finish(scheduler: Scheduler, step: Step, device: ModelDevice) -> list[Outcome]:
    """Runs all iterations of a step on the device and passes the tokens to the scheduler. Returns
    the outcome of each row that has new tokens.
    """
    done = Done(step.chunk_count, step.iterations)
    outcomes = [
        scheduler.take(step, row, tokens)
        for row, tokens in enumerate(device.run(step, done))
        if tokens
    ]
    scheduler.end(step, done)
    return [outcome for outcome in outcomes if outcome is not None]
