"""LoRA files with random weights for the tiny pipelines, written as training scripts write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

_TARGETS = {"text_encoder": ["q_proj", "v_proj"]}
_DENOISER_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def save_lora(model: Path, path: Path, *, seed: int, parts: tuple[str, ...]) -> Path:
    """Write a LoRA for these components of the pipeline in `model` into the safetensors file `path`."""
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(str(model))
    layers = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in parts:
            module = getattr(pipe, part)
            targets = _TARGETS.get(part, _DENOISER_TARGETS)
            config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets)
            inject_adapter_in_model(config, module)
            layers[f"{part}_lora_layers"] = convert_state_dict_to_diffusers(get_peft_model_state_dict(module))
    type(pipe).save_lora_weights(str(path.parent), weight_name=path.name, **layers)
    return path
