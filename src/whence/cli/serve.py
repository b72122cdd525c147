"""`whence serve`: the page, live, on this machine."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import replace
from socket import gethostname
from typing import Annotated

import typer

from whence.cli._app import Debug, Quiet, messages
from whence.cli._model import ModelChoice, takes_model
from whence.errors import InputError, MissingExtraError


@takes_model(without=("model", "pair"))
def command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="A model to offer; the first is loaded first. May be repeated."
        ),
    ] = None,
    allow_model: Annotated[
        list[str] | None, typer.Option("--allow-model", metavar="MODEL", help="A further model that may be asked for.")
    ] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A second text for the page to begin with.")] = None,
    run_paths: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="PATH", help="Also show this survey (its folder) or comparison (its --save file)."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen; anything but loopback lets others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="The port; 0 takes a free one.")] = 8899,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A further host name to answer to.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Off loopback, let everybody in who can reach this machine.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest text, in tokens.")] = 1024,
    max_jobs: Annotated[int, typer.Option("--max-jobs", min=1, help="Jobs that run or wait at once.")] = 8,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one job may take.")] = 300.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 (acted on as it is parsed)
    *,
    source: ModelChoice,
) -> None:
    """Serve the page: a text box, the models named here, and every measure on demand.

    It listens on this machine only unless --host says otherwise; then callers need the token in the link it prints
    ($WHENCE_TOKEN sets it). It answers no other site, loads no model that was not named here, and needs no network.
    --task, --dtype and the like hold for every model. Stop it with Ctrl-C.
    """
    try:
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise MissingExtraError("the server needs uvicorn: pip install 'whence[web]'.") from missing
    from whence.model.load import check_model
    from whence.reporting.runs import read_run
    from whence.serving.limits import Limits
    from whence.serving.server import listen, run

    names = [*(model or ["minilm"]), *(allow_model or [])]
    for name in names:
        check_model(name)
    runs = [read_run(path) for path in run_paths or []]
    source.check()
    limits = Limits(tokens=max_tokens, truncate=source.truncate, jobs=max_jobs, seconds=timeout)
    try:
        socket = listen(host, port)
    except OSError as problem:
        raise InputError(
            f"cannot listen on {host} port {port}: {problem.strerror}. Choose another with --port."
        ) from problem
    port = socket.getsockname()[1]
    token = None if no_token or _is_loopback(host) else os.environ.get("WHENCE_TOKEN") or secrets.token_urlsafe(24)
    everywhere = host in ("0.0.0.0", "::")
    named = gethostname() if everywhere else "localhost" if host in ("127.0.0.1", "::1") else host
    where = f"http://{f'[{named}]' if ':' in named else named}:{port}/{f'?token={token}' if token else ''}"
    if not quiet or token:
        messages.print(
            f"whence serves {', '.join(names)} at {where} (Ctrl-C stops it)",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    if not _is_loopback(host):
        who = "whoever has this link" if token else "EVERYBODY who can reach this machine"
        place = "every address of this machine" if everywhere else host
        messages.print(f"It listens on {place}, port {port}: {who} may use it.", soft_wrap=True)
    if open_:
        from whence.cli._browser import open_in_browser

        open_in_browser(where)
    run(
        names, socket, limits=limits, hosts=frozenset({host, named, *(allow_host or [])}), any_address=everywhere,
        token=token, runs=runs, load=lambda name: replace(source, model=name).load(), pair=pair, quiet=quiet,
    )  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
