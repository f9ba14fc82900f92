"""Converted tokenizers are cached for later starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from control.errors import ModelFilesError
from tests.gguf_models import Stored, vocabulary, write
from worker.repository.gguf import tokenizer
from worker.repository.gguf.description import describe
from worker.repository.gguf.tokenizer import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    GgufTokenizer,
    cached_tokenizer,
    read_tokenizer,
)
from worker.weights.gguf import GgufModel, read_model

VECTOR = Stored(0, (8,), bytes(32))


class Reads:
    """Counts the conversions."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: GgufModel) -> GgufTokenizer:
        self.count += 1
        return read_tokenizer(model)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer, "LEAST_TOKENS", 1)
    return Reads()


def test_a_tokenizer_is_converted_once(read: Reads, tmp_path: Path) -> None:
    """Another start takes what was kept, with the same result; other metadata is another tokenizer."""
    path = write(tmp_path / "a.gguf", vocabulary(), {"a": VECTOR})
    tokenizers = [cached_tokenizer(read_model(path), read) for _ in range(3)]
    assert read.count == 1
    assert tokenizers[0] == tokenizers[1] == tokenizers[2]
    assert "chat_template" in tokenizers[0].tokenizer_config
    again = describe(read_model(path)), describe(read_model(path))
    assert again[0] == again[1] and again[0].chat_template is not None
    other = write(tmp_path / "b.gguf", vocabulary() | {"tokenizer.chat_template": "other"}, {"a": VECTOR})
    assert cached_tokenizer(read_model(other), read).tokenizer_config["chat_template"] == "other"
    assert read.count == 2


def test_other_code_converts_again(read: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", vocabulary(), {"a": VECTOR})
    cached_tokenizer(read_model(path), read)
    monkeypatch.setattr(tokenizer.tokenizers, "__version__", "another")
    cached_tokenizer(read_model(path), read)
    assert read.count == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_again(damage: str, read: Reads, tmp_path: Path) -> None:
    """With a warning that names it."""
    path = write(tmp_path / "a.gguf", vocabulary(), {"a": VECTOR})
    made = cached_tokenizer(read_model(path), read)
    [file] = (tmp_path / "cache").rglob("*.tokenizer")
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-9], "changed": content[:-9] + b"123456789", "empty": b""}[damage])
    with capture_logs() as logs:
        assert cached_tokenizer(read_model(path), read) == made
    assert read.count == 2 and [line["file"] for line in logs] == [str(file)]
    assert file.read_bytes() == content


def test_small_vocabularies_and_closed_folders_keep_none(
    read: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.gguf", vocabulary(), {"a": VECTOR})
    (tmp_path / "cache").write_text("a file, where a folder is wanted")
    cached_tokenizer(read_model(path), read)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(tokenizer, "LEAST_TOKENS", 16_384)
    cached_tokenizer(read_model(path), read)
    assert read.count == 2 and not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["▁" * 16_385], "m.gguf: tokenizer.ggml.tokens has a token of 16385 characters; at most 16384"),
        (
            ["▁" * (16_000 + more) for more in range(5)],
            r"the squares of the lengths .* add up to \d+; at most 1073741824",
        ),
        ([f"t{place}" for place in range(2**20)], r"tokenizer.ggml.tokens has \d+ tokens; at most 1048576"),
    ],
    ids=["long token", "long tokens", "many tokens"],
)
def test_a_vocabulary_that_takes_hours_to_convert_is_refused(texts: list[str], message: str, tmp_path: Path) -> None:
    """Each cut of each token may be a merge."""
    fields = vocabulary()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], *texts]
    path = write(tmp_path / "m.gguf", fields, {"a": VECTOR})
    with pytest.raises(ModelFilesError, match=message):
        read_tokenizer(read_model(path))


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_control_tokens_that_take_minutes_to_add_are_refused(kind: int, tmp_path: Path) -> None:
    """Before any is added. The control: the same texts as ordinary tokens."""
    texts = ["é" * 120 + str(place) for place in range(20_000)]
    fields = vocabulary()
    kinds = fields["tokenizer.ggml.token_type"]
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], *texts]
    path = write(
        tmp_path / "m.gguf", fields | {"tokenizer.ggml.token_type": [*kinds, *[kind] * len(texts)]}, {"a": VECTOR}
    )
    with pytest.raises(ModelFilesError, match=r"m.gguf: the control tokens .* have \d+ bytes; at most 4194304"):
        read_tokenizer(read_model(path))
    path = write(
        tmp_path / "n.gguf", fields | {"tokenizer.ggml.token_type": [*kinds, *[NORMAL] * len(texts)]}, {"a": VECTOR}
    )
    assert read_tokenizer(read_model(path))
