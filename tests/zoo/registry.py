"""The loops of the zoo: what each is, what it needs, and how it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One training loop, `loops/<script>.py`.

    Attributes:
        name: Its name, unique.
        about: What is special about it, for the table in docs/loops.md.
        script: The file's stem; several loops may share one by `arguments`.
        arguments: The script's.
        library: The distribution that it is about.
        ranks: Workers on one host.
        steps: Steps of one job.
        kills: Kills of one job.
        slow: Whether it is left out of what CI runs.
        environ: Set for its workers.
    """

    name: str
    about: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    library: str = "torch"
    ranks: int = 1
    steps: int = 40
    kills: int = 12
    slow: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The installed version of its library."""
        return version(self.library)


LOOPS: tuple[Loop, ...] = (
    Loop(name="accelerate-fused", about="96 MiB", script="accelerate_fused", library="accelerate"),
    Loop(name="ema-evaluation", about="", script="ema_evaluation", library="torch_ema"),
)
