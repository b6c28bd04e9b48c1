"""What a benchmark run is asked to do, checked before anything is sent.

One field per flag, and that field is all there is to know of it: the command line is generated from these models, and
values arrive as the text that was typed. `read_flags` checks them; datasets, backends, the load generator and the
report read the frozen `LoadOptions` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from triptych.config.fields import explain
from triptych.config.settings import Flag
from triptych.errors import ConfigError

__all__ = [
    "BackendName",
    "DatasetName",
    "LoadOptions",
    "RequestProfile",
    "SweepOptions",
    "TargetOptions",
    "Task",
    "parse_replica_counts",
    "read_flags",
]


class BackendName(StrEnum):
    """Which dialect the requests speak."""

    TRIPTYCH = "triptych"
    VLLM_OMNI = "vllm-omni"
    OPENAI = "openai"
    VIDEOS = "v1/videos"


class DatasetName(StrEnum):
    """Where the requests come from."""

    RANDOM = "random"
    TRACE = "trace"
    PROMPTS = "prompts"
    VBENCH = "vbench"


class Task(StrEnum):
    """What is asked for: t text, i image, v video."""

    T2I = "t2i"
    T2V = "t2v"
    I2I = "i2i"
    I2V = "i2v"
    TI2I = "ti2i"
    TI2V = "ti2v"

    @property
    def makes_video(self) -> bool:
        """Whether the answer is a clip."""
        return self.value.endswith("2v")

    @property
    def takes_image(self) -> bool:
        """Whether a request carries an input picture."""
        return "i2" in self.value


_Positive = Annotated[int, Meta(ge=1)]


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `--random-request-config`: parameters of a kind of request and how often it is drawn."""

    weight: Annotated[float, Meta(ge=0)] = 1.0
    width: _Positive | None = None
    height: _Positive | None = None
    num_inference_steps: _Positive | None = None
    num_frames: _Positive | None = None
    fps: _Positive | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None


_PROFILE_FIELDS = frozenset(RequestProfile.__struct_fields__)
_Count = Annotated[int, Field(ge=1)]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


