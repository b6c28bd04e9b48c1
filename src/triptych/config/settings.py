"""The flags of `triptych serve`: one field per flag, and that field is all there is to know of it.

Option name, environment variable, help text, default and check come from `ServeSettings`; the command line and the
documentation are generated from it. `read_settings` merges what was typed over the environment over the defaults, and
`ServeSettings.named` says by which name a value came; None means that the stage file may speak.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from triptych.config.addresses import ApiKey, HttpUrl, Origin, RootPath
from triptych.config.fields import ByteSize, DeviceIds, NamedPaths, explain, short
from triptych.config.limits import Limits
from triptych.errors import ConfigError

__all__ = ["Flag", "FlagSpec", "ServeSettings", "flag_specs", "read_settings"]

_log = logging.getLogger(__name__)

_Names = tuple[Annotated[str, Field(min_length=1)], ...]
_SERVER, _MODEL, _LIMITS, _ACCESS = "Server", "Model and replicas", "Limits", "Access"


@dataclass(frozen=True, slots=True)
class Flag:
    """Help of one flag; `option` is given where it is not the field's name, `metavar` where it takes a value."""

    help: str
    metavar: str = ""
    panel: str = _SERVER
    option: str = ""
    secret: bool = False


class ServeSettings(BaseModel):
    """What was asked of `triptych serve`; None: left to the stage file. Times in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[
        str | None,
        Field(min_length=1),
        Flag("Local diffusers directory, Hugging Face id, or an embedded model.", "MODEL", _MODEL, option="MODEL"),
    ] = None
    omni: Annotated[bool, Flag("Accepted; it is the only mode.", panel=_MODEL)] = False
    stage_configs_path: Annotated[str | None, Flag("Stage file.", "FILE", _MODEL)] = None
    num_replicas: Annotated[
        int | None,
        Field(ge=1, le=1024),
        Flag("Replicas; from the stage file, else 1, and 2 for the embedded model.", "N", _MODEL),
    ] = None
    devices: Annotated[
        DeviceIds | None,
        Flag('Logical device ids, "0,1,2,3"; from the file, else the first ones.', "IDS", _MODEL),
    ] = None
    served_model_names: Annotated[
        _Names,
        Flag("Name that clients use; the first is shown, all are taken.", "NAME", _MODEL, "served-model-name"),
    ] = ()
    revision: Annotated[
        str | None, Field(min_length=1), Flag("Branch, tag or commit of a hub model.", "REV", _MODEL)
    ] = None
    lora_modules: Annotated[NamedPaths, Flag("A LoRA that requests may name.", "NAME=PATH", _MODEL)] = {}
    executor: Annotated[
        Literal["process", "ray"] | None, Flag("Where replicas run (process).", "process|ray", _MODEL)
    ] = None
    ray_address: Annotated[str | None, Flag("Ray cluster to join.", "ADDRESS", _MODEL)] = None
    dry_run: Annotated[bool, Flag("Check, print and leave, as `triptych check`.", panel=_MODEL)] = False

    max_num_seqs: Annotated[
        int | None, Field(ge=1, le=1024), Flag("Requests that run together in a replica (1).", "N", _LIMITS)
    ] = None
    max_queue_size: Annotated[
        int | None, Field(ge=1), Flag("Outputs that may wait for a replica (1024).", "N", _LIMITS)
    ] = None
    request_timeout: Annotated[float, Field(gt=0), Flag("Queue and run of a request.", "SECONDS", _LIMITS)] = 600.0
    shutdown_timeout: Annotated[
        float, Field(ge=0), Flag("Time for running work to finish at the end.", "SECONDS", _LIMITS)
    ] = 30.0
    max_pixels: Annotated[int, Field(ge=1), Flag("Width times height of a frame.", "N", _LIMITS)] = 4_194_304
    max_num_frames: Annotated[int, Field(ge=1), Flag("Frames of a clip.", "N", _LIMITS)] = 257
    max_num_inference_steps: Annotated[int, Field(ge=1), Flag("Denoising steps.", "N", _LIMITS)] = 1000
    max_body_size: Annotated[
        ByteSize, Field(ge=1, le=1024**4), Flag("Body of an HTTP request, in bytes or as 64MiB.", "SIZE", _LIMITS)
    ] = 64 * 1024**2

    host: Annotated[str, Field(min_length=1), Flag("Address to listen at.", "HOST")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535), Flag("TCP port.", "PORT")] = 8000
    root_path: Annotated[RootPath, Flag("Path prefix of a proxy, stripped by it or not.", "PATH")] = ""
    public_url: Annotated[HttpUrl | None, Flag("Address that clients see, for links in answers.", "URL")] = None
    ssl_keyfile: Annotated[str | None, Flag("Private key for HTTPS.", "FILE")] = None
    ssl_certfile: Annotated[str | None, Flag("Certificate for HTTPS.", "FILE")] = None
    data_dir: Annotated[
        str | None, Flag("Where jobs and files are kept, else a folder of the user, by port.", "DIR")
    ] = None
    job_ttl: Annotated[
        float, Field(gt=0, le=31_536_000), Flag("Time for which a video job is kept after its end.", "SECONDS")
    ] = 86_400.0
    max_job_storage: Annotated[
        ByteSize, Field(ge=1), Flag("Room for the clips of video jobs; the oldest go first.", "SIZE")
    ] = 10 * 1024**3
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag("Least level that is logged.", "debug|info|warning|error")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Flag("One line, or one JSON object, per record.", "text|json")] = (
        "text"
    )
    log_prompts: Annotated[bool, Flag("Log the prompt of every request, too.")] = False
    chat_image_format: Annotated[
        Literal["parts", "images"], Flag("How chat answers carry pictures.", "parts|images")
    ] = "parts"

    api_keys: Annotated[
        tuple[ApiKey, ...],
        Field(repr=False),
        Flag("Key that clients must send.", "KEY", _ACCESS, "api-key", secret=True),
    ] = ()
    admin_api_key: Annotated[
        ApiKey | None,
        Field(repr=False),
        Flag("Key for everything, writes to /v1/replicas among it.", "KEY", _ACCESS, secret=True),
    ] = None
    allowed_media_domains: Annotated[
        _Names, Flag("Host that input pictures may be fetched from.", "DOMAIN", _ACCESS)
    ] = ()
    allowed_origins: Annotated[
        tuple[Origin, ...], Flag("Web origin that browsers may call from.", "ORIGIN", _ACCESS)
    ] = ()

    _names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def named(self, field: str) -> str:
        """What messages call a field: the flag, or the variable where the value came from the environment."""
        return self._names.get(field) or _specs()[field].option

    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(
            max_pixels=self.max_pixels,
            max_num_frames=self.max_num_frames,
            max_num_inference_steps=self.max_num_inference_steps,
            request_timeout_s=self.request_timeout,
        )


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag as the command line, the environment and the documentation name it."""

    field: str
    option: str
    variable: str
    flag: Flag
    default: Any
    is_switch: bool
    is_list: bool

    @property
    def default_text(self) -> str:
        """The default as a reader would type it; empty where there is none to show."""
        if self.field in ("max_body_size", "max_job_storage"):
            return f"{self.default // 1024**2}MiB"
        empty = self.is_switch or self.default in (None, "", (), {})
        return "" if empty else f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def flag_specs() -> tuple[FlagSpec, ...]:
    """Every flag, in the order of the help."""
    specs = []
    for name, field in ServeSettings.model_fields.items():
        flag = next(entry for entry in field.metadata if isinstance(entry, Flag))
        option = flag.option or name.replace("_", "-")
        specs.append(
            FlagSpec(
                field=name,
                option=option if option == "MODEL" else f"--{option}",
                variable=f"TRIPTYCH_{option.upper().replace('-', '_')}",
                flag=flag,
                default=field.default,
                is_switch=field.annotation is bool,
                is_list=get_origin(field.annotation) in (tuple, dict),
            )
        )
    return tuple(specs)


