"""`triptych serve`: flags and environment become settings, settings a plan, and the plan runs.

The flags are generated from `ServeSettings`. The server itself is imported only once the plan stands, so that a wrong
configuration is told at once.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Annotated

import typer

from triptych.config.plan import build_plan
from triptych.config.settings import FlagSpec, ServeSettings, flag_specs, read_settings

__all__ = ["serve", "serve_settings"]

_log = logging.getLogger(__name__)


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
    settings = serve_settings(given)
    if settings.dry_run:
        from triptych.cli.check import show_plan

        show_plan(build_plan(settings, refuse_unavailable=False))
        return
    plan = build_plan(settings)
    from triptych.cli.server import run_server
    from triptych.telemetry.logging import configure_logging

    configure_logging(settings.log_level, settings.log_format, background=True)
    for warning in plan.warnings:
        _log.warning(warning)
    raise typer.Exit(run_server(plan))


# Typer reads the signature; it is the table of flags.
serve.__signature__ = inspect.Signature([_parameter(spec) for spec in flag_specs()])  # type: ignore[attr-defined]
