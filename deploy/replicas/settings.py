"""Settings of several replicas: one more table beside the engine's and the server's, and its command line.

Owns `ReplicaSettings` and how words are shared out between this table and `app.py`'s flags. Knows nothing of Ray. Called by
`deploy/ray_serve` and by tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from api.cli import CommandLine, parse_command_line
from api.settings import ConfigFault, environment_values
from engine.config import add_flags, flag_name, setting


@dataclass(frozen=True)
class ReplicaSettings:
    """How many replicas there are, and when an adapter's requests leave those that hold it; frozen."""

    min_replicas: int = setting(2, "fewest replicas of the engine", parse=int, metavar="N")
    max_replicas: int | None = setting(
        None, "most replicas; above --min-replicas their number follows the load", parse=int, metavar="N",
        shown_default="--min-replicas",
    )  # fmt: skip
    target_requests: int | None = setting(
        None, "requests under way and waiting, for each replica, that the number of replicas is chosen for", parse=int,
        metavar="N", shown_default="--max-num-seqs",
    )  # fmt: skip
    busy_requests: int | None = setting(
        None, "requests at which a replica is busy: an adapter's further requests then go to another", parse=int,
        metavar="N", shown_default="--max-num-seqs",
    )  # fmt: skip
    upscale_delay: float = setting(
        30.0, "how long the load must be higher before replicas are added", parse=float, metavar="SECONDS"
    )
    downscale_delay: float = setting(
        600.0, "how long the load must be lower before replicas are taken away", parse=float, metavar="SECONDS"
    )
    ingress_replicas: int = setting(1, "processes that read requests and pass them on", parse=int, metavar="N")
    replica_cpus: float = setting(
        1.0, "CPU cores for each replica; PyTorch gets as many threads", parse=float, metavar="N"
    )
    replica_gpus: float | None = setting(
        None, "GPUs for each replica", parse=float, metavar="N", shown_default="1 where the cluster has any"
    )
    ray_address: str | None = setting(
        None, "cluster to deploy to, such as auto; the command then ends once the replicas are ready", metavar="ADDRESS",
        shown_default="a cluster of this machine alone, for as long as the command runs",
    )  # fmt: skip

    @property
    def most_replicas(self) -> int:
        """`max_replicas`, or what it follows from."""
        return self.min_replicas if self.max_replicas is None else self.max_replicas

    def check(self) -> ReplicaSettings:
        """These settings; raises `ConfigFault`."""
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigFault(f"--{name.replace('_', '-')} is {value}, but must be {lowest} or more.", param=name)
        if self.most_replicas < self.min_replicas:
            raise ConfigFault(
                f"--max-replicas is {self.max_replicas}, but must be --min-replicas ({self.min_replicas}) or more.",
                param="max_replicas",
            )
        return self


@dataclass(frozen=True)
class ReplicaCommand:
    """What the user asked for, checked."""

    app: CommandLine
    replicas: ReplicaSettings


def parse_replica_command(words: Sequence[str], environ: Mapping[str, str]) -> ReplicaCommand:
    """Words and environment of `deploy/ray_serve`: `app.py`'s flags and those of `ReplicaSettings`.

    Raises `ConfigFault` with one sentence; `--help` prints and exits as usual.
    """
    parser = _Parser(
        prog="python -m deploy.ray_serve",
        description="Serve with several replicas of the engine under Ray Serve. Takes every flag of app.py, and these.",
        allow_abbrev=False,
    )
    add_flags(parser, ReplicaSettings)
    given, others = parser.parse_known_args(list(words))
    values = environment_values(ReplicaSettings, environ) | vars(given)
    command = ReplicaCommand(parse_command_line(others, environ), ReplicaSettings(**values).check())
    if command.app.server.port == 0:
        raise ConfigFault("--port is 0, but Ray Serve needs a port of its own; name one.", param="port")
    return command


def replica_flags() -> list[str]:
    """The flags that `app.py` does not have."""
    return [flag_name(row) for row in fields(ReplicaSettings)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigFault(f"{message.removeprefix('argument ')}; see `{self.prog} --help`.")


_LOWEST = {
    "min_replicas": 1,
    "max_replicas": 1,
    "target_requests": 1,
    "busy_requests": 1,
    "upscale_delay": 0,
    "downscale_delay": 0,
    "ingress_replicas": 1,
    "replica_cpus": 0,
    "replica_gpus": 0,
}
