"""Pre-tokenizers cut texts as the models' own do. The vocabularies of DeepSeek LLM and Falcon in llama.cpp's repository
(models, ggml-vocab-*) give the ids beside them for all of their 47 texts."""

from __future__ import annotations

import pytest

from worker.repository.gguf.tokenizer import PRE_TOKENIZERS


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        (
            "falcon",
            "It's 12345 a+b==c $5!  \n\n  x",
            ["It", "'", "s", " ", "123", "45", " a", "+", "b", "==", "c", " ", "$", "5", "!", "  \n\n ", " x"],
        ),
        ("falcon", "Ärger «und» 你好123", ["Ärger", " ", "«", "und", "»", " 你好", "123"]),
        (
            "deepseek-llm",
            "It's 12345 a+b==c $5!  \n\n  x",
            ["It", "'", "s", " ", "12345", " a", "+", "b", "==", "c", " $", "5", "!", "  ", "\n", "\n", " ", " x"],
        ),
        # Its punctuation reaches from : to ~, and so to letters too.
        ("deepseek-llm", "Ärger 你好123\r\n東京  ", ["Ä", "rger", " ", "你好", "123", "\r", "\n", "東京", "  "]),
        ("gpt-4o", "HTTPServer's 12345 née\n\n/x", ["HTTPServer's", " ", "123", "45", " née", "\n\n", "/x"]),
    ],
)
def test_a_text_is_cut_into_pieces(name: str, text: str, pieces: list[str]) -> None:
    token_texts = [text[start:stop] for _, (start, stop) in PRE_TOKENIZERS[name].splitter().pre_tokenize_str(text)]
    assert token_texts == pieces
