"""Reads the log of elastic_worker.py: which history of steps a run has kept, and whether that is a right one."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic_worker

Line = dict[str, Any]

EPOCHS = {"dealt": elastic_worker.DEALT, "shared": elastic_worker.SHARED}


class Log:
    """What the ranks have written so far; `read` takes in what is new.

    Attributes:
        hosts: Rank → host of the newest generation that has restored.
        generation: That one.
        committed: The newest pair of generation and step that a rank knew to be committed.
        made: Step → rank → its line, of the newest generation that made it: that of the history that was kept.
        repeated: How many steps were made again.
        worlds: How many generations had so many ranks.
        problems: Generations that went back behind what was committed before.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open()
        self._begun = ""
        self.hosts: dict[int, str] = {}
        self.generation = 0
        self.committed = (0, 0)
        self.made: dict[int, dict[int, Line]] = {}
        self.restores: list[Line] = []
        self.ends: list[Line] = []
        self.repeated = 0
        self.worlds: Counter[int] = Counter()
        self.problems: list[str] = []

    def read(self) -> None:
        """Take in what is new."""
        while text := self._file.readline():
            self._begun += text
            if not text.endswith("\n"):
                return  # It was read while it was written.
            line, self._begun = json.loads(self._begun), ""
            if "restored" in line:
                self._restored(line)
            elif "ended" in line:
                self.ends.append(line)
                self.committed = max(self.committed, (line["generation"], line["ended"]))
            else:
                self._made(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _restored(self, line: Line) -> None:
        generation = line["generation"]
        self.restores.append(line)
        if generation > self.generation:
            self.generation, self.hosts = generation, {}
            self.worlds[line["of"]] += 1
        if generation == self.generation:
            self.hosts[line["rank"]] = line["host"]
        if self.committed[0] < generation and line["restored"] < self.committed[1]:
            self.problems.append(
                f"generation {generation} began after step {line['restored']}, committed: {self.committed}"
            )

    def _made(self, line: Line) -> None:
        if line["committed"] is not None:
            self.committed = max(self.committed, tuple(line["committed"]))
        made = self.made.setdefault(line["step"], {})
        known = next(iter(made.values()))["generation"] if made else line["generation"]
        if line["generation"] > known:
            self.repeated += 1
            made.clear()
        if line["generation"] >= known:
            made[line["rank"]] = line


def audit(log: Log) -> Iterator[str]:
    """Yield what is wrong with a history: steps, samples or parameters."""
    yield from log.problems
    last = max([log.committed[1], *(line["restored"] for line in log.restores)])
    steps = sorted(step for step in log.made if step <= last)
    if steps != list(range(1, len(steps) + 1)):
        yield f"of {len(steps)} steps up to {steps[-1]} some are missing"
        return
    model, optimizer = elastic_worker.begin()
    digests = {0: elastic_worker.digest_of(model)}
    trained = {name: _Epochs(name, samples) for name, samples in EPOCHS.items()}
    for step in steps:
        lines = [log.made[step][rank] for rank in sorted(log.made[step])]
        if [line["rank"] for line in lines] != list(range(lines[0]["of"])):
            yield f"step {step} of {lines[0]['of']} ranks was made by {[line['rank'] for line in lines]}"
        for epochs in trained.values():
            yield from epochs.add(step, lines)
        samples = [sample for line in lines for name in EPOCHS for sample in line[name][1]]
        elastic_worker.learn(model, optimizer, elastic_worker.gradients(model, samples))
        digests[step] = elastic_worker.digest_of(model)
        if wrong := [line["rank"] for line in lines if line["digest"] != digests[step]]:
            yield f"step {step} of generation {lines[0]['generation']}: ranks {wrong} had other parameters"
    for line in (*log.restores, *log.ends):
        at = line.get("restored", line.get("ended"))
        if digests.get(at) != line["digest"]:
            yield f"generation {line['generation']}, rank {line['rank']} had other parameters after step {at}"


class _Epochs:
    """The samples of one loader, epoch by epoch."""

    def __init__(self, name: str, samples: range) -> None:
        self._name, self._all = name, set(samples)
        self._epoch, self._seen = 0, set[int]()

    def add(self, step: int, lines: list[Line]) -> Iterator[str]:
        """Take in a step, and yield what is wrong with it."""
        epochs = {line[self._name][0] for line in lines}
        if len(epochs) > 1:
            yield f"step {step}: ranks are in epochs {epochs} of {self._name}"
        if epochs != {self._epoch}:
            if missing := self._all - self._seen:
                yield f"epoch {self._epoch} of {self._name} ended before step {step} without {sorted(missing)}"
            if epochs != {self._epoch + 1}:
                yield f"step {step}: epoch {epochs} of {self._name} follows {self._epoch}"
            self._epoch, self._seen = max(epochs), set()
        given = [sample for line in lines for sample in line[self._name][1]]
        new = [sample for sample in given if sample not in self._seen]
        self._seen |= set(new)
        again = len(given) - len(set(new))
        # A DistributedSampler fills the last round up, so that all ranks get as many.
        filling = lines[0]["of"] - 1 if self._name == "dealt" and self._seen == self._all else 0
        if again > filling:
            yield f"step {step}, epoch {self._epoch}: {again} samples of {self._name} were trained twice: {given}"
