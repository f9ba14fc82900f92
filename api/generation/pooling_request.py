"""From the inputs of a request for vectors or scores to what is enqueued: checked, tokenised and packed together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.chat.tokens import WHOLE_CHARACTERS
from api.generation.client_request import Caller, ClientRequest, client_request
from api.models.models import ServedModel
from api.schemas.embeddings import (
    CohereEmbedRequest,
    EmbeddingRequest,
    InputsRequest,
    NativeInputs,
    RerankRequest,
    TextRerankRequest,
    VectorsRequest,
)
from api.schemas.ollama import OllamaInputs
from api.schemas.view import Endpoint, View
from control.errors import ContextLengthExceeded, RequestError
from control.messages import GenerationRequest, Input, PoolingAssets, Sampling

_PROMPTS = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Usual names of prompts, in lower case, for Cohere's types of input."""

_FIELD = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """One input; `second` is where its second text begins, 0 for a single text."""

    tokens: list[int]
    second: int = 0


def tokenize_inputs(body: InputsRequest, served: ServedModel) -> list[TokenizedInput]:
    """The inputs of a request. Raises ContextLengthExceeded and RequestError naming the input at fault."""
    pooling = served.assets.pooling
    assert pooling is not None, "the model gives vectors or scores"
    if isinstance(body, VectorsRequest):
        name, names = _texts_names(body)
        encoded = _texts(body, name, served, pooling)
    else:
        encoded = _pairs(body, served, pooling)
        name = _pairs_name(body)
        names = [f"{name}[{index}]" for index in range(len(encoded))]
    for place, tokenized in zip(names, encoded, strict=True):
        _check(place, name, tokenized.tokens, served)
    return encoded


def _texts_names(body: VectorsRequest) -> tuple[str, list[str]]:
    """The client's name of the field, and of each input."""
    name = "input" if isinstance(body, EmbeddingRequest) else "texts"
    if isinstance(body, OllamaInputs) and body.endpoint == "ollama_embeddings":
        name = "prompt"
    if isinstance(body, NativeInputs):
        name = "content" if body.endpoint == "embedding" else "inputs"
    alone = isinstance(body, EmbeddingRequest) and isinstance(body.input, str)
    return name, [name if alone else f"{name}[{index}]" for index in range(len(body.inputs))]


def _texts(body: VectorsRequest, name: str, served: ServedModel, pooling: PoolingAssets) -> list[TokenizedInput]:
    prompt_name = _prompt_for(body, pooling) if isinstance(body, CohereEmbedRequest) else body.prompt_name
    inputs = body.inputs
    prompt = _prompt(prompt_name, pooling)
    texts = [_lower(prompt + text, pooling) for text in inputs if isinstance(text, str)]
    if isinstance(body, EmbeddingRequest) and body.truncate_prompt_tokens is not None:
        return _cut(inputs, texts, body, served)
    for index, text in enumerate(inputs):
        if isinstance(text, str):
            _check_characters(f"{name}[{index}]", name, text, served)
    encodings = iter(served.vocabulary.encode_all(texts))
    return [TokenizedInput(next(encodings).ids if isinstance(entry, str) else entry) for entry in inputs]


def _cut(
    inputs: Sequence[str | list[int]], texts: list[str], body: EmbeddingRequest, served: ServedModel
) -> list[TokenizedInput]:
    """The inputs with at most `truncate_prompt_tokens` tokens each; `texts` are those of them that are texts. The
    special tokens around a text stay. Raises RequestError where there is no room for more than these."""
    most = body.truncate_prompt_tokens
    if most is None or most < 0:
        most = served.assets.context_length
    from_left = (body.truncation_side or served.assets.tokenizer_config.get("truncation_side")) == "left"
    texts = [text[-WHOLE_CHARACTERS:] if from_left else text[:WHOLE_CHARACTERS] for text in texts]
    vocabulary = served.vocabulary
    whole = iter(vocabulary.encode_all(texts))
    plain = iter(vocabulary.encode_all(texts, special=False))

    def one_side(ids: list[int], count: int) -> list[int]:
        return ids[max(0, len(ids) - count) :] if from_left else ids[:count]

    def cut(ids: list[int], text: list[int]) -> list[int]:
        around = len(ids) - len(text)
        if len(ids) <= most:
            return ids
        if most <= around:
            raise RequestError(
                f"'truncate_prompt_tokens' is {most}, and this model puts {around} tokens around each text; send more.",
                param="truncate_prompt_tokens",
            )
        before = next((place for place in range(around + 1) if ids[place : place + len(text)] == text), 0)
        return [*ids[:before], *one_side(text, most - around), *ids[before + len(text) :]]

    return [
        TokenizedInput(cut(next(whole).ids, next(plain).ids) if isinstance(entry, str) else one_side(entry, most))
        for entry in inputs
    ]


