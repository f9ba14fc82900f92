"""The text and the scores that the scripted leader produces."""

from __future__ import annotations

from control.messages import (
    PromptToken,
)

PROMPT_TOKENS = 3
"""Tokens of a prompt that are told in one step, where they are asked for."""


def scripted_score(prompt: list[int], place: int, top: int) -> PromptToken:
    """What the leader says of a prompt's token: half as likely as the most likely one, which has the next id."""
    token = prompt[place]
    if place == 0:
        return PromptToken(token)
    return PromptToken(token, -place / 8 - 1, 2, [(token ^ 1, -place / 8), (token, -place / 8 - 1)][:top])


def echo(prompt: str) -> str:
    """The default script: what the last message said."""
    return "you said " + prompt.removesuffix("\n").rpartition(": ")[2]
