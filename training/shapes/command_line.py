"""What the command lines of all recipes share: options, the files of a work folder, quiet packages."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging as transformers_logging

__all__ = [
    "CaptionSeed",
    "EncoderSteps",
    "History",
    "Into",
    "JudgedModel",
    "Minutes",
    "ModelToJudge",
    "Seed",
    "SheetEvery",
    "Threads",
    "Work",
    "begin",
    "quiet",
    "results_file",
    "sheet_file",
]

Work = Annotated[Path, typer.Option(help="Folder for data, states, sample sheets and the model.")]
Minutes = Annotated[float | None, typer.Option(help="End after so many minutes of training.")]
EncoderSteps = Annotated[int, typer.Option(help="Steps of 128 captions.")]
SheetEvery = Annotated[int, typer.Option(help="Steps between sample sheets.")]
Seed = Annotated[int, typer.Option(help="Seed of data and training.")]
Threads = Annotated[int, typer.Option(help="Processor threads.")]

ModelToJudge = Annotated[Path, typer.Argument(help="Pipeline directory; the results are written beside it.")]
CaptionSeed = Annotated[int, typer.Option(help="Seed of the captions.")]

JudgedModel = Annotated[Path, typer.Argument(help="Pipeline directory that `judge` has judged.")]
Into = Annotated[Path, typer.Option(help="Directory that receives weights, card and sample sheet.")]
History = Annotated[str, typer.Option(help="One sentence on how these weights were trained.")]


def begin(work: Path, recipe: Mapping[str, object]) -> None:
    """Note what a work folder is begun with; a run that goes on in it must be told the same.

    Raises `typer.BadParameter`: a state of another recipe would be taken up, and what was asked for ignored.
    """
    file, asked = work / "recipe.json", {name: str(value) for name, value in recipe.items()}
    if not file.is_file():
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asked, indent=1) + "\n")
        return
    begun = json.loads(file.read_text())
    for name, value in asked.items():
        if begun.get(name) != value:
            raise typer.BadParameter(
                f"{work} was begun with {name} {begun.get(name)}, got {value}: go on with that, or name another --work"
            )


def results_file(model: Path) -> Path:
    """Where the results of a judged pipeline directory lie."""
    return model.with_name(f"{model.name}-results.json")


def sheet_file(model: Path) -> Path:
    """Where the sample sheet of a judged pipeline directory lies."""
    return model.with_name(f"{model.name}-samples.png")


def quiet(threads: int) -> None:
    """Keep other packages from talking and from asking the network, and use so many threads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")  # of other packages
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
