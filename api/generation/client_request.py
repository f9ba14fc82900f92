"""From a checked body and its headers to what is enqueued: render, tokenise, fill in the sampling parameters, and say
how the answer is shown.

A request's prompts begin with others' cached prefixes only within a scope (`scoped_salt`): a shared prefix shows in
`cached_tokens` and in the time to the first token, so one tenant could test what another has sent, token by token.
Prefixes are therefore shared within a tenant, and beyond it only where the operator says so.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from api.chat.answer import prompt_text
from api.chat.conversation import chat_prompt
from api.chat.tokens import SURELY_CHARACTERS, WHOLE_CHARACTERS, Vocabulary
from api.http.connection import Client
from api.http.errors import ClientDisconnected
from api.http.gate import ANONYMOUS, Identity
from api.http.limits import anthropic_ratelimit_headers, ratelimit_headers
from api.http.turns import off_loop
from api.images.loading import TOO_MANY, HeldPieces, RequestImages, placed, with_marks
from api.models.fill_in_middle import FillInMiddle, TooLong
from api.models.grammar import GrammarChecks
from api.models.models import ServedModel
from api.observability import RequestLog
from api.schemas.chat import FUNCTION_NAMES, ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.converted import Converted
from api.schemas.decoding import Names, Warnings, naming
from api.schemas.embeddings import InputFields
from api.schemas.generation import MAX_BIASES, CommonFields, RequestedGrammar, check_bad_word_tokens, grammar_of
from api.schemas.image_parts import ImageSource
from api.schemas.llama_cpp import Filling, LlamaCppCompletion, NativeCompletion
from api.schemas.ollama import RawPrompt
from api.schemas.view import Endpoint, Reading, View
from api.settings import ApiSettings
from control.access import Allowance
from control.bounds import LONGEST_S, RANGES, shown
from control.engines import adapter_in, refuse
from control.errors import ContextLengthExceeded, RequestError, RequestTooLarge
from control.messages import GenerationRequest, Grammar, ModelAssets, PromptImage, ReasoningBudget, Sampling
from control.requests import Enqueue, member_rid


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of one HTTP request: its identity and what its headers say."""

    request_log: RequestLog
    tenant: str = ""
    identity: Identity = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of the response, filled while the request is handled."""
    warnings: Warnings = field(default_factory=Warnings)
    """Parts of the request that were accepted without an effect, filled while it is read."""
    images: RequestImages = field(default_factory=RequestImages)
    """Its images that are loaded; empty once they belong to the request."""
    idempotency_key: str = ""
    body_hash: str = ""
    body_bytes: int = 0
    on_disconnect: str | None = None
    client_request_id: str | None = None
    rid: str = ""
    """Fresh for every HTTP request; never what the client sent as X-Request-ID."""
    client: Client = field(default_factory=Client)
    """Its connection: whether it is still there."""

    def identified(self, tenant: str, body: bytes = b"", idempotency_key: str = "") -> Caller:
        """The same caller with its tenant, its body's size and its Idempotency-Key."""
        self.request_log.tenant = tenant
        body_hash = hashlib.sha256(body).hexdigest() if idempotency_key else ""
        return replace(self, tenant=tenant, body_hash=body_hash, body_bytes=len(body), idempotency_key=idempotency_key)

    def check_present(self, on_disconnect: str | int | float | None) -> None:
        """Raises ClientDisconnected for a client that has left, unless its request is to go on then.

        `on_disconnect` is the body's field, which goes before the header.
        """
        policy = self.on_disconnect if on_disconnect is None else on_disconnect
        if policy in (None, "cancel") and self.client.has_left():
            raise ClientDisconnected


ALL = "all"
"""In place of tenants: all share with each other."""


def scoped_salt(owner: str, sharing: Collection[str], salt: str) -> str:
    """The salt of a request of `owner` that names the salt `salt` itself ("": none). `sharing`: the tenants that share
    with each other, or ALL. The first line names the scope: no client's salt reaches another scope."""
    scope = "shared" if ALL in sharing or owner in sharing else f"tenant {owner}"
    return f"{scope}\n{salt}"


