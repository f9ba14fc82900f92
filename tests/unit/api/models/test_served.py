"""Objects of a model's assets are reused: when a new epoch publishes them again."""

from __future__ import annotations

import msgspec
import pytest

from api.models.models import serve
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
