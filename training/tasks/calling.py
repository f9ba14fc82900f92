"""Tasks with tools: call the one that fits, with arguments from the question, and say its result in a sentence.

Names, parameters and descriptions differ from conversation to conversation, so that the model has to read them.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.tasks.conversation import Conversation, Message, call_text
from training.tasks.example import Example, dress
from training.tasks.talk import UNKNOWN
from training.tasks.tool_words import (
    CITIES,
    DESCRIPTIONS,
    KEYS,
    LOOK_UP,
    PLACE_NOTES,
    SKIES,
    TIME_NAMES,
    TIME_QUESTIONS,
    WEATHER_NAMES,
    WEATHER_QUESTIONS,
)  # fmt: skip
from training.tasks.words import any_word, invented

Value = str | int


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to find out with a tool: the question, the tool, its argument, and what to make of the result."""

    task: str
    core: str
    tool: dict[str, Any]
    argument: Value
    result: str
    sentence: str

    @property
    def name(self) -> str:
        return self.tool["function"]["name"]

    @property
    def arguments(self) -> dict[str, Value]:
        return {next(iter(self.tool["function"]["parameters"]["properties"])): self.argument}

    @property
    def held_out(self) -> bool:
        """By the argument alone, so that a held-out city is never asked about in training."""
        return Example(self.task, "", (), str(self.argument)).held_out


def _tool(rng: random.Random, name: str, key: str, kind: str, note: str, description: str) -> dict[str, Any]:
    """A tool of one parameter, described as different clients describe them."""
    schema: dict[str, Any] = {"type": kind}
    if rng.random() < 0.4:
        schema["description"] = note
    if rng.random() < 0.2:
        schema = {"title": key.capitalize(), **schema}
    properties = {key: schema}
    if rng.random() < 0.15:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    further_fields: dict[str, Any] = {"required": [key]} if rng.random() < 0.85 else {}
    if rng.random() < 0.2:
        further_fields["additionalProperties"] = False
    shape: dict[str, Any] = {"type": "object"}
    parameters = {**shape, "properties": properties, **further_fields}
    if rng.random() < 0.2:
        parameters = {"properties": properties, **further_fields, **shape}
    described = {"description": description} if rng.random() < 0.75 else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _words(rng: random.Random, most: int) -> str:
    return " ".join(any_word(rng, 0.2) for _ in range(rng.randint(1, most)))


def _about(rng: random.Random, description: str) -> str:
    return description if rng.random() < 0.6 else _words(rng, 6).capitalize()


def _city(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.25:
        return invented(rng).capitalize()
    if roll < 0.3:
        return f"{rng.choice(CITIES)}, {invented(rng).capitalize()}"
    return rng.choice(CITIES)


def _state(rng: random.Random) -> str:
    """The answer of a weather service."""
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 40)
    return rng.choice(
        (
            sky,
            f"{sky}, {degrees} degrees",
            f"{degrees} degrees and {sky}",
            f"{sky} and {degrees} degrees",
            f"{degrees}°C",
            json.dumps({"temperature": degrees, "condition": sky}),
            json.dumps({"sky": sky}),
            _words(rng, 4),
        )
    )


def weather(rng: random.Random) -> Job:
    city, result = _city(rng), _state(rng)
    note = rng.choice(PLACE_NOTES)
    name, key = rng.choice(WEATHER_NAMES), rng.choice(KEYS)
    tool = _tool(rng, name, key, "string", note, _about(rng, rng.choice(DESCRIPTIONS)))
    core = rng.choice(WEATHER_QUESTIONS).format(city)
    return Job("weather tool", core, tool, city, result, f"The weather in {city}: {result}.")