class LoadOptions(BaseModel):
    """One load. Sizes in pixels, `request_rate` in requests per second, None where the server decides.

    Fields that do not agree with one another raise `ConfigError`.
    """

    model_config = _FROZEN

    base_url: str = "http://localhost:8091"
    model: Annotated[str, Flag("Model name; default stands for the first one the server lists.", "NAME")] = "default"
    backend: Annotated[
        BackendName,
        Flag(
            "Request dialect: triptych and vllm-omni post to /v1/chat/completions, openai to /v1/images/generations, "
            "v1/videos to the video job API. OPENAI_API_KEY, where set, is sent as the key.",
            "|".join(BackendName),
        ),
    ] = BackendName.TRIPTYCH
    task: Annotated[Task, Flag("What is asked for; tasks with i send an input picture.", "|".join(Task))] = Task.T2I
    dataset: Annotated[
        DatasetName,
        Flag(
            "Source of requests; trace and prompts read --dataset-path, vbench a local copy of its files.",
            "|".join(DatasetName),
        ),
    ] = DatasetName.RANDOM
    dataset_path: Annotated[Path | None, Flag("File (or folder of pictures) of the dataset.", "PATH")] = None
    num_prompts: Annotated[_Count, Flag("Number of requests.", "N")] = 10
    request_rate: Annotated[
        float,
        Field(gt=0),
        Flag("Requests per second, arriving as a Poisson process; inf sends all at once.", "RATE"),
    ] = math.inf
    max_concurrency: Annotated[_Count | None, Flag("Most requests in flight at a time. Default: no limit.", "N")] = None
    warmup_requests: Annotated[
        int | None,
        Field(ge=0),
        Flag("Requests before the measurement; 0 for none. Default: one per replica.", "N"),
    ] = None
    warmup_num_inference_steps: Annotated[_Count, Flag("Denoising steps of a warm-up request.", "N")] = 2
    width: Annotated[_Count | None, Flag("Width in pixels.", "PIXELS")] = None
    height: Annotated[_Count | None, Flag("Height in pixels.", "PIXELS")] = None
    num_frames: Annotated[_Count | None, Flag("Frames of a clip.", "N")] = None
    fps: Annotated[_Count | None, Flag("Frames per second of a clip.", "N")] = None
    num_inference_steps: Annotated[_Count, Flag("Denoising steps.", "N")] = 50
    seed: Annotated[
        int | None,
        Field(ge=0, le=2**63 - 1),
        Flag("Seed of every request; without one the server draws.", "SEED"),
    ] = None
    random_request_config: Annotated[
        str | None,
        Flag(
            "Kinds of random requests as a JSON list, "
            '[{"width":512,"height":512,"num_inference_steps":20,"weight":0.5}, …]; weight is how often a kind is '
            "drawn.",
            "JSON",
        ),
    ] = None
    random_request_seed: Annotated[int, Flag("Seed of the random dataset and of the arrival times.", "SEED")] = 42
    enable_negative_prompt: Annotated[bool, Flag("Random requests carry a negative prompt.")] = False
    slo: Annotated[
        bool,
        Flag(
            "Report how many requests met their latency target: slo_ms of the trace, else --slo-scale times what the "
            "warm-up requests let expect for the size, frames and steps."
        ),
    ] = False
    slo_scale: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False),
        Flag("Target as a multiple of the expected latency.", "FACTOR"),
    ] = 3.0
    save_dir: Annotated[Path | None, Flag("Keep the pictures and clips in this folder.", "DIR")] = None
    disable_tqdm: Annotated[bool, Flag("No progress bar.")] = False

    @model_validator(mode="after")
    def _check(self) -> LoadOptions:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                "not a web address", where="--base-url", found=self.base_url, wanted="http://host:port or https://…"
            )
        self._check_combinations()
        self.profiles()
        return self

    def _check_combinations(self) -> None:
        if (self.width is None) != (self.height is None):
            given, other = ("--width", "--height") if self.height is None else ("--height", "--width")
            raise ConfigError("given alone", where=given, found=self.width or self.height, wanted=f"{other} as well")
        if self.backend is BackendName.OPENAI and self.task.makes_video:
            raise ConfigError(
                "the image routes make no video",
                where="--backend",
                found=f"openai with --task {self.task}",
                wanted="triptych, vllm-omni or v1/videos",
            )
        if self.backend is BackendName.VIDEOS and not self.task.makes_video:
            raise ConfigError(
                "the video route makes no pictures",
                where="--backend",
                found=f"v1/videos with --task {self.task}",
                wanted="--task t2v, i2v or ti2v",
            )
        if self.dataset_path is None and self.dataset in (DatasetName.TRACE, DatasetName.PROMPTS):
            raise ConfigError(f"--dataset {self.dataset} reads a file", where="--dataset-path", wanted="a file")
        if self.dataset is not DatasetName.RANDOM:
            for name in ("random_request_config", "enable_negative_prompt"):
                if getattr(self, name):
                    raise ConfigError(
                        "only the random dataset takes it",
                        where=_flag(name),
                        found=f"--dataset {self.dataset}",
                        wanted="--dataset random",
                    )
        if self.slo and self.warmup_requests == 0 and self.dataset is not DatasetName.TRACE:
            raise ConfigError(
                "targets are derived from warm-up requests",
                where="--slo",
                found="--warmup-requests 0",
                wanted="1 or more",
            )

    def profiles(self) -> tuple[RequestProfile, ...]:
        """The parsed `--random-request-config`; empty without one. Raises `ConfigError` naming the entry."""
        if self.random_request_config is None:
            return ()
        where = "--random-request-config"
        wanted = 'a JSON list like [{"width":512,"height":512,"num_inference_steps":20,"weight":0.5}]'
        try:
            entries = msgspec.json.decode(self.random_request_config, type=list[dict[str, Any]])
        except msgspec.MsgspecError as error:
            raise ConfigError(str(error), where=where, found=self.random_request_config, wanted=wanted) from error
        profiles = []
        for number, entry in enumerate(entries, start=1):
            label = f"entry {number} of {len(entries)}"
            if unknown := sorted(entry.keys() - _PROFILE_FIELDS):
                keys = ", ".join(sorted(_PROFILE_FIELDS))
                raise ConfigError(f"{label}: unknown key {unknown[0]!r}", where=where, found=entry, wanted=keys)
            try:
                profiles.append(msgspec.convert(entry, RequestProfile))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{label}: {error}", where=where, found=entry, wanted=wanted) from error
        if not sum(profile.weight for profile in profiles) > 0:
            raise ConfigError("no weight above 0", where=where, found=self.random_request_config, wanted=wanted)
        return tuple(profiles)

    def as_json(self) -> dict[str, Any]:
        """The effective configuration as plain JSON values (an infinite rate is `"inf"`)."""
        plain = self.model_dump(mode="json")
        if math.isinf(self.request_rate):
            plain["request_rate"] = "inf"
        return plain


