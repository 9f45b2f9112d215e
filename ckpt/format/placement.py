"""Which hosts keep the replicas of which host: the mixed strategy of Gemini (Algorithm 6.1), 0-based.

With failure domains (racks, switches) the groups are the algorithm's, only the hosts in them are chosen so that a group
spans as many domains as it can.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["group", "mixed", "ring"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Groups of hosts that keep each other's checkpoints; a host's are kept by it and the next m - 1 in its group.

    Attributes:
        strategy: "group" when every group has `replicas` hosts, "mixed" when the last is a larger ring, "ring" when
            all hosts are one ring.
        groups: Every host once, each group in the order of its ring.
        replicas: Copies of each checkpoint, the host's own included; never more than there are hosts.
    """

    strategy: Strategy
    groups: tuple[tuple[int, ...], ...]
    replicas: int

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Return for each host those that keep its checkpoints, itself first (Section 6.4)."""
        kept_by = {
            host: tuple(group[(position + k) % len(group)] for k in range(self.replicas))
            for group in self.groups
            for position, host in enumerate(group)
        }
        return tuple(kept_by[host] for host in range(len(kept_by)))


def placement(
    hosts: int,
    replicas: int,
    *,
    labels: Sequence[str] | None = None,
    strategy: Literal["mixed", "ring"] = "mixed",
) -> Placement:
    """Return the placement of `replicas` copies among `hosts` hosts (Algorithm 6.1, or one ring for comparison).

    With `labels` all copies of every host are in different domains if any assignment of hosts to the groups does that;
    and no host has all of its copies in one domain if that can be avoided. Without, or with only one label, groups are
    of consecutive hosts.

    Args:
        hosts: Number of hosts, N ≥ 1.
        replicas: Copies wanted, m ≥ 1; more than there are hosts means one on each.
        labels: Failure domain of each host; hosts with the same label may be lost together. Not for the ring.
        strategy: "mixed" for the algorithm; "ring" for Gemini's comparison: copies of host i on i, i + 1, ….

    Raises:
        ValueError: `hosts` or `replicas` is less than 1, or there is not one label for each host.
    """
    if hosts < 1 or replicas < 1:
        raise ValueError(f"placement needs at least one host and one replica, got {hosts} and {replicas}")
    labels = labels or [""] * hosts
    if len(labels) != hosts:
        raise ValueError(f"{len(labels)} labels for {hosts} hosts: give one label for each host")
    size = min(replicas, hosts)
    if strategy == "ring":
        if len(set(labels)) > 1:
            raise ValueError("the ring strategy does not know labels: leave them out, or choose mixed")
        return Placement(strategy="ring", groups=(tuple(range(hosts)),), replicas=size)
    starts = range(0, hosts - size + 1, size)
    ends = [*starts[1:], hosts]
    groups = tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))
    if len(set(labels)) > 1:
        dealt = _deal([len(group) for group in groups], labels)
        groups = tuple(tuple(sorted(group) if len(group) == size else _spread(group)) for group in dealt)
    return Placement(strategy="mixed" if hosts % size else "group", groups=groups, replicas=size)


def replica_hosts(hosts: int, replicas: int, labels: Sequence[str] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return for each host those that keep its checkpoints, itself first; arguments as for `placement`."""
    return placement(hosts, replicas, labels=labels).holders()


def _deal(sizes: Sequence[int], labels: Sequence[str]) -> list[list[int]]:
    """Return groups of these sizes in which each domain is spread over as many groups as possible.

    Domain by domain, the largest first: each host goes to the group that has none of its domain yet and the most room.
    That is the construction behind the Gale-Ryser theorem, so every group has distinct domains whenever it is possible.
    """
    domains: defaultdict[str, list[int]] = defaultdict(list)
    for host, label in enumerate(labels):
        domains[label].append(host)
    groups: list[list[int]] = [[] for _ in sizes]
    room = list(sizes)
    for members in sorted(domains.values(), key=lambda members: (-len(members), members[0])):
        visited: set[int] = set()
        for host in members:
            open_groups = (index for index in range(len(groups)) if room[index])
            index = max(open_groups, key=lambda index: (index not in visited, room[index], -index))
            groups[index].append(host)
            room[index] -= 1
            visited.add(index)
    return groups


def _spread(members: Sequence[int]) -> list[int]:
    """Return `members` around a ring so that neighbours in the argument, which share a domain, stand opposite."""
    half = (len(members) + 1) // 2
    places = {position // 2 + position % 2 * half: host for position, host in enumerate(members)}
    return [places[position] for position in range(len(members))]
