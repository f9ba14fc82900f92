"""The model that `furrow run` talks to: an API that answers, and how it is found or brought to serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from control.errors import FurrowError, ModelUnavailable, RedisUnavailable, SettingsError
from control.listening import is_loopback
from control.messages import ModelSpec
from control.operations import desired
from control.records import catalog
from control.redis.clients import SyncRedis
from control.replicas import model_overviews
from ops.cli.progress import Stage, Waiting, stage_here, stage_of
from ops.cli.run.answer import StreamedAnswer, message_of
from ops.cli.run.conversation import Conversation
from ops.client import ResumingTransport

PATIENCE_S = 120.0
"""Time without any event after which an answer is given up."""
CONNECT_S = 10.0
READ_S = 30.0


class ApiRefused(FurrowError):
    """The API answered with an error; `status` is its HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Use as a context manager. `url` is the address with or without `/v1`; answers resume when a process dies."""

    def __init__(self, url: str, key: str) -> None:
        """Raises ApiRefused for a URL that is none."""
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ApiRefused(f"--url {url} is no address: write http://HOST:PORT or https://HOST.")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        try:
            away = not is_loopback(httpx.URL(self.url).host)  # no proxy leads to this machine
            self._plain = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=away)
            # A transport of its own uses no proxies.
            transport = ResumingTransport(patience=PATIENCE_S)
            self._resuming = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, trust_env=away, transport=transport
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ApiRefused(f"--url {url} can't be used: {error}") from None

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._plain.close()
        self._resuming.close()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer. Raises ApiRefused."""
        try:
            response = self._plain.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ApiRefused(
                f"{self.url} can't be reached ({error or type(error).__name__}). Is an API process running there?"
            ) from None
        if response.status_code != 200:
            raise ApiRefused(message_of(response), response.status_code)
        try:
            return response.json()
        except ValueError:
            raise ApiRefused(f"{self.url}{path} answered with no JSON; is it the address of an API?") from None

    def card(self, model: str) -> dict[str, Any] | None:
        """The model's entry of /v1/models; None where the farm does not know it."""
        try:
            return self.ask("GET", f"/v1/models/{quote(model)}")
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise

    def tokenizer_info(self, model: str) -> dict[str, Any] | None:
        """With the chat template and the generation defaults; None of an API without that route."""
        try:
            return self.ask("GET", f"/tokenizer_info?model={quote(model, safe='')}")
        except ApiRefused as error:
            if error.status == 404:  # a proxy that passes on the usual routes only
                return None
            raise

    def answer(self, conversation: Conversation, text: str) -> StreamedAnswer:
        """Ask, and stream the answer."""
        path = "/v1/chat/completions" if conversation.chat else "/v1/completions"
        return StreamedAnswer(self._resuming, path, conversation.request(text))


# --- the model --------------------------------------------------------------------------------------------------------


TICK_S = 0.1
TICK_HTTP_S = 0.3
SILENCE_S = 120.0
"""Time without an answer after which an API is given up."""


class Silence:
    """Limits the wait for Redis or an API that does not answer. Status 502 to 504 counts as no
    answer: the API, or the proxy before it, has no farm."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def bear(self, error: ApiRefused | RedisUnavailable) -> None:
        """Raises the error where it is another one, or FurrowError where no other answer came for SILENCE_S."""
        if isinstance(error, ApiRefused) and error.status not in (0, 502, 503, 504):
            raise error
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= SILENCE_S:
            raise ApiRefused(f"{error} (for {SILENCE_S:.0f} s)")

    def end(self) -> None:
        """Another answer came."""
        self._since = None


class RedisFarm:
    """A farm by its Redis."""

    tick_s = TICK_S

    def __init__(self, client: SyncRedis, *, private: bool = False) -> None:
        """`private`: its worker is started by this command."""
        self._client = client
        self._stage_of = stage_here if private else stage_of
        self._silence = Silence()

    def desire(self, spec: ModelSpec, model: str) -> bool:
        """Load the model, which the user named as `model`, unless the farm has it; True if it was loaded. A model that
        the farm has keeps its specification. Raises FurrowError, also for a known model that failed."""
        current = catalog.get_spec(self._client, spec.name)
        if current is not None and current.source != spec.source and model != spec.name:
            raise SettingsError(
                f"the farm has another model named '{spec.name}', from {current.source}; give this one another --name"
            )
        if current is not None:
            desired.check_stays(current)
            self.stage(spec.name)
            return False
        return desired.load(self._client, spec, None).changed

    def withdraw(self, model: str) -> None:
        """Unload the model."""
        desired.unload(self._client, model)

    def names(self) -> list[str]:
        """The names of the farm's models."""
        return [spec.name for spec in catalog.list_specs(self._client)]

    def stage(self, model: str) -> Stage | None:
        """The progress of the load; None once the model is served. Raises ModelUnavailable for one that failed, and
        FurrowError for one that was unloaded. Redis is waited for, as Silence has it."""
        try:
            overview = model_overviews.overview(self._client, model)
        except RedisUnavailable as error:
            self._silence.bear(error)
            return Stage(f"{model}: Redis is waited for: {error}")
        self._silence.end()
        if not overview.revision:
            raise FurrowError(f"the model '{model}' was unloaded from the farm")
        if overview.state == "failed":
            raise ModelUnavailable(model, "failed", overview.detail)
        return None if overview.state == "loaded" else self._stage_of(overview)


