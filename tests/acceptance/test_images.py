"""Answers to images are transformers': on a whole farm of two ranks, before and after a rank is killed."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import image_models
from tests.farm import serving_farm
from tests.waiting import until

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
pytestmark = pytest.mark.timeout(180)

NEW = 40


def base64_of(picture: image_models.Picture) -> str:
    data = io.BytesIO()
    picture.original.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def url_of(picture: image_models.Picture) -> str:
    return "data:image/png;base64," + base64_of(picture)


def block_of(picture: image_models.Picture) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(picture)}}


def check_other_endpoints(
    base_url: str, client: openai.OpenAI, content: list[Any], pictures: list[image_models.Picture]
) -> None:
    """/v1/messages and /v1/responses give a chat's answer to the same parts, of a user and of a tool's result."""
    blocks: list[Any] = [content[0], *map(block_of, pictures), content[-1]]
    items: list[Any] = [
        {"type": "input_image", "image_url": one["image_url"]["url"], "detail": "auto"}
        if one["type"] == "image_url"
        else {"type": "input_text", "text": one["text"]}
        for one in content
    ]
    result: Any = {"role": "tool", "tool_call_id": "c", "content": content}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": items}
    request_body: dict[str, Any] = {"model": "seeing", "extra_body": {"ignore_eos": True, "temperature": 0}}
    with anthropic.Anthropic(
        base_url=base_url.removesuffix("/v1"), api_key="none", timeout=120, max_retries=0
    ) as claude:
        cases: list[tuple[Any, Any, Any]] = [
            ({"role": "user", "content": content}, blocks, {"role": "user", "content": items}),
            (result, [{"type": "tool_result", "tool_use_id": "c", "content": blocks}], output),
        ]
        for message, given, item in cases:
            said = client.chat.completions.create(**request_body, messages=[message], max_tokens=8)
            turn: Any = {"role": "user", "content": given}
            answer = claude.messages.create(**request_body, messages=[turn], max_tokens=8)
            response: Any = client.responses.create(**request_body, input=[item], max_output_tokens=8)
            assert said.choices[0].message.content == answer.content[0].text == response.output_text
            counted = claude.messages.count_tokens(model="seeing", messages=[turn])
            assert said.usage is not None and counted.input_tokens == said.usage.prompt_tokens
            assert response.usage.input_tokens == said.usage.prompt_tokens


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_an_answer_about_images_is_transformers_and_goes_on_after_a_kill(kind: str, tmp_path: Path) -> None:
    """Two pictures between texts; the rank that dies had the prompt's keys and values, and the pictures' rows."""
    folder = getattr(image_models, kind)(tmp_path / "seeing")
    picture, beside = (image_models.square, b"\n\n") if kind == "gemma3" else (image_models.picture, b"")
    pictures = [picture(1), picture(2, 17, 40)]
    first, second = (image_models.image_tokens(one) for one in pictures)
    prompt = [*b"user: look " + beside, *first, *beside * 2, *second, *beside + b" and say"]
    expected = image_models.generated(folder, prompt, pictures, NEW)
    content: Any = [
        {"type": "text", "text": "look "},
        *({"type": "image_url", "image_url": {"url": url_of(one)}} for one in pictures),
        {"type": "text", "text": " and say"},
    ]
    options = ["--devices", "cpu,cpu", "--tp", "2", "--dtype", "float64"]
    with (
        serving_farm(str(folder), *options) as farm,
        openai.OpenAI(base_url=farm.base_url, api_key="none", timeout=120, max_retries=0) as client,
    ):
        request_body: dict[str, Any] = {
            "model": "seeing",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NEW,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        whole: Any = client.chat.completions.create(**request_body)
        assert whole.prompt_token_ids == prompt
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.choices[0].token_ids == expected
        check_other_endpoints(farm.base_url, client, content, pictures)
        stream = iter(client.chat.completions.create(**request_body, stream=True))
        tokens: list[int] = []
        while len(tokens) < 5:
            tokens += getattr(next(stream).choices[0], "token_ids", None) or []
        farm.kill("seeing", 1)
        for chunk in stream:
            tokens += getattr(chunk.choices[0], "token_ids", None) or [] if chunk.choices else []
        assert tokens == expected
        until(lambda: not list(farm.redis.scan_iter("furrow:{seeing}:images:*")))