_WHAT_FITS = -1
"""`truncate_prompt_tokens` in place of a number: as many as the context has room for."""
_PART_BYTES = 256
"""The least that a part of a message counts for."""
TOO_MUCH = ("context_length_exceeded", TOO_MANY)
"""Codes of errors that a shorter conversation would not have."""

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class RenderedPrompts:
    """A body's prompts before they are tokenised, how the answers are to be read, what they must be, and the images of
    the only prompt."""

    texts: list[str | list[int]]
    reading: Reading | None
    constraint: RequestedGrammar | None
    images: list[ImageSource]
    warnings: Sequence[tuple[str, str]] = ()
    """The parts of the body without their whole effect, each with its parameter."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    """Prompts as token ids. `images` are those of the only prompt, `pieces` their pixels."""

    tokens: list[list[int]]
    images: list[PromptImage]
    pieces: list[HeldPieces]


def size_of(body: Body) -> int:
    """About the bytes of the prompts: a conversation may be larger than the body that continues it."""
    if isinstance(body, CompletionRequest):
        mixed = body.mixed_prompts.values() if isinstance(body, NativeCompletion) else ()
        texts = (part for prompt in mixed for part in prompt if isinstance(part, str))
        return sum(len(prompt) for prompt in body.prompts) + sum(map(len, texts))
    contents = [message.content or "" for message in body.messages]
    return sum(len(content) * (1 if isinstance(content, str) else _PART_BYTES) for content in contents)


def render_prompts(body: Body, served: ServedModel) -> RenderedPrompts:
    """Raises RequestError and its kin, and NeedsProcess."""
    if isinstance(body, CompletionRequest):
        return RenderedPrompts(_one_kind(body, served), None, grammar_of(body), [])
    prompt = chat_prompt(body, served.assets, served.template, served.vocabulary, served.forms)
    return RenderedPrompts([prompt.text], prompt.reading, prompt.constraint, prompt.images, prompt.warnings)


def _one_kind(body: CompletionRequest, served: ServedModel) -> list[str | list[int]]:
    """The prompts, each a text or token ids: what has both becomes ids. As at llama.cpp each text is tokenised for
    itself, and a beginning-of-sequence token comes in front of a text alone. Raises ContextLengthExceeded."""
    prompts = body.prompts
    if not isinstance(body, NativeCompletion):
        return prompts
    context = served.assets.context_length
    for place, parts in body.mixed_prompts.items():
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif not ids:
                ids += _fitting(part, served.vocabulary, context, body, bos=body.add_special_tokens is not False)
            else:
                _check_fits(part, served.vocabulary, context, body)
                ids += served.vocabulary.encode_pieces([part], inside=True)
        prompts[place] = ids
    return prompts


def _fitting(text: str, vocabulary: Vocabulary, context: int, body: Body, *, bos: bool) -> list[int]:
    """The ids of a prompt's text. Raises ContextLengthExceeded for one that is surely too long, before it is
    tokenised."""
    _check_fits(text, vocabulary, context, body)
    return vocabulary.encode(text, bos=bos)


def _check_fits(text: str, vocabulary: Vocabulary, context: int, body: Body) -> None:
    if vocabulary.exceeds(text, context):
        error = ContextLengthExceeded(context + 1, body.token_limit or 1, context, at_least=True)
        error.param = "prompt" if isinstance(body, CompletionRequest) else "messages"
        raise error


async def tokenize_prompts(
    prompts: RenderedPrompts, body: Body, served: ServedModel, images: RequestImages
) -> TokenizedPrompts:
    """The prompts as token ids; images that `images` lacks are loaded once the texts are known to fit.

    Raises RequestError and its kin.
    """
    image_input = served.assets.images
    if prompts.images and body.truncate_prompt_tokens is not None:
        raise RequestError(
            "'truncate_prompt_tokens' is not served with images; leave it out, or send fewer messages.",
            param="truncate_prompt_tokens",
        )
    if not prompts.images or image_input is None or served.images is None:
        return TokenizedPrompts(await _tokens(prompts.texts, body, served, images.tenant), [], [])
    texts = [with_marks(text, image_input) for text in prompts.texts]
    [prompt] = await _tokens(texts, body, served, images.tenant)  # a chat has one
    most = served.assets.most_tokens
    loaded = await served.images.load(prompts.images, image_input, most, images)
    prompt, placed_images = await off_loop(len(prompt) + most, placed, prompt, loaded, image_input)
    return TokenizedPrompts([prompt], placed_images, [image.pieces for image in loaded])


async def _tokens(texts: list[str | list[int]], body: Body, served: ServedModel, tenant: str) -> list[list[int]]:
    if isinstance(body, CompletionRequest) and body.has_gap:
        size = size_of(body) + len(body.suffix or "") + sum(len(text) for _, text in body.files)
        return await served.run(size, tenant, prompts_with_gap, body)
    context = served.assets.context_length
    bos = not isinstance(body, CompletionRequest) or body.add_special_tokens is not False

    most = _kept_tokens(body, context)

    def encode_one(text: str, vocabulary: Vocabulary) -> list[int]:
        if most is None:
            return _fitting(text, vocabulary, context, body, bos=bos)
        return vocabulary.encode(text[-WHOLE_CHARACTERS:], bos=bos)

    def encode(served: ServedModel) -> list[list[int]]:
        prompts = [encode_one(text, served.vocabulary) if isinstance(text, str) else text for text in texts]
        return prompts if most is None else [last_tokens(prompt, most, served.vocabulary.bos) for prompt in prompts]

    return await served.run(sum(len(text) for text in texts), tenant, encode)


def _kept_tokens(body: Body, context: int) -> int | None:
    """The number of tokens that stay of each prompt; None: all of them."""
    if body.truncate_prompt_tokens is None:
        return None
    if body.truncate_prompt_tokens == _WHAT_FITS:
        return max(1, context - max(1, body.token_limit or 1))
    return body.truncate_prompt_tokens


def last_tokens(prompt: list[int], most: int, bos: int | None) -> list[int]:
    """The last `most` tokens; a beginning-of-sequence token stays in front of them and counts."""
    if len(prompt) <= most:
        return prompt
    if prompt[0] == bos and bos is not None:
        return [bos, *prompt[len(prompt) - most + 1 :]]
    return prompt[-most:]


async def prompts_of(body: Body, served: ServedModel, size: int, images: RequestImages) -> list[list[int]]:
    """The request's prompts as token ids; `size` is that of the body in which it came, `images` as for
    `tokenize_prompts`."""
    rendered = await served.run(max(size, size_of(body)), images.tenant, render_prompts, body)
    return (await tokenize_prompts(rendered, body, served, images)).tokens


async def count_tokens(body: Converted, served: ServedModel, size: int, images: RequestImages) -> int:
    """Tokens of the request's prompt; arguments as for `prompts_of`. Raises RequestError in the client's own names."""
    with naming(body.names):
        [prompt] = await prompts_of(body, served, size, images)
    return len(prompt)


def prediction_of(body: Body, served: ServedModel) -> list[int]:
    """The tokens of the request's prediction, at most a context of them, as an answer has no more, and of at most a
    mebibyte of text."""
    predicted = body.predicted if isinstance(body, ChatRequest) else ""
    most = served.assets.context_length
    if not predicted:
        return []
    read = predicted[: min(most * SURELY_CHARACTERS, WHOLE_CHARACTERS)]
    ids = served.vocabulary.encode_pieces([read], inside=True)
    return ids[:most]


_SPARED = 4
"""The part of the context that is left for an answer without a limit of its own: one in so many."""


def bad_words(request: ChatRequest | CompletionRequest, vocabulary: Vocabulary) -> list[list[int]]:
    """The token sequences that the answer must not have. Raises RequestError for too many tokens."""
    sequences = vocabulary.spellings(request.bad_words) if request.bad_words else []
    check_bad_word_tokens(sequences)
    return sequences


def text_biases(request: Body, vocabulary: Vocabulary) -> dict[int, float]:
    """The biases of texts' tokens. Raises RequestError for too many of them."""
    if not isinstance(request, NativeCompletion) or not request.text_biases:
        return {}
    encodings = vocabulary.encode_all(list(request.text_biases), special=False)
    biases = {
        token: bias
        for encoding, bias in zip(encodings, request.text_biases.values(), strict=True)
        for token in encoding.ids
    }
    if len(biases) > MAX_BIASES:
        raise RequestError(
            f"The texts of 'logit_bias' have {len(biases)} tokens; at most {MAX_BIASES} are served.", param="logit_bias"
        )
    return biases


