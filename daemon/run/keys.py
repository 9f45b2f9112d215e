"""Every etcd key of a run below the run's prefix: its name, who writes it, and what its value is.

What has no class here is a JSON object that docs/internals/protocol.md describes. A `Folder` has a key for each
of the names that follow it. *Leased* keys vanish with their writer.
"""

from ..etcd.config import RUNS


class Folder(str):
    """Keys that begin alike; called with the names that follow, one of them, without any, what they all begin with."""

    __slots__ = ()

    def __call__(self, *names: str | int) -> str:
        """Return the key of `names` here; a last name "" leaves it open."""
        return "/".join((self, *map(str, names or ("",))))


RENDEZVOUS = "rdzv/"  # what launchers follow
JOB = "rdzv/job"  # launchers and root: the current life of the run id, and its end, `Agreement` (life.py)
LIVES = Folder("rdzv/job")  # by name, launchers and root: written with the job; its revision guards what is of a life
MEMBERS = Folder("rdzv/members")  # by host, leased, its launcher: a `Member`
ROUND = "rdzv/round"  # launchers: the `Round`; its revision guards what is valid in one generation only
COMMITTED = "rdzv/committed"  # root, launchers: the only number of ranks that can restore what is committed
STORES = Folder("rdzv/store")  # by generation, launcher of group rank 0: where the store is
FAILURES = Folder("rdzv/failure")  # by generation, root and launchers: the `Failure`, settled once
DONE = Folder("rdzv/done")  # by generation and host, its launcher: all its workers succeeded
RECOVERED = Folder("rdzv/recovered")  # by generation and host, its launcher: the recovery event
QUARANTINES = Folder("rdzv/quarantine")  # by host, root: a `Quarantine`

ROOT = "root/"  # what says who is the root, and what roots did
LEADER = "root/leader"  # leased, the daemon that was elected: its host
DECISIONS = "root/decisions"  # root: what roots decided
REQUESTS = "root/requests"  # root: hosts that the operator was asked for, `Request`
HISTORY = "root/failures"  # root: the `Failure` of each generation, as roots noted it

HOSTS = Folder("ckpt/hosts")  # by host, leased, its daemon: where peers fetch, and signs of life
EQUAL = Folder("ckpt/equal")  # by structure, root: `EqualLeaves`
UNHEALTHY = "ckpt/unhealthy"  # root: the steps because of which the run went back (`parse_pairs`)

INJECTION = "inject/"  # faults on purpose
ORDERS = Folder("inject/orders")  # by id, `resilient-inject`: an `Order`
OUTCOMES = Folder("inject/outcomes")  # by id, the daemon of the order's host: the `Outcome`

STATE = "state/"  # only the root follows these; they are sorted after all others, so that daemons follow the rest
# The keys below the watermark are written with it, so that one mirror shows all of them in order.
WATERMARK = "state/watermark"  # root: the newest committed pair
NEXT = "state/watermark/next"  # root: the pair from which on every rank captures the first step (`Agreed`)
OLDER = "state/watermark/older"  # root: the committed pairs before it that stay in memory (`parse_pairs`)
PERSIST = "state/watermark/persist"  # root, a daemon that is told to end: the `PersistRequest`
HELD = Folder("state/held")  # by host, leased, its daemon: what it holds of what the round restores, `HeldPair`
OBSERVATIONS = Folder("state/observations")  # by host, leased, its daemon: what is wrong there
PERSISTED = "state/persisted"  # root: the published pairs (`parse_pairs`)
ANSWERS = Folder("state/persisted")  # by host, its daemon: the `PersistAnswer` to the newest request


def prefix(run_id: str) -> str:
    """Return what all keys of the run begin with."""
    return f"{RUNS}{run_id}/"


def lasting() -> tuple[str, ...]:
    """Return what may stay of a life of a run, once no launcher is a member of it, to be deleted.

    What vanishes with its writer is not among it: daemons may be there already for the next life.
    """
    folders = RENDEZVOUS, EQUAL(), f"{WATERMARK}/", ANSWERS(), INJECTION
    return (*folders, UNHEALTHY, DECISIONS, REQUESTS, HISTORY, WATERMARK, PERSISTED)


def split(key: str) -> list[str]:
    """Return the folder that `key` is in and the names after it, or `key` alone where it is in none."""
    parts = key.split("/")
    return ["/".join(parts[:2]), *parts[2:]]
