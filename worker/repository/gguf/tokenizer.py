"""The tokenizer of a GGUF file as a tokenizer.json, and the cache of converted ones: a large one takes seconds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from control import cache as cache_files
from control.errors import ModelFilesAway, ModelFilesError
from control.text.tokenizer_check import (
    DEEPSEEK3,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DIGIT,
    FALCON,
    GPT2,
    GPT4O,
    LLAMA3,
    MOST_ADDED_BYTES,
    MOST_PIECES,
    MOST_TOKEN_BYTES,
    QWEN2,
    QWEN35,
    TEKKEN,
)
from worker.weights import gguf
from worker.weights.gguf import GgufModel

log = structlog.get_logger()


# Pre-tokenizers by the names that GGUF files give them (`tokenizer.ggml.pre`).
#
# The names that share one are llama.cpp's
# (src/llama-vocab.cpp).


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
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
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


# The tokenizer in the metadata of a GGUF file, as a tokenizer.json.
#
# Keys are those of github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer".


NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
SPACE = "▁"
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
MOST_SQUARES = 1 << 30
"""Of the tokens' lengths: each cut of a token is tried as a merge, which takes half a second for so many. A vocabulary
of 262,144 tokens has some 2^24."""
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


class GgufTokenizer(msgspec.Struct, frozen=True):
    """The outcome of `read_tokenizer`."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    ends: list[int]


class GgufVocabulary:
    """Texts and kinds of the tokens. Raises ModelFilesError where a file's lists don't fit together."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.file = model.files[0]
        tokens = model.array("tokenizer.ggml.tokens")
        if len(tokens) > MOST_PIECES:
            raise ModelFilesError(
                f"{self.file}: tokenizer.ggml.tokens has {len(tokens)} tokens; at most {MOST_PIECES} are served."
            )
        self.texts = tokens.texts()
        lengths = [len(text) for text in self.texts]
        longest = max(lengths, default=0)
        if longest > MOST_TOKEN_BYTES:
            raise ModelFilesError(
                f"{self.file}: tokenizer.ggml.tokens has a token of {longest} characters; at most {MOST_TOKEN_BYTES} "
                "are served."
            )
        squares = sum(length**2 for length in lengths)
        if squares > MOST_SQUARES:
            raise ModelFilesError(
                f"{self.file}: the squares of the lengths of tokenizer.ggml.tokens add up to {squares}; at most "
                f"{MOST_SQUARES} are served."
            )
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for number, text in enumerate(self.texts) if self.ids[text] != number)
            raise ModelFilesError(f"{self.file}: tokenizer.ggml.tokens has the token {twice[:40]!r} twice.")
        self.kinds = [NORMAL] * len(self.texts)
        if "tokenizer.ggml.token_type" in model.fields:
            self.kinds = self._fitting("tokenizer.ggml.token_type")
        added = sum(
            len(text.encode())
            for text, kind in zip(self.texts, self.kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        )
        if added > MOST_ADDED_BYTES:  # they are made into one automaton
            raise ModelFilesError(
                f"{self.file}: the control tokens and the user's of tokenizer.ggml.tokens have {added} bytes; at most "
                f"{MOST_ADDED_BYTES} are served."
            )

    def merges(self) -> list[tuple[str, str]]:
        pairs = (merge.partition(" ") for merge in self.model.array("tokenizer.ggml.merges").texts())
        return [(left, right) for left, _, right in pairs]

    def scores(self) -> list[float]:
        return self._fitting("tokenizer.ggml.scores")

    def special_ids(self) -> dict[str, int]:
        """Ids of the metadata by the names of tokenizer_config.json."""
        ids = {name: self._id(key) for name, key in SPECIAL.items()}
        return {name: number for name, number in ids.items() if number is not None}

    def end_ids(self) -> list[int]:
        """Every token that ends an answer, the file's own first."""
        named_ends = [self.ids[text] for text in NAMED_ENDS if text in self.ids]
        ids = [self._id(key) for key in ENDS]
        ends = [token for token in ids if token is not None]
        return ends + sorted(token for token in named_ends if self.kinds[token] == CONTROL and token not in ends)

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
    file = model.files[0]
    kind = model.text("tokenizer.ggml.model", "none")
    if kind == "none":
        return f"{file} has no tokenizer."
    if kind not in _MAKERS:
        return f"{file}: tokenizer.ggml.model is {kind[:40]!r}; read are {', '.join(_MAKERS)}."
    pre = model.text("tokenizer.ggml.pre", "")
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        served = ", ".join(sorted(PRE_TOKENIZERS))
        return f"{file}: tokenizer.ggml.pre is {pre[:40]!r}, an unknown pre-tokenizer. Known: {served}."
    return None


