"""Clips: uint8 frames `frames x height x width x 3` in, an MP4 that starts to play before it is whole out.

H.264, 4:2:0, index in front of the data. Odd sides, which 4:2:0 cannot hold, are extended by one repeated line.
"""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

__all__ = ["encode_mp4", "first_frame"]

Frames = npt.NDArray[np.uint8]

_CRF = "18"  # visually lossless


def encode_mp4(frames: Frames, *, fps: int, threads: int = 1) -> bytes:
    """MP4 at `fps` frames a second."""
    _, height, width, _ = frames.shape
    odd = ((0, height % 2), (0, width % 2), (0, 0))
    # The index can only move to the front of a file that the muxer may open a second time.
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        path = Path(folder) / "clip.mp4"
        with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=Fraction(fps))
            stream.width, stream.height = width + width % 2, height + height % 2
            stream.pix_fmt = "yuv420p"
            stream.options = {"preset": "veryfast", "crf": _CRF}
            stream.codec_context.thread_count = threads
            for frame in frames:
                even = np.pad(frame, odd, mode="edge") if height % 2 or width % 2 else np.ascontiguousarray(frame)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
            container.mux(stream.encode())
        return path.read_bytes()


def first_frame(path: Path) -> Frames:
    """Pixels `height x width x 3` of the frame that a clip on disk begins with. Raises OSError if there is none."""
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            return np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
    raise OSError(f"{path} has no frames")
