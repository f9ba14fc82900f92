"""`furrow bench lookup`: the rate of answers with and without prompt lookup, through the whole farm."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Annotated, Any

import click

from control.operations.spec import build_spec
from ops.demo import MODEL_DIR
from ops.harness.client import Answer, Base, RequestFailed, ask
from ops.harness.farm import private_farm, say
from ops.harness.program import Figure, benchmark

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


@benchmark
@click.argument("model", default="demo")
def lookup(
    model: str,
    tokens: Annotated[int, click.IntRange(8), "Most tokens of an answer."] = 200,
    rounds: Annotated[int, "Pairs of answers in each case."] = 5,
    tp: Annotated[int, "Ranks."] = 1,
    quant: Annotated[str | None, "As `furrow serve` takes it."] = None,
    dequantize: Annotated[bool, "As `furrow serve` takes it."] = False,
    guesses: Annotated[int | None, "--lookup", click.IntRange(1, 64), "Most guesses [default: the farm's]."] = None,
) -> list[Figure]:
    """Measure how much faster MODEL answers where the context or a prediction suggests the next tokens.

    The farm is private, with one CPU replica in float32. Each answer is asked for with and without guesses, in turn,
    and must be the same.
    """
    more: dict[str, Any] = {} if guesses is None else {"lookup": guesses}
    more |= {"quant": quant, "dequantize": dequantize, "demo": MODEL_DIR}
    spec = build_spec(model, tp=tp, devices="cpu", dtype="float32", **more)
    say(f"starting a replica of {model}")
    figures: list[Figure] = []
    with private_farm(spec) as farm:
        base = farm.base
        [name] = farm.names
        for case, (fields, least) in (CASES | {EDIT: (EDITED, 1.8)}).items():
            body = fields | {"model": name, "max_tokens": tokens, "seed": 1, "stream": True}
            if case == EDIT:
                body |= {"prediction": predicted(asyncio.run(ask(base, body, exact=False)).check().text)}
            pairs = asyncio.run(measure(base, body, rounds))
            plain, guessed = (median(rate(pair[turn]) for pair in pairs) for turn in (0, 1))
            click.echo(f"{case}: {pairs[0][0].tokens} tokens, {plain:.1f} and {guessed:.1f} tokens/s")
            ratio = median(rate(guessed) / rate(unaided) for unaided, guessed in pairs)
            figures.append(Figure(f"{case}: rate with guesses, of that without", ratio, least, at_least=True))
    return figures


def predicted(answer: str) -> dict[str, str]:
    """An answer with other words in its middle, as a prediction of it."""
    words = answer.split(" ")
    middle = len(words) // 2
    return {"type": "content", "content": " ".join([*words[:middle], "something", "else", *words[middle + 6 :]])}


def rate(answer: Answer) -> float:
    """Tokens a second, from the first one on."""
    return (answer.tokens - 1) / (answer.stamps[-1] - answer.stamps[0])


async def measure(base: Base, body: dict[str, Any], rounds: int) -> list[tuple[Answer, Answer]]:
    """Answers without and with guesses, after a pair that warms up. Raises RequestFailed where they differ, or have too
    few tokens for a rate."""
    pairs: list[tuple[Answer, Answer]] = []
    for _ in range(rounds + 1):
        plain, guessed = [(await ask(base, variant, exact=False)).check() for variant in (body | {"lookup": 0}, body)]
        if plain.text != guessed.text:
            raise RequestFailed(f"guesses changed an answer: {plain.text!r} became {guessed.text!r}")
        if min(len(plain.stamps), len(guessed.stamps)) < 3:
            raise RequestFailed(f"an answer of several tokens was asked for, and {plain.text!r} came")
        pairs.append((plain, guessed))
    return pairs[1:]
