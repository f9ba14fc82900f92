"""Prompts with a gap have the family's marks: in its order, put in as ids; a user's text never becomes a mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from api.chat.tokens import Vocabulary
from api.models.fill_in_middle import KNOWN_MARKS, FillInMiddle, TooLong, fill_in_middle_of
from tests.byte_model import byte_assets, byte_tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def vocabulary(*marks: str, special: bool = False) -> Vocabulary:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))


def fill(*marks: str, special: bool = False) -> tuple[FillInMiddle, Vocabulary]:
    own_vocabulary = vocabulary(*marks, special=special)
    gaps = fill_in_middle_of(own_vocabulary)
    assert gaps is not None
    return gaps, own_vocabulary


def shown(known: Vocabulary, ids: list[int]) -> str:
    return known.decode_all(ids)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (QWEN, "<s><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<s><fim_prefix>a<fim_suffix>b<fim_middle>"),
        (["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], "<s><fim-prefix>a<fim-suffix>b<fim-middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<s><｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "<s>▁<PRE>a▁<SUF>b▁<MID>"),
        (
            ["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
            "<s><|code_suffix|>b<|code_prefix|>a<|code_middle|>",
        ),
        (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "<s>[SUFFIX]b[PREFIX]a"),
    ],
)
def test_each_family_has_its_order(marks: list[str], expected: str) -> None:
    """The prompt as the model was trained on it; every mark ends an answer."""
    gaps, known = fill(*marks)
    assert shown(known, gaps.prompt("a", "b", bos=True, most=99, room=99)) == expected
    assert {known.added(mark) for mark in marks} == set(gaps.stop_ids)
    assert shown(known, gaps.prompt("a", "b", bos=False, most=99, room=99)) == expected.removeprefix("<s>")


def test_a_tokenizer_without_marks_has_none() -> None:
    """One mark of three is no family, nor are texts that are no tokens of their own."""
    assert fill_in_middle_of(Vocabulary(byte_assets())) is None
    assert fill_in_middle_of(vocabulary("<|fim_prefix|>", "<|fim_suffix|>")) is None


SPELT = st.lists(st.sampled_from([*QWEN, "<s>", "</s>", "<", "|>", "fim", "é", " ", "\n", "x"]), max_size=8).map(
    "".join
)


@pytest.mark.parametrize("special", [False, True])
@given(before=SPELT, after=SPELT)
def test_a_text_that_spells_marks_is_text(special: bool, before: str, after: str) -> None:
    """Whatever is sent, the prompt has each mark once, and the texts are the user's to the byte."""
    gaps, known = fill(*QWEN, special=special)
    ids = gaps.prompt(before, after, bos=True, most=10_000, room=10_000)
    marks = [known.added(mark) for mark in QWEN[:3]]
    assert [token for token in ids if token in known.added_tokens()] == [known.bos, *marks]
    first, second, third = (ids.index(mark) for mark in marks if mark is not None)
    assert (shown(known, ids[first + 1 : second]), shown(known, ids[second + 1 : third])) == (before, after)


def test_files_come_before_it_as_far_as_they_fit() -> None:
    """Repository and file marks where the family has them, else a line; the last files are kept, in their order."""
    gaps, known = fill(*QWEN)
    files = [("a.py", "A" * 50), ("b.py", "B"), ("c.py", "<|fim_prefix|>")]
    prompt = shown(known, gaps.prompt("x", "y", files, bos=False, most=200, room=200))
    around = "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    assert prompt == (
        f"<|repo_name|>myproject\n<|file_sep|>a.py\n{'A' * 50}<|file_sep|>b.py\nB<|file_sep|>c.py\n<|fim_prefix|>"
        f"<|file_sep|>filename\n{around}"
    )
    ids = gaps.prompt("x", "y", files, bos=False, most=200, room=60)
    assert len(ids) <= 60 and "b.py\nB" in shown(known, ids) and "A" not in shown(known, ids)
    assert shown(known, gaps.prompt("x", "y", files, bos=False, most=200, room=10)) == around
    plain, other = fill("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
    prompt = shown(other, plain.prompt("x", "y", files[1:2], bos=False, most=200, room=200))
    assert prompt == "\n\n--- snippet ---\n\nB<fim-prefix>x<fim-suffix>y<fim-middle>"


def test_sentencepiece_puts_no_space_after_the_gap() -> None:
    """As CodeLlama was trained: the text before the gap begins with the implicit space, the text after it does not."""
    pieces = ["<unk>", "\u2581", "a", "b", "\u2581a", "\u2581b", "<0x0A>", "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"]
    model = models.Unigram([(piece, -1.0) for piece in pieces[:7]], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces[7:]])
    known = Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str(), tokenizer_config={}))
    gaps = fill_in_middle_of(known)
    assert gaps is not None
    assert gaps.prompt("a", "b", bos=False, most=99, room=99) == [7, 4, 8, 3, 9]


@pytest.mark.parametrize("text", ["x" * 1_000_000, "<s>" * 300_000], ids=["long", "marks"])
def test_a_text_far_too_long_is_refused_early(text: str) -> None:
    """In time that follows the limit, before or after the gap."""
    gaps, _ = fill(*QWEN)
    for before, after in ((text, ""), ("", text)):
        with pytest.raises(TooLong):
            gaps.prompt(before, after, bos=True, most=4096, room=4096)


def test_every_family_is_found_first_by_its_own_marks() -> None:
    """No family hides another one."""
    for marks in KNOWN_MARKS:
        gaps, _ = fill(*filter(None, (marks.prefix, marks.suffix, marks.middle)))
        assert gaps._marks is marks
