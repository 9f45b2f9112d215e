"""Draws the terminal of README: a worker that is killed and comes back, line by line at the moments of a real run.

    python docs/recorded_run.py [--record]

With `--record` the command is run, and what it prints is written to recording.json; without, that is drawn again.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

FOLDER: Final = Path(__file__).parent
PICTURE: Final = FOLDER / "recording.svg"
RECORD: Final = FOLDER / "recording.json"
COMMAND: Final = "resilient-run --standalone --nproc-per-node 2 examples/train_gpt.py --steps 24 --demo-kill 20"

_KEPT: Final = re.compile(r"step +(?:1[6-9]|2\d)/|resilient-run: recovered|exitcode: -9|parameters ")
_COLUMNS: Final = 104
_WIDTH, _LINE, _TOP, _LEFT = 900, 19, 58, 78
_PAPER, _INK, _SOFT, _GOOD, _BAD = "#10161d", "#d7dee6", "#7d8a97", "#7bd88f", "#ff8f7e"


def record() -> dict[str, Any]:
    """Run the command and return when it printed what, in seconds since its first step."""
    lines: list[tuple[float, str]] = []
    command = [str(Path(sys.executable).with_name("resilient-run")), *COMMAND.split()[1:]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=FOLDER.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:
        for line in process.stdout or ():
            if _KEPT.search(line):
                lines.append((time.monotonic(), line.rstrip()))
    if process.returncode:
        raise SystemExit(process.returncode)
    began_s = lines[0][0]
    return {"command": COMMAND, "lines": [[round(moment - began_s, 2), shown(line)] for moment, line in lines]}


def shown(line: str) -> str:
    """Return what is shown of a line: of torch's own only what it says of the worker."""
    failed = re.search(r"failed \(exitcode: -9\) local_rank: \d+ \(pid: \d+\)", line)
    return f"torch: {failed[0]}" if failed else line


def draw(recorded: dict[str, Any]) -> str:
    """Return the picture; a viewer that cannot move shows all lines."""
    rows = [(0.0, f"$ {recorded['command']}", _SOFT)]
    for moment, line in recorded["lines"]:
        color = _BAD if "exitcode" in line else _GOOD if "recovered" in line else _INK
        parts = re.findall(rf".{{1,{_COLUMNS}}}(?: |$)", line)
        rows += [(moment, part, color) for part in parts[:1]] + [(moment, f"    {part}", color) for part in parts[1:]]
    height = _TOP + _LINE * len(rows) + 14
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {_WIDTH} {height}",
            "font-family": "'DejaVu Sans Mono', Menlo, Consolas, monospace",
            "font-size": "12.5",
            "role": "img",
        },
    )
    ElementTree.SubElement(root, "title").text = "A worker is killed after step 20 and training goes on"
    style = ElementTree.SubElement(root, "style")
    style.text = "@keyframes appear { from { opacity: 0 } to { opacity: 1 } } text { white-space: pre }"
    ElementTree.SubElement(root, "rect", width=str(_WIDTH), height=str(height), rx="10", fill=_PAPER)
    for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        ElementTree.SubElement(root, "circle", cx=str(20 + 18 * place), cy="20", r="6", fill=color)
    for number, (moment, text, color) in enumerate(rows):
        y = str(_TOP + _LINE * number)
        for x, words, ink in ((12, f"{moment:6.2f} s" if number else "", _SOFT), (_LEFT + 10, text, color)):
            line = ElementTree.SubElement(root, "text", x=str(x), y=y, fill=ink)
            line.text = words
            if moment:
                line.set("style", f"animation: appear {moment:g}s steps(1, end)")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(record(), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(RECORD.read_text())))
