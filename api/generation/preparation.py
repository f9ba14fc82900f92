"""From a checked body and its headers to what is enqueued: prompts as token ids, view, deadline, policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from api.access.limits import anthropic_ratelimit_headers
from api.asgi.off_loop import off_loop
from api.chat.answer import prompt_text
from api.generation.admission import admit
from api.generation.caller import Caller
from api.generation.constraints import bad_words, gap_marks, reasoning_budget
from api.generation.context.prediction import prediction_of
from api.generation.context.prompts import Body, encoded, size_of, written
from api.generation.prepared import Prepared, deadline_ms, on_disconnect_policy
from api.images.loading import HeldPieces
from api.models.grammar import GrammarChecks
from api.models.served import ServedModel
from api.schemas.chat import FUNCTION_NAMES, ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.converted import Converted
from api.schemas.decoding import Names, naming
from api.schemas.infill import Filling
from api.schemas.view import Endpoint, Reading, View
from api.settings import ApiSettings
from control.access import Allowance
from control.errors import RequestError
from control.messages import GenerationRequest
from control.requests import Enqueue

_PROMPT_SCORES = 262_144
"""Ids or log probabilities of prompts that one answer may bring: they travel through Redis and are in it whole."""


@dataclass(frozen=True, kw_only=True)
class PreparedRequest(Prepared):
    """One client request, checked against its model: one member for chat, one per prompt for completions."""

    body: Body
    echo: list[str]
    """The text of each prompt, where it is shown again."""
    reading: Reading | None
    images: list[HeldPieces]
    """The pieces of the request's images."""

    def enqueue(self, first: str, member: int, settings: ApiSettings) -> Enqueue:
        """As for all requests, with the images."""
        return msgspec.structs.replace(super().enqueue(first, member, settings), images=list(self.images))

    def tell_allowance(self, allowance: Allowance) -> None:
        """As for all requests, and in Anthropic's form too on its endpoint."""
        super().tell_allowance(allowance)
        if isinstance(self.body, Converted) and self.body.endpoint == "messages":
            self.caller.headers.update(anthropic_ratelimit_headers(allowance, time.time()))

    def view(self, member: int = 0) -> View:
        """How the answer is shown."""
        body, sampling = self.body, self.members[member].sampling
        extra_fields: dict[str, Any] = {}
        endpoint: Endpoint = "chat" if isinstance(body, ChatRequest) else "completions"
        if isinstance(body, Converted):
            endpoint, extra_fields = body.endpoint, body.shown_fields(sampling)
        elif isinstance(body, Filling):
            endpoint = "infill"
        elif isinstance(body, ChatRequest) and body.store:
            extra_fields = body.stored_fields(self.caller.rid)
        return View(
            endpoint=endpoint,
            extra_fields=extra_fields,
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
            predicted=len(sampling.prediction),
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
    size = max(caller.body_bytes, size_of(body))
    texts = await served.run(size, caller.images.tenant, written, body)
    reading, constraint = texts.reading, texts.constraint
    grammar = await grammars.check(constraint, served.letters) if constraint is not None else None
    prompts = await encoded(texts, body, served, caller.images)
    caller.images.loaded.clear()

    def admitted(served: ServedModel) -> list[GenerationRequest]:
        words, ends = bad_words(body, served.vocabulary), gap_marks(body, served)
        budget = reasoning_budget(body, reading, served.vocabulary)
        limits = {"bad_words": words, "reasoning": budget, "stop_ids": ends, "prediction": prediction_of(body, served)}
        admit_one = partial(admit, body, **limits, strict=strict)
        admitted = [admit_one(prompt, served.assets, grammar) for prompt in prompts.tokens]
        return [msgspec.structs.replace(one, images=prompts.images) for one in admitted]

    members = await served.run(size, caller.images.tenant, admitted)
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
        images=prompts.pieces,
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
