"""The Serve config of the Kubernetes manifest, by Ray's own schema, and the application that it builds."""

from __future__ import annotations

from pathlib import Path

import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from deploy.ray_serve import build
from tests.ray.world import Cluster

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "rayservice.yaml"


def test_the_manifests_config_is_one_of_ray_serve_and_builds_an_application(deployed: Cluster) -> None:
    [text] = [
        document["spec"]["serveConfigV2"]
        for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
        if document["kind"] == "RayService"
    ]
    [application] = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert isinstance(build(dict(application.args)), Application)
