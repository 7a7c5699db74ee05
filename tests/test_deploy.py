"""The files in `deploy/` start the program with flags and variables that it takes, and name files that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from api.cli import CommandLine, parse_command_line
from api.settings import ENVIRONMENT_PREFIX, ServerSettings
from deploy.replicas.settings import ReplicaSettings, parse_replica_command
from engine.config import EngineConfig, flag_rows

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SETTINGS = {name.upper() for table in (EngineConfig, ServerSettings) for name in table.__dataclass_fields__}
KEYS = {"SWITCHBOARD_API_KEY": "user", "SWITCHBOARD_ADMIN_KEY": "admin"}


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(r"(SWITCHBOARD_[A-Z_]+)=(\S+)", text))


def start(words: list[str], environ: Mapping[str, str]) -> CommandLine:
    """Parse as `app.py` does, after a look at the names of the variables."""
    unknown = {name for name in environ if name.startswith(ENVIRONMENT_PREFIX)}
    unknown -= {ENVIRONMENT_PREFIX + name for name in SETTINGS}
    assert not unknown
    return parse_command_line(words, environ)


def compose(name: str) -> dict[str, Any]:
    """One of the compose files, with the keys that it asks for filled in."""
    text = (DEPLOY / "compose" / name).read_text(encoding="utf-8")
    filled = re.sub(r"(?<!\$)\$\{(\w+)[^}]*\}", lambda found: KEYS.get(found[1], ""), text)
    document: dict[str, Any] = yaml.safe_load(filled)
    return document


def test_compose_starts_it_open_to_those_with_a_key() -> None:
    service = compose("compose.yaml")["services"]["switchboard"]
    command = start([], image_environment() | service["environment"])
    assert command.server.host == "0.0.0.0" and command.server.api_key == "user"
    assert command.server.allow_runtime_lora_updating
    assert f"{command.server.port}:{command.server.port}" in service["ports"]
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert command.server.drain_seconds < grace


def test_compose_files_name_files_that_exist() -> None:
    folder = DEPLOY / "compose"
    services = compose("compose.yaml")["services"]
    named = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    files = [name for name in named if name.startswith(".") and Path(name).suffix]
    assert len(files) == 4
    assert all((folder / name).is_file() for name in files)
    build = services["switchboard"]["build"]
    assert (folder / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / build["dockerfile"]).read_text(), re.MULTILINE))
    gpu = compose("gpu.yaml")["services"]["switchboard"]
    assert {build["target"], gpu["build"]["target"]} <= stages


def test_prometheus_reads_the_key_that_compose_gives_it() -> None:
    [job] = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"]
    [script] = compose("compose.yaml")["services"]["prometheus"]["entrypoint"][2:]
    assert f"> {job['authorization']['credentials_file']} " in script
    [target] = job["static_configs"][0]["targets"]
    assert target == f"switchboard:{image_environment()['SWITCHBOARD_PORT']}"
    assert json.loads((DEPLOY / "grafana" / "switchboard.json").read_text())["uid"] == "switchboard"


def test_kubernetes_starts_it_and_asks_the_routes_that_exist() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "switchboard.yaml").read_text()))
    [deployment] = (document for document in documents if document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    environ = {row["name"]: row.get("value", KEYS.get(row["name"])) for row in container["env"]}
    command = start(container["args"], image_environment() | environ)
    assert command.server.drain_seconds < pod["terminationGracePeriodSeconds"]
    assert command.server.port == container["ports"][0]["containerPort"]
    probes = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"/health", "/health/ready"}


def test_a_rayservice_starts_replicas_that_fit_its_workers() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "rayservice.yaml").read_text()))
    [claim, policy, service] = documents
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    module, _, builder = application["import_path"].partition(":")
    assert f"def {builder}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    cluster = service["spec"]["rayClusterConfig"]
    [head] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    [group] = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    [worker] = pod["containers"]
    [port] = [row["containerPort"] for row in worker["ports"] if row["name"] == "serve"]
    assert port == serve["http_options"]["port"], "KubeRay's readiness probe"
    label = policy["spec"]["podSelector"]["matchLabels"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        assert template["metadata"]["labels"] == label
    assert [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule] == [
        [{"protocol": "TCP", "port": port}]
    ]
    assert worker["env"] == head["env"], "the application is built on one of them and runs on the other"
    environ = {row["name"]: row.get("value", KEYS.get(row["name"])) for row in worker["env"]}
    words = shlex.split(application["args"]["flags"])
    command = parse_replica_command(words, image_environment() | environ)
    assert serve["http_options"] == {"host": command.app.server.host, "port": command.app.server.port}
    assert (group["minReplicas"], group["maxReplicas"]) == (
        command.replicas.min_replicas,
        command.replicas.max_replicas,
    )
    assert command.replicas.replica_gpus == int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert command.replicas.replica_cpus <= int(worker["resources"]["requests"]["cpu"])
    assert command.app.server.drain_seconds < pod["terminationGracePeriodSeconds"]
    [volume] = (row for row in pod["volumes"] if row["name"] == "data")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and command.app.engine.adapter_dir == "/data/adapters"
    tested = re.search(r"^ray==(\S+?);", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested is not None and cluster["rayVersion"] == tested[1]


def test_deployment_md_lists_every_flag_of_the_replicas() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    rows = [f"| `{flag}` | {default} | {meaning} |" for flag, default, meaning in flag_rows(ReplicaSettings)]
    assert [line for line in text.splitlines() if line.startswith("| `--")] == rows


def test_systemd_starts_it_with_what_it_may_write() -> None:
    text = (DEPLOY / "systemd" / "switchboard.service").read_text(encoding="utf-8")
    environ = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.+)$", text, re.MULTILINE))
    [words] = re.findall(r"^ExecStart=\S+/python app\.py ?(.*)$", text, re.MULTILINE)
    command = start(words.split(), environ)
    assert command.engine.adapter_dir == "/var/lib/switchboard/adapters"
    [stop_seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert command.server.drain_seconds < int(stop_seconds)


def test_a_space_tells_it_where_to_listen() -> None:
    header = yaml.safe_load((DEPLOY / "space" / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert (ROOT / header["app_file"]).is_file() and header["sdk"] == "gradio"
    pinned = re.search(r"^gradio==(\S+?);", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and header["sdk_version"] == pinned[1]
    space = {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "7861"}
    command = start([], space | {"SWITCHBOARD_INSECURE": "1"})
    assert (command.server.host, command.server.port) == ("0.0.0.0", 7861)
    assert not command.server.allow_runtime_lora_updating
    # Switchboard's own variables and flags win.
    assert start(["--port", "7999"], space | KEYS | {"SWITCHBOARD_HOST": "127.0.0.1"}).server.host == "127.0.0.1"
