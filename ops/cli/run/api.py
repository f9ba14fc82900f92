"""The HTTP API that a conversation uses."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from control.errors import FurrowError
from control.listening import is_loopback
from ops.cli.run.answer import Answer, message_of
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

    def answer(self, conversation: Conversation, text: str) -> Answer:
        """Ask, and stream the answer."""
        path = "/v1/chat/completions" if conversation.chat else "/v1/completions"
        return Answer(self._resuming, path, conversation.request(text))