def reasoning_budget(
    request: ChatRequest | CompletionRequest, reading: Reading | None, vocabulary: Vocabulary
) -> ReasoningBudget | None:
    """The limit of the answer's reasoning; None where there is no limit, or no reasoning in marks that are known."""
    tokens = request.thinking_token_budget if isinstance(request, ChatRequest) else None
    thinking = reading.thinking if reading is not None else None
    if tokens is None or tokens < 0 or thinking is None:
        return None
    return ReasoningBudget(
        tokens=tokens,
        open=thinking.open,
        close=thinking.close,
        opening=vocabulary.encode(thinking.open, bos=False),
        closing=vocabulary.encode(thinking.close, bos=False),
        begun=thinking.begun,
    )


def prompts_with_gap(request: CompletionRequest, served: ServedModel) -> list[list[int]]:
    """The prompts of a request whose gap is to be filled. Raises RequestError, ContextLengthExceeded."""
    gaps = _gaps(served)
    context = served.assets.most_tokens
    answer = context // _SPARED if request.token_limit is None else request.token_limit
    try:
        return [
            gaps.prompt(
                prompt,
                request.suffix or "",
                request.files,
                bos=request.add_special_tokens is not False,
                most=context,
                room=context - answer,
            )
            for prompt in request.prompts
        ]
    except TooLong:
        error = ContextLengthExceeded(context + 1, request.token_limit or 1, context, at_least=True)
        error.param = "prompt"
        raise error from None


