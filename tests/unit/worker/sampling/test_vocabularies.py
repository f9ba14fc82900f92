"""Forms of a vocabulary are reused: those that a standby has made, for the same assets, and for no others."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tokenizers import Tokenizer

from control.errors import ModelFilesError
from tests.byte_model import byte_assets
from worker.sampling.grammars import keep_prepared, prepare, vocabulary_of

ASSETS = byte_assets(vocab_size=300)
IDS = Tokenizer.from_str(ASSETS.tokenizer_json).encode("hi", add_special_tokens=False).ids


@pytest.fixture(autouse=True)
def none_prepared() -> Iterator[None]:
    keep_prepared(set())
    yield
    keep_prepared(set())


def test_a_prepared_vocabulary_is_used_again() -> None:
    """It is made once, and its form for grammars is there at once."""
    prepare("folder", ASSETS)
    first, second = vocabulary_of(ASSETS), vocabulary_of(msgspec.structs.replace(ASSETS, kv_tokens=7, created=9))
    assert first is second and first.for_grammars().done()
    assert first.decode(IDS) == "hi"


@pytest.mark.parametrize("change", [{"vocab_size": 301}, {"eos_ids": [5]}, {"tokenizer_json": None}])
def test_other_assets_get_a_vocabulary_of_their_own(change: dict[str, object]) -> None:
    """The files of a model may have changed since they were prepared."""
    prepare("folder", ASSETS)
    if change.get("tokenizer_json", "") is None:
        change = {"tokenizer_json": ASSETS.tokenizer_json.replace("{", "{ ", 1)}
    own = vocabulary_of(msgspec.structs.replace(ASSETS, **change))
    assert own is not vocabulary_of(ASSETS)
    assert own.for_grammars().result(20.0).vocab_size == change.get("vocab_size", 300)


def test_models_that_are_not_in_use_any_more_are_released() -> None:
    """The memory of a standby does not grow with every model that its host has ever served."""
    other = byte_assets(vocab_size=320)
    prepare("old", ASSETS)
    prepare("new", other)
    keep_prepared({"new", "never seen"})
    assert vocabulary_of(other) is vocabulary_of(other)
    assert vocabulary_of(ASSETS) is not vocabulary_of(ASSETS)


@pytest.mark.parametrize("text", ['"type":"Strange"', '"type":"WordPiece"'])
def test_what_is_no_tokenizer_is_an_error_of_the_files(text: str) -> None:
    """A rank that raises it is not started again."""
    broken = ASSETS.tokenizer_json.replace('"type":"BPE"', text)
    assert broken != ASSETS.tokenizer_json
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: .*save_pretrained"):
        vocabulary_of(msgspec.structs.replace(ASSETS, tokenizer_json=broken))
