"""`triptych serve`: flags and environment become settings, settings a plan, and the plan runs.

The flags are generated from `ServeSettings`. The server itself is imported only once the plan stands and the port is
bound, so that a wrong configuration is told at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from triptych.cli.exit_codes import exit_codes
from triptych.config.settings import FlagSpec, ServeSettings, flag_specs, read_settings
from triptych.errors import ConfigError

__all__ = ["serve", "serve_settings"]

_log = logging.getLogger(__name__)

_BACKLOG = 2048


def _parameter(spec: FlagSpec) -> inspect.Parameter:
    # Values stay text here: one place (ServeSettings) checks them, whether typed or from the environment.
    kind = bool if spec.is_switch else list[str] if spec.is_list else str
    if spec.option.startswith("--"):
        notes = " Repeatable." if spec.is_list else f" Default: {spec.default_text}." if spec.default_text else ""
        info = typer.Option(
            spec.option,
            metavar=spec.flag.metavar or None,
            help=spec.flag.help + notes,
            rich_help_panel=spec.flag.panel,
            show_default=False,
        )
    else:
        info = typer.Argument(metavar=spec.option, help=spec.flag.help, show_default=False)
    return inspect.Parameter(
        spec.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def serve_settings(given: dict[str, object]) -> ServeSettings:
    """Settings from what was typed and this process's environment. Raises `ConfigError`."""
    return read_settings({name: value for name, value in given.items() if value not in (None, [])}, os.environ)


def serve(**given: object) -> None:
    """Serve a model over HTTP until told to stop.

    Without MODEL and stage file: the embedded picture model on two replicas. Every flag is also an environment
    variable, TRIPTYCH_ and the flag's name, lists separated by commas; a flag wins over the environment, the
    environment over the stage file.
    """
    with exit_codes():
        settings = serve_settings(given)
        if settings.dry_run:
            from triptych.cli.check import show_plan
            from triptych.config.plan import build_plan

            show_plan(build_plan(settings, refuse_unavailable=False))
        else:
            with _signals_are_an_orderly_stop():
                raise typer.Exit(_run(settings))


def _run(settings: ServeSettings) -> int:
    # 1. What can be found out at once.
    from triptych.config.plan import build_plan

    plan = build_plan(settings)
    with bind(settings) as listener:
        # 2. The server, whose import takes a while.
        from triptych.cli.server import run_server
        from triptych.telemetry.logging import configure_logging

        configure_logging(settings.log_level, settings.log_format, background=True)
        for warning in plan.warnings:
            _log.warning(warning)
        return run_server(plan, listener)


def bind(settings: ServeSettings) -> socket.socket:
    """The socket that the server will answer at. Raises `ConfigError`."""
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{settings.named('host')}/{settings.named('port')}"
        raise ConfigError(f"cannot listen: {reason}", where=where, found=f"{host}:{port}") from error
    listener.setblocking(False)
    return listener


@contextmanager
def _signals_are_an_orderly_stop() -> Iterator[None]:
    """Until the server takes over the signals there is nothing to drain: leave with exit code 0."""

    def leave(*_: object) -> None:
        os._exit(0)  # an exception raised inside the import machinery may be lost

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:  # else the server took over
                signal.signal(number, handler)


# Typer reads the signature; it is the table of flags.
serve.__signature__ = inspect.Signature([_parameter(spec) for spec in flag_specs()])  # type: ignore[attr-defined]