def _pairs(body: InputsRequest, served: ServedModel, pooling: PoolingAssets) -> list[TokenizedInput]:
    assert not isinstance(body, VectorsRequest)
    name = _pairs_name(body)
    pairs = body.pairs
    for index, (query, document) in enumerate(pairs):
        for text in (query, document):
            _check_characters(f"{name}[{index}]", name, text, served)
    vocabulary = served.vocabulary
    if pooling.pair:
        instruction = body.instruction if body.instruction is not None else pooling.instruction
        _check_characters("instruction", "instruction", instruction, served)
        fields = [{"instruction": instruction, "query": query, "document": document} for query, document in pairs]
        texts = [_FIELD.sub(lambda match, values=values: values[match[1]], pooling.pair) for values in fields]
        return [TokenizedInput(encoding.ids) for encoding in vocabulary.encode_all(texts, special=False)]
    if body.instruction is not None:
        raise RequestError("'instruction' has no effect on this model; leave it out.", param="instruction")
    both = [(_lower(query, pooling), _lower(document, pooling)) for query, document in pairs]
    return [
        TokenizedInput(encoding.ids, encoding.second if pooling.types else 0)
        for encoding in vocabulary.encode_all(both)
    ]


def _pairs_name(body: InputsRequest) -> str:
    if isinstance(body, TextRerankRequest):
        return "texts"
    return "documents" if isinstance(body, RerankRequest) else "text_2"


def _prompt_for(body: CohereEmbedRequest, pooling: PoolingAssets) -> str | None:
    """The name of the model's prompt for an `input_type`; None, which is the default prompt, where it has none."""
    names = _PROMPTS.get(body.input_type or "", ())
    return next((name for name in pooling.prompts if name.lower() in names), None)


def _prompt(name: str | None, pooling: PoolingAssets) -> str:
    name = pooling.default_prompt if name is None else name
    if not name:
        return ""
    if name not in pooling.prompts:
        names = ", ".join(sorted(pooling.prompts)) or "none"
        raise RequestError(f"'prompt_name' is {name[:80]!r}; this model has {names}.", param="prompt_name")
    return pooling.prompts[name]


def _lower(text: str, pooling: PoolingAssets) -> str:
    return text.lower() if pooling.lower else text


def _check_characters(place: str, param: str, text: str, served: ServedModel) -> None:
    """Refuse a text that is surely too long before it is tokenised."""
    context = served.assets.context_length
    if served.vocabulary.exceeds(text, context):
        raise _too_long(place, param, context + 1, context, "more than ")


