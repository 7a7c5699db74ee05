"""One cluster for all tests of this folder, which change it in turn. Collected by `make test-ray` alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray import serve

from tests.ray.world import NUM_REPLICAS, Cluster, free_port, start_ray, wait_for


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three replicas."""
    start_ray()
    cluster = Cluster(free_port(), str(tmp_path_factory.mktemp("adapters")))
    serve.start(http_options={"host": "127.0.0.1", "port": cluster.port})
    cluster.deploy("--min-replicas", str(NUM_REPLICAS))
    yield cluster
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def cluster(deployed: Cluster) -> Cluster:
    """The same, with all replicas there."""
    wait_for("all replicas", lambda: len(deployed.replicas()) == NUM_REPLICAS)
    return deployed
