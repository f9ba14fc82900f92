"""`furrow serve` with several models and the options of an API process."""

from __future__ import annotations

import http.client
from pathlib import Path

import openai
import pytest

from tests.farm import serving_farm
from tests.models import make

pytestmark = pytest.mark.timeout(180)
ORIGIN = "https://app.example"


def test_two_models_are_served_with_aliases_and_an_origin(tmp_path: Path) -> None:
    """Both answer under their own names and their aliases, to a page of the origin that was named."""
    options = ["--devices", "cpu", "--dtype", "float64", "--cors-origin", ORIGIN]
    options += ["--served-model-name", "gpt-4o=demo", "--served-model-name", "small=tiny"]
    with serving_farm("demo", str(make("llama", tmp_path / "tiny")), *options, FURROW_STANDBY="0") as farm:
        with openai.OpenAI(base_url=farm.base_url, api_key="none") as client:
            assert {"demo", "tiny", "gpt-4o", "small"} <= {model.id for model in client.models.list()}
            for alias, name in (("gpt-4o", "demo"), ("small", "tiny")):
                texts = {
                    client.completions.create(model=one, prompt="abc", max_tokens=8, temperature=0).choices[0].text
                    for one in (alias, name)
                }
                assert len(texts) == 1
        connection = http.client.HTTPConnection(farm.address, timeout=30)
        connection.request("GET", "/v1/models", headers={"Origin": ORIGIN})
        assert connection.getresponse().getheader("Access-Control-Allow-Origin") == ORIGIN
        connection.close()
        assert farm.stop() == 0
