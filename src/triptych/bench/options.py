"""What a benchmark run is asked to do, checked before anything is sent.

The command line fills one frozen `LoadOptions`; datasets, backends, the load generator and the report read it and
nothing else. Flag names are the field names, so that an error and the report's `config` speak the user's words.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from triptych.errors import ConfigError

__all__ = ["BackendName", "DatasetName", "LoadOptions", "RequestProfile", "Task"]


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


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `--random-request-config`: parameters of a kind of request and how often it is drawn."""

    weight: float = 1.0
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    seed: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None


_PROFILE_FIELDS = frozenset(RequestProfile.__struct_fields__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """One load. Sizes in pixels, `request_rate` in requests per second, None where the server decides.

    Raises `ConfigError` naming flag, value and what was wanted.
    """

    base_url: str = "http://localhost:8091"
    model: str = "default"
    backend: BackendName = BackendName.TRIPTYCH
    task: Task = Task.T2I
    dataset: DatasetName = DatasetName.RANDOM
    dataset_path: Path | None = None
    num_prompts: int = 10
    request_rate: float = math.inf
    max_concurrency: int | None = None
    warmup_requests: int | None = None
    warmup_num_inference_steps: int = 2
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int = 50
    seed: int | None = None
    random_request_config: str | None = None
    random_request_seed: int = 42
    enable_negative_prompt: bool = False
    slo: bool = False
    slo_scale: float = 3.0
    save_dir: Path | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                "not a web address", where="--base-url", found=self.base_url, wanted="http://host:port or https://…"
            )
        self._check_numbers()
        self._check_combinations()
        self.profiles()

    def _check_numbers(self) -> None:
        positive = ("num_prompts", "num_inference_steps", "warmup_num_inference_steps")
        positive_or_none = ("max_concurrency", "width", "height", "num_frames", "fps")
        for name in positive + positive_or_none:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("out of range", where=_flag(name), found=value, wanted="a whole number of at least 1")
        if self.warmup_requests is not None and self.warmup_requests < 0:
            raise ConfigError("out of range", where="--warmup-requests", found=self.warmup_requests, wanted="0 or more")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError("out of range", where="--seed", found=self.seed, wanted="0 to 2^63-1")
        if not self.request_rate > 0:
            raise ConfigError(
                "out of range", where="--request-rate", found=self.request_rate, wanted="more than 0, or inf"
            )
        if not (self.slo_scale > 0 and math.isfinite(self.slo_scale)):
            raise ConfigError("out of range", where="--slo-scale", found=self.slo_scale, wanted="a number above 0")

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
        """The parsed `--random-request-config`; empty without one."""
        if self.random_request_config is None:
            return ()
        where = "--random-request-config"
        wanted = 'a JSON list like [{"width":512,"height":512,"num_inference_steps":20,"weight":0.5}]'
        try:
            entries = msgspec.json.decode(self.random_request_config, type=list[dict[str, Any]])
            if unknown := sorted({key for entry in entries for key in entry} - _PROFILE_FIELDS):
                raise ConfigError(f"unknown key {unknown[0]!r}", where=where, wanted=", ".join(sorted(_PROFILE_FIELDS)))
            profiles = msgspec.convert(entries, tuple[RequestProfile, ...])
        except msgspec.MsgspecError as error:
            raise ConfigError(str(error), where=where, found=self.random_request_config, wanted=wanted) from error
        weights = [profile.weight for profile in profiles]
        if not weights or min(weights) < 0 or not sum(weights) > 0:
            raise ConfigError("no weight above 0", where=where, found=self.random_request_config, wanted=wanted)
        return profiles

    def as_json(self) -> dict[str, Any]:
        """The effective configuration as plain JSON values (an infinite rate is `"inf"`)."""
        plain = asdict(self)
        for name, value in plain.items():
            if isinstance(value, Path | StrEnum):
                plain[name] = str(value)
        if math.isinf(self.request_rate):
            plain["request_rate"] = "inf"
        return plain


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
