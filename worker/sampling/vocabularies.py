"""The forms of a model's vocabulary that a leader needs: made by the leader, or before it by the standby that forks it.

The form for grammars takes half a second of a large vocabulary, in which no other Python thread runs. So a leader makes
it when it is idle or a grammar needs it. A forked leader shares the standby's memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from control.errors import ModelFilesError
from control.messages import ModelAssets
from control.process import give_back_memory
from control.text.grammar import tokenizer_of
from control.text.text_stream import Decode
from control.text.tokenizer_check import decoding_only
from control.text.vocabulary import read_token_bytes


@dataclass(frozen=True)
class Vocabulary:
    """Ids to text, and the form in which the library of grammars takes a vocabulary: each call makes it in a thread,
    unless it was prepared."""

    decode: Decode
    for_grammars: Callable[[], Future[LLTokenizer]]


_prepared: dict[str, tuple[bytes, Vocabulary]] = {}
"""By the name that `prepare` was given: the digest of the assets, and what was made of them."""


def prepare(name: str, assets: ModelAssets) -> None:
    """Make the vocabulary now, for the `vocabulary_of` of processes that are forked from this one. Raises any error."""
    form = Future[LLTokenizer]()
    _fulfil(form, assets)
    form.result()
    _prepared[name] = _digest(assets), Vocabulary(_decode_of(assets), lambda: form)


def keep_prepared(names: set[str]) -> None:
    """Release the vocabularies that were prepared under other names."""
    for name in _prepared.keys() - names:
        del _prepared[name]


def vocabulary_of(assets: ModelAssets) -> Vocabulary:
    """The one that was prepared, if it was of the same assets; else a new one. Raises ModelFilesError."""
    if _prepared:
        digest = _digest(assets)
        for made_of, vocabulary in _prepared.values():
            if made_of == digest:
                return vocabulary

    def for_grammars() -> Future[LLTokenizer]:
        form = Future[LLTokenizer]()
        threading.Thread(target=_fulfil, args=(form, assets), name="vocabulary", daemon=True).start()
        return form

    return Vocabulary(_decode_of(assets), for_grammars)


def _digest(assets: ModelAssets) -> bytes:
    """Of all that a vocabulary is made of. It takes some hundredths of a second for a large one."""
    parts = f"{assets.vocab_size} {assets.eos_ids} {assets.tokenizer_json}"
    return hashlib.sha256(parts.encode()).digest()


def _decode_of(assets: ModelAssets) -> Decode:
    try:
        tokenizer = Tokenizer.from_str(decoding_only(assets.tokenizer_json))
    except Exception as error:  # the library raises no kind of its own
        raise ModelFilesError(
            f"No tokenizer can be made of tokenizer.json: {error}. Put the published one there "
            "(`tokenizer.save_pretrained(folder)`), or load another model."
        ) from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _fulfil(future: Future[LLTokenizer], assets: ModelAssets) -> None:
    try:
        tokens = read_token_bytes(assets.tokenizer_json, assets.vocab_size)
        future.set_result(tokenizer_of(tokens, assets.eos_ids))
    except BaseException as error:
        future.set_exception(error)
    give_back_memory()  # the file and its entries took several times what is kept
