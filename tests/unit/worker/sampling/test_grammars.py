"""Grammars limit a row's tokens: what it may have next, on every way of sampling, and that its neighbours don't
notice."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
import structlog
import torch
from llguidance import LLTokenizer

from control.messages import Grammar, Sampling, TokenLogprobs
from control.text.vocabulary import read_token_bytes
from tests.byte_model import byte_assets
from worker.engine.step import NO_TOKEN, Forward
from worker.sampling.constraints import Masks
from worker.sampling.grammars import Grammars, vocabulary_of
from worker.sampling.sampler import StepSampler, StepTokens
from worker.sampling.torch.sampler import REMOVED, keep_allowed
from worker.scheduling.sequence import Finisher, Sequence

ASSETS = byte_assets(vocab_size=300)
"""The file has 258 tokens; the model's logits are wider."""
EOS = ASSETS.eos_ids[0]
TEXTS = read_token_bytes(ASSETS.tokenizer_json).texts
IDS = {text: token for token, text in enumerate(TEXTS)}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(vocabulary_of(ASSETS).for_grammars, ASSETS.eos_ids)


def sampled(sampler: StepSampler, rows: list[Sequence], logits: torch.Tensor) -> StepTokens:
    """All that comes of a forward with these logits."""
    return sampler.begin(rows, Forward([row.sid for row in rows], logits)).wait()


def row(grammars: Grammars, grammar: Grammar | None, sid: int = 1, output: str = "", **sampling: object) -> Sequence:
    fields = {"max_tokens": 50, "temperature": 0.0, "seed": "1", "stop_ids": [EOS], "grammar": grammar} | sampling
    sequence = Sequence(
        rid=f"r{sid}",
        choice=0,
        prompt=[1],
        sampling=Sampling(**fields),  # type: ignore[arg-type]
        output=[IDS[byte.encode()] for byte in output],
        sid=sid,
    )
    while not grammars.ready(grammar):
        grammars.wait(10.0)
    if grammar is not None:
        grammars.constrain(sequence)
    return sequence


def allowed(sequence: Sequence) -> set[bytes | int]:
    """The tokens that may come next, as text, or as an id for a token without text."""
    [bits] = Masks().fill([sequence]).values()
    texts = read_token_bytes(ASSETS.tokenizer_json, ASSETS.vocab_size).texts
    return {texts[token] or token for token in range(ASSETS.vocab_size) if int(bits[token >> 3]) >> (token & 7) & 1}


def test_what_is_allowed_follows_the_output(grammars: Grammars) -> None:
    """The end is among it where the text may be complete, and only ids that the tokenizer has ever are."""
    regex = Grammar("regex", "(ab)+")
    assert allowed(row(grammars, regex)) == {b"a"}
    assert allowed(row(grammars, regex, output="a")) == {b"b"}
    assert allowed(row(grammars, regex, output="ab")) == {b"a", b"</s>"}
    free = allowed(row(grammars, Grammar("lark", "start: /(.|\\n)*/")))
    assert b"</s>" in free and b"<s>" not in free and not any(isinstance(one, int) for one in free)


def test_masks_are_the_same_from_several_threads(grammars: Grammars) -> None:
    """Many rows are filled by threads of the library where there are processors for them."""
    rows = [row(grammars, Grammar("regex", "[a-z]{3}|[0-9]+"), sid, output="7" * (sid % 2)) for sid in range(1, 41)]
    alone, together = Masks(threads=1).fill(rows), Masks(threads=2).fill(rows)
    assert alone.keys() == together.keys() == set(range(40))
    assert all((bits == together[sid]).all() for sid, bits in alone.items())