def gap_marks(request: ChatRequest | CompletionRequest, served: ServedModel) -> list[int]:
    """The tokens that end the answer where a gap is filled."""
    if not isinstance(request, CompletionRequest) or not request.has_gap or request.ignore_eos:
        return []
    return _gaps(served).stop_ids


def _gaps(served: ServedModel) -> FillInMiddle:
    if served.gaps is None:
        raise RequestError(
            "'suffix' is not supported by this model: its tokenizer has no tokens that mark a gap. Use a model that "
            "was trained to fill gaps, or remove it from the request.",
            param="suffix",
            code="unsupported_parameter",
        )
    return served.gaps


_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """One client's request, tokenised and checked: one member of the queue for a chat, for each prompt of a completion,
    or for each pack of inputs."""

    caller: Caller
    served: ServedModel
    members: list[GenerationRequest]
    views: list[View]
    """The view of each member's answer."""
    priority: str
    deadline_ms: int
    on_disconnect: str
    images: list[HeldPieces]
    """The pieces of the request's images."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(member.prompt) for member in self.members)

    @property
    def view(self) -> View:
        """The view of the whole answer."""
        return self.views[0]

    def tell_allowance(self, allowance: Allowance) -> None:
        """Put the key's remaining limits into the response's headers; in Anthropic's form too on its endpoint."""
        self.caller.headers.update(ratelimit_headers(allowance))
        if self.view.endpoint == "messages":
            self.caller.headers.update(anthropic_ratelimit_headers(allowance, time.time()))

    def enqueue(self, first: str, member: int, settings: ApiSettings) -> Enqueue:
        """The enqueue of one member of the answer whose first request is `first`."""
        key = self.caller.idempotency_key
        params = self.members[member]
        salt = scoped_salt(self.caller.identity.owner, settings.share_prefixes, params.cache_salt)
        return Enqueue(
            rid=member_rid(first, member),
            model=self.served.name,
            params=msgspec.structs.replace(params, cache_salt=salt),
            tenant=self.caller.tenant,
            account=self.caller.identity.account,
            hold=self.caller.rid if self.caller.identity.limited else "",
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            on_disconnect=self.on_disconnect,
            api=settings.api_id,
            idempotency_key=f"{key}#{member}" if key and member else key,
            body_hash=self.caller.body_hash,
            view=self.views[member].encode(),
            received_ms=self.caller.request_log.received_ms,
            keep_ms=round(1000 * settings.keep_requests),
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            # The class low is for work without a reader: it may wait for any time.
            max_queue_wait_ms=0 if self.priority == "low" else round(1000 * settings.max_queue_wait),
            images=list(self.images),
        )