@cache
def _specs() -> dict[str, FlagSpec]:
    return {spec.field: spec for spec in flag_specs()}


def read_settings(
    given: Mapping[str, object], environ: Mapping[str, str], *, options: Mapping[str, str] = MappingProxyType({})
) -> ServeSettings:
    """What was typed (`given`, by field; None: not typed) over the environment over the defaults.

    `options` are fields that the command calls by another name than `serve`. Raises `ConfigError` that names the flag,
    or the variable where the value came from there.
    """
    values = {name: value for name, value in given.items() if value is not None}
    names = dict(options)
    for spec in _specs().values():
        text = environ.get(spec.variable, "").strip()
        if spec.field in values or not text:
            continue
        if text.startswith("tcp://"):
            _log.warning("%s=%s is ignored: Kubernetes sets it for a Service named triptych", spec.variable, text)
            continue
        values[spec.field] = [part.strip() for part in text.split(",")] if spec.is_list else text
        names[spec.field] = spec.variable
    try:
        settings = ServeSettings.model_validate(values)
    except ValidationError as error:
        problem = explain(error)
        spec = _specs()[str(problem.location[0])]
        name = names.get(spec.field, spec.option)
        raise ConfigError(
            "not a good value" if problem.message == "wrong type" else problem.message,
            where=name,
            found="(a secret)" if spec.flag.secret else short(environ.get(name, problem.found)),
            wanted=problem.wanted,
        ) from error
    settings._names = names
    return settings