def test_ends_are_the_requests_to_say(grammars: Grammars) -> None:
    """Any stop id ends where the grammar may end; min_tokens and ignore_eos take it away, unless nothing is left."""
    regex = Grammar("regex", "(ab)+")
    assert allowed(row(grammars, regex, output="ab", stop_ids=[EOS, 7])) == {b"a", b"</s>", TEXTS[7]}
    assert allowed(row(grammars, regex, output="ab", stop_ids=[])) == {b"a"}
    assert allowed(row(grammars, regex, output="ab", min_tokens=3)) == {b"a"}
    assert allowed(row(grammars, Grammar("regex", ""), min_tokens=3)) == {b"</s>"}
    assert allowed(row(grammars, Grammar("regex", ""), stop_ids=[])) == {b"</s>"}


def test_the_end_of_a_grammar_ends_the_choice(grammars: Grammars) -> None:
    """At once, with the last token of all too; a text that may go on goes on."""
    finisher = Finisher(lambda ids: "")

    def end(sequence: Sequence, text: str) -> object:
        sequence.output.append(IDS[text.encode()])
        return finisher.decide(sequence, sequence.output[-1])

    assert end(row(grammars, Grammar("regex", "ab"), output="a"), "b") == ("stop", "grammar")
    assert end(row(grammars, Grammar("regex", "ab"), output="a", max_tokens=2), "b") == ("stop", "grammar")
    assert end(row(grammars, Grammar("regex", "ab"), output="a", min_tokens=9), "b") == ("stop", "grammar")
    assert end(row(grammars, Grammar("regex", "(ab)+"), output="a"), "b") is None
    assert end(row(grammars, Grammar("regex", "(ab)+"), output="a", max_tokens=2), "b") == ("length", None)


