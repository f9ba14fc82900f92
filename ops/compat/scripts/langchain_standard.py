"""The class that LangChain's standard tests ask for; langchain_python.py runs them."""

from __future__ import annotations

from typing import Any

from checks import BASE_URL, KEY, MODEL, terse
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": BASE_URL,
            "api_key": KEY,
            "max_retries": 0,
            "temperature": 0,
            "max_tokens": 200,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestObjects(TestChat):
    """Those that want JSON."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "logit_bias": terse()}
