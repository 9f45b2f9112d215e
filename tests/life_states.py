"""The states of a run, as docs/internals/protocol.md has them, and who may change them."""

from collections.abc import Container, Mapping
from enum import StrEnum

from resilient_run.daemon.run.records import Agreement
from resilient_run.daemon.run.rounds import Member, Round


class State(StrEnum):
    """What a run does, by its keys."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    TRAINING = "training"
    BROKEN = "broken"
    ENDED = "ended"

    @classmethod
    def of(
        cls, job: Agreement | None, round_: Round | None, failures: Container[int], members: Mapping[str, Member]
    ) -> "State":
        """Return the state of a run with these keys."""
        if job is None:
            return cls.UNKNOWN
        if job.closed is not None:
            return cls.ENDED
        if round_ is None:
            return cls.WAITING
        return cls.BROKEN if round_.generation in failures or round_.gone(members) else cls.TRAINING


TRANSITIONS: Mapping[tuple[State, State], str] = {
    (State.UNKNOWN, State.WAITING): "newcomer",
    (State.WAITING, State.TRAINING): "launcher",
    (State.WAITING, State.BROKEN): "launcher",
    (State.TRAINING, State.BROKEN): "launcher|root|lease|drain",
    (State.BROKEN, State.TRAINING): "launcher",
    (State.WAITING, State.ENDED): "launcher",
    (State.TRAINING, State.ENDED): "launcher|root",
    (State.BROKEN, State.ENDED): "launcher|root",
    (State.ENDED, State.BROKEN): "newcomer",
    (State.ENDED, State.WAITING): "newcomer",
    (State.ENDED, State.UNKNOWN): "launcher|newcomer",
}
"""From which state to which a run goes, and by whom: a launcher of the run, or one that is not in it yet (newcomer).

`resilientctl forget` and an etcd without its data end any.
"""
