"""How a command ends: one readable line on standard error and an exit code, the same for every subcommand.

2 for what the caller can put right (configuration, flags, parameters), 1 for what went wrong, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from triptych.errors import ConfigError, TriptychError

__all__ = ["exit_codes"]


@contextmanager
def exit_codes(*failures: type[Exception]) -> Iterator[None]:
    """Turn what a command raises into its end; `failures` are further errors that are worth one line, exit code 1."""
    try:
        yield
    except ConfigError as error:
        _leave(error, str(error), 2)
    except TriptychError as error:
        _leave(error, error.message, 2 if error.status == 400 else 1)
    except failures as error:
        _leave(error, str(error), 1)
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def _leave(error: Exception, message: str, code: int) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code) from error
