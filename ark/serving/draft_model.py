"""Drafts the next tokens of texts with a smaller model on the same device. The model has its own
plan and runs between two steps of the engine. Created by ark.serving.engine, called by the
scheduler.

The tokens of a draft are sampled with the request's own temperature, top-k and noise. The noise
depends only on the seed and the position. So if the two models compute about the same
probabilities, the draft consists of the tokens that the engine itself would sample.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.errors import InvalidUsageError, UnsupportedError
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.runtime.bootstrap import Bootstrap
from ark.serving.drafts import right_tokens
from ark.serving.loading import LoadedModel, load_model
from ark.serving.progress import Chunks, Progress, Step
from ark.serving.rows import DeviceRows
from ark.serving.types import Request

DRAFT_TOKENS = 3
"""The default number of tokens that a draft model proposes at a time."""


def check_draft_model(
    checkpoint: Checkpoint, draft: Checkpoint, context: int, ranks: Bootstrap | None = None
) -> None:
    """Raises InvalidUsageError if `draft` cannot draft tokens for `checkpoint`, and
    UnsupportedError on several ranks.
    """
    if ranks is not None and ranks.world_size > 1:
        raise UnsupportedError(
            f"a draft model on {ranks.world_size} ranks is not supported; omit it, or use one rank"
        )
    wanted, has = checkpoint.config.vocab_size, draft.config.vocab_size
    if wanted != has:
        raise InvalidUsageError(
            f"the draft model in {draft.directory} has a vocabulary of {has:,} tokens, but the "
            f"model has {wanted:,}; use a draft model with the model's tokenizer"
        )
    most = draft.config.max_position_embeddings
    if most < context:
        raise InvalidUsageError(
            f"the draft model in {draft.directory} has {most:,} positions, but requests may have "
            f"{context:,}; lower the context to {most}, or use another draft model"
        )


class DraftModel:
    """A loaded draft model. It has pages in its KV cache for as many texts as the engine has slots
    (requests that run at once).
    """

    def __init__(self, model: LoadedModel) -> None:
        """model: the loaded draft model, which `close` closes."""
        assert model.shape.pages is not None
        self._model, self._rows = model, DeviceRows(model.executor, model.shape)
        each = model.shape.pages.most(model.shape.context)
        first = self._rows.reserved
        self._free = [
            list(range(begin, begin + each))
            for begin in range(first, first + model.shape.batch * each, each)
        ]
        self._texts: OrderedDict[Progress, Progress] = OrderedDict()  # least recently used first
        self._drafts: dict[Progress, tuple[int, ...]] = {}  # the latest draft of each text

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        backend: Backend | str,
        device: Device | None,
        served: Shape,
        budget_s: float,
    ) -> DraftModel:
        """A draft model on an opened device, for an engine of the shape `served`."""
        assert served.pages is not None and device is not None
        model = load_model(
            checkpoint,
            backend,
            device,
            slots=served.batch,
            context=served.context,
            chunk=None if served.chunk else 0,
            page=served.pages.size,
            budget_s=budget_s,
        )
        try:
            return cls(model)
        except BaseException:
            model.close()
            raise

    def propose(self, texts: Sequence[Progress], most: int) -> list[tuple[int, ...]]:
        """Returns a draft of up to `most` next tokens for each text. `texts` may have at most as
        many texts as the engine has slots. The draft is empty for a text whose recent drafts were
        wrong.
        """
        asked = [text for text in texts if not text.drafts.paused()]
        own = {text: self._continued(text, asked, most) for text in asked}
        for progress in own.values():
            self._compute(progress)
        if own:
            self._decode(list(own.values()))
        return [self._drafts.get(own[text], ()) if text in own else () for text in texts]

    def close(self) -> None:
        """Frees everything."""
        self._rows.close()
        self._model.close()

    def _continued(self, text: Progress, asked: Sequence[Progress], most: int) -> Progress:
        """Returns the draft model's state of a text, updated to the text's current tokens. If the
        last draft had wrong tokens, the keys and values from the first wrong token on are computed
        again.
        """
        known = self._texts.pop(text, None)
        if known is None:
            sampling = text.request.sampling
            how = SamplingParams(
                temperature=sampling.temperature, top_k=sampling.top_k, seed=sampling.seed
            )
            known = Progress(Request(text.request.id, text.request.prompt, how), [], 0)
            known.pages = self._room(asked)
        self._texts[text] = known
        begin = len(known.tokens)
        right = right_tokens(self._drafts.pop(known, ()), text.tokens[begin:])
        known.tokens += text.tokens[begin:]
        known.computed = min(known.computed, begin + right, known.last)
        known.total = min(len(known.tokens) + most, text.total)
        known.admissions += 1  # rewrites the device's row, which has the wrong draft
        return known

    def _room(self, asked: Sequence[Progress]) -> list[int]:
        """The pages of a free slot. If no slot is free, the least recently used text loses its
        slot.
        """
        if not self._free:
            oldest = next(text for text in self._texts if text not in asked)
            known = self._texts.pop(oldest)
            self._drafts.pop(known, None)
            self._free.append(known.pages)
        return self._free.pop()

    def _compute(self, progress: Progress) -> None:
        """Computes the keys and values of a text's new tokens with the prompt phase, which
        processes a chunk of tokens per iteration. Tokens that do not fill a chunk are left to
        `_decode`.
        """
        chunk, left = self._model.shape.chunk, progress.last - progress.computed
        if not chunk or left < chunk:
            return
        chunks = Chunks(progress, progress.computed, -(-left // chunk))
        self._rows.start(Step(chunks, (), 0)).end()
        progress.computed = progress.last

    def _decode(self, rows: list[Progress]) -> None:
        """Decodes each text until it has `total` tokens, and stores the new tokens as the text's
        draft.
        """
        iterations = max(p.total - 1 - p.computed for p in rows)
        launched = self._rows.start(Step(None, tuple(rows), iterations))
        try:
            _, tokens = launched.end()
        except BaseException:
            launched.stop()
            raise
        for row, new in tokens:
            rows[row].computed = rows[row].last + len(new)
            self._drafts[rows[row]] = tuple(new)
