"""Foreign pictures: every kind comes out as upright RGB, everything damaged as a refusal that names the field."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from triptych.errors import ErrorCode, TriptychError
from triptych.media.inputs import MAX_INPUT_PIXELS, Picture, decode_image, decode_mask

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format=image_format, **options)
    return target.getvalue()


def pixels(picture: Picture) -> np.ndarray[Any, Any]:
    shape = (picture.height, picture.width, len(picture.mode))
    return np.frombuffer(picture.data, np.uint8).reshape(shape)[..., 0 if picture.mode == "L" else slice(None)]


def image_of(data: bytes, **options: Any) -> Picture:
    return decode_image(data, **({"param": "image", "max_pixels": 10_000} | options))


def refusal(decode: Callable[..., Picture], data: bytes, **options: Any) -> str:
    with pytest.raises(TriptychError) as caught:
        decode(data, **({"param": "image[3]", "max_pixels": 10_000} | options))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_IMAGE, "image[3]")
    assert caught.value.message.startswith("image[3] ")
    return caught.value.message


def half(mode: str, left: Any, right: Any) -> Image.Image:
    """6x4 with one colour left and another one right."""
    image = Image.new(mode, (6, 4), left)
    image.paste(right, (3, 0, 6, 4))
    return image


def test_an_rgb_png_comes_out_as_it_went_in() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    picture = image_of(encoded(Image.fromarray(noise)))
    assert (picture.mode, picture.width, picture.height) == ("RGB", 7, 5)
    np.testing.assert_array_equal(pixels(picture), noise)


@pytest.mark.parametrize(
    ("image", "left", "right"),
    [
        (half("RGBA", (255, 0, 0, 255), (0, 255, 0, 0)), RED, WHITE),
        (half("RGBA", (255, 0, 0, 128), (0, 0, 255, 255)), (255, 127, 127), BLUE),
        (half("LA", (90, 255), (10, 0)), (90, 90, 90), WHITE),
        (half("L", 7, 200), (7, 7, 7), (200, 200, 200)),
        (half("1", 0, 1), (0, 0, 0), WHITE),
        (half("RGB", RED, BLUE).quantize(4), RED, BLUE),
    ],
    ids=["transparent", "half-transparent", "LA", "L", "1", "P"],
)
def test_every_mode_is_flattened_to_rgb_over_white(image: Image.Image, left: Any, right: Any) -> None:
    result = pixels(image_of(encoded(image)))
    assert result.shape == (4, 6, 3)
    np.testing.assert_allclose(result[0, 0], left, atol=1)
    np.testing.assert_allclose(result[3, 5], right, atol=1)


def test_a_transparent_colour_of_a_palette_turns_white() -> None:
    image = half("P", 0, 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    result = pixels(image_of(encoded(image, transparency=0)))
    assert (tuple(result[0, 0]), tuple(result[0, 5])) == (WHITE, BLUE)


def test_gray_of_sixteen_bits_keeps_its_tones() -> None:
    tones = np.array([[0, 257, 0x8080, 65535]], np.uint16)
    result = pixels(image_of(encoded(Image.fromarray(tones))))
    assert result[0, :, 0].tolist() == [0, 1, 128, 255]


def test_gray_of_sixteen_bits_takes_a_few_times_its_pixels() -> None:
    data = encoded(Image.fromarray(np.zeros((512, 512), np.uint16)))
    tracemalloc.start()
    try:
        image_of(data)
        assert tracemalloc.get_traced_memory()[1] < 12 * 512 * 512
    finally:
        tracemalloc.stop()


def test_a_colour_png_of_sixteen_bits_is_read() -> None:
    row = b"\0" + struct.pack(">6H", 65535, 0, 0, 0, 0, 65535)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(row)), (b"IEND", b""))
    )
    result = pixels(image_of(b"\x89PNG\r\n\x1a\n" + chunks))
    assert (tuple(result[0, 0]), tuple(result[0, 1])) == (RED, BLUE)


def test_a_cmyk_jpeg_is_turned_into_rgb() -> None:
    result = pixels(image_of(encoded(half("CMYK", (0, 255, 255, 0), (0, 255, 255, 0)), "JPEG", quality=95)))
    np.testing.assert_allclose(result[0, 0], RED, atol=6)


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "AVIF"])
def test_of_a_moving_picture_the_first_frame_counts(image_format: str) -> None:
    options: dict[str, Any] = {"save_all": True, "append_images": [half("RGB", BLUE, BLUE)], "duration": 100}
    if image_format == "WEBP":
        options["lossless"] = True
    result = pixels(image_of(encoded(half("RGB", RED, RED), image_format, **options)))
    np.testing.assert_allclose(result[2, 3], RED, atol=4)


def test_a_photo_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    picture = image_of(encoded(half("RGB", RED, BLUE), "JPEG", quality=100, subsampling=0, exif=exif))
    assert (picture.width, picture.height) == (4, 6)
    np.testing.assert_allclose(pixels(picture)[0, 0], RED, atol=8)
    np.testing.assert_allclose(pixels(picture)[5, 0], BLUE, atol=8)


def test_broken_exif_does_not_matter() -> None:
    data = encoded(half("RGB", RED, BLUE), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\xff" + b"\xff" * 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert image_of(data).width == 6


def test_a_picture_over_the_limit_is_scaled_down_in_shape() -> None:
    picture = image_of(encoded(Image.new("RGB", (400, 200), RED)), max_pixels=20_000)
    assert (picture.width, picture.height) == (200, 100)
    assert tuple(pixels(picture)[50, 100]) == RED
    line = image_of(encoded(Image.new("RGB", (3000, 1), RED)), max_pixels=100)
    assert (line.width * line.height) <= 100


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    header = struct.pack(">IIBBBBB", 8193, 8192, 8, 2, 0, 0, 0)
    start = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    message = refusal(decode_image, b"\x89PNG\r\n\x1a\n" + start + struct.pack(">I", 0) + b"IDAT")
    assert f"at most {MAX_INPUT_PIXELS} pixels, got 8193x8192" in message
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    start = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    message = refusal(decode_image, b"\x89PNG\r\n\x1a\n" + start + struct.pack(">I", 0) + b"IDAT")
    assert f"at most {MAX_INPUT_PIXELS} pixels" in message


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_a_picture_that_is_cut_off_is_refused(image_format: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    data = encoded(noise, image_format)
    assert image_of(data).width == 64
    refusal(decode_image, data[: len(data) * 2 // 3])


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7\n", b"\0" * 99]
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    refusal(decode_image, data)
    refusal(decode_mask, data)


def test_formats_outside_the_list_are_not_even_tried() -> None:
    message = refusal(decode_image, encoded(half("RGB", RED, BLUE), "TIFF"))
    assert "wanted PNG, JPEG, WEBP, GIF, BMP, AVIF" in message


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [
        (half("RGBA", (0, 0, 0, 0), (255, 255, 255, 255)), 255, 0),
        (half("RGBA", (9, 9, 9, 255), (9, 9, 9, 64)), 0, 191),
        (half("LA", (0, 0), (0, 255)), 255, 0),
        (half("L", 0, 255), 0, 255),
        (half("1", 1, 0), 255, 0),
        (half("RGB", (0, 0, 0), WHITE), 0, 255),
        (half("RGBA", (0, 0, 0, 255), (255, 255, 255, 255)), 0, 255),
    ],
    ids=["transparent", "half-transparent", "LA", "L", "1", "RGB", "opaque"],
)
def test_a_mask_is_white_where_the_picture_is_drawn_anew(mask: Image.Image, left: int, right: int) -> None:
    picture = decode_mask(encoded(mask), param="mask", max_pixels=10_000)
    assert picture.mode == "L"
    assert (pixels(picture)[0, 0], pixels(picture)[3, 5]) == (left, right)


def test_a_mask_that_marks_nothing_is_refused() -> None:
    assert "nothing to edit" in refusal(decode_mask, encoded(Image.new("L", (4, 4), 0)))


VALID = [
    encoded(half("RGBA", (255, 0, 0, 255), (0, 255, 0, 0))),
    encoded(half("RGB", RED, BLUE), "JPEG"),
    encoded(half("RGB", RED, BLUE), "GIF", save_all=True, append_images=[half("RGB", BLUE, RED)]),
    encoded(half("RGB", RED, BLUE), "WEBP"),
    encoded(half("RGB", RED, BLUE), "BMP"),
    encoded(half("RGB", RED, BLUE), "AVIF"),
]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_a_picture_or_a_refusal(data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(1, len(damaged))) :]
    for decode in (decode_image, decode_mask):
        try:
            picture = decode(damaged, param="image", max_pixels=5000)
        except TriptychError as error:
            assert error.code == ErrorCode.INVALID_IMAGE
        else:
            assert len(picture.data) == picture.width * picture.height * len(picture.mode)
            assert picture.width * picture.height <= 5000