class TargetOptions(BaseModel):
    """What `bench serve` measures, and where its report goes."""

    model_config = _FROZEN

    base_url: Annotated[str | None, Flag("Server address; wins over --host and --port.", "URL")] = None
    host: Annotated[str, Field(min_length=1), Flag("Server host.", "HOST")] = "localhost"
    port: Annotated[int, Field(ge=1, le=65535), Flag("Server port.", "PORT")] = 8091
    output_file: Annotated[Path | None, Flag("Write the whole report there as JSON.", "FILE")] = None

    @property
    def url(self) -> str:
        """The server's address."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"http://{host}:{self.port}" if self.base_url is None else self.base_url


def parse_replica_counts(text: str) -> tuple[int, ...]:
    """`"1,2,4"` as increasing distinct counts. Raises `ConfigError`."""
    where, wanted = "--replicas", "distinct whole numbers of at least 1, like 1,2,3,4"
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError("not a list of counts", where=where, found=text, wanted=wanted) from error
    if min(counts) < 1 or len(set(counts)) != len(counts):
        raise ConfigError("bad counts", where=where, found=text, wanted=wanted)
    return tuple(sorted(counts))


class SweepOptions(BaseModel):
    """What `bench sweep` starts; of the load, what it decides itself when not told. Times in seconds."""

    model_config = _FROZEN

    model: Annotated[
        str | None, Flag("What `triptych serve` takes as MODEL. Default: the embedded model.", "MODEL", option="MODEL")
    ] = None
    replicas: Annotated[
        tuple[int, ...], BeforeValidator(parse_replica_counts), Flag("Replica counts to measure.", "COUNTS")
    ] = (1, 2, 3, 4)
    stage_configs_path: Annotated[
        str | None, Flag("Stage file; its device list is cut to what each count needs.", "FILE")
    ] = None
    output_dir: Annotated[Path, Flag("Folder of table, plot, reports and server logs.", "DIR")] = Path("results/sweep")
    start_timeout: Annotated[
        float,
        Field(ge=1, allow_inf_nan=False),
        Flag("Time until all replicas must be ready.", "SECONDS"),
    ] = 600.0
    num_prompts: Annotated[
        _Count | None, Flag("Requests per count. Default: 8 per replica, divisible by every count.", "N")
    ] = None
    max_concurrency: Annotated[
        _Count | None, Flag("Most requests in flight at a time. Default: twice the largest count.", "N")
    ] = None


_Options = TypeVar("_Options", bound=BaseModel)


def read_flags(options: type[_Options], given: Mapping[str, object]) -> _Options:
    """The fields of `options` from what was typed (None: not typed). Raises `ConfigError` with flag, value, wanted."""
    typed = {name: given[name] for name in options.model_fields if given.get(name) is not None}
    try:
        return options.model_validate(typed)
    except ValidationError as error:
        problem = explain(error)
        message = "not a good value" if problem.kind == "enum" or problem.message == "wrong type" else problem.message
        where = _flag(str(problem.location[0]))
        raise ConfigError(message, where=where, found=problem.found, wanted=problem.wanted) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
