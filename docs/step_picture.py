"""Draws `step.svg`: two hosts, their processes, and the path of a step, numbered as in `architecture.md`.

    python docs/step_picture.py

The picture depends on this file alone, byte for byte. Boxes and arrows stand where their coordinates say; so whoever
moves one looks at the result, in a browser for example.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from drawing import LINE, MUTED, Anchor, Picture

PICTURE: Final = Path(__file__).with_suffix("").with_name("step.svg")

WIDTH: Final = 1280
HEIGHT: Final = 820
HOST_WIDTH: Final = 566

CAPTURE: Final = "#1d5fbf"
COMMIT: Final = "#1e7d4f"
DISCARD: Final = "#c0392b"


def draw() -> str:
    """Return the text of `step.svg`."""
    picture = Picture(WIDTH, HEIGHT, "The path of a step through two hosts")
    picture.box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, stroke="#d9e2ec", radius=12, weight=1)
    _etcd(picture)
    _host(picture, 24, "host a", left=True)
    _host(picture, WIDTH - 24 - HOST_WIDTH, "host b", left=False)
    _capture(picture)
    _replication(picture)
    _commit(picture)
    _legend(picture)
    return picture.to_svg()


def _etcd(picture: Picture) -> None:
    picture.box(400, 36, 480, 104, fill="#f0f4f8", stroke=MUTED)
    picture.text(640, 60, "etcd v3", size=15, bold=True, anchor="middle")
    picture.box(530, 74, 220, 54, radius=5)
    picture.text(640, 97, "state/watermark", anchor="middle", bold=True)
    picture.text(640, 115, "committed, next to capture", size=11, color=MUTED, anchor="middle")


def _host(picture: Picture, x: float, name: str, *, left: bool) -> None:
    """Draw a host with its processes: the daemon on the inner side, the launcher and the ranks on the outer one."""
    picture.box(x, 200, HOST_WIDTH, 556, fill="#f7f9fb", radius=12)
    ranks, daemon, slots = (x + 20, x + 396, x + 20) if left else (x + 294, x + 10, x + 10)
    anchor: Anchor = "start" if left else "end"
    picture.text(x + 20 if left else x + HOST_WIDTH - 20, 225, name, size=15, bold=True, anchor=anchor)

    picture.box(ranks, 240, 252, 58, fill="#fff8e6", stroke="#d9b44a")
    picture.text(ranks + 126, 264, "launcher", size=14, bold=True, anchor="middle")
    picture.text(ranks + 126, 284, "torch's agent, rendezvous", size=11, color=MUTED, anchor="middle")
    edge = 400 if left else 880
    picture.arrow((ranks + 126, 240), (ranks + 126, 88), (edge, 88), color=LINE, weight=1.4)
    picture.text((ranks + 126 + edge) / 2, 80, "rounds, failures", color=MUTED, anchor="middle")

    picture.box(daemon, 240, 160, 350, fill="#e8f1fb", stroke=CAPTURE)
    picture.text(daemon + 80, 264, "daemon", size=14, bold=True, anchor="middle")
    picture.text(daemon + 80, 282, "resilientd, an event loop", size=11, color=MUTED, anchor="middle")
    for line, what in enumerate(("serves the ranks,", "moves replicas,", "reports to the root")):
        picture.text(daemon + 80, 420 + 18 * line, what, color=MUTED, anchor="middle")
    inner = (ranks + 252, daemon) if left else (ranks, daemon + 160)
    picture.arrow((inner[0], 269), (inner[1], 269), color=LINE, weight=1.4)
    picture.text(sum(inner) / 2, 262, "starts", color=MUTED, anchor="middle")

    picture.arrow((ranks + 126, 298), (ranks + 126, 334), color=LINE, weight=1.4)
    picture.text(ranks + 136, 320, "starts", color=MUTED)
    shift = 10 if left else -10
    picture.box(ranks + shift, 334, 252, 256, fill="#eef1f4")
    picture.box(ranks, 360, 252, 238)
    first, second = (0, 1) if left else (2, 3)
    picture.text(ranks + 14 + shift, 352, f"rank {second}: the same", size=11, color=MUTED)
    picture.text(ranks + 14, 382, f"rank {first}", size=14, bold=True)
    picture.text(ranks + 238, 382, "a worker: your script", size=11, color=MUTED, anchor="end")
    for y, height, thread in ((392, 48, "link thread"), (446, 78, "training thread"), (530, 60, "capture thread")):
        picture.box(ranks + 10, y, 232, height, fill="#f7f9fb", radius=6, weight=1)
        picture.text(ranks + 20, y + 17, thread, size=11, color=MUTED)

    picture.box(slots, 660, 536, 84, fill="#eefaf3", stroke="#7bbf9b")
    what = "shared memory: two slots of each rank that is kept here"
    picture.text(slots + 524, 677, what, size=11, color=MUTED, anchor="end")
    owners = ("rank 0", "rank 1", "copy of 2", "copy of 3") if left else ("copy of 0", "copy of 1", "rank 2", "rank 3")
    for place, owner in enumerate(owners):
        _slots(picture, slots + 12 + 130 * place, owner)


def _slots(picture: Picture, x: float, owner: str) -> None:
    picture.box(x, 686, 56, 30, fill="#d5efe0", stroke="#7bbf9b", radius=4)
    picture.text(x + 28, 705, "n \N{MINUS SIGN} 1", size=11, anchor="middle")
    picture.box(x + 62, 686, 56, 30, fill="#dbe8fa", stroke=CAPTURE, radius=4)
    picture.text(x + 90, 705, "n", size=11, anchor="middle", bold=True)
    picture.text(x + 59, 733, owner, size=11, color=MUTED, anchor="middle")


def _capture(picture: Picture) -> None:
    """Draw 1 to 8: from `step()` into the slot, and to the daemon."""
    _row(picture, 482, ((74, 1, "step(n)"), (158, 2, "submit")))
    _row(picture, 508, ((74, 3, "slot"), (158, 4, "copy")))
    picture.numbered(74, 571, 6, "discard what changed", DISCARD)
    picture.arrow((136, 590), (136, 686), color=CAPTURE)
    for y, number, text in ((618, 5, "from GPUs"), (643, 7, "header")):
        picture.number(136, y, number, CAPTURE)
        picture.text(121, y + 4, text, color=CAPTURE, anchor="end")
    picture.arrow((286, 559), (420, 559), color=CAPTURE)
    picture.number(363, 559, 8, CAPTURE)
    picture.text(363, 541, "complete", color=CAPTURE, anchor="middle")


def _row(picture: Picture, y: float, items: Sequence[tuple[float, int, str]]) -> None:
    for x, number, text in items:
        picture.numbered(x, y, number, text, CAPTURE)


def _replication(picture: Picture) -> None:
    """Draw 9 to 12: from the one daemon to the other, and into its slot."""
    picture.text(640, 308, "TCP", color=MUTED, anchor="middle")
    for y, number, text, back in ((350, 9, "offer", False), (410, 10, "get", True), (470, 11, "ranges", False)):
        ends = [(580, y), (700, y)]
        picture.arrow(*(reversed(ends) if back else ends), color=CAPTURE, weight=4 if number == 11 else 1.8)
        picture.numbered(622, y - 18, number, text, CAPTURE)
    picture.arrow((162, 686), (162, 630), (500, 630), (500, 590), color=LINE, weight=1.4)
    picture.text(330, 624, "reads the slot", color=MUTED, anchor="middle")
    picture.arrow((802, 590), (802, 686), color=CAPTURE)
    picture.numbered(802, 626, 12, "verify", CAPTURE)


def _commit(picture: Picture) -> None:
    """Draw 13 to 16: the reports, the watermark, and the news of it."""
    picture.arrow((580, 530), (700, 530), color=COMMIT)
    picture.numbered(622, 512, 13, "report", COMMIT)
    picture.arrow((712, 240), (712, 128), color=COMMIT)
    picture.number(712, 172, 14, COMMIT)
    picture.text(697, 176, "commit", color=COMMIT, anchor="end")
    picture.arrow((700, 574), (580, 574), color=COMMIT, dashed=True)
    picture.text(640, 566, "watermark", size=11, color=COMMIT, anchor="middle")
    picture.box(730, 296, 100, 24, fill=COMMIT, stroke=COMMIT, radius=12)
    picture.text(780, 312, "elected root", size=11.5, color="#ffffff", bold=True, anchor="middle")
    for daemon, rank in ((420, 286), (860, 994)):
        picture.arrow((daemon, 416), (rank, 416), color=COMMIT)
        middle = (daemon + rank) / 2
        picture.number(middle, 416, 15, COMMIT)
        picture.text(middle, 400, "watermark", color=COMMIT, anchor="middle")
    for x in (74, 1014):
        picture.numbered(x, 424, 16, "step n is committed", COMMIT)
    for y, line in ((494, "1 to 4 likewise"), (574, "5 to 12 likewise, to host a")):
        picture.text(1004, y, line, color=MUTED)


def _legend(picture: Picture) -> None:
    y = 788
    for x, color, text in (
        (40, CAPTURE, "a capture and its copy"),
        (240, COMMIT, "its commit"),
        (360, DISCARD, "a capture that is given up"),
        (570, LINE, "everything else"),
    ):
        picture.box(x, y - 10, 24, 10, fill=color, stroke=color, radius=3)
        picture.text(x + 32, y, text, color=MUTED)
    picture.text(WIDTH - 40, y, "numbers: the walk of a step in architecture.md", color=MUTED, anchor="end")


if __name__ == "__main__":
    PICTURE.write_text(draw())
