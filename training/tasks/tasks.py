"""The training text and the held-out questions: task shares, conversations of several turns, system messages."""

import random
from collections.abc import Callable, Iterator

from training.tasks import arithmetic, calling, counting, talk, wordplay
from training.tasks.conversation import Conversation, Message
from training.tasks.example import Example, dress

Task = Callable[[random.Random], Example]

SHARES: dict[Task, float] = {
    arithmetic.add: 9,
    arithmetic.subtract: 9,
    arithmetic.multiply: 4,
    arithmetic.number_words: 3,
    arithmetic.compare: 4,
    arithmetic.parity: 1.5,
    counting.count: 9,
    counting.count_long: 2.7,
    counting.count_by: 4,
    counting.count_open: 1.5,
    counting.count_too_far: 1.5,
    wordplay.order: 6,
    wordplay.nth: 1.5,
    wordplay.series: 4,
    wordplay.repeat: 6,
    wordplay.spell: 18,
    wordplay.reverse: 5,
    wordplay.pick: 3,
    talk.small_talk: 4,
    talk.greet_by_name: 2,
    talk.fact: 12,
    talk.overview: 0.5,
    talk.story: 0.7,
    talk.any_story: 0.3,
    talk.chance: 2,
    talk.unknown: 4,
}
"""How often each task is drawn, in relative numbers."""

TOOL_SHARE = 0.4
"""Of the conversations: those with tools."""

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Furrow's demonstration model.",
    "Answer briefly.",
    "You are a helpful, honest assistant. Answer in one or two sentences.",
    "Be polite and short.",
    "You answer questions about Furrow.",
    "You are a friendly assistant on a farm.",
    "Think carefully, then answer.",
)


def _draw(rng: random.Random, task: Task, held_out: bool) -> Example:
    while True:
        example = task(rng)
        if example.held_out == held_out:
            return example


def _draw_any(rng: random.Random, held_out: bool = False) -> Example:
    return _draw(rng, rng.choices(list(SHARES), weights=list(SHARES.values()))[0], held_out)


def _turn(example: Example) -> list[Message]:
    return [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answers[0]}]


def _memory(rng: random.Random, earlier: list[Message], held_out: bool) -> Example | None:
    """A last question that only the earlier turns can answer: the user's name, or the last answer once more."""
    if rng.random() < 0.5:
        greeting = _draw(rng, talk.greet_by_name, held_out)
        earlier[:0] = _turn(greeting)
        core = rng.choice(("what is my name", "do you know my name", "who am i", "say my name", "tell me my name"))
        return Example("memory", dress(rng, core), (f"Your name is {greeting.key}.",), core)
    if len(earlier[-1]["content"]) > 100:
        return None
    core = rng.choice(("say that again", "repeat that", "once more", "again, please", "please say that once more"))
    return Example("memory", dress(rng, core, "."), (earlier[-1]["content"],), core)


def _conversation(rng: random.Random, last: Example) -> Conversation:
    """Puts earlier turns and at times a system message before a question; earlier turns are never held out."""
    turns = rng.choices((0, 1, 2), weights=(70, 18, 12))[0]
    earlier = [message for _ in range(turns) for message in _turn(_short_turn(rng))]
    if turns and rng.random() < 0.2:
        last = _memory(rng, earlier, held_out=False) or last
    system = _system(rng)
    question = {"role": "user", "content": last.prompt}
    return Conversation(last.task, (*system, *earlier, question), last.answers)


def _system(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.25 else []


def _with_tools(rng: random.Random, held_out: bool = False) -> Conversation:
    return calling.conversation(rng, _short_turn(rng), _system(rng), held_out)


def _short_turn(rng: random.Random, held_out: bool = False) -> Example:
    while True:
        example = _draw_any(rng, held_out)
        if len(example.answers[0]) < 200:
            return example


def training(seed: int) -> Iterator[Conversation]:
    """An endless stream of training conversations, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield _with_tools(rng) if rng.random() < TOOL_SHARE else _conversation(rng, _draw_any(rng))


def held_out(seed: int, per_task: int) -> list[Conversation]:
    """Up to `per_task` questions of each task that training never shows; fewer where a task has fewer of them.

    One in three has earlier turns or a system message, as in training.
    """
    rng = random.Random(seed)
    conversations: list[Conversation] = []
    for task in SHARES:
        prompts: set[str] = set()
        for _ in range(per_task * 200):
            example = task(rng)
            if example.held_out and example.key not in prompts and len(prompts) < per_task:
                prompts.add(example.key)
                conversations.append(_plain_or_conversation(rng, example))
    while sum(conversation.task == "memory" for conversation in conversations) < per_task:
        earlier = _turn(_short_turn(rng, held_out=True))
        if (asked := _memory(rng, earlier, held_out=True)) is not None:
            question = {"role": "user", "content": asked.prompt}
            conversations.append(Conversation(asked.task, (*earlier, question), asked.answers))
    return conversations


def held_out_with_tools(seed: int, per_task: int) -> list[Conversation]:
    """Calls with arguments that training never shows, and the results of such calls."""
    rng = random.Random(seed)
    by_task: dict[str, list[Conversation]] = {}
    for _ in range(per_task * 100):
        conversation = _with_tools(rng, held_out=True)
        of_task = by_task.setdefault(conversation.task, [])
        if conversation.task not in ("missing tool", "no tool needed") and len(of_task) < per_task:
            of_task.append(conversation)
    return [conversation for of_task in by_task.values() for conversation in of_task]


def _plain_or_conversation(rng: random.Random, example: Example) -> Conversation:
    conversation = _conversation(rng, example)
    if rng.random() < 0.5 or conversation.task != example.task:
        return Conversation(example.task, ({"role": "user", "content": example.prompt},), example.answers)
    return conversation


def documents(seed: int) -> Iterator[tuple[str, str]]:
    """Plain text for the completions endpoint, without a chat: (prompt, continuation) pairs without end.

    Counting goes on to one hundred, a story or an overview goes on to its end, a question gets its answer.
    """
    rng = random.Random(seed)
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            example = _draw_any(rng)
            yield f"Question: {example.prompt}\nAnswer:", f" {example.answers[0]}"
            continue
        if kind == 1:
            text = counting.counted(rng.choice((1, 1, rng.randint(0, 90))), 100)
        else:
            text = _draw(rng, talk.story if kind == 2 else talk.overview, held_out=False).answers[0]
        cut = rng.choice([at for at, letter in enumerate(text) if letter == " " and at > 3])
        yield text[:cut], text[cut:]
