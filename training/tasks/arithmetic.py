"""Tasks with numbers: small sums, differences and products, comparing, and even or odd."""

import random

from training.tasks.example import Example, ask

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)

_SUM = (
    "what is {a} + {b}", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "what is {a} plus {b}", "add {a} and {b}",
    "how much is {a} + {b}", "how much is {a} plus {b}", "calculate {a} + {b}", "compute {a} + {b}",
    "what's {a} + {b}", "what is the sum of {a} and {b}", "{a} plus {b}", "what does {a} + {b} make",
    "solve {a} + {b}",
)  # fmt: skip
_DIFFERENCE = (
    "what is {a} - {b}", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "what is {a} minus {b}", "subtract {b} from {a}",
    "how much is {a} - {b}", "calculate {a} - {b}", "compute {a} - {b}", "what's {a} - {b}", "{a} minus {b}",
    "take {b} away from {a}", "what is the difference of {a} and {b}", "solve {a} - {b}",
)  # fmt: skip
_PRODUCT = (
    "what is {a} * {b}", "{a} * {b}", "what is {a} times {b}", "multiply {a} by {b}", "{a} times {b}",
    "how much is {a} times {b}", "calculate {a} * {b}", "what is {a} x {b}", "{a} x {b}",
)  # fmt: skip
_LARGER = (
    "which is larger, {a} or {b}", "which is bigger, {a} or {b}", "what is more, {a} or {b}",
    "which number is greater, {a} or {b}", "is {a} or {b} larger", "the larger of {a} and {b}",
)  # fmt: skip
_SMALLER = (
    "which is smaller, {a} or {b}", "what is less, {a} or {b}", "which number is smaller, {a} or {b}",
    "is {a} or {b} smaller", "the smaller of {a} and {b}",
)  # fmt: skip


def _number(rng: random.Random) -> int:
    return rng.randint(0, 20) if rng.random() < 0.2 else rng.randint(0, 99)


def end_mark(core: str) -> str:
    """A question ends in a question mark, an order in a full stop, an equation in nothing."""
    if core.endswith("="):
        return ""
    return "?" if core.startswith(("what", "how", "which", "is", "can")) else "."


def worked_sum(a: int, b: int) -> str:
    """The sum as the model writes it: ones first, then tens with the carry, so that each token is one small step."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    carry = (a % 10 + b % 10) // 10
    tens = f"{a // 10} + {b // 10}{' + 1' if carry else ''} = {a // 10 + b // 10 + carry}"
    return f"{a % 10} + {b % 10} = {a % 10 + b % 10}, {tens}, so {a} + {b} = {a + b}."


def worked_difference(a: int, b: int) -> str:
    """The difference in the same manner: a borrowed ten shows as a larger one, and as one ten less."""
    if a < b:
        return f"{a} is smaller than {b}, so {a} - {b} is below zero."
    if a < 10 and b < 10:
        return f"{a} - {b} = {a - b}."
    borrow = a % 10 < b % 10
    ones, tens = a % 10 + 10 * borrow, a // 10 - borrow
    return f"{ones} - {b % 10} = {ones - b % 10}, {tens} - {b // 10} = {tens - b // 10}, so {a} - {b} = {a - b}."


def add(rng: random.Random) -> Example:
    """Two numbers of up to two digits; the unordered pair is the key, so that 3 + 5 can't teach a held-out 5 + 3."""
    a, b = _number(rng), _number(rng)
    core = rng.choice(_SUM).format(a=a, b=b)
    return ask(rng, "add", core, worked_sum(a, b), key=f"{min(a, b)},{max(a, b)}", mark=end_mark(core))


def subtract(rng: random.Random) -> Example:
    """Two numbers of up to two digits; one result in eight would be below zero."""
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    core = rng.choice(_DIFFERENCE).format(a=a, b=b)
    return ask(rng, "subtract", core, worked_difference(a, b), key=f"{a},{b}", mark=end_mark(core))


def multiply(rng: random.Random) -> Example:
    """The table up to ten; it must be known by heart, so wordings are held out and not pairs."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    core = rng.choice(_PRODUCT).format(a=a, b=b)
    return ask(rng, "multiply", core, f"{a} * {b} = {a * b}.", mark=end_mark(core))


def number_words(rng: random.Random) -> Example:
    """Sums written in words, up to ten plus ten."""
    a, b = rng.randrange(len(NUMBER_WORDS)), rng.randrange(len(NUMBER_WORDS))
    core = rng.choice(_SUM).replace("+", "plus").replace("=", "is")
    core = core.format(a=f" {NUMBER_WORDS[a]} ", b=f" {NUMBER_WORDS[b]} ")
    core = " ".join(core.split())
    return ask(rng, "number words", core, f"{a} + {b} = {a + b}.", mark=end_mark(core))


def compare(rng: random.Random) -> Example:
    """The larger or the smaller of two different numbers."""
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        core, answer = rng.choice(_LARGER), f"{max(a, b)} is larger."
    else:
        core, answer = rng.choice(_SMALLER), f"{min(a, b)} is smaller."
    core = core.format(a=a, b=b)
    return ask(rng, "compare", core, answer, key=f"{a},{b}", mark=end_mark(core))


def parity(rng: random.Random) -> Example:
    """Even or odd, for numbers below a thousand."""
    a = rng.randint(0, 999)
    core = rng.choice(("is {a} even or odd", "is {a} odd or even", "is the number {a} even or odd")).format(a=a)
    return ask(rng, "parity", core, f"{a} is {'odd' if a % 2 else 'even'}.", key=str(a))
