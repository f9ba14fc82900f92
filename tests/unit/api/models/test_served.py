"""Objects of a model's assets are made once: a new epoch reuses them. Files that can't be used are refused by name."""

from __future__ import annotations

import msgspec
import pytest

from api.models.models import serve
from control.errors import ModelFileRefused
from tests.byte_model import byte_assets

ASSETS = byte_assets(vocab_size=300)


def test_a_new_epoch_makes_no_new_tokenizer() -> None:
    """Other KV memory is the only difference: streams of all models would stop while a tokenizer is made."""
    first = serve("m", ASSETS, None, None, None)
    second = serve("m", msgspec.structs.replace(ASSETS, kv_tokens=ASSETS.kv_tokens + 1, created=5), first, None, None)
    assert second.vocabulary is first.vocabulary
    assert second.assets.kv_tokens == ASSETS.kv_tokens + 1 and second.assets.tokenizer_json == ""


@pytest.mark.parametrize(
    "change", [{"eos_ids": [5]}, {"chat_template": "{{ messages }}"}, {"tokenizer_json": ASSETS.tokenizer_json + " "}]
)
def test_other_assets_are_served_anew(change: dict[str, object]) -> None:
    first = serve("m", ASSETS, None, None, None)
    second = serve("m", msgspec.structs.replace(ASSETS, **change), first, None, None)
    assert second.vocabulary is not first.vocabulary


def test_an_id_that_the_library_does_not_take_is_named() -> None:
    """Its own error names no piece."""
    spoilt = ASSETS.tokenizer_json.replace('"vocab":{', '"vocab":{"spoilt":-1,', 1)
    with pytest.raises(ModelFileRefused, match="its piece 'spoilt' has the id '-1'"):
        serve("m", msgspec.structs.replace(ASSETS, tokenizer_json=spoilt), None, None, None)


def test_other_errors_of_the_library_are_its_own() -> None:
    """Only the log of the API has them."""
    spoilt = ASSETS.tokenizer_json.replace('"version":"1.0"', '"version":"7.0"', 1)
    with pytest.raises(Exception, match="version"):
        serve("m", msgspec.structs.replace(ASSETS, tokenizer_json=spoilt), None, None, None)
