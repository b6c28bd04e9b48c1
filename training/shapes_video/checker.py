"""Judge a clip from its pixels: motion from the first frame to the last, colour, shape and background in the middle.

Every frame is read by the checker of the pictures, where a connected part is one shape: clips show nothing inside
another, and the soft edge of a moving shape is no shape of its own. On drawn clips it is right on nearly all, which its
tests measure.
"""

from __future__ import annotations

from typing import Final

from training.shapes.checker import Seen, look
from training.shapes_video.captions import Example
from training.shapes_video.clips import FRAMES, Video

__all__ = ["check_clip", "motion_of"]

GROWN: Final = 0.06  # change of the radius
MOVED: Final = 0.2  # of the centre


def motion_of(first: Seen, last: Seen) -> str:
    """The motion that leads from one sighting to the other."""
    across, down, grown = last.x - first.x, last.y - first.y, last.radius - first.radius
    if abs(grown) > GROWN:
        return "grow" if grown > 0 else "shrink"
    if max(abs(across), abs(down)) <= MOVED:
        return "still"
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "down" if down > 0 else "up"


def check_clip(video: Video, example: Example) -> dict[str, bool]:
    """Right or not, by attribute the caption speaks of; `all` says whether everything is right.

    What is unsaid is checked where it is fixed: standing still, and the background.
    """
    clip = example.clip
    first, middle, last = (look(video[k], nested=False) for k in (0, FRAMES // 2, FRAMES - 1))
    shown = middle.items[0] if middle.items else None
    moved = motion_of(first.items[0], last.items[0]) if first.items and last.items else None
    verdict = {
        "motion": moved == clip.path.motion,
        "shape": shown is not None and shown.shape == clip.path.shape,
        "background": middle.background == clip.background,
        "count": all(len(sighting.items) == 1 for sighting in (first, middle, last)),
    }
    if example.says_color:
        verdict["color"] = shown is not None and shown.color == clip.color
    verdict["all"] = all(verdict.values())
    return verdict
