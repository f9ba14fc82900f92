"""Images through a whole farm of two ranks: the answers are transformers', before and after a rank is killed."""

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

pytestmark = pytest.mark.timeout(180)

NEW = 40


def url_of(picture: image_models.Picture) -> str:
    data = io.BytesIO()
    picture.original.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def test_an_answer_about_images_is_transformers_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Two pictures between texts; the rank that dies had the prompt's keys and values, and the pictures' rows."""
    folder = image_models.qwen3_vl(tmp_path / "seeing")
    pictures = [image_models.picture(1), image_models.picture(2, 17, 40)]
    first, second = (image_models.image_tokens(one) for one in pictures)
    prompt = [*b"user: look ", *first, *second, *b" and say"]
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
        asked: dict[str, Any] = {
            "model": "seeing",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NEW,
            "temperature": 0,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},
        }
        whole: Any = client.chat.completions.create(**asked)
        assert whole.prompt_token_ids == prompt
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.choices[0].token_ids == expected
        stream = iter(client.chat.completions.create(**asked, stream=True))
        tokens: list[int] = []
        while len(tokens) < 5:
            tokens += getattr(next(stream).choices[0], "token_ids", None) or []
        farm.kill("seeing", 1)
        for chunk in stream:
            tokens += getattr(chunk.choices[0], "token_ids", None) or [] if chunk.choices else []
        assert tokens == expected
        until(lambda: not list(farm.redis.scan_iter("furrow:{seeing}:images:*")))
