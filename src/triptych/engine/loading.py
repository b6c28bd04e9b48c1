"""From a model folder to a pipeline on its device. Whatever goes wrong is one readable `EngineStartError`.

Nothing is fetched and no code of the folder is run here. On CPU the dtype is the one on disk where the processor can
compute in it, so that the weights of all replicas are the same memory-mapped pages.
"""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.guiders import BaseGuidance
from diffusers.pipelines.pag.pag_utils import PAGMixin
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from triptych.config.tree import EngineArgs
from triptych.engine.base import EngineStartError
from triptych.engine.failures import one_line
from triptych.engine.lora import Loras
from triptych.engine.switches import apply_switches, denoisers, offload, quantization_arguments
from triptych.messages import ReplicaSpec

__all__ = ["check_guiders", "device_of", "load_pipeline", "locate_model"]

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CPU_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100 * 1024 * 1024


def locate_model(spec: ReplicaSpec) -> Path:
    """Folder of the model: a local one, or a snapshot already in the Hugging Face cache. Raises `EngineStartError`."""
    folder = Path(spec.model)
    if not folder.is_dir():
        try:
            found = snapshot_download(spec.model, revision=spec.engine_args.get("revision"), local_files_only=True)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise EngineStartError(
                f"model {spec.model!r} is neither a folder nor in the Hugging Face cache; "
                "wanted a diffusers folder with model_index.json"
            ) from error
        folder = Path(found)
    if not (folder / "model_index.json").is_file():
        raise EngineStartError(f"model {spec.model!r}: {folder} holds no model_index.json; wanted a diffusers folder")
    return folder


def device_of(spec: ReplicaSpec, rank: int = 0) -> torch.device:
    """Where one rank of the replica computes: its device among those that the process sees."""
    return torch.device("cuda", rank) if spec.device_kind == "cuda" else torch.device("cpu")


def load_pipeline(spec: ReplicaSpec, args: EngineArgs, folder: Path, *, rank: int = 0) -> tuple[Any, Loras]:
    """The pipeline with its LoRAs and switches, silent, where it will compute. Raises `EngineStartError`.

    Ranks above 0 compute with the denoisers only, and the rest stays where it is.
    """
    torch.set_num_threads(spec.cpu_threads)
    torch.backends.cudnn.deterministic = True
    _silence_libraries(spec)
    device, dtype = device_of(spec, rank), _dtype(spec, args, folder)
    quantized = quantization_arguments(args, folder)
    try:
        pipe: Any = DiffusionPipeline.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, **quantized
        )
        if spec.device_kind == "cuda" and args.offload is None:
            for part in denoisers(pipe).values() if rank else (pipe,):
                part.to(device)
    except Exception as error:
        raise EngineStartError(f"model {spec.model!r} ({folder}) cannot be loaded: {one_line(error)}") from error
    pipe.set_progress_bar_config(disable=True)
    check_guiders(pipe)
    loras = Loras(pipe, args.lora_modules)
    apply_switches(pipe, args, device=device, dtype=dtype)
    if args.offload is not None:
        offload(pipe, args.offload, device=device)
    _log.info("loaded %s from %s as %s", type(pipe).__name__, folder, str(dtype).removeprefix("torch."))
    return pipe, loras


def check_guiders(pipe: Any) -> None:
    """Raises `EngineStartError` for guidance that changes the model from before a forward to after it.

    Requests beside it would be drawn with the change, and after an abort it would stay.
    """
    if isinstance(pipe, PAGMixin):
        kind = type(pipe).__name__
        raise EngineStartError(f"{kind} changes the model's attention for each request: not available in this version")
    for name, guider in pipe.components.items():
        if isinstance(guider, BaseGuidance) and type(guider).prepare_models is not BaseGuidance.prepare_models:
            kind = type(guider).__name__
            raise EngineStartError(
                f"{name} ({kind}) changes the model for single forwards: not available in this version"
            )


def _silence_libraries(spec: ReplicaSpec) -> None:
    """No bars, and no hints to the programmer with every picture."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        if spec.log_level != "debug":
            library.set_verbosity_error()


def _dtype(spec: ReplicaSpec, args: EngineArgs, folder: Path) -> torch.dtype:
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    if spec.device_kind == "cuda":
        return torch.bfloat16
    on_disk = {dtype for path in folder.glob("*/*.safetensors") for dtype in _float_dtypes(path)}
    return _CPU_DTYPES.get(on_disk.pop(), torch.float32) if len(on_disk) == 1 else torch.float32


def _float_dtypes(path: Path) -> set[str]:
    """Floating-point dtypes in a safetensors header."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise EngineStartError(f"{path} is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise EngineStartError(f"{path} is no safetensors file") from error
    return {entry["dtype"] for entry in header.values() if entry.get("dtype") in _FLOATS}
