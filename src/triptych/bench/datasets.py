"""Where the requests of a run come from: one small class per dataset, chosen by name.

A dataset is built from the options and yields `--num-prompts` requests, the same ones for the same options; what the
user should know of it (lines left out, flags without effect) is in `notes`.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import msgspec
from PIL import Image

from triptych.bench.options import DatasetName, LoadOptions, RequestProfile
from triptych.bench.traces import TraceRow, read_trace
from triptych.bench.workload import BenchRequest, InputImage
from triptych.errors import ConfigError

__all__ = [
    "DATASETS",
    "BenchDataset",
    "PromptsDataset",
    "RandomDataset",
    "TraceDataset",
    "VBenchDataset",
    "load_dataset",
]

_COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
_SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring")
_PLACES = ("", " at the top", " at the bottom", " on the left", " on the right", " in the center")
_MIMES = MappingProxyType({".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"})


class BenchDataset(Protocol):
    """Makes the requests of a run."""

    notes: list[str]

    def __init__(self, options: LoadOptions) -> None: ...

    def requests(self) -> list[BenchRequest]:
        """All requests, in order. Raises `ConfigError`."""


def _from_flags(options: LoadOptions, prompt: str) -> BenchRequest:
    return BenchRequest(
        prompt=prompt,
        width=options.width,
        height=options.height,
        num_frames=options.num_frames,
        fps=options.fps,
        num_inference_steps=options.num_inference_steps,
        seed=options.seed,
    )


class RandomDataset:
    """Invented prompts, no two alike; sizes and steps drawn from `--random-request-config` when given."""

    def __init__(self, options: LoadOptions) -> None:
        self.notes: list[str] = []
        self._options = options

    def requests(self) -> list[BenchRequest]:
        """`num_prompts` requests, the same for the same `random_request_seed`."""
        options = self._options
        rng = random.Random(options.random_request_seed)
        profiles = options.profiles()
        weights = [profile.weight for profile in profiles]
        drawn: Sequence[RequestProfile | None] = [None] * options.num_prompts
        if profiles:
            drawn = rng.choices(profiles, weights=weights, k=options.num_prompts)
        images = (_noise_picture(options.random_request_seed),) if options.task.takes_image else ()
        return [self._request(index, rng, profile, images) for index, profile in enumerate(drawn)]

    def _request(
        self, index: int, rng: random.Random, profile: RequestProfile | None, images: tuple[InputImage, ...]
    ) -> BenchRequest:
        colour, shape, place = rng.choice(_COLOURS), rng.choice(_SHAPES), rng.choice(_PLACES)
        request = _from_flags(self._options, f"a {colour} {shape}{place}, number {index}")
        request = replace(request, images=images)
        if self._options.enable_negative_prompt:
            request = replace(request, negative_prompt=f"blurry, crooked, number {index}")
        if profile is not None:
            given = {key: value for key, value in msgspec.structs.asdict(profile).items() if value is not None}
            given.pop("weight")
            request = replace(request, **given)
        return request


class TraceDataset:
    """The lines of a trace file; width and height given as flags win over the trace, otherwise the trace wins."""

    def __init__(self, options: LoadOptions) -> None:
        self.notes: list[str] = []
        self._options = options

    def requests(self) -> list[BenchRequest]:
        """The first `num_prompts` lines, in the order of their timestamps."""
        options = self._options
        assert options.dataset_path is not None
        rows, total, unknown = read_trace(options.dataset_path, limit=options.num_prompts)
        if total > len(rows):
            self.notes.append(f"the first {len(rows)} of {total} lines of the trace are used (--num-prompts)")
        if unknown:
            self.notes.append(f"fields of the trace that mean nothing here: {', '.join(unknown)}")
        if rows[0].timestamp is not None and not math.isinf(options.request_rate):
            self.notes.append("--request-rate has no effect: the timestamps of the trace are kept")
        if rows[0].timestamp is not None:
            rows.sort(key=lambda row: row.timestamp or 0.0)
        return [self._request(index, row) for index, row in enumerate(rows)]

    def _request(self, index: int, row: TraceRow) -> BenchRequest:
        options = self._options
        prompt = row.prompt or row.text or f"a picture of a harbour, number {index}"
        paths = row.image_paths or ((row.image_path,) if row.image_path else ())
        if options.task.takes_image and not paths:
            raise ConfigError(
                "a line without an input picture",
                where=str(options.dataset_path),
                found=f"request {index} with --task {options.task}",
                wanted="image_path or image_paths on every line",
            )
        own_size = options.width is None
        return BenchRequest(
            prompt=prompt,
            negative_prompt=row.negative_prompt,
            width=row.width if own_size else options.width,
            height=row.height if own_size else options.height,
            num_frames=options.num_frames if row.num_frames is None else row.num_frames,
            fps=options.fps if row.fps is None else row.fps,
            num_inference_steps=options.num_inference_steps
            if row.num_inference_steps is None
            else row.num_inference_steps,
            seed=options.seed if row.seed is None else row.seed,
            guidance_scale=row.guidance_scale,
            true_cfg_scale=row.true_cfg_scale,
            images=tuple(_read_picture(Path(path)) for path in paths) if options.task.takes_image else (),
            timestamp_s=row.timestamp,
            slo_ms=row.slo_ms,
        )


class PromptsDataset:
    """Prompts from a file, one a line, or JSON lines with `prompt` and trace fields; repeated when too few."""

    def __init__(self, options: LoadOptions) -> None:
        self.notes: list[str] = []
        self._options = options

    def requests(self) -> list[BenchRequest]:
        """`num_prompts` requests; JSON lines may carry an own seed, size and so on."""
        options = self._options
        if options.task.takes_image:
            raise ConfigError(
                "a prompts file has no pictures",
                where="--dataset",
                found=f"prompts with --task {options.task}",
                wanted="random, trace or vbench",
            )
        assert options.dataset_path is not None
        lines = _read_lines(options.dataset_path)
        if lines[0].startswith("{"):
            traced = TraceDataset(options)
            found = [replace(request, timestamp_s=None) for request in traced.requests()]
            self.notes += traced.notes
        else:
            found = [_from_flags(options, line) for line in lines]
        return _repeated(found, options.num_prompts, self.notes)


class VBenchDataset:
    """VBench from a local copy: its prompt file, or for tasks with input pictures a folder of pictures."""

    def __init__(self, options: LoadOptions) -> None:
        self.notes: list[str] = []
        self._options = options

    def requests(self) -> list[BenchRequest]:
        """`num_prompts` requests; a picture's caption is its file name."""
        options = self._options
        if options.dataset_path is None:
            raise ConfigError(
                "downloading VBench is not available in this version",
                where="--dataset-path",
                wanted="a prompt file (one prompt a line), or a folder of pictures for tasks with input pictures",
            )
        if not options.task.takes_image:
            found = [_from_flags(options, line) for line in _read_lines(options.dataset_path)]
            return _repeated(found, options.num_prompts, self.notes)
        if not options.dataset_path.is_dir():
            raise ConfigError(
                "not a folder", where="--dataset-path", found=str(options.dataset_path), wanted="a folder of pictures"
            )
        paths = sorted(path for path in options.dataset_path.iterdir() if path.suffix.lower() in _MIMES)
        if not paths:
            raise ConfigError(
                "no picture in it", where="--dataset-path", found=str(options.dataset_path), wanted=", ".join(_MIMES)
            )
        found = [
            replace(_from_flags(options, path.stem), images=(_read_picture(path),))
            for path in paths[: options.num_prompts]
        ]
        return _repeated(found, options.num_prompts, self.notes)


