"""Prompts with a gap that the model fills: the text before and after it, around the marks of the model's family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from api.chat.tokens import Vocabulary

_PIECES = 1024
"""Pieces of a text that are tokenised together."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Before a file of context where the family has no mark for files, as in llama.cpp."""
# Names in the repository-level form, as in llama.cpp.
_PROJECT = "myproject\n"
_THIS_FILE = "filename\n"
_NAME_TOKENS = 64
"""More than such a name has in any vocabulary."""


class TooLong(Exception):
    """The prompt has more tokens than were allowed."""


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """The marks of models that were trained alike. An empty one does not exist."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()
    """More marks that end an answer."""


KNOWN_MARKS = (
    # Qwen2.5-Coder (arXiv 2409.12186) and CodeGemma (ai.google.dev/gemma/docs/codegemma).
    InfillMarks(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2 (arXiv 2402.19173), Granite Code and Stable Code.
    InfillMarks(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository="<repo_name>",
        file="<file_sep>",
        ends=("<fim_pad>", "<|endoftext|>", "<filename>", "<reponame>"),
    ),
    # SantaCoder (huggingface.co/bigcode/santacoder).
    InfillMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # DeepSeek-Coder and DeepSeek-V2 and later (github.com/deepseek-ai/DeepSeek-Coder).
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama (github.com/meta-llama/codellama, `infilling_prompt_tokens`).
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # GLM-4 and later in the order of CodeGeeX4 (github.com/THUDM/CodeGeeX4, guides/Infilling_guideline).
    InfillMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", True, ends=("<|endoftext|>", "<|user|>")),
    # Codestral (mistral-common, `encode_fim`).
    InfillMarks("[PREFIX]", "[SUFFIX]", suffix_first=True, ends=("[MIDDLE]",)),
)
"""The first one whose marks a tokenizer has is the model's."""


def fill_in_middle_of(vocabulary: Vocabulary) -> FillInMiddle | None:
    """The way to fill gaps; None for a tokenizer without such marks."""
    usable = [marks for marks in KNOWN_MARKS if all(map(vocabulary.knows, filter(None, _marks(marks))))]
    return FillInMiddle(vocabulary, usable[0]) if usable else None


def _marks(marks: InfillMarks) -> tuple[str, str, str]:
    return marks.prefix, marks.suffix, marks.middle


class FillInMiddle:
    """Builds a model's prompts with a gap. Marks are put in as ids; a user's text that has them is only text."""

    def __init__(self, vocabulary: Vocabulary, marks: InfillMarks) -> None:
        self._vocabulary = vocabulary
        self._marks = marks
        names = [*_marks(marks), marks.repository, marks.file, *marks.ends]
        self._ids = {name: token for name in names if name and (token := vocabulary.added(name)) is not None}
        texts = sorted({*self._ids, *vocabulary.special_texts()}, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(text) for text in texts if len(text) > 1))

    @property
    def stop_ids(self) -> list[int]:
        """Marks that end an answer."""
        return sorted(self._ids.values())

    def prompt(
        self,
        prefix: str | list[int],
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        bos: bool,
        most: int,
        room: int,
    ) -> list[int]:
        """The tokens of a prompt. Of `files`, name and text of each, the last ones come before it that fit into `room`.

        Raises TooLong for more than `most` tokens without them.
        """
        begin = [self._vocabulary.bos] if bos and self._vocabulary.bos is not None else []
        before = self._text(prefix, most) if isinstance(prefix, str) else prefix
        before = [*self._mark(self._marks.prefix), *before]
        after = [*self._mark(self._marks.suffix), *self._text(suffix, most, inside=True)]
        around = after + before if self._marks.suffix_first else before + after
        around += self._mark(self._marks.middle)
        if len(begin) + len(around) > most:
            raise TooLong
        return [*begin, *self._context(files, room - len(begin) - len(around)), *around]

    def _mark(self, name: str) -> list[int]:
        return [self._ids[name]] if name in self._ids else []

    def _context(self, files: Sequence[tuple[str, str]], room: int) -> list[int]:
        """The last of `files` that fit, in their order, in the form that the family was trained on."""
        mark = self._mark(self._marks.file)
        chunks = list[list[int]]()
        head = [*self._mark(self._marks.repository), *self._text(_PROJECT, _NAME_TOKENS)] if mark else []
        tail = [*mark, *self._text(_THIS_FILE, _NAME_TOKENS)] if mark else []
        room -= len(head) + len(tail)
        for name, text in reversed(files):
            try:
                title = [*mark, *self._text(f"{name}\n", room)] if mark else self._text(_SNIPPET, room)
                chunk = [*title, *self._text(text, room - len(title), inside=True)]
            except TooLong:
                break
            if len(chunk) > room:
                break
            room -= len(chunk)
            chunks.append(chunk)
        return [*head, *(token for chunk in reversed(chunks) for token in chunk), *tail] if chunks else []

    def _text(self, text: str, most: int, *, inside: bool = False) -> list[int]:
        """A user's text; `inside`: without a space that the tokenizer puts in front. Raises TooLong."""
        if self._vocabulary.exceeds(text, max(most, 0)):
            raise TooLong
        ids: list[int] = []
        pieces = list(self._pieces(text))
        for start in range(0, len(pieces), _PIECES):
            ids += self._vocabulary.encode_pieces(pieces[start : start + _PIECES], inside=inside or start > 0)
            if len(ids) > most:
                raise TooLong
        return ids

    def _pieces(self, text: str) -> Iterable[str]:
        """The text, cut inside each mark that it spells out."""
        start = 0
        while match := self._special.search(text, start):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        if start < len(text):
            yield text[start:]