def client_request(
    body: CommonFields | InputFields,
    caller: Caller,
    served: ServedModel,
    members: list[GenerationRequest],
    views: list[View],
    images: Sequence[HeldPieces] = (),
) -> ClientRequest:
    """The request with what body and headers say of its class, deadline and reader. Raises RequestError."""
    return ClientRequest(
        caller=caller,
        served=served,
        members=members,
        views=views,
        priority=caller.identity.priority(body.priority),
        deadline_ms=deadline_ms(body),
        on_disconnect=on_disconnect_policy(body.on_disconnect, caller.on_disconnect),
        images=list(images),
    )


def deadline_ms(body: CommonFields | InputFields) -> int:
    """Milliseconds from now, 0 for none. Raises RequestError for both fields at once, or a moment that has passed."""
    if body.timeout is not None and body.deadline is not None:
        raise RequestError("'timeout' and 'deadline' are both set; send one of them.", param="deadline")
    if body.timeout is not None:
        return max(1, round(body.timeout * 1000))
    if body.deadline is None:
        return 0
    seconds = body.deadline - time.time()
    if seconds <= 0:
        raise RequestError(
            f"'deadline' ({body.deadline}) has passed; it is a moment in Unix seconds.", param="deadline"
        )
    if seconds > LONGEST_S:
        raise RequestError(
            f"'deadline' ({body.deadline}) is more than a day ({LONGEST_S} seconds) away; it is a moment in Unix "
            "seconds, and a request lives for a day at most.",
            param="deadline",
        )
    return max(1, round(seconds * 1000))


def on_disconnect_policy(field: str | int | float | None, header: str | None) -> str:
    """The policy as control takes it: cancel, continue, or whole seconds. The body's field goes before the header."""
    value = header if field is None else field
    if value is None:
        return "cancel"
    if value in ("cancel", "continue"):
        return str(value)
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        seconds = math.nan
    allowed = RANGES["on_disconnect"]
    if not allowed.holds(seconds):
        shown_value = repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else shown(value)
        raise RequestError(
            f"Invalid value for 'on_disconnect': {shown_value}; use 'cancel', 'continue' or a number of seconds "
            f"{allowed}.",
            param="on_disconnect",
        )
    return str(math.ceil(seconds))


_PROMPT_SCORES = 262_144
"""Ids or log probabilities of prompts that one answer may bring: they travel through Redis and are in it whole."""


