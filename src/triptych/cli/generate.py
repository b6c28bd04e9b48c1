"""`triptych generate`: one request without a server, on the same engine, in this process.

Flags become `CommonParameters`, the model's `ModelInfo` turns them into one `GenerationRequest`, its units run on the
main thread, and each output is written whole or not at all. What needs no model is refused before one is loaded.
"""

from __future__ import annotations

import json
import os
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli.exit_codes import exit_codes
from triptych.errors import ConfigError, ErrorCode, TriptychError

if TYPE_CHECKING:
    from triptych.cli.generation import Picture
    from triptych.config.parameters import CommonParameters
    from triptych.messages import GenerationRequest, MediaInput

__all__ = ["generate"]

_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".mp4": "mp4"}
_SUFFIXES = {name: suffix for suffix, name in reversed(_FORMATS.items())}

_Model = Annotated[
    str | None,
    typer.Option(
        help="Local diffusers directory, Hugging Face id, or an embedded model.", show_default="triptych/shapes"
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="File to write; its suffix says the format.", show_default="triptych.png or .mp4"
    ),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.", show_default=False)],
    output: _Output = None,
    model: _Model = None,
    stage_configs_path: Annotated[Path | None, typer.Option(help="Stage file; its first replica is used.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Outputs; number i uses seed + i.")] = None,
    num_outputs_per_prompt: Annotated[int | None, typer.Option(help="Another name of --n.")] = None,
    size: Annotated[str | None, typer.Option(help="WxH in pixels, or auto.")] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels.")] = None,
    height: Annotated[int | None, typer.Option(help="Height in pixels.")] = None,
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free (or distilled) guidance.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="Guidance by a negative prompt.")] = None,
    strength: Annotated[float | None, typer.Option(help="How far an input picture may change, 0 to 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first output.", show_default="drawn")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames of a clip.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames a second.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of a clip, instead of frames.")] = None,
    output_format: Annotated[str | None, typer.Option(help="png, jpeg or webp.", show_default="by suffix")] = None,
    output_compression: Annotated[int | None, typer.Option(help="0 to 100; quality of jpeg and webp.")] = None,
    lora: Annotated[str | None, typer.Option(help="Name of a LoRA of the stage file.")] = None,
    lora_scale: Annotated[float | None, typer.Option(help="Its strength, -10 to 10.", show_default="1")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Picture to work on; may be repeated.")] = None,
    mask: Annotated[Path | None, typer.Option(help="Where to draw anew: transparent, or white.")] = None,
    extra_args: Annotated[str | None, typer.Option(help="JSON object of further arguments of the pipeline.")] = None,
) -> None:
    """Make one picture or clip without a server."""
    from triptych.engine.base import EngineStartError

    with exit_codes(EngineStartError, OSError):
        fields = {name: value for name, value in locals().items() if name in _PARAMETERS}
        asked = {"model": model, "revision": revision}
        if stage_configs_path is not None:
            asked["stage_configs_path"] = str(stage_configs_path)
        _run(fields, asked, output=output, images=image or [], mask=mask)


_PARAMETERS = frozenset(signature(generate).parameters) - {
    *("output", "model", "stage_configs_path", "revision", "image", "mask")
}


def _run(
    fields: dict[str, Any], asked: dict[str, str | None], *, output: Path | None, images: list[Path], mask: Path | None
) -> None:
    # 1. What can be found out without weights.
    fields["extra_args"] = _json_object(fields["extra_args"])
    fields["lora"] = _lora(fields.pop("lora"), fields.pop("lora_scale"))
    if output is not None and fields["output_format"] is None and _format_of(output) in ("jpeg", "webp"):
        fields["output_format"] = _format_of(output)
    from triptych.config.lora import resolve_lora
    from triptych.config.parameters import check_without_model, parse_parameters
    from triptych.config.plan import build_plan
    from triptych.config.settings import read_settings

    parameters = parse_parameters(fields)
    _check_target(output, parameters)
    # The plan is that of `serve`, and its first replica is what runs here: that of the file, or one with all there is.
    if "stage_configs_path" not in asked:
        asked["num_replicas"] = "1"
    settings = read_settings(asked, {}, options={"model": "--model"})
    check_without_model(parameters, settings.limits())
    inputs, frames = _inputs(images, mask, max_pixels=settings.max_pixels)
    plan = build_plan(settings)
    resolve_lora(parameters.lora, registered=plan.stage.engine_args.lora_modules)
    # 2. Weights, and what they take.
    from triptych.cli.generation import Generation

    generation = Generation(plan)
    request = generation.load(parameters, inputs, frames)
    target = _target(output, request)
    # 3. Run, and write what is done.
    for picture in generation.run(request):
        path = target if request.n == 1 else target.with_stem(f"{target.stem}-{picture.unit}")
        _write(path, picture.data)
        typer.echo(_summary(path, picture, request))


def _inputs(
    images: list[Path], mask: Path | None, *, max_pixels: int
) -> tuple[tuple[MediaInput, ...], tuple[bytes, ...]]:
    if not images and mask is None:
        return (), ()
    from triptych.cli.input_files import read_input_files  # brings Pillow and numpy

    return read_input_files(images, mask, max_pixels=max_pixels)


def _lora(name: str | None, scale: float | None) -> dict[str, Any] | None:
    if name is None:
        if scale is not None:
            raise ConfigError("needs --lora", where="--lora-scale", found=scale)
        return None
    return {"name": name} if scale is None else {"name": name, "scale": scale}


def _json_object(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        found = text if len(text) <= 200 else f"{text[:200]}..."
        raise ConfigError(f"is not JSON: {error}", where="--extra-args", found=found) from error


def _format_of(output: Path) -> str:
    if output.suffix.lower() not in _FORMATS:
        raise ConfigError("unknown suffix", where="--output", found=str(output), wanted=", ".join(_FORMATS))
    return _FORMATS[output.suffix.lower()]


def _check_target(output: Path | None, parameters: CommonParameters) -> None:
    """Find out now, not after minutes of work."""
    if output is None:
        return
    if parameters.output_format not in (None, _format_of(output)):
        raise ConfigError(
            "format and suffix disagree", where="--output", found=str(output), wanted=f"{parameters.output_format}"
        )
    folder = output.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError("cannot write there", where="--output", found=str(output), wanted="an existing folder")
    if output.is_dir():
        raise ConfigError("is a folder", where="--output", found=str(output), wanted="a file")


def _target(output: Path | None, request: GenerationRequest) -> Path:
    suffix = _SUFFIXES[request.output.format]
    if output is None:
        return Path(f"triptych{suffix}")
    if _format_of(output) != request.output.format:
        makes = "clips (.mp4)" if request.output.format == "mp4" else "pictures (.png, .jpg, .webp)"
        message = f"this model makes {makes}, got --output {output}"
        raise TriptychError(ErrorCode.INVALID_VALUE, message, param="output_format")
    return output


def _write(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _summary(path: Path, picture: Picture, request: GenerationRequest) -> str:
    output, seed = picture.output, request.params.seed + picture.unit
    size = f"{output.width}x{output.height}"
    if output.fps:
        size += f", {output.num_frames} frames at {output.fps} fps"
    return f"{path}: {size}, {output.steps} steps, seed {seed}, {output.inference_s:.2f} s"
