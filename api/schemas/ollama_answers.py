"""The answers of Ollama's routes, as they are encoded: lines of a stream, and whole bodies."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape

Unset = UnsetType


class OllamaFunction(Shape, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Shape, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaMessage(Shape, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | Unset = UNSET
    tool_calls: list[OllamaToolCall] | Unset = UNSET


class TokenScore(Shape, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenScore] | Unset = UNSET


class TextAnswer(Shape, kw_only=True):
    """A line of a stream, or a whole answer. The last line has the counts, and durations in nanoseconds:
    `load_duration` until the request was queued, `prompt_eval_duration` from there to the first token, `eval_duration`
    the rest."""

    model: str
    created_at: datetime.datetime
    done: bool = False
    logprobs: list[TokenScore] | Unset = UNSET
    done_reason: Literal["stop", "length", "load"] | Unset = UNSET
    total_duration: int | Unset = UNSET
    load_duration: int | Unset = UNSET
    prompt_eval_count: int | Unset = UNSET
    prompt_eval_duration: int | Unset = UNSET
    eval_count: int | Unset = UNSET
    eval_duration: int | Unset = UNSET


class ChatAnswer(TextAnswer, kw_only=True):
    message: OllamaMessage


class GenerateAnswer(TextAnswer, kw_only=True):
    response: str = ""
    thinking: str | Unset = UNSET


class EmbedAnswer(Shape, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class EmbeddingsAnswer(Shape, kw_only=True):
    embedding: list[float]


class ModelDetails(Shape, kw_only=True):
    """Fields that no API process knows are empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Shape, kw_only=True):
    """`digest` changes with the model's name, files and chat template; names of one model have the same."""

    name: str
    model: str
    modified_at: datetime.datetime
    size: int
    """Bytes that its ranks hold now."""
    digest: str
    details: ModelDetails


class OllamaModels(Shape, kw_only=True):
    models: list[ListedModel]


class RunningModel(Shape, kw_only=True):
    name: str
    model: str
    size: int
    """Bytes that its ranks hold."""
    digest: str
    details: ModelDetails
    expires_at: datetime.datetime
    size_vram: int
    """Of these bytes those of GPUs."""
    context_length: int


class RunningModels(Shape, kw_only=True):
    models: list[RunningModel]


class ShownModel(Shape, kw_only=True):
    """`template` is a Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime.datetime


class OllamaVersion(Shape, kw_only=True):
    version: str
    """Of Ollama, whose API this is."""
    furrow: str
    """Of this server."""


class PullStatus(Shape, kw_only=True):
    """A line of the progress; the last one has the status `success`."""

    status: str
    total: int | Unset = UNSET
    completed: int | Unset = UNSET