DATASETS: Final[Mapping[DatasetName, type[BenchDataset]]] = MappingProxyType(
    {
        DatasetName.RANDOM: RandomDataset,
        DatasetName.TRACE: TraceDataset,
        DatasetName.PROMPTS: PromptsDataset,
        DatasetName.VBENCH: VBenchDataset,
    }
)


def load_dataset(options: LoadOptions) -> tuple[list[BenchRequest], list[str]]:
    """The requests of the dataset the options name, and notes for the user. Raises `ConfigError`."""
    dataset = DATASETS[options.dataset](options)
    return dataset.requests(), dataset.notes


def _repeated(found: list[BenchRequest], count: int, notes: list[str]) -> list[BenchRequest]:
    if len(found) < count:
        notes.append(f"{len(found)} different requests are repeated to make {count} (--num-prompts)")
    return [found[index % len(found)] for index in range(count)]


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read it: {error}", where="--dataset-path", found=str(path)) from error
    if not lines:
        raise ConfigError("no prompt in it", where="--dataset-path", found=str(path), wanted="one prompt a line")
    return lines


def _read_picture(path: Path) -> InputImage:
    try:
        return InputImage(path.name, _MIMES.get(path.suffix.lower(), "application/octet-stream"), path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read an input picture: {error}", where="--dataset-path", found=str(path)) from error


def _noise_picture(seed: int) -> InputImage:
    side = 512
    picture = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(side * side * 3))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return InputImage("input.png", "image/png", buffer.getvalue())
