"""OpenAI's client is served; and it parses the answers."""

from __future__ import annotations

import openai
import pytest

from tests.byte_model import byte_tokenizer
from tests.leader import ScriptedLeader


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_answer_has_openais_fields_and_usage(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A body that is not streamed has OpenAI's fields, the right usage and the model's own end."""
    answer = client.chat.completions.create(model="tiny", messages=say("hello"))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "you said hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = leader.claimed[0].params.prompt
    assert leader.tokenizer.decode(prompt, skip_special_tokens=False) == "<s>user: hello\n"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("you said hello") + 1
    assert answer.usage.total_tokens == len(prompt) + len("you said hello") + 1


def test_a_chat_stream_is_role_text_finish_usage(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Role first, then text, then the finish reason, then the usage; one id and one moment throughout."""
    stream = client.chat.completions.create(
        model="tiny", messages=say("hello"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "you said hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("you said hello") + 1


def test_cached_prompt_tokens_are_reported(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """How much of the prompt was not computed again is told as OpenAI tells it, streamed and not; 0 where nothing."""
    for cached in (None, 7):
        leader.cached = cached
        whole = client.chat.completions.create(model="tiny", messages=say("hello"))
        stream = client.chat.completions.create(
            model="tiny", messages=say("hello"), stream=True, stream_options={"include_usage": True}
        )
        for usage in (whole.usage, list(stream)[-1].usage):
            assert usage is not None and usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == (cached or 0)
    answer = client.completions.create(model="tiny", prompt=["a", "b"])
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 14


def test_a_cache_salt_reaches_the_leader(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A request can name the group with which it may share prefixes."""
    client.chat.completions.create(model="tiny", messages=say("hello"), extra_body={"cache_salt": "team 1"})
    client.chat.completions.create(model="tiny", messages=say("hello"))
    salts = [claimed.params.cache_salt for claimed in leader.claimed]
    assert salts == ["tenant ~keyless\nteam 1", "tenant ~keyless\n"]


def test_stream_and_body_are_equal_for_split_characters(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Emoji that are split over four tokens come whole, streamed or not."""
    text = "naïve 👩‍👩‍👧‍👦 東京 😀"
    leader.reply = lambda _: text
    whole = client.chat.completions.create(model="tiny", messages=say("x")).choices[0].message.content
    stream = client.chat.completions.create(model="tiny", messages=say("x"), stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_by_max_tokens(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """An answer that ends within a character is the same streamed or not."""
    leader.reply = lambda _: "ab😀"
    whole = client.chat.completions.create(model="tiny", messages=say("x"), max_tokens=4).choices[0]
    stream = client.chat.completions.create(model="tiny", messages=say("x"), max_completion_tokens=4, stream=True)
    chunks = list(stream)
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab\ufffd"


def test_several_choices_are_complete_and_counted(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """n=2 gives two complete choices, streamed and not, and counts both."""
    answer = client.chat.completions.create(model="tiny", messages=say("hi"), n=2)
    assert [choice.message.content for choice in answer.choices] == ["you said hi", "you said hi"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens == 2 * (len("you said hi") + 1)
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=say("hi"), n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["you said hi", "you said hi"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_token_borders(client: openai.OpenAI, leader: ScriptedLeader, stream: bool) -> None:
    """No part of a stop string is ever sent, and what only looked like its start is."""
    leader.reply = lambda _: "one STOX two STOP three"
    got = client.chat.completions.create(model="tiny", messages=say("x"), stop=["STOP", "never"], stream=stream)
    if isinstance(got, openai.Stream):
        chunks = list(got)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = got.choices[0].message.content or "", got.choices[0].finish_reason
    assert (text, finish) == ("one STOX two ", "stop")


def test_chat_logprobs_have_bytes_and_alternatives(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Each token has its bytes and alternatives; a token that is a part of a character shows its bytes."""
    leader.reply = lambda _: "aé"
    answer = client.chat.completions.create(model="tiny", messages=say("x"), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs
    assert content is not None and content.content is not None
    assert [token.token for token in content.content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [token.bytes for token in content.content] == [[0x61], [0xC3], [0xA9]]
    assert [len(token.top_logprobs) for token in content.content] == [2, 2, 2]
    assert content.content[0].logprob == -0.5
    streamed = client.chat.completions.create(
        model="tiny", messages=say("x"), logprobs=True, top_logprobs=2, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [t.token for part in parts if part and part.content for t in part.content] == [
        token.token for token in content.content
    ]


def test_completions_accept_text_token_ids_and_lists(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Prompts as text, token ids, and lists of both; a list is answered as one, in order."""
    leader.reply = lambda prompt: f"<{prompt}>"
    one = client.completions.create(model="tiny", prompt="ab")
    assert one.object == "text_completion"
    assert one.choices[0].text == "<ab>"
    ids = leader.tokenizer.encode("cd").ids
    assert client.completions.create(model="tiny", prompt=ids).choices[0].text == "<cd>"
    many = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2)
    assert [(choice.index, choice.text) for choice in many.choices] == [
        (0, "<ab>"),
        (1, "<ab>"),
        (2, "<cd>"),
        (3, "<cd>"),
    ]
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["ab", "cd"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["<ab>", "<cd>"]


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """OpenAI's default length of this endpoint holds; chat may use the rest of the context."""
    leader.reply = lambda _: "x" * 100
    answer = client.completions.create(model="tiny", prompt="ab")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")
    assert len(client.chat.completions.create(model="tiny", messages=say("x")).choices[0].message.content or "") == 100


def test_completion_logprobs_are_parallel_lists_with_offsets(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The older format: parallel lists, with offsets into the choice's text."""
    leader.reply = lambda _: "aéb"
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"a": -0.5}


def test_models_are_listed_and_an_unknown_one_is_404(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The list names what is served, one model can be looked up, another is a 404."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").created == leader.assets.created
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_sampling_reaches_the_leader(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Every honoured parameter arrives as it was sent; a negative seed wraps around."""
    client.chat.completions.create(
        model="tiny",
        messages=say("x"),
        temperature=0,
        top_p=0.5,
        seed=-2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 10},
        max_completion_tokens=9,
        user="me",
        metadata={"a": "b"},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 2}
        | {"typical_p": 0.9, "bad_words": ["hi"]},
    )
    sampling = leader.claimed[0].params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.logit_bias, sampling.max_tokens, sampling.min_tokens) == ({5: 10}, 9, 2)
    assert (sampling.seed, sampling.stop_ids) == (str(2**64 - 2), [])
    hi = byte_tokenizer().encode("hi").ids
    assert (sampling.typical_p, sampling.bad_words) == (0.9, [hi, [*byte_tokenizer().encode(" ").ids, *hi]])
