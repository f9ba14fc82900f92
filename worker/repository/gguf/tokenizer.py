"""The tokenizer in the metadata of a GGUF file, as a tokenizer.json.

Keys are those of github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from control.errors import ModelFilesError
from worker.repository.gguf.pre_tokenizers import PRE_TOKENIZERS
from worker.weights.gguf import GgufModel

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "▁"
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
}
"""Control tokens that end an answer whatever the ids say, as in llama.cpp."""


class Vocabulary:
    """Texts and kinds of the tokens. Raises ModelFilesError where a file's lists don't fit together."""

    def __init__(self, model: GgufModel) -> None:
        self.model, self.file = model, model.files[0]
        self.texts = model.array("tokenizer.ggml.tokens").texts()
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for number, text in enumerate(self.texts) if self.ids[text] != number)
            raise ModelFilesError(f"{self.file}: tokenizer.ggml.tokens has the token {twice[:40]!r} twice.")
        self.kinds = [NORMAL] * len(self.texts)
        if "tokenizer.ggml.token_type" in model.fields:
            self.kinds = self._fitting("tokenizer.ggml.token_type")

    def scores(self) -> list[float]:
        return self._fitting("tokenizer.ggml.scores")

    def special_ids(self) -> dict[str, int]:
        """Ids of the metadata by the names of tokenizer_config.json."""
        ids = {name: self._id(key) for name, key in SPECIAL.items()}
        return {name: number for name, number in ids.items() if number is not None}

    def end_ids(self) -> list[int]:
        """Every token that ends an answer, the file's own first."""
        named = [self.ids[text] for text in NAMED_ENDS if text in self.ids]
        ids = [self._id(key) for key in ENDS]
        ends = [one for one in ids if one is not None]
        return ends + sorted(one for one in named if self.kinds[one] == CONTROL and one not in ends)

    def _id(self, key: str) -> int | None:
        number = self.model.whole(f"tokenizer.ggml.{key}", None, least=0)
        if number is not None and number >= len(self.texts):
            raise ModelFilesError(
                f"{self.file}: tokenizer.ggml.{key} is {number}, and there are {len(self.texts)} tokens."
            )
        return number

    def _fitting(self, key: str) -> list[Any]:
        values = self.model.array(key)
        if len(values) != len(self.texts):
            raise ModelFilesError(f"{self.file}: {key} has {len(values)} items for {len(self.texts)} tokens.")
        return values.numbers()


def refusal(model: GgufModel) -> str | None:
    """The reason for which the file's tokenizer can't be used, as far as names tell; None where it can."""
    file, kind = model.files[0], model.text("tokenizer.ggml.model", "none")
    if kind == "none":
        return f"{file} has no tokenizer."
    if kind not in _MAKERS:
        return f"{file}: tokenizer.ggml.model is {kind[:40]!r}; {' and '.join(_MAKERS)} are read."
    pre = model.text("tokenizer.ggml.pre", "")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        served = ", ".join(sorted(PRE_TOKENIZERS))
        return f"{file}: tokenizer.ggml.pre is {pre[:40]!r}, an unknown pre-tokenizer. Known: {served}."
    return None


def read_tokenizer(model: GgufModel) -> tuple[str, dict[str, Any], list[int]]:
    """tokenizer.json and tokenizer_config.json with the chat template, and the ids that end an answer. Raises
    ModelFilesError naming file and field, for an unknown pre-tokenizer among others."""
    if (reason := refusal(model)) is not None:
        raise ModelFilesError(reason)
    make = _MAKERS[model.text("tokenizer.ggml.model")]
    vocabulary = Vocabulary(model)
    special = vocabulary.special_ids()
    try:
        tokenizer, starts = make(vocabulary, special)
    except ModelFilesError:
        raise
    except Exception as error:  # of the library, which has no type of its own
        raise ModelFilesError(f"{model.files[0]}: no tokenizer can be made of tokenizer.ggml: {error}") from error
    starts = model.flag("tokenizer.ggml.add_bos_token", starts)
    if starts and "bos_token" in special:
        first = vocabulary.texts[special["bos_token"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", "$B:1"], special_tokens=[(first, special["bos_token"])]
        )
    _add_tokens(tokenizer, vocabulary)
    config: dict[str, Any] = {name: vocabulary.texts[number] for name, number in special.items()}
    config["add_bos_token"] = starts and "bos_token" in special
    if (template := model.text("tokenizer.chat_template", None)) is not None:
        config["chat_template"] = template
    return tokenizer.to_str(), config, vocabulary.end_ids()


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens that a text spells out: control tokens are hidden from an answer, those of the user's are not."""
    control, defined = list[AddedToken](), list[AddedToken]()
    for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True):
        if kind == CONTROL and text:
            control.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED and text:
            defined.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_tokens(defined)
    tokenizer.add_special_tokens(control)


def _byte_level(vocabulary: Vocabulary, special: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE; and whether prompts begin with BOS by default."""
    pre = PRE_TOKENIZERS[vocabulary.model.text("tokenizer.ggml.pre")]
    pairs = (one.partition(" ") for one in vocabulary.model.array("tokenizer.ggml.merges").texts())
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=pre.whole_words))
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.bos


def _sentencepiece(vocabulary: Vocabulary, special: dict[str, int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, whose merges follow from the scores; unknown characters become bytes."""
    unknown = vocabulary.texts[special["unk_token"]] if "unk_token" in special else None
    bytes_too = "<0x00>" in vocabulary.ids
    tokenizer = Tokenizer(
        models.BPE(vocabulary.ids, _merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    )
    spaced = vocabulary.model.flag("tokenizer.ggml.add_space_prefix", True)
    replaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if spaced else replaced
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if spaced else []))
    return tokenizer, True


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Each cut of a token into two tokens, the best score first: SentencePiece merges by the score of the result."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    plain = {
        text for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True) if kind in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[float, int, str, str]] = []
    for text in plain:
        rank = -scores[ids[text]]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in plain and right in plain:
                merges.append((rank, ids[text], left, right))
    merges.sort(key=lambda one: one[:2])
    return [(left, right) for _, _, left, right in merges]


_MAKERS: dict[str, Callable[[Vocabulary, dict[str, int]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
