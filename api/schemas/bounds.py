"""Limits of single fields of a request. The size of the body limits their sum."""

from __future__ import annotations

from typing import Any, cast

from control.errors import RequestError
from control.requests.bounds import Range, refusal

MAX_MODEL_NAME = 512
MAX_MESSAGES = 4_096
MAX_PARTS = 4_096
"""Content parts of all messages together."""
MAX_STOP_CHARACTERS = 1_024
MAX_STOP_IDS = 1_024
MAX_BIASES = 4_096
MAX_PAIRS, MAX_PAIR_NAME, MAX_LABEL = 16, 64, 512
"""OpenAI's bounds: pairs of metadata, characters of a name, and of a value or another label."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS_CHARACTERS = 1_024, 1_024, 65_536
"""Words, characters of one, and of all together."""
MAX_BAD_WORD_TOKENS = 16_384
"""Tokens of all spellings of the bad words: they travel with the request, and a leader indexes them."""
MAX_DEPTH = 32
"""Levels of a value whose form is free."""


def check_bounds(request: Any) -> None:
    """Raise RequestError for the first field of a generating request that holds too much."""
    _check_length("model", request.model, MAX_MODEL_NAME, "characters")
    messages: list[Any] = getattr(request, "messages", None) or []
    _check_length("messages", messages, MAX_MESSAGES, "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise _too_much("messages", parts, MAX_PARTS, "content parts")
    for index, text in enumerate(request.stop_strings):
        _check_length(f"stop[{index}]", text, MAX_STOP_CHARACTERS, "characters")
    _check_length("stop_token_ids", request.stop_token_ids, MAX_STOP_IDS, "ids")
    _check_length("logit_bias", request.logit_bias, MAX_BIASES, "tokens")
    _check_bad_words(request.bad_words or [])
    variables = getattr(request, "chat_template_kwargs", None)
    if variables is not None and deeper(variables, MAX_DEPTH):
        raise RequestError(
            f"'chat_template_kwargs' nests more than {MAX_DEPTH} levels deep; send a flatter value.",
            param="chat_template_kwargs",
        )


def _check_bad_words(words: list[str]) -> None:
    _check_length("bad_words", words, MAX_BAD_WORDS, "words")
    for index, word in enumerate(words):
        _check_length(f"bad_words[{index}]", word, MAX_BAD_WORD_CHARACTERS, "characters")
        if not word:
            raise RequestError(f"'bad_words[{index}]' is empty; remove it.", param=f"bad_words[{index}]")
    if (characters := sum(len(word) for word in words)) > MAX_BAD_WORDS_CHARACTERS:
        raise _too_much("bad_words", characters, MAX_BAD_WORDS_CHARACTERS, "characters in all words")


def check_bad_word_tokens(sequences: list[list[int]]) -> None:
    """Raise RequestError where the spellings of the bad words have too many tokens."""
    if (tokens := sum(len(sequence) for sequence in sequences)) > MAX_BAD_WORD_TOKENS:
        raise _too_much("bad_words", tokens, MAX_BAD_WORD_TOKENS, "tokens in all spellings of the words")


def check_number(name: str, value: float, known: Range | None = None) -> None:
    """Raise RequestError where `value` is out of the range of `name` (or of `known`), naming all three."""
    if (text := refusal(name, value, known)) is not None:
        raise RequestError(text, param=name)


def _check_length(name: str, value: Any, most: int, unit: str) -> None:
    if value is not None and len(value) > most:
        raise _too_much(name, len(value), most, unit)


def _too_much(name: str, held: int, most: int, unit: str) -> RequestError:
    return RequestError(f"'{name}' has {held} {unit}; at most {most} are served.", param=name)


def deeper(value: Any, levels: int) -> bool:
    """True if lists and objects nest more than `levels` deep; looks no deeper than that."""
    if not isinstance(value, (dict, list)):
        return False
    inner = cast("list[Any]", value.values() if isinstance(value, dict) else value)
    return levels == 0 or any(deeper(one, levels - 1) for one in inner)
