"""`furrow selftest`: every kernel of a device beside plain torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from control.errors import DevicesError, SettingsError
from ops.cli.tables import echo_table

if TYPE_CHECKING:
    from worker.selftest import report

# Exit statuses: a kernel does not work; the device is not there.
SWITCHED_OFF = 1
ABSENT = 2


@click.command(short_help="Try every kernel of a device.")
@click.option("--device", help="cpu, or cuda:0 [default: the first GPU, else cpu].")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the model whose shapes are tried [default: shapes of three known models].",
)
@click.option("--dtype", default="auto", show_default=True, help="With --model: the type in which it is served.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="With --model: ranks that share it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def selftest(device: str | None, model: Path | None, dtype: str, tp: int, as_json: bool) -> None:
    """Try every kernel of a device beside plain torch, and print how each did and how fast it is.

    Trials run in child processes, so a kernel that faults or hangs ends none but itself. What fails is switched off
    from the next start of a rank on, and models are served without it. The exit status is 1 then, 2 where the device is
    absent, else 0. The output is ready to be pasted into an issue.
    """
    import torch  # only here: --help needs none

    from worker.models.loading import resolve_dtype
    from worker.repository import validation
    from worker.selftest import report
    from worker.selftest.shapes import DEFAULT, of_config

    device_name = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = report.present(device_name)
    except DevicesError as error:
        click.echo(f"furrow: {error}", err=True)
        sys.exit(ABSENT)
    shapes = DEFAULT
    if model is not None:
        config = validation.inspect(model).config
        validation.check(config, tp)
        kind = resolve_dtype(dtype, torch_device.type, config).name
        shapes = (of_config(config, kind, tp),)
    elif dtype != "auto" or tp != 1:
        raise SettingsError("--dtype and --tp belong to a model: give --model FOLDER")
    click.echo(f"trying the kernels of {device_name}; the first time they are compiled ...", err=True)
    verdicts = report.selftest(str(torch_device), shapes)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(verdicts)).decode())
    else:
        _print(verdicts)
    sys.exit(SWITCHED_OFF if verdicts.off else 0)


def _print(verdicts: report.SelftestReport) -> None:
    click.echo(
        f"device: {verdicts.device}; as torch reaches it: {verdicts.limits.gigabytes_per_s:,.1f} GB/s copied, "
        f"{verdicts.limits.teraflops:,.2f} TFLOP/s multiplied"
    )
    click.echo("versions: " + ", ".join(f"{name} {version}" for name, version in verdicts.versions.items()))
    from worker.selftest.report import rows_of

    echo_table(rows_of(verdicts))
    for kernel, instead in verdicts.off.items():
        click.echo(f"{kernel} is switched off: {instead}")
    if not verdicts.off:
        click.echo("everything that is available here works")