class HttpFarm:
    """A farm by its API. Only operators may load a model."""

    tick_s = TICK_HTTP_S

    def __init__(self, api: Api) -> None:
        self._api = api
        self._silence = Silence()
        self._operator = True

    def desire(self, spec: ModelSpec, model: str) -> bool:
        """As RedisFarm's."""
        if self._api.card(spec.name) is not None:
            return False
        body = {name: value for name, value in msgspec.to_builtins(spec).items() if name in _LOADED}
        # A path is meant on the farm's hosts; `demo` is where they have it.
        body |= {"source": model if model == spec.name else spec.source, "devices": ",".join(spec.devices) or None}
        try:
            self._api.ask("POST", "/farm/models/load", body)
        except ApiRefused as error:
            if error.status not in (401, 403):
                raise
            served = ", ".join(self.names()) or "no model"
            raise SettingsError(
                f"{self._api.url} serves {served}, not '{spec.name}', and can't be told to load it: {error}"
            ) from None
        return True

    def withdraw(self, model: str) -> None:
        """As RedisFarm's."""
        self._api.ask("POST", "/farm/models/unload", {"model": model})

    def names(self) -> list[str]:
        """As RedisFarm's."""
        return [str(card["id"]) for card in self._api.ask("GET", "/v1/models")["data"]]

    def stage(self, model: str) -> Stage | None:
        """As RedisFarm's. An API that does not answer is waited for, as Silence has it."""
        try:
            card = self._api.card(model)
        except ApiRefused as error:
            self._silence.bear(error)
            return Stage(f"{model}: the API is waited for: {error}")
        self._silence.end()
        if card is None:
            raise FurrowError(
                f"{self._api.url} does not know the model '{model}' any more: it was unloaded, or the API key may not "
                "use it"
            )
        state = card.get("state")
        detail = card.get("detail")
        if state == "failed":
            raise ModelUnavailable(model, "failed", detail or "")
        if state in ("loaded", None):  # other servers have no state
            return None
        return self._overview_stage(model) or Stage(f"{model}: {state}" + (f" ({detail})" if detail else ""))

    def _overview_stage(self, model: str) -> Stage | None:
        """With the bytes, which only operators are shown."""
        if not self._operator:
            return None
        try:
            overviews = msgspec.convert(
                self._api.ask("GET", "/farm/models")["data"], list[model_overviews.Overview], strict=False
            )
        except (ApiRefused, msgspec.ValidationError, KeyError):
            self._operator = False
            return None
        return next((stage_of(overview) for overview in overviews if overview.model == model), None)


_LOADED = (
    "source",
    "name",
    "tp",
    "dtype",
    "max_context",
    "kv_tokens",
    "kv_type",
    "quant",
    "gguf",
    "dequantize",
    "prefix_cache",
    "images",
    "lookup",
    "deterministic",
    "engine",
    "engine_args",
    "adapters",
    "sampling",
)
"""Fields of a specification that the operator's route takes."""


_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "do_sample"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its API describes it. `chat`: it has a chat template; `sampling`: it has sampling defaults."""

    name: str
    chat: bool
    context: int | None
    sampling: bool = True


def wait_until_served(
    farm: RedisFarm | HttpFarm, api: Api, spec: ModelSpec, check: Callable[[], None] = lambda: None
) -> ServedModel:
    """Show the progress until the API serves the model. `check` is called in every turn and may raise.

    Raises ModelUnavailable, and FurrowError for a model that does not answer in text, and for an API that does not
    answer.
    """
    silence = Silence()
    starts = Stage(f"{spec.name}: loaded, the API process starts")
    with Waiting() as waiting:
        while (stage := farm.stage(spec.name)) is not None or (card := _card(api, spec.name, silence)) is None:
            waiting.show(stage or starts)
            check()
            time.sleep(farm.tick_s)
    kind = card.get("kind") or "generate"
    if kind != "generate":
        answers = {"embed": "embeddings (POST /v1/embeddings)", "score": "scores (POST /v1/rerank)"}.get(kind, kind)
        raise FurrowError(f"the model '{spec.name}' gives {answers}, and no text; it can't be talked to")
    info = api.tokenizer_info(spec.name)
    chat = info is None or bool(info.get("chat_template"))
    sampling = info is None or bool(_SAMPLING & info.get("generation_config", {"temperature": 1}).keys())
    return ServedModel(spec.name, chat, card.get("max_model_len"), sampling)


def _card(api: Api, model: str, silence: Silence) -> dict[str, Any] | None:
    """The model's entry once the API serves it; None while the process starts. Raises ApiRefused."""
    try:
        if not _is_loaded(card := api.card(model)):
            # An API process looks at the farm once a second, but at once for a model that it does not serve yet.
            api.tokenizer_info(model)
            card = api.card(model)
    except ApiRefused as error:
        silence.bear(error)
        return None
    silence.end()
    return card if _is_loaded(card) else None


def _is_loaded(card: dict[str, Any] | None) -> bool:
    return card is not None and card.get("state", "loaded") == "loaded"
