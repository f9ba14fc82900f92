"""Two models with hostile files: `hostile-template`, and `hostile-tokenizer` for requests whose template it lets alone.

What they want is bounded even where nothing bounds it: a control does it in the API process. There a loop takes some
seconds, and a text some hundred MB.
"""

from __future__ import annotations

from typing import Any

import msgspec

from control.messages import ModelAssets
from ops.bench.fanout.replica import demo_assets

LOOPS = "{% for a in range(99999) %}{% for b in range(1500) %}{% endfor %}{% endfor %}"
CENTER = "{{ 'x'|center(100000000) }}"
DOUBLE = (
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(24) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
)
TEMPLATE = (
    "{% set digit = messages[0].content[-1:] %}"
    f"{{% if digit in '0123' %}}{LOOPS}{{% elif digit in '4567' %}}{CENTER}{{% else %}}{DOUBLE}{{% endif %}}"
    "{{ messages[0].content }}"
)
"""What is done follows from the last digit of the message."""
MULTIPLIED = "z"
TOKENIZED = "{{ messages[0].content }} " + MULTIPLIED
MODELS = ("hostile-template", "hostile-tokenizer")
CONTEXT = 4096
"""Tokens: what a template writes without bounds is refused before all of it is tokenised."""


def hostile_assets() -> dict[str, ModelAssets]:
    """By the name of the model."""
    assets = msgspec.structs.replace(demo_assets(), context_length=CONTEXT)
    tokenizer_json = multiplying(assets.tokenizer_json)
    template, tokenizer = MODELS
    return {
        template: msgspec.structs.replace(assets, chat_template=TEMPLATE),
        tokenizer: msgspec.structs.replace(assets, chat_template=TOKENIZED, tokenizer_json=tokenizer_json),
    }


def multiplying(tokenizer_json: str) -> str:
    """A tokenizer.json whose normalizer makes 64 ** 6 characters of each `MULTIPLIED`, and alters no other text."""
    definition: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    parts = [{"type": "Replace", "pattern": {"String": MULTIPLIED}, "content": MULTIPLIED * 64}] * 6
    definition["normalizer"] = {"type": "Sequence", "normalizers": parts}
    return msgspec.json.encode(definition).decode()
