"""From a checked body and its headers to what is enqueued: prompts as token ids, view, deadline, policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from api.access.headers import anthropic_ratelimit_headers
from api.asgi.off_loop import off_loop
from api.chat.conversation import chat_prompt
from api.chat.echo import prompt_text
from api.generation.admission import admit
from api.generation.caller import Caller
from api.generation.constraints import bad_words, gap_marks, prompts_with_gap, reasoning_budget
from api.generation.prepared import Prepared, deadline_ms, on_disconnect_policy
from api.models.grammar import GrammarChecks
from api.models.models import ServedModel
from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.converted import Converted
from api.schemas.functions import FUNCTION_NAMES
from api.schemas.how import Reading
from api.schemas.infill import Filling
from api.schemas.naming import Names, naming
from api.schemas.structured import Asked, grammar_of
from api.schemas.view import Endpoint, View
from control.access import Allowance
from control.errors import ContextLengthExceeded, RequestError
from control.messages import GenerationRequest

_PART_BYTES = 256
"""The least that a part of a message counts for."""
_SURELY_CHARACTERS = 8
"""Characters per token of context beyond which a text is measured in pieces: to tokenise megabytes takes gigabytes."""
_PROMPT_SCORES = 262_144
"""Ids or log probabilities of prompts that one answer may bring: they travel through Redis and are in it whole."""

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, kw_only=True)
class PreparedRequest(Prepared):
    """One client request, checked against its model: one member for chat, one per prompt for completions."""

    body: Body
    echo: list[str]
    """The text of each prompt, where it is shown again."""
    reading: Reading | None

    def tell_allowance(self, allowance: Allowance) -> None:
        """As for all requests, and in Anthropic's form too on its endpoint."""
        super().tell_allowance(allowance)
        if isinstance(self.body, Converted) and self.body.endpoint == "messages":
            self.caller.headers.update(anthropic_ratelimit_headers(allowance, time.time()))

    def view(self, member: int = 0) -> View:
        """How the answer is shown."""
        body, sampling = self.body, self.members[member].sampling
        told: dict[str, Any] = {}
        endpoint: Endpoint = "chat" if isinstance(body, ChatRequest) else "completions"
        if isinstance(body, Converted):
            endpoint, told = body.endpoint, body.told(sampling)
        elif isinstance(body, Filling):
            endpoint = "infill"
        return View(
            endpoint=endpoint,
            told=told,
            created=self.caller.request_log.received_ms // 1000,
            model=body.model or self.served.name,
            n=sampling.n,
            members=len(self.members),
            member=member,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            logprobs=sampling.logprobs,
            stop=sampling.stop,
            stop_ids=sampling.stop_ids,
            min_tokens=sampling.min_tokens,
            echo=[] if member else self.echo,
            functions=isinstance(body, ChatRequest) and bool(body.functions),
            shown_first=body.shown_first if isinstance(body, ChatRequest) else "",
            prompt_logprobs=body.prompt_logprobs,
            include_stop=bool(body.include_stop_str_in_output),
            special_tokens=body.skip_special_tokens is False,
            token_ids=bool(body.return_tokens_as_token_ids),
            return_ids=bool(body.return_token_ids),
            prompt_ids=[one.prompt for one in self.members] if body.return_token_ids and not member else [],
            reading=self.reading,
            user=body.user,
            metadata=body.metadata or {},
            client_request_id=self.caller.client_request_id,
        )


async def prepare(
    body: Body, caller: Caller, served: ServedModel, grammars: GrammarChecks, *, strict: bool
) -> PreparedRequest:
    """Check everything that can be checked before the queue. Raises RequestError and its kin."""
    if served.assets.kind != "generate":
        raise _no_text(served)
    with naming(_names(body)):
        return await _prepared(body, caller, served, grammars, strict)


def _no_text(served: ServedModel) -> RequestError:
    embeds = served.assets.kind == "embed"
    gives, path = ("embeddings", "/v1/embeddings") if embeds else ("scores of pairs", "/v1/rerank or /score")
    return RequestError(
        f"The model '{served.name}' gives {gives} and generates no text. Send it to {path}, or use another model.",
        param="model",
        code="generation_not_supported",
    )


def _names(body: Body) -> Names:
    """The client's own names of parameters."""
    if isinstance(body, (Converted, Filling)):
        return body.names
    return FUNCTION_NAMES if isinstance(body, ChatRequest) and body.functions else {}


