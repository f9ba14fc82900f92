"""Pre-tokenizers by the names that GGUF files give them (`tokenizer.ggml.pre`).

The names that share one are llama.cpp's
(src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from control.text.tokenizer_check import (
    DEEPSEEK3,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DIGIT,
    FALCON,
    GPT2,
    GPT4O,
    LLAMA3,
    QWEN2,
    QWEN35,
    TEKKEN,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Texts are cut by each of `patterns` in turn. `whole_words`: a piece that is a token is not merged. `bos`: prompts
    begin with the BOS token unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    composed: bool = False
    """True if texts are normalised to NFC."""

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None


_LLAMA3 = PreTokenizer((LLAMA3,), whole_words=True, bos=True)
_QWEN2 = PreTokenizer((QWEN2,))
_DIGITS = PreTokenizer((DIGIT, GPT2))
_GPT2 = PreTokenizer((GPT2,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    "glm4": PreTokenizer((LLAMA3,), whole_words=True),
    "qwen2": replace(_QWEN2, composed=True),
    "qwen35": PreTokenizer((QWEN35,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2", "solar-open"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": replace(_DIGITS, composed=True),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "mellum", "exaone4", "trillion"), _GPT2),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((GPT4O,))),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "falcon": PreTokenizer(FALCON),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(DEEPSEEK3)),
}
