"""Inputs of vectors and scores as tokens, each checked against the model's context."""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.models.served import ServedModel
from api.schemas.embeddings import CohereEmbedRequest, EmbeddingRequest, InputsRequest, RerankRequest, VectorsRequest
from control.errors import ContextLengthExceeded, RequestError
from control.messages import PoolingAssets

_PROMPTS = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Usual names of prompts, in lower case, for Cohere's types of input."""

_FIELD = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One input; `second` is where its second text begins, 0 for a single text."""

    tokens: list[int]
    second: int = 0


def encode(body: InputsRequest, served: ServedModel) -> list[Encoded]:
    """The inputs of a request. Raises ContextLengthExceeded and RequestError naming the input at fault."""
    pooling = served.assets.pooling
    assert pooling is not None, "the model gives vectors or scores"
    if isinstance(body, VectorsRequest):
        name = "input" if isinstance(body, EmbeddingRequest) else "texts"
        encoded = _texts(body, name, served, pooling)
        alone = isinstance(body, EmbeddingRequest) and isinstance(body.input, str)
        names = [name if alone else f"{name}[{index}]" for index in range(len(encoded))]
    else:
        encoded, name = _pairs(body, served, pooling), _pairs_name(body)
        names = [f"{name}[{index}]" for index in range(len(encoded))]
    for place, one in zip(names, encoded, strict=True):
        _check(place, name, one.tokens, served)
    return encoded


def _texts(body: VectorsRequest, name: str, served: ServedModel, pooling: PoolingAssets) -> list[Encoded]:
    chosen = _prompt_for(body, pooling) if isinstance(body, CohereEmbedRequest) else body.prompt_name
    inputs, prompt = body.inputs, _prompt(chosen, pooling)
    texts = [_lower(prompt + one, pooling) for one in inputs if isinstance(one, str)]
    for index, one in enumerate(inputs):
        if isinstance(one, str):
            _check_characters(f"{name}[{index}]", name, one, served)
    encodings = iter(served.vocabulary.encode_all(texts))
    return [Encoded(next(encodings).ids if isinstance(one, str) else one) for one in inputs]


def _pairs(body: InputsRequest, served: ServedModel, pooling: PoolingAssets) -> list[Encoded]:
    assert not isinstance(body, VectorsRequest)
    name, pairs = _pairs_name(body), body.pairs
    for index, (query, document) in enumerate(pairs):
        for text in (query, document):
            _check_characters(f"{name}[{index}]", name, text, served)
    vocabulary = served.vocabulary
    if pooling.pair:
        instruction = body.instruction if body.instruction is not None else pooling.instruction
        _check_characters("instruction", "instruction", instruction, served)
        fields = [{"instruction": instruction, "query": query, "document": document} for query, document in pairs]
        texts = [_FIELD.sub(lambda found, one=one: one[found[1]], pooling.pair) for one in fields]
        return [Encoded(one.ids) for one in vocabulary.encode_all(texts, special=False)]
    if body.instruction is not None:
        raise RequestError("'instruction' has no effect on this model; leave it out.", param="instruction")
    both = [(_lower(query, pooling), _lower(document, pooling)) for query, document in pairs]
    return [Encoded(one.ids, one.second if pooling.types else 0) for one in vocabulary.encode_all(both)]


def _pairs_name(body: InputsRequest) -> str:
    return "documents" if isinstance(body, RerankRequest) else "text_2"


def _prompt_for(body: CohereEmbedRequest, pooling: PoolingAssets) -> str | None:
    """The name of the model's prompt for an `input_type`; None, which is the default prompt, where it has none."""
    wanted = _PROMPTS.get(body.input_type or "", ())
    return next((name for name in pooling.prompts if name.lower() in wanted), None)


def _prompt(name: str | None, pooling: PoolingAssets) -> str:
    name = pooling.default_prompt if name is None else name
    if not name:
        return ""
    if name not in pooling.prompts:
        known = ", ".join(sorted(pooling.prompts)) or "none"
        raise RequestError(f"'prompt_name' is {name[:80]!r}; this model has {known}.", param="prompt_name")
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
