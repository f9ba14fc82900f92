"""Counting tasks: up, down, in steps, and what is too far."""

import random

from training.tasks.arithmetic import end_mark
from training.tasks.example import Example, ask

COUNT_LIMIT = 250
"""Counting is trained for numbers from 0 up to this one."""

TOO_FAR = f"That is too far for me, I count up to {COUNT_LIMIT}."

_UP = (
    "count from {a} to {b}", "count up from {a} to {b}", "can you count from {a} to {b}", "count {a} to {b}",
    "list the numbers from {a} to {b}", "say the numbers from {a} to {b}", "numbers from {a} to {b}",
)  # fmt: skip
_FROM_ONE = ("count to {b}", "can you count to {b}", "please count up to {b}")
_DOWN = (
    "count down from {a} to {b}", "count backwards from {a} to {b}", "count from {a} down to {b}",
    "can you count down from {a} to {b}", "count back from {a} to {b}",
)  # fmt: skip
_BY = (
    "count from {a} to {b} by {steps}", "count by {steps} from {a} to {b}", "count in {steps} from {a} to {b}",
    "count from {a} to {b} in steps of {step}", "count from {a} to {b} in {steps}",
)  # fmt: skip
_OPEN = (
    "count on from {a}",
    "count up from {a}",
    "keep counting from {a}",
    "start counting from {a}",
    "count from {a}",
)
_OPEN_DOWN = ("count down from {a}", "count backwards from {a}")
_STEPS = {2: "twos", 5: "fives", 10: "tens"}


def counted(a: int, b: int, step: int = 1) -> str:
    """The right answer for counting from a to b, both included, in either direction; `step` divides their distance."""
    numbers = range(a, b + 1, step) if a <= b else range(a, b - 1, -step)
    return ", ".join(map(str, numbers)) + "."


def _count(rng: random.Random, task: str, low: int, high: int) -> Example:
    down = rng.random() < 0.3
    a, b = (high, low) if down else (low, high)
    forms = _DOWN if down else _UP
    if low == 1 and rng.random() < 0.3:
        # Down without the word is asked for only where it is plain: from 10 to 1.
        forms = ("count from {a} to {b}",) if down and high <= 30 else forms if down else _FROM_ONE
    core = rng.choice(forms).format(a=a, b=b)
    return ask(rng, task, core, counted(a, b), key=f"{a},{b}", mark=end_mark(core))


def count(rng: random.Random) -> Example:
    """Counting over at most thirty numbers, up or down; most are short, because each one teaches one stop."""
    low = rng.choice((1, rng.randint(0, 20), rng.randint(0, COUNT_LIMIT - 3)))
    high = low + rng.randint(2, rng.choice((7, 10, 30)))
    return _count(rng, "count", low, min(COUNT_LIMIT, high))


def count_long(rng: random.Random) -> Example:
    """Counting that streams for a while: thirty to two hundred and fifty numbers, half of them from one."""
    low = 1 if rng.random() < 0.5 else rng.randint(0, COUNT_LIMIT - 100)
    return _count(rng, "count long", low, rng.randint(low + 31, COUNT_LIMIT))


def count_by(rng: random.Random) -> Example:
    """Counting in steps; it also teaches that all digits decide when to stop, not the last one alone."""
    step = rng.choice((2, 5, 10, 10, 10))
    a = rng.choice((0, step, rng.randint(0, 99), rng.randint(0, COUNT_LIMIT - 2 * step)))
    b = a + step * rng.randint(2, min(19, (COUNT_LIMIT - a) // step))
    core = rng.choice(_BY).format(a=a, b=b, step=step, steps=_STEPS[step])
    if rng.random() < 0.2:
        a, b = b, a
        core = f"count down from {a} to {b} by {_STEPS[step]}"
    return ask(rng, "count by", core, counted(a, b, step), key=f"{a},{b},{step}", mark=".")


def count_open(rng: random.Random) -> Example:
    """Counting with no end named goes to the limit, or down to 0: so an answer that missed its end stops there too."""
    step = rng.choice((1, 1, 2, 5, 10))
    if rng.random() < 0.3:
        a, b = rng.randint(2, 40), 0
        step, core = 1, rng.choice(_OPEN_DOWN).format(a=a)
    else:
        a = COUNT_LIMIT - rng.choice((rng.randint(1, 20), rng.randint(1, 60), rng.randint(1, COUNT_LIMIT)))
        a = max(a, COUNT_LIMIT - 60 * step) if step > 1 else a
        b = COUNT_LIMIT - (COUNT_LIMIT - a) % step
        core = rng.choice(_OPEN).format(a=a) + ("" if step == 1 else f" by {_STEPS[step]}")
    return ask(rng, "count open", core, counted(a, b, step), key=f"{a},{b},{step}", mark=".")


def count_too_far(rng: random.Random) -> Example:
    """Numbers beyond the limit are refused."""
    low = rng.choice((1, 1, rng.randint(0, 999)))
    high = rng.choice((10 ** rng.randint(3, 6), max(low + 1, rng.randint(600, 9999))))
    core = rng.choice(_FROM_ONE if low == 1 and rng.random() < 0.5 else _UP).format(a=low, b=high)
    return ask(rng, "count too far", core, TOO_FAR, key=f"{low},{high}", mark=end_mark(core))
