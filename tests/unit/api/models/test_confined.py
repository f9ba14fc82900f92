"""A model's files run in a confined process: the same results, bounded time and memory, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, normalizers

from api.chat.template import PlainTemplate, render
from api.models.confined import ConfinedFiles
from api.models.model_process import Files
from api.models.models import ServedModel, serve
from control.errors import ModelFileBreach, ModelFileRefused, TemplateFailed
from tests.byte_model import byte_assets, byte_tokenizer
from tests.unit.api.chat.hostile_templates import HOSTILE
from tests.unit.api.chat.ordinary_templates import ORDINARY

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CENTERED = "{{ messages[0].content|center(20) }}"
"""Has no price, and is harmless."""


def rendered(served: ServedModel, template: str | None = None) -> str:
    """A conversation as the model's template writes it, wherever that is done."""

    def work(model: ServedModel) -> str:
        return render(model.template, MESSAGES, {}, {})

    return asyncio.run(served.run(0, "tenant", work))


def encoded(served: ServedModel, text: str) -> list[int]:
    def work(model: ServedModel) -> list[int]:
        return model.vocabulary.encode(text, bos=False)

    return asyncio.run(served.run(0, "tenant", work))


def model(template: str, tokenizer: Tokenizer | None = None, **options: Any) -> ServedModel:
    tokenizer = tokenizer or byte_tokenizer()
    assets = byte_assets(chat_template=template, tokenizer_json=tokenizer.to_str())
    served = serve("m", assets, None, None, None, **options)
    asyncio.run(served.prepare())
    return served


def replaced(*pairs: tuple[str, str]) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in pairs])
    return tokenizer


def test_a_template_without_a_price_is_rendered_by_a_process() -> None:
    """The text is the same; the control: a trusted one needs none."""
    served = model(CENTERED)
    assert rendered(served) == " " * 9 + "hi" + " " * 9
    assert served.confined is not None and served.confined.pid is not None
    for word in ("m", "0e1ceaf4f5efa8ed31b1ed0f4bb7fd1b8d36d0d1ac2df5b7c40ee3a76b0b4fd1"):
        trusted = model(CENTERED, trusted=(word,))
        assert isinstance(trusted.template, PlainTemplate) == (word == "m")


def test_both_ways_give_the_same() -> None:
    """Text, refusal and variables."""
    context = {"messages": MESSAGES, "tools": None, "bos_token": "<s>"}
    for name in ("filters", "refuses", "syntax"):
        source = ORDINARY[name]
        plain, confined = PlainTemplate(source), ConfinedFiles("m", Files(source))
        found = asyncio.run(confined.run("tenant", outcome, confined.render, context))
        assert found == outcome(plain.render, context), name
        assert asyncio.run(confined.run("tenant", getattr, confined, "variables")) == plain.variables, name


def outcome(render: Callable[[dict[str, Any]], str], context: dict[str, Any]) -> str:
    try:
        return render(context)
    except TemplateFailed as error:
        return str(error)


@pytest.mark.parametrize("name", ["loops", "center", "deep", "deep_expression", "double_block"])
def test_a_hostile_template_is_refused_and_the_next_is_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time, with the model's name; operators hear of it; then other requests are served as ever."""
    monkeypatch.setattr("api.models.confined.DEADLINE_S", 1.0)
    told: list[tuple[str, str]] = []

    def report(file: str, deed: str) -> None:
        told.append((file, deed))

    source = "{% if messages[0].content == 'harmless' %}" + CENTERED + "{% else %}" + HOSTILE[name] + "{% endif %}"
    served = model(source, report=report)
    with pytest.raises(TemplateFailed) as caught:
        rendered(served)
    if isinstance(caught.value, ModelFileBreach):
        assert "the model 'm'" in str(caught.value) and [file for file, _ in told] == ["chat template"]
    else:
        assert name.startswith("deep") and not told
    monkeypatch.setitem(MESSAGES[0], "content", "harmless")
    if not name.startswith("deep"):
        assert rendered(served).strip() == "harmless"


