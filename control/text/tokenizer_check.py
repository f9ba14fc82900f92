"""Judges a tokenizer.json by its parts alone: what it may do to a text.

A tokenizer is a program from a model's authors: normalizers and decoders replace texts by longer ones, one after
another, and patterns may take exponential time. One of ordinary parts is harmless; any other one encodes in a process
of its own, and one that decodes in another way is refused, because every answer is decoded where other answers are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
_CASED = rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_CASED_REST}"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
GPT2 = rf"{_GPT2_WORDS}|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", DIGIT)
_CASED_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    r"ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    r"ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have two cases, as the tokenizer of DeepSeek LLM lists them."""
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", rf"{_GPT2_WORDS}|\s+(?!\S)", r"[0-9][0-9][0-9]")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

SPLIT_PATTERNS = frozenset(
    (
        *(LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, GPT2, DIGIT),
        *DEEPSEEK_CODER,
        *DEEPSEEK_LLM,
        *FALCON,
        *DEEPSEEK3,
        r"\p{N}{1,3}",
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        rf"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
        rf",\s(?=\p{{N}})|'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    )
)
"""Patterns by which published tokenizers cut texts, known to take time in proportion to the text. The last one is the
demonstration model's."""


MOST_GROWTH = 80
"""Characters that one character may become before it is cut into tokens: NFKC makes 18 of one, bytes up to 4."""
MOST_DECODED_GROWTH = 16
MOST_TOKEN_BYTES = 16_384
"""Of a token; published ones have some hundred at most."""
MOST_ADDED_BYTES = 4 << 20
"""Of all added tokens. They are made into one automaton, which takes seconds and gigabytes for long ones. Those of
vocabularies with tens of thousands of codes of speech or images take one to three."""
MOST_PIECES = 1 << 20
"""Of a vocabulary; the largest published one has 901,629. In the seconds for more no other Python thread runs."""
_MOST_PREFIX = 64
"""Characters that a part may add once."""
_MOST_WORD = 1000
"""Characters of a word in a WordPiece model, which takes time with the square of it."""
_MOST_PARTS = 64
_MOST_DEPTH = 64
"""Of objects and lists inside each other in a part; the library reads 127 in all."""
_MOST_ID = 2**32 - 1

TokenId = Annotated[int, msgspec.Meta(ge=0, le=_MOST_ID)]


class _Model(msgspec.Struct):
    type: str = "BPE"
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 100
    vocab: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _AddedToken(msgspec.Struct):
    id: TokenId = 0
    content: str = ""


class _Definition(msgspec.Struct):
    """The fields of a tokenizer.json that are read here."""

    model: _Model = msgspec.field(default_factory=_Model)
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list[_AddedToken])


class Judgement(msgspec.Struct, frozen=True):
    """The objections to a tokenizer; empty if there are none."""

    encoding: str = ""
    """The reason why it is to encode in a process of its own; "" if it is not."""
    decoding: str = ""
    """The reason why it is not to be used at all; "" if it is."""


class _Unusual(Exception):
    """A part that is not known to be harmless."""


def judge(tokenizer_json: str | bytes) -> Judgement:
    """The judgement on the parts of a tokenizer. A file that is no tokenizer.json is not to be used."""
    try:
        definition = msgspec.json.decode(tokenizer_json, type=_Definition)
    except (msgspec.MsgspecError, RecursionError) as error:
        return Judgement(decoding=f"it can't be read: {error}")
    encoding = decoding = ""
    try:
        _check_model(definition.model)
        growth = _growth(definition.normalizer, _NORMALIZERS, "normalizers")
        growth *= _growth(definition.pre_tokenizer, _PRE_TOKENIZERS, "pretokenizers")
        if growth > MOST_GROWTH:
            raise _Unusual(f"it makes up to {growth} characters of one")
    except _Unusual as error:
        encoding = str(error)
    try:
        _check_depths(definition)
        _check_sizes(definition)
        growth = _growth(definition.decoder, _DECODERS, "decoders")
        if growth > MOST_DECODED_GROWTH:
            raise _Unusual(f"its decoder makes up to {growth} characters of one")
    except _Unusual as error:
        decoding = str(error)
    return Judgement(encoding, decoding)


class _Pieces(msgspec.Struct):
    vocab: dict[str, Any] | list[tuple[str, Any]] = msgspec.field(default_factory=dict[str, Any])


class _WithPieces(msgspec.Struct):
    model: _Pieces = msgspec.field(default_factory=_Pieces)


def wrong_id(tokenizer_json: str) -> str:
    """The first piece whose id the library does not take, in words; "" without one. The library's own error does not
    name it. It is looked for only once the library has refused a file: to read 262,144 ids takes 0.13 s.
    """
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        vocab = msgspec.json.decode(tokenizer_json, type=_WithPieces).model.vocab
        for piece, number in vocab.items() if isinstance(vocab, dict) else ():  # pieces in a list have scores
            if type(number) is not int or not 0 <= number <= _MOST_ID:
                return (
                    f"its piece {piece[:40]!r} has the id {str(number)[:40]!r}; a whole number from 0 to {_MOST_ID} is "
                    "needed"
                )
    return ""


def longest_piece(tokenizer_json: str, byte_level: bool) -> int:
    """Bytes of the longest token that is not a marker, at most: a piece is at least as long as what it means. With
    `byte_level` a letter of a piece stands for one byte. Raises msgspec.MsgspecError.

    The text is read, not the tokenizer: its own list of 152,000 tokens takes ten times as long.
    """
    vocab = msgspec.json.decode(tokenizer_json, type=_WithPieces).model.vocab
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    return max(map(len, pieces if byte_level else map(str.encode, pieces)), default=1)