async def _prepared(
    body: Body, caller: Caller, served: ServedModel, grammars: GrammarChecks, strict: bool
) -> PreparedRequest:
    size = max(caller.body_bytes, _size(body))
    texts, reading, asked = await off_loop(size, _texts, body, served)
    grammar = await grammars.check(asked, served.letters) if asked is not None else None
    prompts = await _encoded(texts, body, served)

    def admitted() -> list[GenerationRequest]:
        words, ends = bad_words(body, served.vocabulary), gap_marks(body, served)
        budget = reasoning_budget(body, reading, served.vocabulary)
        admit_one = partial(admit, body, bad_words=words, reasoning=budget, stop_ids=ends, strict=strict)
        return [admit_one(prompt, served.assets, grammar) for prompt in prompts]

    members = await off_loop(size, admitted)
    _check_scores(body, members)
    return PreparedRequest(
        body=body,
        caller=caller,
        served=served,
        members=members,
        echo=await off_loop(size, _echo, body, served),
        reading=reading,
        priority=caller.identity.priority(body.priority),
        deadline_ms=deadline_ms(body),
        on_disconnect=on_disconnect_policy(body.on_disconnect, caller.on_disconnect),
    )


def _check_scores(body: Body, members: list[GenerationRequest]) -> None:
    """Raise RequestError where the answer would show too much of the prompts."""
    tokens = sum(len(member.prompt) * member.sampling.n for member in members)
    if body.return_token_ids and tokens > _PROMPT_SCORES:
        raise RequestError(
            f"'return_token_ids' would show {tokens} prompt tokens, choices counted; at most {_PROMPT_SCORES} are "
            "shown. Send less at a time.",
            param="return_token_ids",
        )
    if body.prompt_scores is None:
        return
    if tokens * (1 + body.prompt_scores) > _PROMPT_SCORES:
        param = "prompt_logprobs" if body.prompt_logprobs == body.prompt_scores else "logprobs"
        raise RequestError(
            f"'{param}' asks for {body.prompt_scores} alternatives at each of {tokens} prompt tokens, choices counted; "
            f"tokens and alternatives together may be {_PROMPT_SCORES}. Ask for fewer, or send less at a time.",
            param=param,
        )


def _echo(body: Body, served: ServedModel) -> list[str]:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    return [prompt if isinstance(prompt, str) else prompt_text(served.vocabulary, prompt) for prompt in body.prompts]


async def prompts_of(body: Body, served: ServedModel, size: int) -> list[list[int]]:
    """The request's prompts as token ids; `size` is that of the body in which it came."""
    texts, _, _ = await off_loop(max(size, _size(body)), _texts, body, served)
    return await _encoded(texts, body, served)


def _size(body: Body) -> int:
    """About the bytes of the prompts: a conversation may be larger than the body that continues it."""
    if isinstance(body, CompletionRequest):
        return sum(len(prompt) for prompt in body.prompts)
    contents = [message.content or "" for message in body.messages]
    return sum(len(content) * (1 if isinstance(content, str) else _PART_BYTES) for content in contents)


def _texts(body: Body, served: ServedModel) -> tuple[list[str | list[int]], Reading | None, Asked | None]:
    """The request's prompts before they are tokenised, how the answers are to be read, and what they must be."""
    if isinstance(body, CompletionRequest):
        return body.prompts, None, grammar_of(body)
    prompt = chat_prompt(body, served.assets, served.vocabulary, served.forms)
    return [prompt.text], prompt.reading, prompt.asked


async def _encoded(texts: list[str | list[int]], body: Body, served: ServedModel) -> list[list[int]]:
    if isinstance(body, CompletionRequest) and body.has_gap:
        size = _size(body) + len(body.suffix or "") + sum(len(text) for _, text in body.files)
        return await off_loop(size, prompts_with_gap, body, served)
    vocabulary, context = served.vocabulary, served.assets.context_length
    bos = not isinstance(body, CompletionRequest) or body.add_special_tokens is not False

    def encode_one(text: str) -> list[int]:
        if len(text) > _SURELY_CHARACTERS * context and vocabulary.exceeds(text, context):
            error = ContextLengthExceeded(context + 1, body.token_limit or 1, context, at_least=True)
            error.param = "prompt" if isinstance(body, CompletionRequest) else "messages"
            raise error
        return vocabulary.encode(text, bos=bos)

    def encode() -> list[list[int]]:
        return [encode_one(text) if isinstance(text, str) else text for text in texts]

    return await off_loop(sum(len(text) for text in texts), encode)


async def count_tokens(body: Converted, served: ServedModel, size: int) -> int:
    """Tokens of the request's prompt; `size` as for `prompts_of`. Raises RequestError in the client's own names."""
    with naming(body.names):
        [prompt] = await prompts_of(body, served, size)
    return len(prompt)
