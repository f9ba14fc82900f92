"""Lark grammars inside JSON strings: they match the escaped text where the grammar matches the text."""

from __future__ import annotations

import json

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.schemas.escaped_lark import in_json_string
from tests.byte_model import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
KNOWN = llguidance.LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id(EOS))
PATCH = r"""
// What Codex sends for its patches.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
GRAMMARS = [
    r'start: /[a-c"\\\n]+/',
    r"start: /[^a-c\n]*/",
    r"start: /.*/ /\n?/",
    r"start: /.+/s",
    r"start: /[\n€é]+[^€]/",
    r"start: (/\s/ | /\S{2}/)*",
    r'start: "\"" /(?:x|\t|\\)*/ "\n\\"',
    r"start: /(\w+|\W)=\d?\D?/",
    'start: (a | B)+\n?a: "x"i -> said\nB: "\\n" "y"?',
    "start: WS INT\n%import common.WS\n%import common.INT",
]


def takes(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(KNOWN, llguidance.grammar_from("lark", grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from('abcxyz09 "\\\n\r\t\b\f/.,=é€😀'), max_size=6))
def test_the_escaped_text_matches_where_the_text_does(grammar: str, text: str) -> None:
    escaped = in_json_string(grammar)
    assert escaped is not None
    assert takes(escaped, json.dumps(text, ensure_ascii=False)[1:-1]) == takes(grammar, text)


@pytest.mark.parametrize(
    "text, good",
    [
        ('*** Begin Patch\n*** Add File: a "b"\\c.py\n+x = "\\n"\n+\n*** End Patch', True),
        ("*** Begin Patch\n*** Update File: a\n@@ def f():\n-a\n+\tb\n c\n*** End Patch\n", True),
        ("*** Begin Patch\n*** Delete File: a\n*** End Patch\n", True),
        ("*** Begin Patch\n*** End Patch\n", False),
        ("*** Begin Patch\n*** Add File: a\nx\n*** End Patch\n", False),
    ],
)
def test_the_patches_of_a_coding_agent(text: str, good: bool) -> None:
    escaped = in_json_string(PATCH)
    assert escaped is not None
    assert takes(PATCH, text) == good
    assert takes(escaped, json.dumps(text, ensure_ascii=False)[1:-1]) == good


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "object"}',
        "start: <|end|>",
        'start: "a".."z"',
        r'start: "a\n"i',
        r"start: /a/i",
        r"start: /\p{L}/",
        r"start: /(?i:a)/",
        r"start: /[a[b]]/",
        r"start: /[a-z&&b]/",
        "start: X\n%import common.SQL",
        "start: X\n%import common (X)",
        "start: @other",
        r"start: /[z-a]/",
        'start: "(" start? ")"',
        'start: "a',
        "start: /a",
        "start: " + '"\\\\' * 4000,
        'start: a\na: "x" b?\nb: "y" a',
        'start: "a"\n%ignore " "',
    ],
)
def test_what_can_not_be_rewritten_is_told(grammar: str) -> None:
    assert in_json_string(grammar) is None


def test_a_long_grammar_is_not_looked_at() -> None:
    assert in_json_string("start: " + '"a" ' * 10_000) is None
