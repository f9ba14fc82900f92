"""What a request forbids or demands of the answer's tokens, beside its grammar, in token ids of its model."""

from __future__ import annotations

from api.chat.tokens import Vocabulary
from api.schemas.bounds import check_bad_word_tokens
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.how import Reading
from control.messages import ReasoningBudget


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
