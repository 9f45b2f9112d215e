"""Draws `concept-commit.svg` and `concept-recovery.svg`, the pictures of `concepts.md`.

    python docs/concept_pictures.py

The pictures depend on this file alone, byte for byte.
"""

from pathlib import Path
from typing import Final

from drawing import LINE, MUTED, Picture

HERE: Final = Path(__file__).parent

STEP: Final = "#1d5fbf"
STEP_FILL: Final = "#e8f1fb"
COMMIT: Final = "#1e7d4f"
COMMIT_FILL: Final = "#eefaf3"
LOST: Final = "#c0392b"
LOST_FILL: Final = "#fbeae8"

LANE_X: Final = 190
STEP_WIDTH: Final = 180


def commit() -> str:
    """Return the text of `concept-commit.svg`: a step's capture, its replica and its commit, beside training."""
    picture = _picture(960, 330, "A step is captured, copied to another host, and committed, while the next steps run")
    lanes = ((80, "training", "rank 0 on host a"), (150, "capture", "memory of host a"))
    for y, name, where in (*lanes, (220, "replica", "memory of host b"), (290, "watermark", "in etcd")):
        picture.text(24, y, name, size=14, bold=True)
        picture.text(24, y + 17, where, size=11, color=MUTED)
    for place in range(4):
        x = LANE_X + STEP_WIDTH * place
        _block(picture, x, 62, STEP_WIDTH - 6, f"step {place + 1}", STEP, STEP_FILL)
    for place in range(3):
        done = LANE_X + STEP_WIDTH * (place + 1)
        picture.arrow((done, 98), (done, 132), color=STEP)
        _block(picture, done, 132, 70, f"copy {place + 1}", STEP, STEP_FILL)
        picture.arrow((done + 70, 150), (done + 82, 150), (done + 82, 202), color=STEP)
        _block(picture, done + 70, 202, 80, f"copy {place + 1}", STEP, STEP_FILL)
        picture.arrow((done + 150, 220), (done + 158, 220), (done + 158, 272), color=COMMIT)
    for place in range(4):
        x = LANE_X if place == 0 else LANE_X + STEP_WIDTH * place + 158
        end = min(LANE_X + STEP_WIDTH * (place + 1) + 158, 936)
        if x < end:
            _block(picture, x, 272, end - x - 3, str(place) if end - x < 90 else f"step {place}", COMMIT, COMMIT_FILL)
    picture.text(936, 40, "time \N{RIGHTWARDS ARROW}", color=MUTED, anchor="end")
    return picture.to_svg()


def recovery() -> str:
    """Return the text of `concept-recovery.svg`: a host is lost, a standby takes its place, both go back to a step."""
    picture = _picture(960, 340, "Host b is lost: a standby takes its place, and all ranks continue from the watermark")
    for y, name, what in ((80, "host a", "rank 0"), (160, "host b", "rank 1"), (240, "host c", "standby, then rank 1")):
        picture.text(24, y, name, size=14, bold=True)
        picture.text(24, y + 17, what, size=11, color=MUTED)
    for y in (62, 142):
        for place, step in enumerate((38, 39, 40)):
            color, fill = (LOST, LOST_FILL) if step == 40 else (STEP, STEP_FILL)
            _block(picture, 190 + 100 * place, y, 94, f"step {step}", color, fill)
    picture.text(500, 165, "lost", size=14, bold=True, color=LOST)
    _block(picture, 190, 222, 294, "waits", LINE, "#f7f9fb")
    _block(picture, 560, 62, 150, "restores step 39", COMMIT, COMMIT_FILL)
    _block(picture, 560, 222, 150, "restores step 39", COMMIT, COMMIT_FILL)
    picture.arrow((635, 98), (635, 222), color=COMMIT)
    picture.text(645, 165, "replica of rank 1", color=COMMIT)
    for y in (62, 222):
        for place, step in enumerate((40, 41)):
            _block(picture, 720 + 110 * place, y, 104, f"step {step}", STEP, STEP_FILL)
    picture.text(190, 40, "generation 1, watermark 39", bold=True)
    picture.text(560, 40, "generation 2", bold=True)
    picture.text(936, 40, "time \N{RIGHTWARDS ARROW}", color=MUTED, anchor="end")
    for x, color, fill, what in (
        (190, STEP, STEP_FILL, "a step"),
        (300, LOST, LOST_FILL, "not committed: trained again"),
        (530, COMMIT, COMMIT_FILL, "from memory, not from disk"),
    ):
        picture.box(x, 298, 24, 14, fill=fill, stroke=color, radius=3)
        picture.text(x + 32, 310, what, color=MUTED)
    return picture.to_svg()


PICTURES: Final = {HERE / "concept-commit.svg": commit, HERE / "concept-recovery.svg": recovery}


def _picture(width: float, height: float, title: str) -> Picture:
    picture = Picture(width, height, title)
    picture.box(0.5, 0.5, width - 1, height - 1, stroke="#d9e2ec", radius=12, weight=1)
    return picture


def _block(picture: Picture, x: float, y: float, width: float, text: str, color: str, fill: str) -> None:
    picture.box(x, y, width, 36, fill=fill, stroke=color, radius=5)
    picture.text(x + width / 2, y + 22, text, anchor="middle")


if __name__ == "__main__":
    for path, draw in PICTURES.items():
        path.write_text(draw())
