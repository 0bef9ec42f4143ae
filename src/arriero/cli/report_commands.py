"""``arriero report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from arriero.errors import UserError


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders; several are compared.", metavar="RUN [RUN …]", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; default: report.html in the first run folder.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page to this machine's browsers, updated while the runs go on.")
    ] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="For --watch; 0 takes a free one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """One page with the curves, events, figures and samples of a run, or of several side by side. It needs no network.

    Example: arriero report runs/my-run runs/another --out comparison.html
    """
    if watch:
        if out is not None:
            raise UserError("--watch writes no file, so --out has no meaning with it")
        _watch(runs, port, as_json)
        return
    from arriero.monitor.report import write_report

    report = write_report(runs, out)
    if as_json:
        value = {
            "path": str(report.path),
            "bytes": report.size_bytes,
            "runs": [str(run) for run in runs],
            "rows": report.rows,
            "rows_shown": report.rows_shown,
        }
        typer.echo(json.dumps(value, ensure_ascii=False))
        return
    shown = "" if report.rows == report.rows_shown else f", {report.rows_shown:,} of them as points of the curves"
    typer.echo(f"{report.path}: {report.rows:,} logged steps{shown}, {report.size_bytes / 1e6:.2f} MB")


def _watch(runs: list[Path], port: int, as_json: bool) -> None:
    from arriero.monitor.watch import open_server

    with open_server(runs, port) as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        said = (
            json.dumps({"url": url}) if as_json else f"watching {', '.join(map(str, runs))} at {url}. Ctrl-C stops it."
        )
        typer.echo(said)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
