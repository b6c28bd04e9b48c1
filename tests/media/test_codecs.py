"""Encoders, each decoded again."""

from __future__ import annotations

import io
from typing import Any

import av
import fpng_py
import numpy as np
import pytest
from PIL import Image

from triptych.media.codecs import CODECS
from triptych.media.images import encode_jpeg, encode_png, encode_webp
from triptych.media.mp4_text import append_text
from triptych.media.video import encode_mp4


def noise(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int) -> Any:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1).astype(np.uint8)


def decoded(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (64, 64), (33, 100), (256, 8)])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("compression", [None, 0, 55, 100])
def test_png_is_lossless_with_and_without_fpng(
    shape: tuple[int, int], fast: bool, compression: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fpng_py, "fpng_cpu_supports_sse41", lambda: fast)
    for pixels in (noise(*shape, 3), smooth(*shape), noise(*shape, 3)[::-1]):
        np.testing.assert_array_equal(decoded(encode_png(pixels, compression=compression)), pixels)


@pytest.mark.parametrize("encode", [encode_jpeg, encode_webp])
def test_lossy_formats_are_near_and_smaller_with_less_quality(encode: Any) -> None:
    pixels = smooth(64, 96)
    best, worst = encode(pixels), encode(pixels, compression=0)
    assert encode(pixels, compression=100) == best
    assert len(worst) < len(best)
    assert np.abs(decoded(best).astype(int) - pixels).mean() < 4
    assert decoded(worst).shape == pixels.shape


def test_every_codec_says_what_it_makes() -> None:
    assert {name: (codec.kind, codec.mime) for name, codec in CODECS.items()} == {
        "png": ("image", "image/png"),
        "jpeg": ("image", "image/jpeg"),
        "webp": ("image", "image/webp"),
        "mp4": ("video", "video/mp4"),
    }


@pytest.mark.parametrize(("count", "height", "width", "fps"), [(9, 48, 64, 24), (1, 32, 32, 16), (5, 33, 31, 120)])
def test_mp4_plays_with_its_frames_rate_and_size(count: int, height: int, width: int, fps: int) -> None:
    frames = np.stack([np.roll(smooth(height, width), 3 * number, axis=1) for number in range(count)])
    data = encode_mp4(frames, fps=fps)
    assert data == encode_mp4(frames, fps=fps)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == fps
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(shown) == count
    assert shown[0].shape == (height + height % 2, width + width % 2, 3)
    assert np.abs(shown[-1][:height, :width].astype(int) - frames[-1]).mean() < 12


def test_mp4_has_its_index_in_front_so_that_it_starts_before_it_is_whole() -> None:
    data = encode_mp4(noise(3, 32, 32, 3), fps=8)
    assert data[4:8] == b"ftyp"
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_a_text_behind_a_clip_leaves_it_playing() -> None:
    data = append_text(encode_mp4(noise(3, 32, 32, 3), fps=8), "zwölf")
    assert data.endswith("zwölf".encode())
    with av.open(io.BytesIO(data)) as container:
        assert len(list(container.decode(video=0))) == 3
    with pytest.raises(ValueError, match="not an MP4"):
        append_text(b"\x89PNG\r\n\x1a\n", "text")
