"""`furrow doctor`: check everything once, print what is wrong and what mends it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

import click
import msgspec
from redis.exceptions import ResponseError

from control.errors import FurrowError, KeyDamaged
from control.operations.checks.findings import LEVELS, Checks, Finding, Report, Subject, report_of
from control.operations.checks.hosts import check_hosts
from control.operations.checks.redis_server import check_key_types, remedy_for_key
from control.operations.options import NO_FARM, START_OR_NAME, farm_named, redis_option
from control.placement import farm, membership
from control.placement.membership import facts_of_all
from control.redis.clients import SyncRedis
from control.redis.servers import RoundTrip
from control.redis.urls import address
from ops.cli.doctor.api_server import check_api
from ops.cli.doctor.models import check_models
from ops.cli.doctor.redis_server import check_redis
from ops.cli.tables import LONGEST_CELL, LONGEST_LINE, echo_json, one_line

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--url", metavar="URL", help="Check the API at this address too, as clients reach it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
@redis_option
def doctor(url: str | None, as_json: bool, redis_url: str | None) -> None:
    """Check Redis, hosts, models and, with --url, the API, with a remedy for each finding.

    Agents tell the facts about their hosts, so it may run anywhere. It changes nothing and gives no model work. The
    exit status is 0 where all is well, 1 with warnings, 2 with errors.
    """
    report = report_of(examine(redis_url, url))
    if as_json:
        echo_json(report)
    else:
        _print(report)
    sys.exit(LEVELS.index(report.level))


def examine(redis_url: str | None, url: str | None) -> list[Finding]:
    """All findings. Where Redis can't be used, hosts and models are left out."""
    findings: list[Finding] = []
    try:
        farm_url = farm_named(redis_url)
        if farm_url is not None:
            findings += _check_farm(farm_url)
        elif url is None:
            checks = Checks("redis")
            checks.error("connection", NO_FARM, f"{START_OR_NAME[0].upper()}{START_OR_NAME[1:]}.")
            findings += checks.findings
    except FurrowError as error:
        findings += _failed("redis", error, "Correct it, or wait, and run the command again.")
    if url is not None:
        try:
            findings += check_api(url)
        except FurrowError as error:
            findings += _failed("api", error, "Give the address that clients use.")
    return findings


def _check_farm(redis_url: str) -> list[Finding]:
    outcome = check_redis(redis_url)
    with outcome.client as client:
        findings = outcome.findings
        if outcome.trip is not None:
            try:
                types = Checks("redis", address(client))
                if not check_key_types(client, types):
                    return [*findings, *types.findings]  # hosts and models can't be read
                findings = [*findings, *_check_hosts_and_models(client, outcome.trip)]
            except KeyDamaged as error:
                damaged = Checks("redis", address(client))
                damaged.error("key", str(error), remedy_for_key(client, error.key))
                findings = [*findings, *damaged.findings]
            except (FurrowError, ResponseError) as error:
                findings = [*findings, *_failed("redis", error, "Mend what is found above, and run the command again.")]
        return findings


def _check_hosts_and_models(client: SyncRedis, trip: RoundTrip) -> list[Finding]:
    cards = farm.host_cards(client)
    facts = facts_of_all(client, [card.id for card in cards])
    apis = membership.api_versions(client)
    findings = check_hosts(cards, facts, apis, trip.skew_ms, membership.silent_apis(client, apis))
    return [*findings, *check_models(client, cards, facts)]


def _failed(subject: Subject, error: Exception, remedy: str) -> list[Finding]:
    checks = Checks(subject)
    checks.error("connection", str(error), remedy)
    return checks.findings


def _print(report: Report) -> None:
    """By subject and place; what is well on one line."""
    for (subject, place), group in groupby(report.findings, key=lambda finding: (finding.subject, finding.where)):
        for line in _lines(subject, place, list(group)):
            click.echo(line)
    counts = [sum(finding.level == level for finding in report.findings) for level in ("error", "warning")]
    if not any(counts):
        click.echo("All is well.")
        return
    click.echo(", ".join(_counted(*pair) for pair in zip(counts, ("error", "warning"), strict=True) if pair[0]) + ".")


def _lines(subject: str, place: str, findings: Sequence[Finding]) -> Iterable[str]:
    findings = [
        msgspec.structs.replace(
            finding, message=one_line(finding.message, LONGEST_LINE), remedy=one_line(finding.remedy, LONGEST_LINE)
        )
        for finding in findings
    ]
    yield click.style(one_line(f"{subject} {place}".strip(), LONGEST_CELL), bold=True)
    if well := "; ".join(f"{finding.check}: {finding.message}" for finding in findings if finding.level == "ok"):
        yield f"  {_marked('ok')} {well}"
    for finding in findings:
        if finding.level != "ok":
            yield f"  {_marked(finding.level)} {finding.check}: {finding.message}"
            yield f"          {finding.remedy}"


def _marked(level: str) -> str:
    return click.style(f"{level:<7}", fg=_COLOURS[level])


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