def _views(
    body: Body,
    caller: Caller,
    served: ServedModel,
    members: list[GenerationRequest],
    echo: list[str],
    reading: Reading | None,
) -> list[View]:
    """The view of each member's answer. `echo`: the text of each prompt, where it is shown again."""
    prompt_ids = [member.prompt for member in members] if body.return_token_ids else []
    return [
        View(
            endpoint=_endpoint(body),
            extra_fields=_extra_fields(body, caller, served, members, place),
            created=caller.request_log.received_ms // 1000,
            received_ms=caller.request_log.received_ms,
            timed=bool(body.timings_per_token),
            model=body.model or served.name,
            n=member.sampling.n,
            members=len(members),
            member=place,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            logprobs=member.sampling.logprobs,
            stop=member.sampling.stop,
            stop_ids=member.sampling.stop_ids,
            min_tokens=member.sampling.min_tokens,
            echo=[] if place else echo,
            functions=isinstance(body, ChatRequest) and bool(body.functions),
            shown_first=body.shown_first if isinstance(body, ChatRequest) else "",
            prompt_logprobs=body.prompt_logprobs,
            include_stop=bool(body.include_stop_str_in_output),
            special_tokens=body.skip_special_tokens is False,
            token_ids=bool(body.return_tokens_as_token_ids),
            return_ids=bool(body.return_token_ids) or (isinstance(body, NativeCompletion) and body.shows_ids),
            prompt_ids=[] if place else prompt_ids,
            predicted=len(member.sampling.prediction),
            reading=reading,
            user=body.user,
            metadata=body.metadata or {},
            client_request_id=caller.client_request_id,
        )
        for place, member in enumerate(members)
    ]


def _endpoint(body: Body) -> Endpoint:
    if isinstance(body, Converted):
        return body.endpoint
    if isinstance(body, Filling):
        return "infill"
    if isinstance(body, NativeCompletion):
        return "completion"
    if isinstance(body, RawPrompt):
        return "ollama_generate"
    return "chat" if isinstance(body, ChatRequest) else "completions"


def _extra_fields(
    body: Body, caller: Caller, served: ServedModel, members: list[GenerationRequest], place: int
) -> dict[str, Any]:
    """The fields of the request that the answer of the member at `place` repeats."""
    if isinstance(body, Converted):
        return body.shown_fields(members[place].sampling)
    if isinstance(body, NativeCompletion) and not place:
        prompts = [
            (len(member.prompt), prompt if isinstance(prompt, str) else prompt_text(served.vocabulary, member.prompt))
            for member, prompt in zip(members, body.prompts, strict=True)
        ]
        return body.shown_fields(prompts, members[0].sampling)
    return body.stored_fields(caller.rid) if isinstance(body, ChatRequest) and body.store else {}


async def text_request(
    body: Body, caller: Caller, served: ServedModel, grammars: GrammarChecks, *, strict: bool
) -> ClientRequest:
    """Check everything that can be checked before the queue. Raises RequestError and its kin."""
    if served.assets.kind != "generate":
        raise _no_text(served)
    with naming(_names(body)):
        return await _checked_request(body, caller, served, grammars, strict)


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
    if isinstance(body, (Converted, LlamaCppCompletion, RawPrompt)):
        return body.names
    return FUNCTION_NAMES if isinstance(body, ChatRequest) and body.functions else {}


async def _checked_request(
    body: Body, caller: Caller, served: ServedModel, grammars: GrammarChecks, strict: bool
) -> ClientRequest:
    size = max(caller.body_bytes, size_of(body))
    rendered = await served.run(size, caller.images.tenant, render_prompts, body)
    for text, param in rendered.warnings:
        caller.warnings.add(text, param)
    constraint = rendered.constraint
    grammar = await grammars.check(constraint, served.grammar_tokens) if constraint is not None else None
    prompts = await tokenize_prompts(rendered, body, served, caller.images)
    caller.images.loaded.clear()

    def with_sampling(served: ServedModel) -> list[GenerationRequest]:
        one_member = partial(
            generation_request,
            body,
            bad_words=bad_words(body, served.vocabulary),
            biases=text_biases(body, served.vocabulary),
            reasoning=reasoning_budget(body, rendered.reading, served.vocabulary),
            stop_ids=gap_marks(body, served),
            prediction=prediction_of(body, served),
            strict=strict,
        )
        members = [one_member(prompt, served.assets, grammar) for prompt in prompts.tokens]
        for member in members:
            refuse(served.assets.engine, member.sampling, images=bool(prompts.images))
        return [msgspec.structs.replace(member, images=prompts.images) for member in members]

    members = await served.run(size, caller.images.tenant, with_sampling)
    _check_scores(body, members)
    echo = await off_loop(size, _echo, body, prompts.tokens, served)
    views = _views(body, caller, served, members, echo, rendered.reading)
    return client_request(body, caller, served, members, views, prompts.pieces)


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