def time(rng: random.Random) -> Job:
    city = _city(rng)
    result = rng.choice((f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}", f"{rng.randint(1, 12)} {rng.choice('ap')}m"))
    tool = _tool(rng, rng.choice(TIME_NAMES), rng.choice(KEYS), "string", "The city", _about(rng, "The time in a city"))
    core = rng.choice(TIME_QUESTIONS).format(city)
    return Job("time tool", core, tool, city, result, f"The time in {city}: {result}.")


def any_tool(rng: random.Random) -> Job:
    """A tool of any name, called because the question says so."""
    name = "_".join(any_word(rng, 0.3) for _ in range(rng.choice((1, 2, 2, 3))))
    number = rng.random() < 0.5
    argument: Value = rng.randint(0, 10 ** rng.randint(1, 4)) if number else _words(rng, 2)
    key = rng.choice(("input", "x", "value", "text", "name", "query", "number", any_word(rng, 0.3)))
    kind = rng.choice(("integer", "integer", "number")) if number else "string"
    tool = _tool(rng, name, key, kind, _words(rng, 3), _about(rng, f"Apply {name} to an input."))
    result = rng.choice((str(rng.randint(0, 999)), _words(rng, 3), json.dumps({any_word(rng): rng.randint(0, 99)})))
    core = rng.choice(LOOK_UP).format(name=name, x=argument)
    return Job("any tool", core, tool, argument, result, f"The result is {result}.")


KINDS: tuple[Callable[[random.Random], Job], ...] = (weather, weather, time, any_tool, any_tool)


def _job(rng: random.Random, held_out: bool) -> Job:
    while True:
        job = rng.choice(KINDS)(rng)
        if job.held_out == held_out:
            return job


def conversation(rng: random.Random, last: Example, system: list[Message], held_out: bool = False) -> Conversation:
    """A conversation with tools; `last` is a question that needs none of them."""
    job = _job(rng, held_out)
    other_jobs = _others(rng, job)
    mark = "." if job.task == "any tool" else "?"
    asked: Message = {"role": "user", "content": dress(rng, job.core, mark)}
    roll = rng.random()
    if roll < 0.1 and job.task != "any tool":
        # The tool that would fit is not there.
        other_jobs = [other for other in other_jobs if other.task == "any tool"] or [any_tool(rng)]
        return Conversation("missing tool", (*system, asked), (UNKNOWN,), _shuffled(rng, other_jobs))
    tools = _shuffled(rng, [job, *other_jobs])
    if roll < 0.25 and last.task != "unknown":
        question: Message = {"role": "user", "content": last.prompt}
        return Conversation("no tool needed", (*system, question), last.answers, tools)
    if roll < 0.35 and job.task == "weather tool":
        return _both(rng, job, system, tools)
    if roll < 0.65:
        return Conversation(job.task, (*system, asked), (call_text(job.name, job.arguments),), tools)
    messages = _called(job, "call_1")
    if roll < 0.85:
        return Conversation(f"{job.task} result", (*system, asked, *messages), (job.sentence,), tools)
    return _second(rng, job, (*system, asked, *messages, {"role": "assistant", "content": job.sentence}), tools)


def _others(rng: random.Random, job: Job) -> list[Job]:
    """Tools that are there besides; none that would do as well."""
    jobs: list[Job] = []
    for _ in range(rng.choices((0, 1, 2), (5, 4, 1))[0]):
        other = _job(rng, held_out=False)
        names = {drawn.name if drawn.task == "any tool" else drawn.task for drawn in (job, *jobs)}
        if other.task not in names and other.name not in names:
            jobs.append(other)
    return jobs


def _both(rng: random.Random, job: Job, system: list[Message], tools: tuple[dict[str, Any], ...]) -> Conversation:
    """Two cities in one question are two calls."""
    key, cities = next(iter(job.arguments)), (str(job.argument), rng.choice(CITIES))
    core = rng.choice(WEATHER_QUESTIONS).format(
        rng.choice(("{} and {}", "{} and in {}", "{} and of {}")).format(*cities)
    )
    question: Message = {"role": "user", "content": dress(rng, core)}
    calls: list[dict[str, Any]] = [{"name": job.name, "arguments": {key: city}} for city in cities]
    if rng.random() < 0.6:
        answer = "\n".join(call_text(**call) for call in calls)
        return Conversation("two calls", (*system, question), (answer,), tools)
    states = [_state(rng) for _ in cities]
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": f"call_{index}", "content": state} for index, state in enumerate(states)
    ]
    tool_calls = [{"id": f"call_{index}", "type": "function", "function": call} for index, call in enumerate(calls)]
    said = " ".join(f"The weather in {city}: {state}." for city, state in zip(cities, states, strict=True))
    call_message: Message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    return Conversation("two results", (*system, question, call_message, *messages), (said,), tools)


def _second(
    rng: random.Random, job: Job, before: tuple[Message, ...], tools: tuple[dict[str, Any], ...]
) -> Conversation:
    """Another question for the same tool after the first was answered."""
    while True:
        other = next(kind for kind in KINDS if kind(random.Random(0)).task == job.task)(rng)
        if not other.held_out:
            break
    core = other.core.replace(other.name, job.name)
    argument = {next(iter(job.arguments)): other.argument}
    if job.task == "any tool" and isinstance(other.argument, int) != isinstance(job.argument, int):
        core, argument = job.core, job.arguments
    question: Message = {"role": "user", "content": dress(rng, core)}
    return Conversation(f"{job.task} again", (*before, question), (call_text(job.name, argument),), tools)


def _called(job: Job, call_id: str) -> tuple[Message, ...]:
    call = {"id": call_id, "type": "function", "function": {"name": job.name, "arguments": job.arguments}}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": job.result},
    )


def _shuffled(rng: random.Random, jobs: list[Job]) -> tuple[dict[str, Any], ...]:
    tools = [job.tool for job in jobs]
    rng.shuffle(tools)
    return tuple(tools)
