"""What collation must be told about some model classes: data, one line a class.

Most models need no line: samples lie along the first dimension of every tensor, and whatever does not is compared by
value. A class is looked up by its name. A line that is missing or wrong costs a merge, not a picture: `merging` checks
the first forward of each kind against separate ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OVERRIDES", "Override", "override_of"]


@dataclass(frozen=True, slots=True)
class Override:
    """How the arguments of one model's forward hold their samples."""

    batch_from: str | None = None
    """Argument whose length is the number of samples; None: the first one."""
    samples: tuple[str, ...] = ()
    """Lists with one entry per sample. Entries that are tensors may differ in shape, others must be equal."""
    padded: Mapping[str, str] = field(default_factory=dict)
    """Text arguments that may be padded at the end, each with the argument that masks it (None there: all valid)."""
    shared: tuple[str, ...] = ("img_ids", "txt_ids", "position_ids", "image_rotary_emb", "freqs_cis")
    """Tensors that all samples use alike; compared by value, whatever their length."""
    scalars: tuple[str, ...] = ("timestep",)
    """Numbers that may as well be given per sample."""
    ignored: tuple[str, ...] = ()
    """Arguments that this method does not read."""
    deferred: bool = False
    """Whether pipelines call it for both guidance branches in turn, with `return_dict=False`; see `deferral`."""


OVERRIDES: Mapping[str, Override] = {
    "AutoencoderKL": Override(ignored=("generator",)),
    "Flux2Transformer2DModel": Override(deferred=True),
    "FluxTransformer2DModel": Override(deferred=True),
    "HunyuanVideo15Transformer3DModel": Override(deferred=True),
    "Lumina2Transformer2DModel": Override(deferred=True),
    "PixArtTransformer2DModel": Override(padded={"encoder_hidden_states": "encoder_attention_mask"}),
    "QwenImageTransformer2DModel": Override(
        samples=("img_shapes",), padded={"encoder_hidden_states": "encoder_hidden_states_mask"}, deferred=True
    ),
    "WanTransformer3DModel": Override(deferred=True),
    "ZImageTransformer2DModel": Override(batch_from="x", samples=("x", "cap_feats")),
}

_NONE = Override()


def override_of(model_class: type) -> Override:
    """The line of a class, or the rules that hold for all others."""
    return OVERRIDES.get(model_class.__name__, _NONE)
