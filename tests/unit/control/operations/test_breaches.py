"""Breaches of a model's files are told: what the doctor and the console show of one that broke its bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakeredis import FakeRedis

from control.messages import ModelSpec
from control.operations.checks.findings import Finding
from control.operations.checks.report import read_farm_findings
from control.records import catalog
from control.records.api_reports import CALLS, note_breach
from control.redis.clients import SyncRedis
from control.replicas import model_overviews
from ops.cli.doctor.models import check_models


def of_doctor(client: SyncRedis) -> list[Finding]:
    return check_models(client, [], {})


def of_console(client: SyncRedis) -> list[Finding]:
    return read_farm_findings(client, [], model_overviews.overviews(client))


@pytest.mark.parametrize("findings", [of_doctor, of_console])
def test_calls_that_are_not_understood_are_told(findings: Callable[[SyncRedis], list[Finding]]) -> None:
    """A warning with the model and a remedy."""
    client = FakeRedis(decode_responses=True)
    catalog.put_spec(client, ModelSpec(name="odd", source="script"))
    note_breach(client, "odd", CALLS, "are not understood")
    [finding] = [one for one in findings(client) if one.check == "calls"]
    assert (finding.where, finding.level) == ("odd", "warning")
    assert finding.message == "calls of this model are not understood" and "--tool-parser" in finding.remedy
    assert not [one for one in findings(client) if one.check == "breaches"]


@pytest.mark.parametrize("findings", [of_doctor, of_console])
def test_the_last_breach_of_each_file_is_told(findings: Callable[[SyncRedis], list[Finding]]) -> None:
    """A warning with the model, the file, what it did, and a remedy; the control has none."""
    client = FakeRedis(decode_responses=True)
    for name in ("hostile", "other"):
        catalog.put_spec(client, ModelSpec(name=name, source="script"))
    assert not [one for one in findings(client) if one.check == "breaches"]
    note_breach(client, "hostile", "chat template", "took more than 1.0 s")
    note_breach(client, "hostile", "chat template", "took more than 2.0 s")
    note_breach(client, "hostile", "tokenizer", "made more than 16 MiB of text")
    template, tokenizer = [one for one in findings(client) if one.check == "breaches"]
    assert (template.subject, template.where, template.level) == ("models", "hostile", "warning")
    assert template.message.startswith("its chat template took more than 2.0 s, last at ")
    assert tokenizer.where == "hostile" and tokenizer.message.startswith("its tokenizer made more than 16 MiB")
    assert "with another tokenizer" in tokenizer.remedy