def test_streams_go_on_while_a_template_runs_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is never held up, by one tenant or several; each is refused after its own turn."""
    monkeypatch.setattr("api.models.confined.DEADLINE_S", 1.0)
    served = model(HOSTILE["loops"])

    def work(model: ServedModel) -> str:
        return render(model.template, MESSAGES, {}, {})

    async def scene() -> int:
        waits = asyncio.gather(*(served.run(0, name, work) for name in "ab"), return_exceptions=True)
        turns = 0
        while not waits.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert all(isinstance(one, ModelFileBreach) for one in waits.result())
        return turns

    assert asyncio.run(scene()) >= 20, "some 400 on a quiet machine; a template on the event loop leaves none"


def test_a_client_that_leaves_is_no_breach_of_the_file() -> None:
    """The process of its template is killed, nobody hears of it, and the next one is served."""
    told: list[tuple[str, str]] = []
    source = "{% if messages[0].content == 'harmless' %}" + CENTERED + "{% else %}" + HOSTILE["loops"] + "{% endif %}"

    def report(file: str, deed: str) -> None:
        told.append((file, deed))

    def work(content: str, model: ServedModel) -> str:
        return render(model.template, [{"role": "user", "content": content}], {}, {})

    served = model(source, report=report)

    async def scene() -> str:
        assert served.confined is not None
        leaving = asyncio.create_task(served.run(0, "tenant", work, "endless"))
        while served.confined.pid is None:
            await asyncio.sleep(0.005)
        leaving.cancel()
        await asyncio.wait([leaving])
        return await served.run(0, "tenant", work, "harmless")

    assert asyncio.run(scene()).strip() == "harmless"
    assert told == []


def test_the_process_has_no_password_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FURROW_REDIS_URL", "redis://:password@localhost")
    served = model(CENTERED)
    rendered(served)
    assert served.confined is not None
    assert "FURROW_REDIS_URL" not in psutil.Process(served.confined.pid).environ()


GROWING = [("a", "a" * 64)] * 6
"""Aborts the process that tokenises an `a`."""


def test_an_ordinary_tokenizer_works_here() -> None:
    served = model(ORDINARY["demo"], replaced((" ", "\u2581"), ("-", "--")))
    assert served.encodes and len(encoded(served, "a-b")) == 4
    assert served.confined is not None and served.confined.pid is None


def test_a_tokenizer_that_multiplies_works_in_a_process() -> None:
    """The tokens are the same, and the process is that of its model."""
    strange = replaced(("b", "c" * 60), ("c", "dd"))
    served = model(ORDINARY["demo"], strange)
    assert not served.encodes and served.vocabulary.bos == strange.token_to_id("<s>")
    assert encoded(served, "ab") == strange.encode("ab", add_special_tokens=False).ids
    assert served.vocabulary.decode(encoded(served, "ax")) == "ax"


def test_a_tokenizer_that_aborts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its load, where it does so with every text; else with the request at fault, and then it goes on."""
    monkeypatch.setattr("api.models.confined.DEADLINE_S", 1.0)
    with pytest.raises(ModelFileBreach, match="tokenizer of the model 'm'"):
        model(ORDINARY["demo"], replaced(*GROWING))
    served = model(
        ORDINARY["demo"], replaced(*((old.replace("a", "z"), new.replace("a", "z")) for old, new in GROWING))
    )
    with pytest.raises(ModelFileBreach, match="tokenizer of the model"):
        encoded(served, "z")
    assert len(encoded(served, "abc")) == 3


def test_a_decoder_that_multiplies_is_refused() -> None:
    """Answers are decoded where others are."""
    text = (
        byte_tokenizer()
        .to_str()
        .replace(
            '"decoder":{"type":"ByteLevel"',
            '"decoder":{"type":"Replace","pattern":{"String":"a"},"content":"' + "a" * 60 + '"',
        )
    )
    with pytest.raises(ModelFileRefused, match="60 characters"):
        serve("m", byte_assets(tokenizer_json=text), None, None, None)


def test_the_process_ends_with_its_model() -> None:
    served = model(CENTERED)
    rendered(served)
    confined = served.confined
    assert isinstance(confined, ConfinedFiles)
    pid = confined.pid
    assert pid is not None
    del served, confined
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid):
        gc.collect()  # an exception refers to its frames
        assert time.monotonic() < deadline
        time.sleep(0.01)
