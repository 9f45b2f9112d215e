"""The entry point by which plain torchrun finds the `etcd-v3` rendezvous."""

from typing import Any


def load_etcd_v3() -> Any:
    """Return the creator of the `etcd-v3` handler: `(RendezvousParameters) -> RendezvousHandler`."""
    # torch reads every plug-in whatever backend it will use, so what the handler needs is loaded when it is wanted.
    return _create


def _create(params: Any) -> Any:
    from .rendezvous.rendezvous import EtcdRendezvous

    return EtcdRendezvous(params)


__all__ = ["load_etcd_v3"]
