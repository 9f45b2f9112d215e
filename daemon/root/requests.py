"""Which hosts the operator was asked for, and which came; only roots read and write it."""

from dataclasses import dataclass

from ..base.codec import UNIX_S, Record, limited
from ..base.fields import Fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record):
    """One host that the operator was asked for.

    Attributes:
        host: The host in whose place another one is needed, "" for a standby.
        generation: In which it was asked for.
        unix_s: When.
        known: Hosts with a launcher at that moment: another one that comes answers the request.
        answer: The host that came, "" until then.
    """

    host: str = ""
    generation: int
    unix_s: float = limited(high=UNIX_S)
    known: tuple[str, ...] = limited(
        read=lambda values, name: tuple(Fields(each, name).text("host") for each in values.objects(name)),
        write=lambda hosts: [{"host": host} for host in hosts],
    )
    answer: str = ""
