"""A model without weights: a tokenizer of bytes, and what the catalog says of it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from control.messages import ModelAssets

BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.content == 'forbidden' %}{{ raise_exception('this template takes no forbidden words') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
CONTEXT = 4096


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character beyond ASCII is split over several; then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def byte_assets(**changes: object) -> ModelAssets:
    """The catalog entry of a model with the tokenizer above."""
    tokenizer = byte_tokenizer()
    given: dict[str, object] = {
        "tokenizer_json": tokenizer.to_str(),
        "tokenizer_config": {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True},
        "chat_template": TEMPLATE,
        "generation_config": {},
        "context_length": CONTEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_ids": [tokenizer.token_to_id(EOS)],
        "kv_tokens": 10 * CONTEXT,
        "created": 1_700_000_000,
    }
    return ModelAssets(**(given | changes))  # type: ignore[arg-type]