def _check(place: str, param: str, tokens: list[int], served: ServedModel) -> None:
    assets = served.assets
    if not tokens:
        raise RequestError(f"'{place}' is empty; send at least one token.", param=param)
    wrong = next((token for token in tokens if not 0 <= token < assets.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"'{place}' has token id {wrong}; this model's ids are 0 to {assets.vocab_size - 1}.", param=param
        )
    if len(tokens) > assets.context_length:
        raise _too_long(place, param, len(tokens), assets.context_length)


def _too_long(place: str, param: str, tokens: int, context: int, bound: str = "") -> ContextLengthExceeded:
    count = f"{bound}{context}" if bound else str(tokens)
    error = ContextLengthExceeded(tokens, 0, context)
    error.args = (f"'{place}' has {count} tokens; this model takes {context} at most. Shorten the text, or split it.",)
    error.param = param
    return error


# Inputs and tokens of one request of the queue, or one input of any length: so small that tenants take turns.
PACK_INPUTS = 32
PACK_TOKENS = 1_024


def _views(body: InputsRequest, caller: Caller, served: ServedModel, members: list[GenerationRequest]) -> list[View]:
    """The view of each member's answer."""
    return [
        View(
            endpoint=_endpoint(body),
            extra_fields={} if place else _extra_fields(body, members),
            created=caller.request_log.received_ms // 1000,
            received_ms=caller.request_log.received_ms,
            model=body.model or served.name,
            n=member.sampling.n,
            members=len(members),
            member=place,
            user=body.user,
            client_request_id=caller.client_request_id,
        )
        for place, member in enumerate(members)
    ]


def _extra_fields(body: InputsRequest, members: list[GenerationRequest]) -> dict[str, Any]:
    fields: dict[str, Any] = {"inputs": [member.sampling.n for member in members]}
    if isinstance(body, EmbeddingRequest):
        return {**fields, "encoding_format": body.encoding_format or "float"}
    if isinstance(body, RerankRequest):
        documents = body.texts if body.return_documents is not False else None
        return {**fields, "top_n": body.top_n, "documents": documents}
    return fields


async def pooling_request(body: InputsRequest, caller: Caller, served: ServedModel) -> ClientRequest:
    """Check everything that can be checked before the queue. Raises RequestError and its kin."""
    _check_kind(body, served)
    dimensions = body.dimensions if isinstance(body, VectorsRequest) else None
    pooling = served.assets.pooling
    if dimensions is not None and pooling is not None and dimensions > pooling.dimensions:
        name = "output_dimension" if isinstance(body, CohereEmbedRequest) else "dimensions"
        raise RequestError(f"'{name}' is {dimensions}; this model's vectors have {pooling.dimensions}.", param=name)
    inputs = await served.run(caller.body_bytes, caller.images.tenant, tokenize_inputs, body)
    members = [_member(pack, dimensions) for pack in packs(inputs)]
    return client_request(body, caller, served, members, _views(body, caller, served, members))


def packs(inputs: list[TokenizedInput]) -> list[list[TokenizedInput]]:
    """Neighbouring inputs together, as far as the limits of a pack allow."""
    packed = list[list[TokenizedInput]]()
    tokens = 0
    for tokenized in inputs:
        if not packed or len(packed[-1]) == PACK_INPUTS or tokens + len(tokenized.tokens) > PACK_TOKENS:
            packed.append([])
            tokens = 0
        packed[-1].append(tokenized)
        tokens += len(tokenized.tokens)
    return packed


def _member(pack: list[TokenizedInput], dimensions: int | None) -> GenerationRequest:
    return GenerationRequest(
        prompt=[token for tokenized in pack for token in tokenized.tokens],
        sampling=Sampling(max_tokens=0, temperature=0.0, seed="0", n=len(pack), dimensions=dimensions),
        inputs=[Input(len(tokenized.tokens), tokenized.second) for tokenized in pack],
    )


def _endpoint(body: InputsRequest) -> Endpoint:
    if isinstance(body, (OllamaInputs, NativeInputs)):
        return body.endpoint
    if isinstance(body, TextRerankRequest):
        return "tei_rerank"
    if isinstance(body, EmbeddingRequest):
        return "embeddings"
    if isinstance(body, CohereEmbedRequest):
        return "embed"
    return "rerank" if isinstance(body, RerankRequest) else "score"


def _check_kind(body: InputsRequest, served: ServedModel) -> None:
    kind = served.assets.kind
    name = served.name
    embeds = isinstance(body, VectorsRequest)
    if kind == ("embed" if embeds else "score"):
        return
    result = "embeddings" if embeds else "scores"
    gives = {
        "generate": f"generates text and gives no {result}",
        "embed": "gives embeddings and no scores",
        "score": "gives scores of pairs (/v1/rerank, /score) and no embeddings",
    }
    use = "an embedding model" if embeds else "a reranker"
    raise RequestError(
        f"The model '{name}' {gives[kind]}. Use {use} for this endpoint; GET /v1/models shows each model's kind.",
        param="model",
        code=f"{result}_not_supported",
    )
