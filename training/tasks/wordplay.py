"""Tasks with words: days, months, the alphabet, repeating, spelling, reversing, taking the first or the last."""

import random

from training.tasks.example import Example, ask
from training.tasks.words import EMOJI, any_word, invented

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip

_AFTER = (
    "what {kind} comes after {x}", "which {kind} comes after {x}", "what {kind} follows {x}",
    "which {kind} follows {x}", "what is the {kind} after {x}", "what is the next {kind} after {x}",
    "what comes after {x}", "tell me the {kind} after {x}", "name the {kind} that follows {x}",
)  # fmt: skip
_BEFORE = (
    "what {kind} comes before {x}", "which {kind} comes before {x}", "what is the {kind} before {x}",
    "which {kind} is before {x}", "what comes before {x}", "tell me the {kind} before {x}",
    "name the {kind} just before {x}",
)  # fmt: skip
_NTH = (
    "what is the {nth} {kind} of the {whole}", "which {kind} is the {nth} of the {whole}", "name the {nth} {kind}",
    "what is the {nth} {kind}", "tell me the {nth} {kind} of the {whole}", "which is the {nth} {kind}",
)  # fmt: skip
_ALL = (
    "list the {kind}s of the {whole}", "name the {kind}s of the {whole}", "what are the {kind}s of the {whole}",
    "list all {kind}s", "name all {kind}s", "say all the {kind}s of the {whole}", "which {kind}s are there",
    "tell me the {kind}s of the {whole}", "recite the {kind}s",
)  # fmt: skip
_REPEAT = (
    "repeat after me: {x}", "repeat: {x}", "say: {x}", "repeat this: {x}", "echo: {x}", "please repeat: {x}",
    "say this: {x}", "say it after me: {x}",
)  # fmt: skip
_SPELL = (
    "spell {x}", "spell the word {x}", "how do you spell {x}", "how is {x} spelled", "can you spell {x}",
    "spell out {x}", "what are the letters of {x}",
)  # fmt: skip
_REVERSE = (
    "reverse this list: {x}", "reverse: {x}", "reverse the list {x}", "say this list backwards: {x}",
    "turn this list around: {x}", "backwards: {x}",
)  # fmt: skip
_FIRST = ("what is the first of {x}", "the first of this list: {x}", "first word: {x}", "which comes first: {x}")
_LAST = ("what is the last of {x}", "the last of this list: {x}", "last word: {x}", "which comes last: {x}")

_SERIES = (("day", "week", DAYS), ("month", "year", MONTHS), ("letter", "alphabet", LETTERS))


def order(rng: random.Random) -> Example:
    """Neighbours in the week, the year and the alphabet."""
    kind, _, items = rng.choice(_SERIES)
    index, shift = rng.randrange(len(items)), rng.choice((1, -1))
    if kind == "letter":
        index = min(max(index, 1), len(items) - 2)
    core = rng.choice(_AFTER if shift == 1 else _BEFORE).format(kind=kind, x=items[index])
    answer = items[(index + shift) % len(items)]
    word = "after" if shift == 1 else "before"
    return ask(rng, "order", core, f"{answer} comes {word} {items[index]}.", mark="?")


def nth(rng: random.Random) -> Example:
    """The third month, the second day."""
    kind, whole, items = rng.choice(_SERIES[:2])
    index = rng.randrange(len(items))
    core = rng.choice(_NTH).format(nth=ORDINALS[index], kind=kind, whole=whole)
    return ask(rng, "nth", core, f"The {ORDINALS[index]} {kind} is {items[index]}.", mark="?")


def series(rng: random.Random) -> Example:
    """A whole series, or a part of it from one item to another."""
    kind, whole, items = rng.choice(_SERIES)
    if rng.random() < 0.3:
        core = rng.choice(_ALL).format(kind=kind, whole=whole)
        if kind == "letter" and rng.random() < 0.5:
            core = rng.choice(
                ("recite the alphabet", "say the alphabet", "what is the alphabet", "the alphabet, please")
            )
        return ask(rng, "series", core, ", ".join(items) + ".", mark="?")
    first = rng.randrange(len(items) - 2)
    last = rng.randrange(first + 2, len(items))
    form = rng.choice(
        ("list the {kind}s from {a} to {b}", "say the {kind}s from {a} to {b}", "{kind}s from {a} to {b}")
    )
    core = form.format(kind=kind, a=items[first], b=items[last])
    return ask(
        rng, "series", core, ", ".join(items[first : last + 1]) + ".", key=f"{items[first]},{items[last]}", mark="."
    )


def repeat(rng: random.Random) -> Example:
    """A phrase of one to nine words, at times with a number or a picture, given back as it is."""
    words = [any_word(rng) for _ in range(rng.randint(1, 9))]
    if rng.random() < 0.15:
        words.append(rng.choice(EMOJI))
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), str(rng.randint(0, 999)))
    phrase = " ".join(words)
    return Example("repeat", rng.choice(_REPEAT).format(x=phrase), (phrase,), phrase)


def spell(rng: random.Random) -> Example:
    """A word of at most nine letters, letter by letter.

    Some are known words with an invented ending: they teach the letters of words that are themselves held out.
    """
    word = any_word(rng, invented_share=0.4)
    if rng.random() < 0.3:
        word += invented(rng)
    word = word[:9]
    core = rng.choice(_SPELL).format(x=word)
    return ask(rng, "spell", core, "-".join(word), key=word, mark="?" if core[0] in "hcw" else ".")


def reverse(rng: random.Random) -> Example:
    """A list of two to five words, backwards."""
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    listed = ", ".join(words)
    return Example("reverse", rng.choice(_REVERSE).format(x=listed), (", ".join(reversed(words)),), listed)


def pick(rng: random.Random) -> Example:
    """The first or the last word of a list."""
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    listed, first = ", ".join(words), rng.random() < 0.5
    answer = words[0] if first else words[-1]
    return Example("pick", rng.choice(_FIRST if first else _LAST).format(x=listed), (answer,), listed)
