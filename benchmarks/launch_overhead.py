"""How much later does a script begin, and end, under resilient-run than under torchrun?

One worker, cold start: resilient-run brings up its own etcd and its daemon each time. Two scripts: one prints a line,
one imports torch first, as training scripts do. The launchers alternate. Goal: at most 0.5 s extra.
"""

import tempfile
import time
from pathlib import Path

from jobs import RESILIENT_RUN, TORCHRUN, host, job
from report import Summary, parser, table, write_json

SCRIPTS = {
    "print": "import time\nprint(time.monotonic(), flush=True)\n",
    "import torch": "import time\nimport torch\nprint(time.monotonic(), flush=True)\n",
}
LAUNCHERS = {"torchrun": TORCHRUN, "resilient-run": RESILIENT_RUN}


def measure(launcher: tuple[str, ...], script: Path) -> tuple[float, float]:
    """Return seconds from the command to the script's line, and to the end of the launcher."""
    with host() as env:
        start_s = time.monotonic()
        with job([*launcher, "--standalone", "--nproc-per-node", "1", str(script)], env) as process:
            assert process.stdout is not None
            first_line_s = float(process.stdout.readline()) - start_s
        return first_line_s, time.monotonic() - start_s


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repetitions", type=int, default=10)
    args = options.parse_args()

    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        for name, text in SCRIPTS.items():
            script.write_text(text)
            for _ in range(args.repetitions):
                for launcher, command in LAUNCHERS.items():
                    samples.setdefault((name, launcher), []).append(measure(command, script))

    results = {
        f"{name} / {launcher}": {
            "first_line_s": Summary.of(first for first, _ in pairs),
            "total_s": Summary.of(total for _, total in pairs),
        }
        for (name, launcher), pairs in samples.items()
    }
    rows = [[name, f"{values['first_line_s']:.2f}", f"{values['total_s']:.2f}"] for name, values in results.items()]
    for name in SCRIPTS:
        theirs, ours = results[f"{name} / torchrun"], results[f"{name} / resilient-run"]
        extra = [ours[key].median - theirs[key].median for key in ("first_line_s", "total_s")]
        rows.append([f"{name}: extra", *(f"{seconds:+.2f}" for seconds in extra)])
    table("Launch, seconds: median (p10..p90)", ["script / launcher", "first line", "total"], rows)
    write_json(args.json, question="launch_overhead", parameters={"repetitions": args.repetitions}, results=results)


if __name__ == "__main__":
    main()
