"""Images in chat, messages and responses: each at its place in the prompt, every refusal in the endpoint's own
names."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from control.messages import ImageInput
from tests.byte_model import BOS, byte_assets, byte_tokenizer
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

PLACE = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% if message.tool_calls %}(call){% endif %}|{% endfor %}"
)
UNIT = 8


def encoded(width: int = 16, height: int = 8, colour: int = 7, kind: str = "PNG") -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 2, 3)).save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


def url_of(data: str) -> str:
    return f"data:image/png;base64,{data}"


TWO, THREE = encoded(16), encoded(24)
"""Pictures of two and of three tokens."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLeader, ApiProcess]]:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([PLACE])
    images = ImageInput(
        kind="grid",
        token=tokenizer.get_vocab()[PLACE],
        placeholder=PLACE,
        unit=UNIT,
        least_pixels=64,
        most_pixels=1 << 20,
        resample=3,
    )
    assets = byte_assets(
        tokenizer_json=tokenizer.to_str(),
        chat_template=TEMPLATE,
        vocab_size=tokenizer.get_vocab_size(),
        images=images,
    )
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=assets)
        leader.start()
        with running_api(server.url, tmp_path_factory.mktemp("api")) as api:
            yield leader, api
        leader.stop()


@pytest.fixture
def leader(seeing: tuple[ScriptedLeader, ApiProcess]) -> ScriptedLeader:
    seeing[0].reset()
    seeing[0].reply = lambda _: "seen"
    return seeing[0]


@pytest.fixture
def gpt(seeing: tuple[ScriptedLeader, ApiProcess]) -> Iterator[openai.OpenAI]:
    url = f"{seeing[1].url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


@pytest.fixture
def claude(seeing: tuple[ScriptedLeader, ApiProcess]) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=seeing[1].url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


@pytest.fixture
def plain(seeing: tuple[ScriptedLeader, ApiProcess]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seeing[1].url, timeout=40) as client:
        yield client


def prompt_of(leader: ScriptedLeader) -> str:
    """The last prompt; `#` for each token of an image."""
    tokens = leader.claimed[-1].params.prompt
    return leader.tokenizer.decode(tokens, skip_special_tokens=False).removeprefix(BOS).replace(PLACE, "#")


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def block(data: str = TWO) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def part(data: str = TWO) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(data), "detail": "high"}


def told(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def test_blocks_of_messages_and_of_results(claude: Any, leader: ScriptedLeader) -> None:
    """Text and images keep their order, those of a result stand in it, and the count is that of the request."""
    messages: list[Any] = [
        {"role": "user", "content": [words("a"), words("b"), block(), words("c"), block(THREE)]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                words("and now?"),
                {"type": "tool_result", "tool_use_id": "t", "content": [words("shot:"), block()], "is_error": True},
            ],
        },
    ]
    answer = claude.messages.create(model="tiny", max_tokens=9, messages=messages)
    whole = "user: a\nb##c###|assistant: (call)|tool: Error: shot:##|user: and now?|"
    assert prompt_of(leader) == whole and answer.content[0].text == "seen"
    counted = claude.messages.count_tokens(model="tiny", messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens == 1 + len(whole)


def test_parts_of_items_and_a_stored_conversation(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Messages and outputs of functions have images; a later response has those of the ones that it continues."""
    asked: Any = [{"role": "user", "content": [told("a"), part(), told("b")]}]
    first = gpt.responses.create(model="tiny", input=asked)
    assert prompt_of(leader) == "user: a##b|"
    given: Any = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [told("shot"), part(THREE)]},
    ]
    second = gpt.responses.create(model="tiny", input=given, previous_response_id=first.id)
    whole = "user: a##b|assistant: seen(call)|tool: shot###|"
    assert prompt_of(leader) == whole
    counted = gpt.responses.input_tokens.count(model="tiny", input=given, previous_response_id=first.id)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens == 1 + len(whole)
    [item] = gpt.responses.input_items.list(first.id).data
    assert dict[str, Any](item.to_dict())["content"][1] == part()
    compacted = gpt.responses.compact(model="tiny", input="more", previous_response_id=second.id)
    output: Any = dict[str, Any](compacted.to_dict(warnings=False))["output"]
    assert "##" in prompt_of(leader) and "data:" not in str(output)
    gpt.responses.create(model="tiny", input=[*output, {"role": "user", "content": "on"}])
    assert "#" not in prompt_of(leader) and "An image was here" in prompt_of(leader)


def test_truncation_drops_turns_with_too_many_images(gpt: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Twelve turns with an image each: ten remain. Each image is decoded once."""
    given: Any = [{"role": role, "content": [part(encoded(colour=turn))] if role == "user" else "yes"}
        for turn in range(12) for role in ("user", "assistant")]  # fmt: skip
    given.append({"role": "user", "content": "all?"})
    gpt.responses.create(model="tiny", input=given, truncation="auto")
    assert prompt_of(leader).count("##") == 10
    with pytest.raises(openai.BadRequestError, match="12 images; at most 10"):
        gpt.responses.create(model="tiny", input=given)


def test_what_is_too_large_to_be_stored_is_served(plain: httpx.Client, leader: ScriptedLeader) -> None:
    """Where the client says nothing of storing: with a warning. A client that asks for it gets a 400."""
    large = base64.b64encode(base64.b64decode(TWO) + bytes(4 << 20)).decode()
    body: dict[str, Any] = {"model": "tiny", "input": [{"role": "user", "content": [part(large)]}]}
    response = plain.post("/v1/responses", json=body)
    assert response.status_code == 200 and response.json()["store"] is False
    assert "too large" in response.headers["warning"]
    assert plain.post("/v1/responses", json=body | {"store": True}).status_code == 400


MANY: list[Any] = [block(), words("and")] * 5
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def of_user(path: str, *parts: Any) -> dict[str, Any]:
    """A body of each endpoint; strings are the data of images."""
    content: list[Any] = [one for one in parts if not isinstance(one, str)]
    for data in [one for one in parts if isinstance(one, str)]:
        image = {CHAT: {"type": "image_url", "image_url": {"url": url_of(data)}}, MESSAGES: block(data)}
        content.append(image.get(path) or part(data))
    name = "input" if path == RESPONSES else "messages"
    return {"model": "tiny", name: [{"role": "user", "content": content}]} | (
        {"max_tokens": 9} if path == MESSAGES else {}
    )


BROKEN = base64.b64encode(base64.b64decode(TWO)[:-26]).decode()
NAMES = {
    CHAT: "messages[0].content[0].image_url",
    MESSAGES: "messages[0].content[0].source.data",
    RESPONSES: "input[0].content[0].image_url",
}


LARGE = "A" * (28 << 20)
"""21 MiB."""


@pytest.mark.parametrize(
    ("path", "data", "why"),
    [
        *((path, BROKEN, "damaged") for path in NAMES),
        *((path, encoded(4000, 8), "200 times the other") for path in NAMES),
        (CHAT, base64.b64encode(b"%PDF-1.7").decode(), "none that can be read"),
        (RESPONSES, "!!!!", "no valid base64"),
        (MESSAGES, LARGE, "20 MiB together"),
    ],
    ids=lambda value: value[:12],
)
def test_a_refusal_names_part_and_limit(
    plain: httpx.Client, leader: ScriptedLeader, path: str, data: str, why: str
) -> None:
    """In the endpoint's own names; nothing reaches a leader."""
    response = plain.post(path, json=of_user(path, data))
    message = response.json()["error"]["message"]
    assert response.status_code == 400, response.text
    assert f"'{NAMES[path]}'" in message and why in message
    assert leader.claimed == []


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_thousand_images_are_too_many(plain: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    response = plain.post(path, json=of_user(path, *([TWO] * 1000)))
    assert response.status_code == 400 and "1000 images; at most 10" in response.json()["error"]["message"]
    assert leader.claimed == []


def test_eleven_images_over_messages_and_results(plain: httpx.Client, leader: ScriptedLeader) -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages: list[Any] = [
        {"role": "user", "content": MANY},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [*MANY, block()]}]},
    ]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages}
    response = plain.post(MESSAGES, json=body)
    assert response.status_code == 400 and "11 images; at most 10" in response.json()["error"]["message"]
    messages[0]["content"] = MANY[2:]
    assert plain.post(MESSAGES, json=body).status_code == 200
    assert prompt_of(leader).count("##") == 10