def _echo(body: Body, prompts: list[list[int]], served: ServedModel) -> list[str]:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    if body.truncate_prompt_tokens is not None:
        bos = served.vocabulary.bos
        return [prompt_text(served.vocabulary, prompt[prompt[0] == bos :]) for prompt in prompts]
    return [prompt if isinstance(prompt, str) else prompt_text(served.vocabulary, prompt) for prompt in body.prompts]


_ANY_SEED = -1
"""As at vLLM and llama.cpp: no seed."""
_SAMPLERS = Sampling(max_tokens=1)
"""The defaults of llama.cpp's samplers."""
_BREAKERS = ["\n", ":", '"', "*"]
"""llama.cpp's default of `dry_sequence_breakers`."""
_LEAST_TOP_P = 1e-6
"""top_p 0 is allowed by OpenAI and keeps the most likely token alone; filters need a value above 0."""


def generation_request(
    request: ChatRequest | CompletionRequest,
    prompt: list[int],
    assets: ModelAssets,
    grammar: Grammar | None = None,
    *,
    bad_words: Sequence[list[int]] = (),
    biases: Mapping[int, float] | None = None,
    reasoning: ReasoningBudget | None = None,
    stop_ids: Sequence[int] = (),
    prediction: Sequence[int] = (),
    strict: bool = False,
) -> GenerationRequest:
    """Check a tokenised prompt against the model's limits and fill in the sampling parameters.

    Defaults: the request, then the model's generation_config.json, then OpenAI's.

    `bad_words` are the token sequences that spell the request's bad words, `biases` those of texts' tokens, `stop_ids`
    more tokens that end the answer, `prediction` those that it may repeat.

    A limit of tokens beyond what is left of the context and of the memory is cut to that, or refused if `strict`.

    Raises ContextLengthExceeded, RequestTooLarge, or RequestError for token ids outside the vocabulary.
    """
    if not prompt:
        raise RequestError("The prompt is empty; send at least one token.", param=_prompt_param(request))
    _check_ids("prompt", prompt, assets)
    _check_ids("logit_bias", list(request.logit_bias or {}), assets)
    _check_ids("stop_token_ids", request.stop_token_ids or [], assets)
    _check_ids("allowed_token_ids", request.allowed_token_ids or [], assets)
    max_tokens = _max_tokens(request, len(prompt), assets, strict)
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' ({request.min_tokens}) is above the most tokens that can be generated ({max_tokens}).",
            param="min_tokens",
        )
    sampling = _sampling(request, max_tokens, assets)
    sampling = msgspec.structs.replace(
        sampling,
        grammar=grammar,
        bad_words=list(bad_words),
        logit_bias={**sampling.logit_bias, **(biases or {})},
        reasoning=reasoning,
        stop_ids=sorted({*sampling.stop_ids, *stop_ids}),
        prediction=list(prediction),
    )
    return GenerationRequest(prompt=prompt, sampling=sampling, cache_salt=request.cache_salt or "")


