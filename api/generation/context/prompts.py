"""The prompts of a body as token ids, with the places of their images."""

from __future__ import annotations

from dataclasses import dataclass

from api.asgi.off_loop import off_loop
from api.chat.conversation import chat_prompt
from api.chat.tokens import Vocabulary
from api.generation.constraints import prompts_with_gap
from api.images.loading import TOO_MANY, HeldPieces, RequestImages, placed, with_marks
from api.models.served import ServedModel
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.converted import Converted
from api.schemas.decoding import naming
from api.schemas.generation import Constraint, grammar_of
from api.schemas.image_parts import ImageSource
from api.schemas.view import Reading
from control.errors import ContextLengthExceeded
from control.messages import PromptImage

_PART_BYTES = 256
"""The least that a part of a message counts for."""
TOO_MUCH = ("context_length_exceeded", TOO_MANY)
"""Codes of errors that a shorter conversation would not have."""

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Written:
    """A body's prompts before they are tokenised, how the answers are to be read, what they must be, and the images of
    the only prompt."""

    texts: list[str | list[int]]
    reading: Reading | None
    constraint: Constraint | None
    images: list[ImageSource]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as token ids. `images` are those of the only prompt, `pieces` their pixels."""

    tokens: list[list[int]]
    images: list[PromptImage]
    pieces: list[HeldPieces]


def size_of(body: Body) -> int:
    """About the bytes of the prompts: a conversation may be larger than the body that continues it."""
    if isinstance(body, CompletionRequest):
        return sum(len(prompt) for prompt in body.prompts)
    contents = [message.content or "" for message in body.messages]
    return sum(len(content) * (1 if isinstance(content, str) else _PART_BYTES) for content in contents)


def written(body: Body, served: ServedModel) -> Written:
    """Raises RequestError and its kin, and NeedsProcess."""
    if isinstance(body, CompletionRequest):
        return Written(body.prompts, None, grammar_of(body), [])
    prompt = chat_prompt(body, served.assets, served.template, served.vocabulary, served.forms)
    return Written([prompt.text], prompt.reading, prompt.constraint, prompt.images)


async def encoded(prompts: Written, body: Body, served: ServedModel, images: RequestImages) -> Prompts:
    """The prompts as token ids; images that `images` lacks are loaded once the texts are known to fit.

    Raises RequestError and its kin.
    """
    image_input = served.assets.images
    if not prompts.images or image_input is None or served.images is None:
        return Prompts(await _tokens(prompts.texts, body, served, images.tenant), [], [])
    texts = [with_marks(text, image_input) for text in prompts.texts]
    [prompt] = await _tokens(texts, body, served, images.tenant)  # a chat has one
    most = min(served.assets.context_length, served.assets.kv_tokens)
    loaded = await served.images.load(prompts.images, image_input, most, images)
    prompt, placed_images = await off_loop(len(prompt) + most, placed, prompt, loaded, image_input)
    return Prompts([prompt], placed_images, [one.pieces for one in loaded])


async def _tokens(texts: list[str | list[int]], body: Body, served: ServedModel, tenant: str) -> list[list[int]]:
    if isinstance(body, CompletionRequest) and body.has_gap:
        size = size_of(body) + len(body.suffix or "") + sum(len(text) for _, text in body.files)
        return await served.run(size, tenant, prompts_with_gap, body)
    context = served.assets.context_length
    bos = not isinstance(body, CompletionRequest) or body.add_special_tokens is not False

    def encode_one(text: str, vocabulary: Vocabulary) -> list[int]:
        if vocabulary.exceeds(text, context):
            error = ContextLengthExceeded(context + 1, body.token_limit or 1, context, at_least=True)
            error.param = "prompt" if isinstance(body, CompletionRequest) else "messages"
            raise error
        return vocabulary.encode(text, bos=bos)

    def encode(served: ServedModel) -> list[list[int]]:
        return [encode_one(text, served.vocabulary) if isinstance(text, str) else text for text in texts]

    return await served.run(sum(len(text) for text in texts), tenant, encode)


async def prompts_of(body: Body, served: ServedModel, size: int, images: RequestImages) -> list[list[int]]:
    """The request's prompts as token ids; `size` is that of the body in which it came, `images` as for `encoded`."""
    written_prompts = await served.run(max(size, size_of(body)), images.tenant, written, body)
    return (await encoded(written_prompts, body, served, images)).tokens


async def count_tokens(body: Converted, served: ServedModel, size: int, images: RequestImages) -> int:
    """Tokens of the request's prompt; arguments as for `prompts_of`. Raises RequestError in the client's own names."""
    with naming(body.names):
        [prompt] = await prompts_of(body, served, size, images)
    return len(prompt)
