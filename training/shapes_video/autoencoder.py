"""An `AutoencoderKLWan` whose weights are set rather than trained: it packs and unpacks pixels without loss.

The decoder doubles the picture by repeating every place, so it must tell even pixels from odd ones: the two marks of
the latents alternate from place to place, their differences vanish at pixels of one parity, and they shut off every
colour that belongs elsewhere. The transformer predicts the marks; the encoder writes colours alone.

Colours pass the nonlinearities lifted to where `silu` is the identity, and the norms beside a constant so large that
it alone decides their length.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

import torch
from diffusers import AutoencoderKLWan

from training.shapes_video.packing import CHANNELS, COLORS, MARKS

__all__ = ["new_autoencoder"]

Tap = tuple[int, ...]
RGB: Final = 3
HALF: Final = COLORS // 2  # colours of one frame: row, column and rgb within a place
LIFT: Final = 10.0  # silu(10 + s) = 10 + s, to 0.001 for a colour s in -1..1
STEADY: Final = 30_000.0  # the constant; half precision ends at 65504
CERTAIN: Final = -30.0  # log variance

# Channels of the encoder: packed colours, the pixel's own colour, the constant.
PIXEL: Final = COLORS
ENCODER_STEADY: Final = PIXEL + RGB
ENCODER_WIDTH: Final = ENCODER_STEADY + 1

# Channels of the decoder once doubled: a place's colours, differences of the marks in pairs, the pixel, the constant.
DIFFERENCES: Final = HALF
DRAWN: Final = DIFFERENCES + 8
DECODER_STEADY: Final = DRAWN + RGB
DECODER_WIDTH: Final = CHANNELS
SHARPNESS: Final = 8.0  # of the differences, so that silu(d) + silu(-d) is their size
SHUT: Final = 4.0  # times that size, 16 inside the picture and 8 at its rim, closes a lifted colour


def new_autoencoder() -> Any:
    """The autoencoder of packed clips; the same for every call."""
    autoencoder = AutoencoderKLWan(
        base_dim=ENCODER_WIDTH,
        decoder_base_dim=DECODER_WIDTH,
        z_dim=CHANNELS,
        dim_mult=[1, 1],
        num_res_blocks=0,
        temperal_downsample=[True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        is_residual=True,
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    )
    with torch.no_grad():
        for name, parameter in autoencoder.named_parameters():
            parameter.fill_(1.0 if name.endswith("gamma") else 0.0)
        for conv in (autoencoder.quant_conv, autoencoder.post_quant_conv, autoencoder.decoder.conv_in):
            for channel in range(conv.in_channels):
                _connect(conv, channel, channel)
        _set_encoder(autoencoder.encoder)
        _set_frames(autoencoder.decoder.up_blocks[0].upsampler.time_conv)
        _set_places(autoencoder.decoder.up_blocks[0].upsampler.resample[1])
        _set_gate(autoencoder.decoder.up_blocks[1].resnets[0])
        _set_output(autoencoder.decoder)
    return autoencoder.eval()


def _connect(conv: Any, target: int, source: int, weight: float = 1.0, *, at: Tap | None = None) -> None:
    """Let a channel flow into another one; `at` is the tap, otherwise the pixel itself in the newest frame."""
    sides = conv.kernel_size
    here = (sides[0] - 1, sides[1] // 2, sides[2] // 2) if len(sides) == 3 else (sides[0] // 2, sides[1] // 2)
    conv.weight[(target, source, *(here if at is None else at))] += weight


def _scale(norm: Any, channels: range, gain: float, length: float) -> None:
    """Let a norm whose input has this length multiply these channels by `gain`."""
    norm.gamma[channels.start : channels.stop] = gain * length / norm.scale


def _set_encoder(encoder: Any) -> None:
    for channel in range(RGB):
        _connect(encoder.conv_in, PIXEL + channel, channel)
    down = encoder.down_blocks[0].downsampler
    space, time = down.resample[1], down.time_conv
    for k, (row, column, channel) in enumerate(product(range(2), range(2), range(RGB))):
        _connect(space, k, PIXEL + channel, at=(row, column))
        for frame in range(2):
            _connect(time, HALF * frame + k, k, at=(1 + frame, 0, 0))
    _connect(time, ENCODER_STEADY, ENCODER_STEADY)
    space.bias[:COLORS] = LIFT
    space.bias[ENCODER_STEADY] = STEADY
    _scale(encoder.norm_out, range(COLORS), 0.5, 2 * STEADY)  # the second block adds its input to itself
    for k in range(COLORS):
        _connect(encoder.conv_out, k, k)
    encoder.conv_out.bias[:COLORS] = -LIFT
    encoder.conv_out.bias[CHANNELS:] = CERTAIN


def _set_frames(conv: Any) -> None:
    """Two frames from one place with the colours `e` and `l`; the block will add the place to what follows.

    The very first frame comes past here as `(e, l)`, and so does every earlier one of two; the later one becomes
    `(2 l - e, l)`, so that adding `(e, l)` to the first half gives twice the frame's colours for each of them.
    """
    for frame in range(2):
        start = DECODER_WIDTH * frame
        for k in range(HALF):
            _connect(conv, start + k, k, -1.0 if frame else 1.0)
            _connect(conv, start + HALF + k, HALF + k)
            if frame:
                _connect(conv, start + k, HALF + k, 2.0)
        for mark in range(COLORS, CHANNELS):
            _connect(conv, start + mark, mark)


def _set_places(conv: Any) -> None:
    """On doubled places: twice the frame's colours, and the marks' differences to both sides.

    What the block adds in other channels is taken away.
    """
    for k in range(HALF):
        _connect(conv, k, k)
        _connect(conv, HALF + k, HALF + k, -1.0)
    for mark in range(MARKS):
        _connect(conv, COLORS + mark, COLORS + mark, -1.0)
        for side, sign in product((0, 2), (1.0, -1.0)):
            target = _difference(mark, side, negative=sign < 0)
            _connect(conv, target, COLORS + mark, sign)
            _connect(conv, target, COLORS + mark, -sign, at=(1, side) if mark == 0 else (side, 1))
    conv.bias[:HALF] = 2 * LIFT
    conv.bias[DECODER_STEADY] = STEADY


def _difference(mark: int, side: int, *, negative: bool) -> int:
    return DIFFERENCES + 4 * mark + side + negative


def _set_gate(block: Any) -> None:
    """Of the four colours that a place repeats at four pixels, let each through at its own pixel alone."""
    _scale(block.norm1, range(HALF), 0.5, STEADY)
    _scale(block.norm1, range(DIFFERENCES, DRAWN), SHARPNESS, STEADY)
    for k, (row, column, channel) in enumerate(product(range(2), range(2), range(RGB))):
        _connect(block.conv1, k, k)
        for mark, odd in enumerate((column, row)):
            side = 0 if odd else 2  # at its own pixels the mark is the same on that side
            for negative in (False, True):
                _connect(block.conv1, k, _difference(mark, side, negative=negative), -SHUT)
        _connect(block.conv2, DRAWN + channel, k)
    block.conv1.bias[DECODER_STEADY] = STEADY
    _scale(block.norm2, range(HALF), 1.0, STEADY)


def _set_output(decoder: Any) -> None:
    _scale(decoder.norm_out, range(DRAWN, DRAWN + RGB), 1.0, STEADY)
    for channel in range(RGB):
        _connect(decoder.conv_out, channel, DRAWN + channel)
        decoder.conv_out.bias[channel] = -LIFT
