"""Entry point of `triptych`: finds the subcommand and imports it alone.

Exit codes: 0 done or stopped as asked, 2 bad configuration (one message on stderr), 1 anything else, 130 interrupted.
Help and configuration errors stay fast because no other subcommand, no server and no model library is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from triptych import __version__

__all__ = ["app", "main"]

# Subcommand: where its callback or Typer app is, and what the list of commands says of it.
_COMMANDS = {
    "serve": ("triptych.cli.serve:serve", "Serve a model over HTTP."),
    "generate": ("triptych.cli.generate:generate", "Make one picture or video without a server."),
    "check": ("triptych.cli.check:check", "Check a stage file and show what it means here."),
    "bench": ("triptych.cli.bench:bench_app", "Measure a server."),
}
_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _LazyGroup(TyperGroup):
    """Replaces the stub of a subcommand by the real one at the moment it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _COMMANDS:
            self.add_command(_load(args[0]), args[0])
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    target, summary = _COMMANDS[name]
    module, attribute = target.split(":")
    command = getattr(import_module(module), attribute)
    if not isinstance(command, typer.Typer):
        single = typer.Typer(add_completion=False, context_settings=_HELP_OPTIONS, pretty_exceptions_enable=False)
        single.command(name, help=_flowing(command.__doc__ or summary))(command)
        command = single
    return typer.main.get_command(command)


def _flowing(doc: str) -> str:
    """Paragraphs as single lines, so that the help wraps them to the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in doc.split("\n\n"))


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    context_settings=_HELP_OPTIONS,
    pretty_exceptions_enable=False,
    help="Multi-replica serving for diffusion models behind one OpenAI-compatible port.",
)


def _stub() -> None:
    """Stands for a subcommand in the list of commands; never runs."""


for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, help=_summary)(_stub)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triptych {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before the subcommand."""


def _settle_process() -> None:
    """Make good what a careless parent left out: standard descriptors, and a working directory that exists."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket gets a number that is written to
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def main() -> NoReturn:
    """Run the command line of this process and leave with its exit code."""
    _settle_process()
    app(prog_name="triptych")
    sys.exit(0)
