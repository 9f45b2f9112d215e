"""`torch.distributed.launcher.api` with recovery: the same names and signatures, our agent and our worker start."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as torch_api
from torch.distributed.launcher.api import LaunchConfig

from resilient_run.daemon.trust.secret import withheld

from .agent import make_agent
from .config import RunConfig
from .workers.handler import warm_workers
from .workers.rebind import rebound

__all__ = ["LaunchConfig", "elastic_launch", "installed", "launch_agent"]


@contextmanager
def installed(run_config: RunConfig) -> Iterator[None]:
    """Let torch's launcher make our agents and start workers our way while the block runs.

    An agent class that someone else has put into the launcher stays. With `RunConfig.enabled` false nothing changes but
    that what is started sees neither RESILIENT_KEY nor RESILIENT_ETCD_PASSWORD.
    """
    with ExitStack() as stack:
        stack.enter_context(withheld())
        if run_config.enabled:
            starter = stack.enter_context(warm_workers(enabled=run_config.warm_workers, preload=run_config.preload))
            agent = partial(make_agent, run_config=run_config, starter=starter)
            stack.enter_context(rebound(torch_api, "LocalElasticAgent", LocalElasticAgent, agent))
        yield


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run `entrypoint` on this host's workers, and return what each returned, by global rank.

    Recovery from memory needs ``config.rdzv_backend == "etcd-v3"``; `RunConfig` comes from the environment.

    Raises:
        ChildFailedError: A worker failed, and restarting did not help.
        click.UsageError: A variable has a value that its option would not take, or everybody may read and write etcd.
    """
    # torch 2.12 has no such parameter.
    more: dict[str, Any] = {} if health_check_server is None else {"health_check_server": health_check_server}
    with installed(RunConfig.from_environ()):
        results: dict[int, Any] = torch_api.launch_agent(config, entrypoint, args, **more)
    return results


class elastic_launch(torch_api.elastic_launch):
    """torch's `elastic_launch` through our `launch_agent`."""

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the entrypoint with `args`; see `launch_agent`."""
        call: Callable[..., dict[int, Any]] = super().__call__
        with installed(RunConfig.from_environ()):
            return call(*args)
