"""Kills a worker of a framework's example, and writes what was printed into the page of that framework.

    python docs/killed_runs.py accelerate lightning …

The commands are those of the page. `…` stands for lines, and ends of lines, that are left out; nothing else is changed.
The run must end as one that nobody killed.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "docs" / "frameworks"

_BLOCK: Final = "<!--killed_runs.py:{name}:{digest}-->\n{text}<!--end-->\n"
_RECOVERED: Final = "resilient-run: recovered in "
_LETTERS: Final = 120
_TIME_S: Final = 400
_LATE_S: Final = 10
"""How long the second command may take after the first: a run that ended before its step came would wait for ever."""


@dataclass(frozen=True)
class Example:
    """An example, and what a page shows of its killed run.

    Attributes:
        script: The script with its arguments, and before them assignments of environment variables.
        at_step: When rank 1 is killed.
        shown: Which lines of the output the page has, besides that of the recovery.
        ends: What an undisturbed run prints, too.
    """

    script: str
    at_step: int
    shown: str
    ends: str = r"parameters.*\w{64}"

    @property
    def file(self) -> Path:
        """The script's file."""
        return ROOT / next(part for part in self.script.split() if part.endswith(".py"))

    @property
    def digest(self) -> str:
        """What the script's file has, in eight letters."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest()[:8]

    @property
    def start(self) -> str:
        """The command that starts the run."""
        words = self.script.split()
        first = next(number for number, word in enumerate(words) if "=" not in word)
        run = "resilient-run --nproc-per-node 2 --rdzv-id demo --rr-allow-injection"
        return " ".join([*words[:first], run, *words[first:]])

    @property
    def kill(self) -> str:
        """The command that kills a worker, as soon as there is the run."""
        return (
            f"until resilient-inject fault kill-rank --rank 1 --at-step {self.at_step} --run-id demo \\\n"
            "    --rdzv-endpoint \"$(resilientctl status | sed -n 's/^  etcd: //p')\"; do sleep 0.2; done"
        )


EXAMPLES: Final = {
    "accelerate": Example("examples/with_accelerate.py", 250, "^epoch |^parameters "),
    "transformers": Example("examples/with_transformers.py", 15, "'loss'|^parameters "),
    "trl": Example("examples/with_trl.py", 10, "^{'loss'.*num_tokens': '(?:331|507|1020)'|^parameters "),
    "lightning": Example("examples/with_lightning.py", 15, "^{'train_loss'|^parameters "),
    "torchtitan": Example(
        "examples/with_torchtitan.py",
        12,
        r"- step: +(?:12|30) +loss",
        r"step: +\d+ +loss: +[-\d.]+ +(?:grad_norm: +[\d.]+)?",
    ),
    "torch-distributed-checkpoint": Example(
        "tests/frameworks/dcp_beside.py --steps 200 --dump-folder files", 50, "^parameters "
    ),
    "fsdp1": Example("examples/with_fsdp1.py", 15, "^rank ", r"parameters \w{64}"),
    "deepspeed": Example("DS_ACCELERATOR=cpu examples/with_deepspeed.py", 25, "^step |^parameters "),
    "megatron": Example("examples/with_megatron.py --tensor 2", 12, r'"rank": 0, "step": (?:1[2-4]|30),|parameters'),
}


def block(name: str, struck: str, printed: str) -> str:
    """Return what a page shows of a killed run, from what the two commands have printed."""
    example = EXAMPLES[name]
    file = example.file.relative_to(ROOT)
    return _BLOCK.format(
        name=name,
        digest=example.digest,
        text=f"""\
[{file.name}](../../{file}) on two ranks:

```sh
{example.start}
```

In another terminal:

```sh
{example.kill}
```

```
{struck}
```

The run ends as an undisturbed one:

```
{printed}
```
""",
    )


def recorded(name: str) -> re.Match[str] | None:
    """Return what a page shows now, with the groups `struck` and `printed`."""
    printed = r"(?s:.*?\n```\n(?P<struck>host [^`]*)\n```\n.*\n```\n(?P<printed>[^`]*)\n```\n|)"
    block = _BLOCK.format(name=name, digest=r"\w+", text=printed)
    return re.search(block, page(name).read_text())


def page(name: str) -> Path:
    """Return the page of a framework."""
    return FOLDER / f"{name}.md"


def record(name: str) -> tuple[str, str]:
    """Run an example twice, once with a kill, and return what is shown of what the two commands of it print."""
    example = EXAMPLES[name]
    (undisturbed,) = run(example.start)
    printed, struck = run(example.start, example.kill)
    ends = [set(re.findall(example.ends, output)) for output in (undisturbed, printed)]
    if ends[0] != ends[1] or not ends[0] or _RECOVERED not in printed:
        raise SystemExit(f"{name} ended otherwise than the undisturbed run:\n{printed}\n{ends}")
    return struck.strip(), shown(example, printed)


def run(*commands: str) -> list[str]:
    """Run commands at the same time, where nothing is left of others, and return what they print, without colors."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "run").mkdir()
        for part in ("examples", "tests"):
            (folder / part).symlink_to(ROOT / part)
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RESILIENT_RUN_DIR": str(folder / "run"),
            "RESILIENT_SHM_DIR": stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")),
        }
        outputs = []
        started = []
        for command in commands:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=folder,
                env=environ,
                text=True,
                stdout=subprocess.PIPE,
                # The second command fails until there is the run.
                stderr=subprocess.DEVNULL if started else subprocess.STDOUT,
            )
            stack.callback(process.kill)
            started.append(process)
        for process, timeout_s in zip(started, (_TIME_S, _LATE_S), strict=False):
            outputs.append(re.sub(r"\x1b\[[\d;]*m", "", process.communicate(timeout=timeout_s)[0]))
            if process.returncode:
                raise SystemExit("\n".join(outputs))
        return outputs


def shown(example: Example, printed: str) -> str:
    """Return which lines are shown of what a killed run has printed."""
    lines: list[str] = []
    for line in printed.splitlines():
        if line.startswith(_RECOVERED):
            lines.append(f"{line.partition('; detect ')[0]}; …")
        elif re.search(example.shown, line):
            lines.append(line if len(line) <= _LETTERS else f"{line[:_LETTERS].rpartition(' ')[0]} …")
        elif lines[-1:] != ["…"]:
            lines.append("…")
    return "\n".join(lines)


def main() -> None:
    """Record the examples that the command line names."""
    for name in sys.argv[1:]:
        made = block(name, *record(name))
        before = recorded(name)
        assert before, f"{page(name)} has no place for it"
        page(name).write_text(page(name).read_text().replace(before[0], made))
        print(made)


if __name__ == "__main__":
    main()
