"""Which hosts the operator was asked for, and which came; only roots read and write it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..base.fields import Fields
from ..run import keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One host that the operator was asked for.

    Attributes:
        host: The host in whose place another one is needed, "" for a standby.
        generation: In which it was asked for.
        unix_s: When.
        known: Hosts with a launcher at that moment: another one that comes answers the request.
        answer: The host that came, "" until then.
    """

    host: str
    generation: int
    unix_s: float
    known: tuple[str, ...]
    answer: str = ""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return the request in an item of the etcd value.

        Raises:
            DaemonError: The item is none.
        """
        fields = Fields(value, keys.REQUESTS)
        return cls(
            host=fields.optional_text("host"),
            generation=fields.integer("generation"),
            unix_s=fields.number("unix_s", high=1e12),
            known=tuple(Fields(item, keys.REQUESTS).text("host") for item in fields.objects("known")),
            answer=fields.optional_text("answer"),
        )

    def to_item(self) -> dict[str, Any]:
        """Return the item that `parse` reads."""
        return {**asdict(self), "known": [{"host": host} for host in self.known]}


def parse_requests(value: Mapping[str, Any]) -> tuple[Request, ...]:
    """Return the requests, oldest first, as `root/requests` has them.

    Raises:
        DaemonError: The value is no list of requests.
    """
    return tuple(map(Request.parse, Fields(value, keys.REQUESTS).objects("requests")))
