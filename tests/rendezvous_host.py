"""A launcher without workers, as a process: joins every generation of a run and prints one JSON line for each.

Usage: rendezvous_host.py ENDPOINT RUN_ID MIN_NODES MAX_NODES [OPTION=VALUE...]; the host id is in RESILIENT_HOST_ID.
The option `elastic` is --rr-elastic, the others are those of --rdzv-conf.
"""

import json
import select
import signal
import sys

from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilient_run.launcher.rendezvous.rendezvous import EtcdRendezvous


def main(endpoint: str, run_id: str, min_nodes: str, max_nodes: str, *options: str) -> None:
    """Join until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    settings = dict(option.split("=", 1) for option in options)
    elastic = settings.pop("elastic", None)
    handler = EtcdRendezvous(
        RendezvousParameters("etcd-v3", endpoint, run_id, int(min_nodes), int(max_nodes), **settings)
    )
    if elastic is not None:
        handler.describe(1, "default", elastic_s=float(elastic))
    while True:
        info = handler.next_rendezvous()
        place = {"rank": info.rank, "world_size": info.world_size, "generation": handler.generation}
        print(json.dumps(place), flush=True)
        while handler.num_nodes_waiting() == 0:
            select.select([handler.changed_fd], [], [])
            handler.clear_changed()


if __name__ == "__main__":
    main(*sys.argv[1:])