@pytest.mark.parametrize(
    ("path", "content", "named"),
    [
        (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[0].source"),
        (MESSAGES, {"type": "image"}, "messages[0].content[0].source"),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}, "--image-hosts"),
        (RESPONSES, {"type": "input_image", "file_id": "file-1"}, "input[0].content[0].file_id"),
        (RESPONSES, {"type": "input_image"}, "input[0].content[0].image_url"),
        (RESPONSES, {"type": "input_image", "image_url": url_of(TWO), "detail": "huge"}, "input[0].content[0].detail"),
        (RESPONSES, {"type": "input_image", "image_url": "https://a.b/c.png"}, "input[0].content[0].image_url"),
        (CHAT, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "messages[0].content[0].image_url"),
    ],
)
def test_a_source_that_is_not_served_is_named(
    plain: httpx.Client, leader: ScriptedLeader, path: str, content: Any, named: str
) -> None:
    response = plain.post(path, json=of_user(path, content))
    assert response.status_code == 400 and named in response.json()["error"]["message"], response.text
    assert leader.claimed == []


def test_images_of_ollamas_clients(plain: httpx.Client, leader: ScriptedLeader) -> None:
    """Bare base64 beside the text, in a chat and in a prompt; a refusal has the client's own name of the field."""
    turn = {"role": "user", "content": "what?", "images": [TWO, THREE]}
    answer = plain.post("/api/chat", json={"messages": [turn], "stream": False}).raise_for_status().json()
    assert (answer["message"]["content"], prompt_of(leader)) == ("seen", "user: #####what?|")
    assert answer["prompt_eval_count"] == len(leader.claimed[-1].params.prompt)
    plain.post("/api/generate", json={"prompt": "and?", "images": [TWO]}).raise_for_status()
    assert prompt_of(leader) == "user: ##and?|"
    assert "vision" in plain.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
    for path, body, named in (
        ("/api/chat", {"messages": [turn | {"images": [TWO, "no base64"]}]}, "'messages[0].images[1]'"),
        ("/api/generate", {"prompt": "x", "images": ["http://127.0.0.1/x.png"]}, "'images[0]'"),
        ("/api/generate", {"prompt": "x", "images": [TWO] * 99}, "99 images"),
    ):
        refused = plain.post(path, json=body)
        assert refused.status_code == 400 and named in refused.json()["error"], refused.text