def decoding_only(tokenizer_json: str) -> str:
    """A tokenizer that decodes as the given one and can't encode: no part that works on texts is left.

    It is built in a third of the time, in which no other Python thread runs.
    """
    definition = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(definition.get("model", b"{}"), type=dict[str, msgspec.Raw])
    if "merges" in model:
        model["merges"] = msgspec.Raw(b"[]")
    nothing = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    return msgspec.json.encode(definition | nothing | {"model": model}).decode()


def _check_sizes(definition: _Definition) -> None:
    """Raises _Unusual for a tokenizer that takes seconds to make."""
    lengths = [len(token.content.encode()) for token in definition.added_tokens]
    if (longest := max(lengths, default=0)) > MOST_TOKEN_BYTES:
        raise _Unusual(f"it has an added token of {longest} bytes; at most {MOST_TOKEN_BYTES} are served")
    if sum(lengths) > MOST_ADDED_BYTES:
        raise _Unusual(f"its added tokens have {sum(lengths)} bytes; at most {MOST_ADDED_BYTES} are served")
    vocabulary = bytes(definition.model.vocab)
    if max(vocabulary.count(b":"), vocabulary.count(b"[")) > MOST_PIECES:
        # A piece may hold such a mark, so the text alone does not say the number.
        pieces = len(msgspec.json.decode(vocabulary))
        if pieces > MOST_PIECES:
            raise _Unusual(f"its vocabulary has {pieces} pieces; at most {MOST_PIECES} are served")


def _check_depths(definition: _Definition) -> None:
    """Raises _Unusual for a part that the library would not read to its end."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        level: list[Any] = [getattr(definition, name)]
        depth = 0
        while level := [one for one in level if isinstance(one, (dict, list))]:
            depth += 1
            if depth > _MOST_DEPTH:
                raise _Unusual(f"its {name} has parts inside each other at more than {_MOST_DEPTH} levels")
            level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]


def _check_model(model: _Model) -> None:
    if model.type not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise _Unusual(f"its model is of the type {model.type[:40]!r}")
    if model.dropout:
        raise _Unusual("its merges are chosen by chance")
    if len(model.continuing_subword_prefix or "") > _MOST_PREFIX or len(model.end_of_word_suffix or "") > _MOST_PREFIX:
        raise _Unusual("its model adds long texts to words")
    if model.max_input_chars_per_word > _MOST_WORD:
        raise _Unusual(f"it takes words of {model.max_input_chars_per_word} characters")


Growths = dict[str, int]


def _growth(part: Any, growths: Growths, parts_name: str) -> int:
    """Characters that one becomes, at most. Raises _Unusual."""
    growth = 1
    for one in _parts(part, parts_name):
        kind = one.get("type")
        if kind == "Replace":
            growth *= _replaced(one)
        elif kind == "Split":
            _check_pattern(one.get("pattern"))
        elif kind not in growths:
            raise _Unusual(f"it has a part of the type {str(kind)[:40]!r}")
        growth *= growths.get(kind, 1)
        if any(len(text) > _MOST_PREFIX for text in one.values() if isinstance(text, str)):
            raise _Unusual(f"it has a {kind} with a long text")
    return growth


def _parts(part: Any, parts_name: str) -> Iterable[dict[str, Any]]:
    """The parts of a sequence, in their order, without those that are none."""
    waiting = [part]
    parts = list[dict[str, Any]]()
    while waiting:
        one = waiting.pop()
        if one is None:
            continue
        if not isinstance(one, dict):
            raise _Unusual("it has a part that is none")
        if one.get("type") == "Sequence":  # type: ignore[reportUnknownMemberType]
            inner: Any = one.get(parts_name)  # type: ignore[reportUnknownMemberType]
            if not isinstance(inner, list):
                raise _Unusual("it has a sequence without parts")
            waiting += inner  # type: ignore[reportUnknownArgumentType]
        else:
            parts.append(one)  # type: ignore[reportUnknownArgumentType]
        if len(parts) + len(waiting) > _MOST_PARTS:
            raise _Unusual(f"it has more than {_MOST_PARTS} parts")
    return parts


def _replaced(part: dict[str, Any]) -> int:
    pattern = part.get("pattern")
    content = part.get("content")
    if not isinstance(content, str):
        raise _Unusual("it replaces by what is no text")
    text: Any = pattern.get("String") if isinstance(pattern, dict) else None  # type: ignore[reportUnknownMemberType]
    if isinstance(text, str) and text:
        return max(1, -(-len(content) // len(text)))
    _check_pattern(pattern)
    return 1 + len(content)


def _check_pattern(pattern: Any) -> None:
    """Raises _Unusual for a regular expression that is not known: it may take exponential time."""
    if isinstance(pattern, dict):
        text: Any = pattern.get("String")  # type: ignore[reportUnknownMemberType]
        regex: Any = pattern.get("Regex")  # type: ignore[reportUnknownMemberType]
        if isinstance(text, str) or (isinstance(regex, str) and regex in SPLIT_PATTERNS):
            return
    raise _Unusual("it has a pattern that is not known")


_NORMALIZERS: Growths = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "Strip": 1,
    "StripAccents": 1,
    "Prepend": 2,
    "Replace": 1,
    "Nmt": 1,
    "BertNormalizer": 12,
}
"""By type; the one of a Replace follows from its texts. A Prepend adds to an empty text too."""
_PRE_TOKENIZERS: Growths = {
    "ByteLevel": 4,
    "Metaspace": 2,
    "Split": 1,
    **dict.fromkeys(("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits"), 1),
    **dict.fromkeys(("CharDelimiterSplit", "UnicodeScripts"), 1),
}
_DECODERS: Growths = {
    **dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "BPEDecoder"), 1),
    "Replace": 1,
    "WordPiece": 2,
}