def _prompt_param(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _limit_param(request: ChatRequest | CompletionRequest) -> str:
    newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _check_ids(param: str, ids: list[int], assets: ModelAssets) -> None:
    wrong = next((token for token in ids if not 0 <= token < assets.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"'{param}' has token id {wrong}; this model's ids are 0 to {assets.vocab_size - 1}.", param=param
        )


def _max_tokens(request: ChatRequest | CompletionRequest, prompt_tokens: int, assets: ModelAssets, strict: bool) -> int:
    """The request's limit, else the model's default, else the rest of the context (and of the memory)."""
    rest = assets.most_tokens - prompt_tokens
    limit = request.token_limit
    needed = limit if strict and limit is not None else 1
    if prompt_tokens + needed > assets.context_length:
        error = ContextLengthExceeded(prompt_tokens, limit or 1, assets.context_length)
        error.param = _limit_param(request) if needed > assets.context_length else _prompt_param(request)
        raise error
    if prompt_tokens + needed > assets.memory_tokens:
        raise RequestTooLarge(
            f"The request needs memory for {prompt_tokens + needed} tokens ({prompt_tokens} in the prompt); this "
            f"deployment holds {assets.memory_tokens}. Shorten the prompt or lower max_tokens.",
            param=_limit_param(request) if needed > 1 else _prompt_param(request),
        )
    if limit is not None or request.unlimited:
        return rest if limit is None else min(limit, rest)
    default = _default_max_tokens(assets.generation_config, prompt_tokens)
    return rest if default is None else min(rest, max(default, request.min_tokens or 0))


def _default_max_tokens(config: dict[str, Any], prompt_tokens: int) -> int | None:
    """The cap of generation_config.json: `max_new_tokens`, else `max_length`, which counts the prompt. None: no cap."""
    cap = _positive(config.get("max_new_tokens"))
    if cap is None:
        length = _positive(config.get("max_length"))
        cap = _positive(length - prompt_tokens) if length is not None else None
    return cap


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int, assets: ModelAssets) -> Sampling:
    config = assets.generation_config
    top_k = _default(request.top_k, config, "top_k", 0)
    eos_ids = [] if request.ignore_eos else assets.eos_ids
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=_temperature(request.temperature, config),
        top_p=max(_LEAST_TOP_P, float(_default(request.top_p, config, "top_p", 1.0))),
        top_k=max(0, int(top_k)),
        min_p=float(_default(request.min_p, config, "min_p", 0.0)),
        typical_p=float(_default(request.typical_p, config, "typical_p", 1.0)),
        dry_multiplier=request.dry_multiplier or 0.0,
        dry_base=_SAMPLERS.dry_base if request.dry_base is None else request.dry_base,
        dry_allowed_length=request.dry_allowed_length or _SAMPLERS.dry_allowed_length,
        dry_penalty_last_n=_SAMPLERS.dry_penalty_last_n
        if request.dry_penalty_last_n is None
        else request.dry_penalty_last_n,
        dry_sequence_breakers=_breakers(request),
        xtc_probability=request.xtc_probability or 0.0,
        xtc_threshold=_SAMPLERS.xtc_threshold if request.xtc_threshold is None else request.xtc_threshold,
        top_n_sigma=max(0.0, request.top_n_sigma or 0.0),
        dynatemp_range=request.dynatemp_range or 0.0,
        dynatemp_exponent=1.0 if request.dynatemp_exponent is None else request.dynatemp_exponent,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=float(_default(request.repetition_penalty, config, "repetition_penalty", 1.0)),
        logit_bias=request.logit_bias or {},
        allowed_token_ids=sorted(set(request.allowed_token_ids or [])),
        # Drawn here where the client gives none, so that a request that Redis loses can be brought back unchanged.
        seed=str(secrets.randbits(64) if request.seed in (None, _ANY_SEED) else request.seed % 2**64),
        stop=request.stop_strings,
        stop_ids=sorted({*eos_ids, *(request.stop_token_ids or [])}),
        logprobs=request.logprobs_count,
        prompt_logprobs=request.prompt_scores,
        n=request.n or 1,
        lookup=request.lookup,
        adapter=adapter_in(request.model or "", assets.adapters),
    )


def _breakers(request: ChatRequest | CompletionRequest) -> list[str]:
    """The texts at which repetitions end; none where no penalty asks for them."""
    if not request.dry_multiplier:
        return []
    return _BREAKERS if request.dry_sequence_breakers is None else request.dry_sequence_breakers


def _temperature(requested: float | None, config: dict[str, Any]) -> float:
    """As transformers reads generation_config.json: `do_sample` false there means the most likely token."""
    if requested is None and config.get("do_sample") is False and "temperature" not in config:
        return 0.0
    return float(_default(requested, config, "temperature", 1.0))


def _default(requested: Any, config: dict[str, Any], name: str, otherwise: float) -> Any:
    if requested is not None:
        return requested
    value = config.get(name)
    return otherwise if value is None else value