@pytest.mark.parametrize("on_device", [None, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_ways_of_sampling_obey(grammars: Grammars, on_device: bool | None, temperature: float) -> None:
    """Where tokens are computed without waiting, and where not: the same ones, with neighbours that are as if alone."""
    logits = torch.randn(40, ASSETS.vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [
        row(grammars, Grammar("regex", "[0-9]{9}") if sid % 2 else None, sid, temperature=temperature)
        for sid in range(1, 41)
    ]
    tokens = sampled(StepSampler(on_device), rows, logits).ids
    assert {TEXTS[token].isdigit() for token in tokens[::2]} == {True}
    free = rows[1::2]
    assert tokens[1::2] == sampled(StepSampler(None), free, logits[1::2]).ids
    assert tokens == sampled(StepSampler(not on_device), rows, logits).ids


@pytest.mark.parametrize("on_device", [None, True])
def test_log_probabilities_are_those_without_the_grammar(grammars: Grammars, on_device: bool | None) -> None:
    """The chosen token's as the model has it, the best others whether allowed or not."""
    logits = torch.zeros(1, ASSETS.vocab_size)
    logits[0, 299] = 5.0
    tokens = sampled(StepSampler(on_device), [row(grammars, Grammar("regex", "a"), logprobs=1)], logits)
    [token] = tokens.ids
    expected = logits[0].log_softmax(dim=-1)
    assert token == IDS[b"a"]
    assert tokens.logprobs[0] == TokenLogprobs(expected[token].item(), [(299, expected[299].item())])


@pytest.mark.parametrize("on_device", [None, True])
def test_a_failed_grammar_fails_its_row_only(grammars: Grammars, on_device: bool | None) -> None:
    """Output that it does not allow, as after an upgrade of the library, or a text that does not compile."""
    rows = [
        row(grammars, Grammar("regex", "a+"), 1, output="aab"),
        row(grammars, Grammar("regex", "("), 2),
        row(grammars, Grammar("regex", "b"), 3),
        row(grammars, None, 4),
    ]
    with structlog.testing.capture_logs():
        tokens = sampled(StepSampler(on_device), rows, torch.eye(4, ASSETS.vocab_size))
    assert tokens.ids == [NO_TOKEN, NO_TOKEN, IDS[b"b"], 3]
    assert "doesn't satisfy the grammar" in tokens.failures[0] and "unclosed group" in tokens.failures[1]


def test_each_forward_is_masked_by_the_state_after_the_one_before(grammars: Grammars) -> None:
    """A token that ends a choice moves its grammar on before the next forward is sampled."""
    finisher, sampler = Finisher(lambda ids: ""), StepSampler()
    sequences = [row(grammars, Grammar("regex", "[ab][cd][ef]gh"), 1), row(grammars, Grammar("choice", '["abcde"]'), 2)]
    logits = torch.randn(2, ASSETS.vocab_size)
    ended: set[int] = set()
    while not ended:
        for sequence, token in zip(sequences, sampled(sampler, sequences, logits).ids, strict=True):
            sequence.output.append(token)
            ended |= {sequence.sid} if finisher.decide(sequence, token) else set()
    texts = [b"".join(TEXTS[token] for token in sequence.output) for sequence in sequences]
    assert texts[1] == b"abcde" and texts[0][3:] == b"gh" and len(texts[0]) == 5


def test_masks_wider_and_narrower_than_the_logits() -> None:
    """A token without a bit is impossible; bits without a logit are ignored."""
    bits = torch.tensor([[0b10000001, 0b1], [0b0, 0b0]], dtype=torch.uint8)
    wide = torch.ones(3, 20, dtype=torch.float64)
    keep_allowed(wide, [0, 2], list(bits))
    assert (wide[0] == 1).nonzero()[:, 0].tolist() == [0, 7, 8]
    assert bool((wide[1] == 1).all()) and bool((wide[2] == REMOVED).all())
    narrow = torch.ones(1, 3)
    keep_allowed(narrow, [0], [bits[0]])
    assert (narrow[0] == 1).tolist() == [True, False, False]


def test_every_kind_of_vocabulary_is_read() -> None:
    """Byte-level pieces, byte fall-back with its word mark, and lists with scores; ids that nobody has are empty."""

    def texts(definition: dict[str, object]) -> list[bytes]:
        return read_token_bytes(json.dumps(definition), 5).texts

    byte_level = {"model": {"vocab": {"Ġa": 0, "ÃŃ": 1, "日": 2}}, "decoder": {"type": "ByteLevel"}}
    assert texts(byte_level) == [b" a", "í".encode(), "日".encode(), b"", b""]
    fallback = {"model": {"vocab": {"▁a": 0, "<0x0A>": 1}}, "added_tokens": [{"id": 3, "content": "</s>"}]}
    assert texts(fallback) == [b" a", b"\n", b"", b"</s>", b""]
    assert texts({"model": {"vocab": [["<unk>", 0], ["▁", -1.5]]}}) == [b"<unk>", b" ", b"", b"", b""]


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    """The next request with it finds it ready, and the choices share nothing."""
    grammar = Grammar("choice", '["once"]')
    first = row(grammars, grammar)
    assert grammars.ready(grammar)
    second = row(grammars, grammar, output="on")
    assert allowed(first) == {b"o"} and allowed(second) == {b"c"}


def test_the_vocabulary_is_made_when_it_is_needed() -> None:
    """Once, for the first grammar, or before it by a leader that is idle: meanwhile no other thread runs."""
    begun: list[int] = []

    def begin() -> Future[LLTokenizer]:
        begun.append(1)
        return vocabulary_of(ASSETS).for_grammars()

    grammars = Grammars(begin, ASSETS.eos_ids)
    assert grammars.ready(None) and not begun
    first, second = row(grammars, Grammar("regex", "a")), row(grammars, Grammar("regex", "b"))
    assert allowed(first) == {b"a"} and allowed(second) == {b"b"} and begun == [1]
    idle = Grammars(begin, ASSETS.eos_ids)
    assert idle.prepare() is idle.prepare() and begun == [1, 1]
    assert allowed(row(idle, Grammar("regex", "c"))) == {b"c"} and begun == [1, 1]


def test_a_vocabulary_that_can_not_be_read_fails_constrained_rows_only() -> None:
    """Its reason is the row's; nobody else needs it."""
    form: Future[LLTokenizer] = Future()
    form.set_exception(ValueError("no object"))
    sequence = row(Grammars(lambda: form, []), Grammar("regex", "a"))
    assert sequence.constraint is not None and "object" in sequence.constraint.failure