def read_tokenizer(model: GgufModel) -> GgufTokenizer:
    """tokenizer.json and tokenizer_config.json with the chat template, and the ids that end an answer. Raises
    ModelFilesError naming file and field, for an unknown pre-tokenizer among others."""
    if (reason := refusal(model)) is not None:
        raise ModelFilesError(reason)
    make = _MAKERS[model.text("tokenizer.ggml.model")]
    vocabulary = GgufVocabulary(model)
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
    return GgufTokenizer(tokenizer.to_str(), config, vocabulary.end_ids())


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Tokens that a text spells out: control tokens are hidden from an answer, those of the user's are not."""
    control = list[AddedToken]()
    defined = list[AddedToken]()
    for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True):
        if kind == CONTROL and text:
            control.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED and text:
            defined.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_tokens(defined)
    tokenizer.add_special_tokens(control)


def _byte_level(vocabulary: GgufVocabulary, special: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE; and whether prompts begin with BOS by default."""
    pre = PRE_TOKENIZERS[vocabulary.model.text("tokenizer.ggml.pre")]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=pre.whole_words))
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.bos


def _sentencepiece(vocabulary: GgufVocabulary, special: dict[str, int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, whose merges follow from the scores; unknown characters become bytes."""
    return _merged(vocabulary, special, _merges(vocabulary))


def _merged(
    vocabulary: GgufVocabulary, special: dict[str, int], merges: list[tuple[str, str]]
) -> tuple[Tokenizer, bool]:
    unknown = vocabulary.texts[special["unk_token"]] if "unk_token" in special else None
    bytes_too = "<0x00>" in vocabulary.ids
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too))
    spaced = vocabulary.model.flag("tokenizer.ggml.add_space_prefix", True)
    replaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced]) if spaced else replaced
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if spaced else []))
    return tokenizer, True


def _listed_sentencepiece(vocabulary: GgufVocabulary, special: dict[str, int]) -> tuple[Tokenizer, bool]:
    """The same of a file that lists its merges."""
    return _merged(vocabulary, special, vocabulary.merges())


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Each cut of a token into two tokens, the best score first: SentencePiece merges by the score of the result."""
    ids = vocabulary.ids
    scores = vocabulary.scores()
    plain = {
        text for text, kind in zip(vocabulary.texts, vocabulary.kinds, strict=True) if kind in (NORMAL, USER_DEFINED)
    }
    merges: list[tuple[float, int, str, str]] = []
    for text in plain:
        rank = -scores[ids[text]]
        for cut in range(1, len(text)):
            left = text[:cut]
            right = text[cut:]
            if left in plain and right in plain:
                merges.append((rank, ids[text], left, right))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]


_MAKERS: dict[str, Callable[[GgufVocabulary, dict[str, int]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _listed_sentencepiece,
}


# Converted tokenizers, kept in the user's cache: that of 262,144 tokens takes three seconds to make.


KIND = "tokenizers"
LEAST_TOKENS = 16_384
"""Tokens from which on reading a file saves time worth it."""
# Limit of all files together, and bytes of the disk that are left free.
MOST_BYTES = 2**28
SPARE_BYTES = 2**30


def cached_tokenizer(model: GgufModel, read: Callable[[GgufModel], GgufTokenizer] = read_tokenizer) -> GgufTokenizer:
    """The file's tokenizer: from the cache, else by `read`. The key is all of the file but its weights, and the code
    that converts. Raises ModelFilesError, ModelFilesAway where the file went away."""
    if len(model.array("tokenizer.ggml.tokens")) < LEAST_TOKENS:
        return read(model)
    try:
        path = cache_files.folder(KIND) / f"{_key(model)}.tokenizer"
    except OSError as error:
        raise ModelFilesAway(f"{model.files[0]} can't be read: {error}. Repair the file system.") from error
    if (converted := _read(path)) is not None:
        return converted
    tokenizer = read(model)
    with contextlib.suppress(OSError):  # a home that can't be written to: converted at each start
        _keep(path, tokenizer)
    return tokenizer


def _key(model: GgufModel) -> str:
    first = model.files[0]
    starts = [tensor.start for tensor in model.tensors.values() if tensor.path == first]
    digest = hashlib.sha256(tokenizers.__version__.encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(gguf.__file__)):
        digest.update(source.read_bytes())
    with first.open("rb") as file:
        digest.update(file.read(min(starts, default=-1)))
    return digest.hexdigest()[:24]


def _read(path: Path) -> GgufTokenizer | None:
    try:
        checksum, content = path.read_bytes().split(b"\n", 1)
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            raise ValueError("its checksum differs")
        converted = msgspec.msgpack.decode(content, type=GgufTokenizer)
    except OSError:
        return None
    except (ValueError, msgspec.DecodeError) as error:
        log.warning("a kept tokenizer is damaged", file=str(path), reason=str(error), action="read_tokenizer")
        return None
    cache_files.mark_used(path)
    return converted


def _keep(path: Path, tokenizer: GgufTokenizer) -> None:
    content = msgspec.msgpack.encode(tokenizer)
    cache_files.made_folder(KIND)
    if not cache_files.make_room(KIND, len(content), MOST_BYTES, SPARE_BYTES):
        return
    with cache_files.replacing(path) as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
