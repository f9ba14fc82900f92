"""The rate of answers with and without prompt lookup, through the whole farm."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import click

from control.operations.spec import build_spec
from ops.bench.common.ask import kind_of
from ops.bench.common.client import Base, request
from ops.bench.common.farm import private_farm, say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.demo import MODEL_DIR

CODE = '''def total(orders, country):
    """Sum of the orders that were sent to a country, tax included."""
    amount = 0.0
    for order in orders:
        if order.country == country and not order.cancelled:
            amount += order.price * order.quantity * (1 + order.tax)
    return round(amount, 2)


def report(orders, countries):
    lines = []
    for country in sorted(countries):
        lines.append(f"{country}: {total(orders, country)}")
    return "\\n".join(lines)
'''
FORM = {
    "type": "object",
    "properties": {
        name: {"enum": ["unknown to the person", "known to the person"]}
        for name in ("family_name_of_the_person", "street_of_the_address", "country_of_the_address", "date_of_birth")
    },
    "required": ["family_name_of_the_person", "street_of_the_address", "country_of_the_address", "date_of_birth"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "a copy of the prompt": (
        {"messages": [{"role": "user", "content": f"Repeat this code exactly as it is:\n\n{CODE}"}], "temperature": 0},
        1.8,
    ),
    "a JSON form": (
        {
            "messages": [{"role": "user", "content": "Fill in the form."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}},
        },
        1.8,
    ),
    "nothing repeats": (
        {"messages": [{"role": "user", "content": "Write random words."}], "temperature": 1.8, "ignore_eos": True},
        0.97,
    ),
}
"""Bodies of requests, and the least ratio of the rates with and without guesses."""
EDIT = "an edit of predicted text"
"""The case whose answer, but for one line or sentence, is sent as its prediction; its limit is that of a copy."""
EDITED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write a long story about a river and the people beside it."}],
    "temperature": 0,
}


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: int
    rate: float
    """Tokens a second, from the first one on."""


@click.command()
@click.argument("model", default="demo")
@click.option("--tokens", type=click.IntRange(8), default=200, show_default=True, help="Most tokens of an answer.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Pairs of answers in each case.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option("--quant", help="As `furrow serve` takes it.")
@click.option("--dequantize", is_flag=True, help="As `furrow serve` takes it.")
@click.option("--lookup", type=click.IntRange(1, 64), help="Most guesses [default: the farm's].")
def lookup(
    model: str, tokens: int, rounds: int, tp: int, quant: str | None, dequantize: bool, lookup: int | None
) -> None:
    """Measure how much faster MODEL answers where the context or a prediction suggests the next tokens.

    The farm is private, with one CPU replica in float32. Each answer is asked for with and without guesses, in turn,
    and must be the same.
    """
    click.echo(describe())
    wanted = {} if lookup is None else {"lookup": lookup}
    spec = build_spec(
        model,
        tp=tp,
        devices="cpu",
        dtype="float32",
        quant=quant,
        dequantize=dequantize,
        demo=MODEL_DIR,
        **wanted,  # type: ignore[arg-type]
    )
    say(f"starting a replica of {model}")
    figures: list[Figure] = []
    with private_farm(spec, (1,)) as (url, _, (name,)):
        for case, (body, least) in (CASES | {EDIT: (EDITED, 1.8)}).items():
            asked = body | {"model": name, "max_tokens": tokens, "seed": 1}
            if case == EDIT:
                asked |= {"prediction": predicted(asyncio.run(ask(Base.of(url), asked)).text)}
            pairs = asyncio.run(measure(Base.of(url), asked, rounds))
            plain, guessed = (statistics.median(pair[turn].rate for pair in pairs) for turn in (0, 1))
            click.echo(f"{case}: {pairs[0][0].tokens} tokens, {plain:.1f} and {guessed:.1f} tokens/s")
            ratio = statistics.median(pair[1].rate / pair[0].rate for pair in pairs)
            figures.append(Figure(f"{case}: rate with guesses, of that without", ratio, least, at_least=True))
    conclude(figures)


def predicted(answer: str) -> dict[str, str]:
    """An answer with other words in its middle, as a prediction of it."""
    words = answer.split(" ")
    middle = len(words) // 2
    return {"type": "content", "content": " ".join([*words[:middle], "something", "else", *words[middle + 6 :]])}


async def measure(base: Base, body: dict[str, Any], rounds: int) -> list[tuple[Answer, Answer]]:
    """Answers without and with guesses, after a pair that warms up. Raises ClickException where they differ."""
    pairs: list[tuple[Answer, Answer]] = []
    for _ in range(rounds + 1):
        plain, guessed = await ask(base, body | {"lookup": 0}), await ask(base, body)
        if plain.text != guessed.text:
            raise click.ClickException(f"guesses changed an answer: {plain.text!r} became {guessed.text!r}")
        pairs.append((plain, guessed))
    return pairs[1:]


async def ask(base: Base, body: dict[str, Any]) -> Answer:
    """One streamed answer. Raises ClickException where there is none."""
    text, usage, times = "", None, list[float]()
    sent = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    headers = {"content-type": "application/json"}
    async with request(base, "POST", "/v1/chat/completions", body=sent, headers=headers) as response:
        if response.status != 200:
            kind = kind_of(json.loads(await response.read()))
            raise click.ClickException(f"the farm answered {response.status}: {kind}")
        async for _, data, _ in response.events():
            if data == b"[DONE]":
                continue
            event = json.loads(data)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                times.append(time.perf_counter())
                text += choice["delta"].get("content") or ""
    if usage is None or len(times) < 3:
        raise click.ClickException(f"an answer of several tokens was asked for; what came says {usage}")
    tokens = usage["completion_tokens"]
    return Answer(text, tokens, (tokens - 1) / (times[-1] - times[0]))
