"""Chat templates have bounded work and memory: rendered in the API's process, and the same text as without."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest

from api.chat.metered import FUEL, Meter, NeedsProcess, metered
from api.chat.template import (
    SHIPPED,
    MeteredTemplate,
    PlainTemplate,
    _metered_environment,  # pyright: ignore[reportPrivateUsage]
)
from control.errors import TemplateFailed
from tests.unit.api.chat.hostile_templates import DEEP, HOSTILE
from tests.unit.api.chat.ordinary_templates import DEMO, ORDINARY

USER: dict[str, Any] = {"role": "user", "content": "What is <this>, “ü😀”?\n\n1. a\n2. b"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": "x", "b": [1, 2.5, None]}}}
    ],
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    CALL,
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "user", "content": [{"type": "text", "text": "more"}]},
]


def context(**changes: Any) -> dict[str, Any]:
    return {"messages": CONVERSATION, "tools": [TOOL], "bos_token": "<s>", "add_generation_prompt": True} | changes


def outcome(template: MeteredTemplate | PlainTemplate) -> str:
    try:
        return template.render(context())
    except TemplateFailed as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", ORDINARY)
def test_a_text_is_the_same_as_without_prices(name: str) -> None:
    """Rendered in this process, with the same outcome, variables included."""
    source = ORDINARY[name]
    own, plain = MeteredTemplate(source), PlainTemplate(source)
    assert outcome(own) == outcome(plain)
    assert own.variables == plain.variables


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str) -> None:
    """Within a part of a second of work, whether it is parsed, compiled or rendered."""
    began = time.process_time()
    with pytest.raises(NeedsProcess):
        MeteredTemplate(HOSTILE[name]).render(context())
    assert time.process_time() - began < 1.0


def test_what_stops_them_are_the_prices() -> None:
    """The control: with more to spend the same templates get further than any template may."""
    loops = metered(
        "{% for a in range(9999) %}{% for b in range(99) %}{% endfor %}{% endfor %}done", _metered_environment()
    )
    with pytest.raises(NeedsProcess):
        loops.render({})
    assert loops.render({}, fuel=100 * FUEL) == "done"
    grows = metered("{{ ('ab' * 999)|length }}{{ ('ab' * 999999)|length }}", _metered_environment())
    with pytest.raises(NeedsProcess):
        grows.render({})
    assert grows.render({}, fuel=100 * FUEL) == "19981999998"


def test_nothing_is_evaluated_before_it_is_paid_for() -> None:
    """Jinja evaluates constants when it compiles; here it compiles what would take gigabytes."""
    began = time.process_time()
    made = metered(
        "{% if 0 %}{{ 'x' * 9000000000 }}{{ 9 ** (9 ** 9) }}{{ '%999999999d' is odd }}{% endif %}ok",
        _metered_environment(),
    )
    assert made.render({}) == "ok" and time.process_time() - began < 1.0


def test_what_was_too_much_once_is_not_tried_again() -> None:
    """Inputs of half its size are."""
    template = MeteredTemplate(
        "{% for m in messages %}{% for n in messages %}{{ m.content ~ n.content }}{% endfor %}{% endfor %}"
    )
    many = [{"role": "user", "content": "x"}] * 300
    with pytest.raises(NeedsProcess, match="more work"):
        template.render({"messages": many})
    with pytest.raises(NeedsProcess, match="less was too much"):
        template.render({"messages": many})
    assert template.render({"messages": many[:30]}) == "xx" * 900


def test_a_deep_template_fails_where_nothing_else_does() -> None:
    """As in the process that it is given to: it is refused, and reads no variables."""
    deep = PlainTemplate(DEEP)
    assert deep.variables == frozenset()
    with pytest.raises(TemplateFailed):
        deep.render({})


def test_a_value_is_measured_without_recursion() -> None:
    """However deep it is, and no part of it twice as often as it can be reached."""
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    assert Meter(10**6).measure(deep)[1] == 10_001
    wide: Any = []
    for _ in range(64):
        wide = [wide, wide]
    with pytest.raises(NeedsProcess):
        Meter(10**5).measure(wide)


def test_the_template_of_the_demonstration_model_is_trusted() -> None:
    assert hashlib.sha256(DEMO.encode()).hexdigest() in SHIPPED
