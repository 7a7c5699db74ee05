"""Starts Switchboard as several replicas under Ray Serve: `python -m deploy.ray_serve [flags of app.py] [flags of its own]`.

Puts the parts of `deploy/replicas` together: the ingress behind Ray Serve's proxy, the replicas behind the adapter router, and
the ledger that keeps their adapters the same. `build` is the same for a Ray Serve config file, such as a RayService's. Exit
codes are those of `app.py`.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api.settings import ConfigFault
from deploy.replicas.settings import ReplicaCommand, parse_replica_command

log = logging.getLogger("switchboard")

ROOT = Path(__file__).resolve().parents[1]
APP_NAME = "switchboard"
# How much longer than the drain a replica may take to end.
GRACE_SECONDS = 5.0
# Each replica bounds its own queue and answers 429; Ray Serve must not hold requests back before that, nor long polls.
UNBOUNDED = 100_000


def main(words: Sequence[str] | None = None) -> int:
    """Deploy, and run until told to stop unless the cluster is somebody else's; the exit code."""
    try:
        command = parse_replica_command(sys.argv[1:] if words is None else words, os.environ)
    except ConfigFault as error:
        sys.stderr.write(f"ray_serve: error: {error.message}\n")
        return 2
    from app import set_up_logging

    set_up_logging(command.app.server.log_level)
    try:
        return _run(command)
    except KeyboardInterrupt:
        return 0


def _run(command: ReplicaCommand) -> int:
    prepare_environment()
    import ray
    from ray import serve

    server, address = command.app.server, command.replicas.ray_address
    is_own = address is None
    # Without an address Ray would join a cluster that it finds, whose applications are not ours to end.
    ray.init(address or "local", include_dashboard=False if is_own else None)
    # Only now: Ray installs its own handler, which aborts. SIGTERM ends this like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": server.host, "port": server.port})
        serve.run(make_application(command), name=APP_NAME, route_prefix="/")
        log.info("event=ready url=http://%s:%d replicas=%d", server.host, server.port, command.replicas.min_replicas)
        if is_own:
            threading.Event().wait()
    except RuntimeError as error:  # Ray Serve's word for replicas that do not start; their reason is in the log above.
        sys.stderr.write(f"ray_serve: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        log.info("event=stopping drain_seconds=%g", server.drain_seconds)
    finally:
        if is_own:
            serve.shutdown()
        ray.shutdown()
    return 0


def build(args: dict[str, Any]) -> Any:
    """The application of a Ray Serve config file: `args: {flags: "--model … --min-replicas 2"}`.

    `SWITCHBOARD_…` variables of the cluster's containers stand for flags too. Host and port are the config file's
    `http_options`, but `--host` says here too whether credentials are needed. Raises `ConfigFault`.
    """
    unknown = args.keys() - {"flags"}
    if unknown:
        raise ConfigFault(f"args holds {sorted(unknown)[0]!r}; it takes flags, a text.")
    return make_application(parse_replica_command(shlex.split(args.get("flags", "")), os.environ))


def prepare_environment() -> None:
    """Before Ray starts: its processes must find this project's packages, and report to nobody."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def make_application(command: ReplicaCommand) -> Any:
    """The deployments, bound to each other; Ray must be running."""
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from deploy.replicas.ingress import Ingress
    from deploy.replicas.ledger import Ledger
    from deploy.replicas.replica import Replica
    from deploy.replicas.router import AdapterRouter

    app, replicas = command.app, command.replicas
    gpus = replicas.replica_gpus
    if gpus is None:
        gpus = float(ray.cluster_resources().get("GPU", 0) > 0)
    count: dict[str, Any] = {"num_replicas": replicas.min_replicas}
    if replicas.most_replicas > replicas.min_replicas:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.min_replicas,
                max_replicas=replicas.most_replicas,
                target_ongoing_requests=replicas.target_requests or app.engine.max_num_seqs,
                upscale_delay_s=replicas.upscale_delay,
                downscale_delay_s=replicas.downscale_delay,
                look_back_period_s=min(30.0, max(2.0, replicas.upscale_delay)),
            )
        }
    quiet = {"enable_access_log": False}  # As `app.py` is.
    ledger = serve.deployment(
        Ledger,
        name="ledger",
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    replica = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=UNBOUNDED,
        max_constructor_retry_count=3,
        graceful_shutdown_timeout_s=app.server.drain_seconds + GRACE_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=AdapterRouter,
            request_router_kwargs={"busy_at": replicas.busy_requests or app.engine.max_num_seqs},
        ),
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": gpus},
        logging_config=quiet,
        **count,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=replicas.ingress_replicas,
        max_surge_percent=100,  # An update starts the new ones first, so that there is always a way in.
        max_ongoing_requests=UNBOUNDED,
        graceful_shutdown_timeout_s=app.server.drain_seconds + GRACE_SECONDS,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    return ingress.bind(replica.bind(app, ledger.bind()), app.server, app.engine.max_upload_mb)


if __name__ == "__main__":
    sys.exit(main())
