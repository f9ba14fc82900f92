"""Constraints of a request on the answer's tokens beside its grammar, and prompts with a gap, in token ids."""

from __future__ import annotations

from api.chat.tokens import Vocabulary
from api.models.fill_in_middle import FillInMiddle, TooLong
from api.models.served import ServedModel
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.generation import check_bad_word_tokens
from api.schemas.view import Reading
from control.errors import ContextLengthExceeded, RequestError
from control.messages import ReasoningBudget

_SPARED = 4
"""Where an answer has no limit of its own, this part of the context is left for it."""


def bad_words(request: ChatRequest | CompletionRequest, vocabulary: Vocabulary) -> list[list[int]]:
    """The token sequences that the answer must not have. Raises RequestError for too many tokens."""
    sequences = vocabulary.spellings(request.bad_words) if request.bad_words else []
    check_bad_word_tokens(sequences)
    return sequences


def reasoning_budget(
    request: ChatRequest | CompletionRequest, reading: Reading | None, vocabulary: Vocabulary
) -> ReasoningBudget | None:
    """The limit of the answer's reasoning; None where there is no limit, or no reasoning in marks that are known."""
    tokens = request.thinking_token_budget if isinstance(request, ChatRequest) else None
    thinking = reading.thinking if reading is not None else None
    if tokens is None or tokens < 0 or thinking is None:
        return None
    return ReasoningBudget(
        tokens=tokens,
        open=thinking.open,
        close=thinking.close,
        opening=vocabulary.encode(thinking.open, bos=False),
        closing=vocabulary.encode(thinking.close, bos=False),
        begun=thinking.begun,
    )


def prompts_with_gap(request: CompletionRequest, served: ServedModel) -> list[list[int]]:
    """The prompts of a request whose gap is to be filled. Raises RequestError, ContextLengthExceeded."""
    gaps, context = _gaps(served), min(served.assets.context_length, served.assets.kv_tokens)
    answer = context // _SPARED if request.token_limit is None else request.token_limit
    try:
        return [
            gaps.prompt(
                prompt,
                request.suffix or "",
                request.files,
                bos=request.add_special_tokens is not False,
                most=context,
                room=context - answer,
            )
            for prompt in request.prompts
        ]
    except TooLong:
        error = ContextLengthExceeded(context + 1, request.token_limit or 1, context, at_least=True)
        error.param = "prompt"
        raise error from None


def gap_marks(request: ChatRequest | CompletionRequest, served: ServedModel) -> list[int]:
    """The tokens that end the answer where a gap is filled."""
    if not isinstance(request, CompletionRequest) or not request.has_gap or request.ignore_eos:
        return []
    return _gaps(served).stop_ids


def _gaps(served: ServedModel) -> FillInMiddle:
    if served.gaps is None:
        raise RequestError(
            "'suffix' is not supported by this model: its tokenizer has no tokens that mark a gap. Use a model that "
            "was trained to fill gaps, or remove it from the request.",
            param="suffix",
            code="unsupported_parameter",
        )
    return served.gaps
