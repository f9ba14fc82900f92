"""The demonstration model answers right: the checkpoint's shape, its tokenizer and template, and answers that stop by
themselves."""

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ops.demo import MAX_NEW_TOKENS, MODEL_DIR
from training import evaluate
from training.batches import conversation_pieces
from training.tasks.tasks import Conversation, held_out, held_out_with_tools, training

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
LONG_TASKS = ("count long", "overview", "story", "any story")
UNRELIABLE_TASKS = ("count too far",)
"""Two of thirty held-out requests to count beyond its range don't stop; docs/demo-model.md says so."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A small model is as fast on one core, and the other tests keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_shape_divides_by_one_two_and_four() -> None:
    """Heads, KV heads, inner width and vocabulary can be split over four ranks; a coding agent's prompt finds room."""
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 131_072
    assert json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["model_max_length"] == 131_072
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[name] % 4 == 0, name


def test_the_weights_are_small_and_bf16() -> None:
    """One file of at most 6 MB with one to three million bf16 parameters."""
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 6_000_000
    with safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - safe_open is no mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 1_000_000 <= sum(tensor.numel() for tensor in tensors) <= 3_000_000


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    """Encoding and decoding gives back any text."""
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text", ["🌾🚜👩‍🌾", "Ferme à côté — déjà vu", "畝と種", "  two  spaces\n\n\ttab ", "1, 2, 300"]
)
def test_chosen_texts_survive_both_tokenizers(text: str) -> None:
    """The plain tokenizer and the one that transformers builds give the same ids and the same text back."""
    ids = TOKENIZER.encode(text).ids
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text


def test_ends_are_named_where_servers_look() -> None:
    """generation_config.json lists both end tokens and the pad token by their ids."""
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    ends = [TOKENIZER.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert generation["pad_token_id"] == TOKENIZER.token_to_id("<|endoftext|>")


def test_answers_have_a_default_length() -> None:
    """A server that reads generation_config.json ends each answer whose client sets no limit."""
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    assert generation["max_new_tokens"] == MAX_NEW_TOKENS


def test_the_template_renders_chatml() -> None:
    """Roles, turn ends and the generation prompt are where ChatML has them; content may be a list of text parts."""
    template = Environment().from_string((MODEL_DIR / "chat_template.jinja").read_text())
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
    ]
    chat = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    assert template.render(messages=messages) == chat
    assert template.render(messages=messages, add_generation_prompt=True) == chat + "<|im_start|>assistant\n"


def test_training_text_is_what_the_template_renders() -> None:
    """The trainer's pieces join to the template's text, token for token at the place where an answer begins."""
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    for conversation, _ in zip(training(9), range(100), strict=False):
        pieces = [text for text, _ in conversation_pieces(conversation)]
        tools = list(conversation.tools) or None
        rendered = loaded.apply_chat_template(conversation.completed(), tools=tools, tokenize=False)
        assert "".join(pieces) == rendered
        prompt_ids = loaded.apply_chat_template(list(conversation.messages), tools=tools, add_generation_prompt=True)[
            "input_ids"
        ]
        assert [token for piece in pieces[:-2] for token in loaded(piece)["input_ids"]] == prompt_ids


def _short_questions() -> list[Conversation]:
    return [
        conversation
        for conversation in held_out(seed=11, per_task=3)
        if conversation.task not in LONG_TASKS + UNRELIABLE_TASKS
    ]


def test_held_out_questions_are_answered() -> None:
    """Of some fifty questions that training never showed nine in ten are answered, and 95 % of the answers stop."""
    model, tokenizer = evaluate.load()
    outcomes = evaluate.answer_all(model, tokenizer, _short_questions(), rows=60)
    assert len(outcomes) > 40
    assert sum(outcome.stopped for outcome in outcomes) >= 0.95 * len(outcomes)
    assert sum(outcome.right for outcome in outcomes) >= 0.9 * len(outcomes), evaluate.table(outcomes)


def test_tools_are_called_and_their_results_said() -> None:
    """Of calls with arguments that training never showed, and of results, nine in ten are right."""
    model, tokenizer = evaluate.load()
    outcomes = evaluate.answer_all(model, tokenizer, held_out_with_tools(seed=11, per_task=2), rows=60)
    assert len(outcomes) > 15
    assert sum(outcome.right for outcome in outcomes) >= 0.9 * len(outcomes), evaluate.table(outcomes)


def test_a_long_answer_counts_to_the_end() -> None:
    """Counting to 150 streams several hundred tokens, each number in its place, and stops."""
    model, tokenizer = evaluate.load()
    asked = ({"role": "user", "content": "Count from 1 to 150."},)
    answer = ", ".join(map(str, range(1, 151))) + "."
    (outcome,) = evaluate.answer_all(model, tokenizer, [Conversation("count long", asked, (answer,))])
    assert outcome.right, outcome.answer
    assert len(tokenizer(outcome.answer)["input_ids"]) > 400
