"""Replicas under a real Ray Serve: where requests go, that changes reach everyone, and what a lost replica costs."""

from __future__ import annotations

import io
import json
import random
import threading
import zipfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from engine.config import EMBEDDED_ASSETS
from tests.ray.world import ADAPTERS, BUSY, NAMES, NUM_REPLICAS, Cluster, Reply, actor_of, wait_for

AUDIO = EMBEDDED_ASSETS / "audio" / "train-time.wav"


@pytest.fixture(scope="session")
def right_text(deployed: Cluster) -> dict[str, str]:
    """The answer of each content, asked while nothing else runs."""
    texts = {kind: deployed.ask(f"{kind}-0").text for kind in ("pirate", "sql")}
    assert texts["pirate"] != texts["sql"]
    return texts


def is_right(model: str, reply: Reply, right_text: dict[str, str]) -> bool:
    return reply.text == right_text[model.partition("-")[0]]


def test_an_adapters_requests_go_where_it_is(cluster: Cluster, right_text: dict[str, str]) -> None:
    models = NAMES * 12
    random.Random(0).shuffle(models)
    replies = cluster.ask_all(models, at_once=3)
    assert all(is_right(model, reply, right_text) for model, reply in zip(models, replies, strict=True))
    # Nothing was busy, so an adapter has no reason to be anywhere but at its first place.
    places = defaultdict(Counter)
    for model, reply in zip(models, replies, strict=True):
        places[model][reply.replica] += 1
    at_home = sum(max(counts.values()) for counts in places.values())
    print(f"affinity: {at_home} of {len(replies)} requests at home, chance {len(replies) // NUM_REPLICAS}")
    assert at_home >= 0.95 * len(replies)
    assert len({reply.replica for reply in replies}) == NUM_REPLICAS, "six adapters fill three replicas"


def test_a_popular_adapter_spreads_once_its_replica_is_busy(cluster: Cluster, right_text: dict[str, str]) -> None:
    at_rest = {cluster.ask("sql-0").replica for _ in range(6)}
    crowd = cluster.ask_all(["sql-0"] * 60, at_once=BUSY * 2 * NUM_REPLICAS, max_tokens=12)
    assert all(is_right("sql-0", reply, right_text) for reply in crowd)
    counts = Counter(reply.replica for reply in crowd)
    print(f"spread: {len(at_rest)} replica at rest, {sorted(counts.values())} of {len(crowd)} under a crowd")
    assert len(at_rest) == 1
    assert len(counts) == NUM_REPLICAS
    assert max(counts.values()) <= 0.8 * len(crowd)


def test_audio_without_a_name_is_routed_by_its_default(cluster: Cluster) -> None:
    replicas = set()
    for model in ("speech", "tiny-speech", "speech"):
        answer = cluster.client.post(
            "/v1/audio/transcriptions", data={"model": model, "temperature": "0"}, files={"file": AUDIO.read_bytes()}
        )
        assert answer.status_code == 200 and "train" in answer.json()["text"], answer.text
        assert answer.headers["X-LoRA-Name"] == "speech"
        replicas.add(answer.headers["X-Replica"])
    assert len(replicas) == 1


def test_a_load_and_an_unload_are_everywhere_once_they_are_answered(
    cluster: Cluster, right_text: dict[str, str]
) -> None:
    loaded = cluster.change("/v1/load_lora_adapter", lora_name="sql-new", lora_path=str(ADAPTERS / "sql"))
    assert loaded.text == "Success: LoRA adapter 'sql-new' added successfully."
    assert loaded.headers["X-Replicas"] == f"{NUM_REPLICAS}/{NUM_REPLICAS}"
    replies = cluster.ask_all(["sql-new"] * 30, at_once=BUSY * 2 * NUM_REPLICAS)
    assert all(is_right("sql-new", reply, right_text) for reply in replies)
    assert len({reply.replica for reply in replies}) > 1
    again = cluster.client.post(
        "/v1/load_lora_adapter", json={"lora_name": "sql-new", "lora_path": str(ADAPTERS / "sql")}
    )
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
    cluster.change("/v1/unload_lora_adapter", lora_name="sql-new")
    gone = cluster.ask_all(["sql-new"] * 30, at_once=BUSY * 2 * NUM_REPLICAS)
    assert {(reply.status, reply.text) for reply in gone} == {(404, "model_not_found")}


def test_an_adapter_that_two_clients_load_at_once_is_loaded_once(cluster: Cluster) -> None:
    body = {"lora_name": "once", "lora_path": str(ADAPTERS / "sql")}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: cluster.client.post("/v1/load_lora_adapter", json=body), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400, 400, 400]
    cluster.change("/v1/unload_lora_adapter", lora_name="once")


def test_a_reload_swaps_each_replica_at_once_and_is_told_when_all_have_it(
    cluster: Cluster, right_text: dict[str, str]
) -> None:
    cluster.change("/v1/load_lora_adapter", lora_name="style", lora_path=str(ADAPTERS / "sql"))
    before = cluster.ask("style")
    assert before.text == right_text["sql"]
    is_over = threading.Event()

    def keep_asking(_: int) -> list[Reply]:
        replies = []
        while not is_over.is_set():
            replies.append(cluster.ask("style"))
        return replies

    with ThreadPoolExecutor(BUSY * NUM_REPLICAS) as pool:
        asking = pool.map(keep_asking, range(BUSY * NUM_REPLICAS))
        try:
            reload = cluster.change(
                "/v1/load_lora_adapter", lora_name="style", lora_path=str(ADAPTERS / "pirate"), load_inplace=True
            )
        finally:
            is_over.set()
        replies = [reply for replies in asking for reply in replies]
    later = cluster.ask_all(["style"] * 24, at_once=BUSY * 2 * NUM_REPLICAS)
    assert reload.headers["X-Replicas"] == f"{NUM_REPLICAS}/{NUM_REPLICAS}"
    [row] = [row for row in cluster.status()["adapters"] if row["name"] == "style"]
    assert (row["have"], row["of"]) == (NUM_REPLICAS, NUM_REPLICAS) and row["generation"] != before.generation
    by_generation = {before.generation: right_text["sql"], row["generation"]: right_text["pirate"]}
    assert replies
    assert all(reply.status == 200 and reply.text == by_generation[reply.generation] for reply in replies + later)
    assert {reply.generation for reply in later} == {row["generation"]}
    cluster.change("/v1/unload_lora_adapter", lora_name="style")


def test_an_upload_is_stored_once_and_served_by_all(cluster: Cluster, right_text: dict[str, str]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted((ADAPTERS / "pirate").iterdir()):
            archive.write(path, path.name)
        # Larger than what travels with a call.
        archive.writestr("notes.txt", random.Random(0).randbytes(3 << 20))
    files = {"files": ("pirate.zip", packed.getvalue())}
    answer = cluster.client.post("/v1/adapters", data={"name": "pirate-up"}, files=files)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Replicas"] == f"{NUM_REPLICAS}/{NUM_REPLICAS}"
    replies = cluster.ask_all(["pirate-up"] * 30, at_once=BUSY * 2 * NUM_REPLICAS)
    assert all(is_right("pirate-up", reply, right_text) for reply in replies)
    assert len({reply.replica for reply in replies}) > 1
    assert cluster.client.delete("/v1/adapters/pirate-up").status_code == 200
    assert {reply.status for reply in cluster.ask_all(["pirate-up"] * 12, at_once=12)} == {404}


def test_metrics_are_those_of_all_replicas(cluster: Cluster) -> None:
    text = cluster.client.get("/metrics").text
    labels = {line.split('replica="')[1].split('"')[0] for line in text.splitlines() if not line.startswith("#")}
    assert labels == cluster.replicas()
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) > 10


def test_a_page_stays_with_one_replica(cluster: Cluster) -> None:
    home = cluster.client.get("/")
    replica = home.cookies["switchboard_replica"]
    cluster.client.cookies.clear()
    others = {
        cluster.client.get("/config", headers={"Cookie": f"switchboard_replica={replica}"}).headers["X-Replica"]
        for _ in range(12)
    }
    assert others == {replica} == {home.headers["X-Replica"]}
    strangers = [cluster.client.get("/config", headers={"Cookie": "switchboard_replica=gone"}) for _ in range(3)]
    assert all(
        f"switchboard_replica={answer.headers['X-Replica']}" in answer.headers["set-cookie"] for answer in strangers
    )
    cluster.client.cookies.clear()


def test_an_open_page_is_no_request_under_way(cluster: Cluster) -> None:
    with cluster.client.stream("GET", "/gradio_api/heartbeat/page") as page:
        replica = page.headers["X-Replica"]
        lines = page.iter_lines()  # Kept: the page is closed with it.
        assert next(lines) == "data: ALIVE"
        ongoing = actor_of("replica", replica).get_num_ongoing_requests
        assert wait_for("no request", lambda: ray.get(ongoing.remote()) == 0) is True


def test_a_reader_who_leaves_frees_what_the_answer_held(cluster: Cluster) -> None:
    def counted(metric: str, label: str = "") -> float:
        lines = cluster.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{metric}{{") and label in line)

    assert counted("switchboard_requests_running") == 0
    assert counted("switchboard_requests_total", 'outcome="abort"') == 0
    body = {
        "model": "pirate-0", "messages": [{"role": "user", "content": "tell me a long story"}], "max_tokens": 2000,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # Kept: the answer is left with it.
        first = next(lines)
        assert response.status_code == 200 and first.startswith("data: "), first
        wait_for("a running request", lambda: counted("switchboard_requests_running") == 1)
    wait_for("the end of it", lambda: counted("switchboard_requests_running") == 0)
    assert counted("switchboard_requests_total", 'outcome="abort"') == 1


def test_a_lost_replica_costs_no_wrong_answer_and_none_is_lost_silently(
    cluster: Cluster, right_text: dict[str, str]
) -> None:
    loaded = cluster.change("/v1/load_lora_adapter", lora_name="pirate-late", lora_path=str(ADAPTERS / "pirate"))
    assert loaded.headers["X-Replicas"] == f"{NUM_REPLICAS}/{NUM_REPLICAS}"
    models = [*NAMES, "pirate-late"] * 20
    before = cluster.replicas()
    victim = cluster.ask("pirate-late").replica
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(cluster.ask, model, stream=index % 2 == 0) for index, model in enumerate(models)]
        wait_for("a third of the answers", lambda: sum(each.done() for each in asked) > len(models) // 3)
        ray.kill(actor_of("replica", victim))
        replies = [each.result() for each in asked]
    refused = [reply for reply in replies if reply.status != 200]
    cut = [reply for reply in replies if reply.is_cut]
    retried = [reply for reply in replies if reply.status == 200 and reply.lost]
    print(
        f"failover: {len(replies)} asked, half of them streamed, {len(retried)} answered by a second replica, "
        f"{len(cut)} cut with an error event, {len(refused)} refused"
    )
    assert all((reply.status, reply.text, reply.retry_after) == (503, "replica_lost", "1") for reply in refused)
    assert len(refused) <= len(models) // 4
    for model, reply in zip(models, replies, strict=True):
        text = right_text[model.partition("-")[0]]
        if reply.status == 200:
            assert text.startswith(reply.text) if reply.is_cut else reply.text == text, (model, reply)
    assert all(reply.replica == victim for reply in cut)
    # The one that takes its place has what was loaded meanwhile.
    wait_for("a new replica", lambda: len(cluster.replicas() - {victim}) == NUM_REPLICAS)
    assert cluster.replicas() - before
    row = wait_for("the adapter on it", lambda: _is_everywhere(cluster, "pirate-late"))
    assert row["generation"] is not None
    assert {reply.status for reply in cluster.ask_all(["pirate-late"] * 24, at_once=24)} == {200}
    cluster.change("/v1/unload_lora_adapter", lora_name="pirate-late")


def _is_everywhere(cluster: Cluster, name: str) -> dict[str, str] | None:
    rows = [row for row in cluster.status()["adapters"] if row["name"] == name]
    return rows[0] if rows and rows[0]["have"] == rows[0]["of"] == NUM_REPLICAS else None


def test_a_new_ledger_hears_what_the_old_one_knew(cluster: Cluster) -> None:
    cluster.change("/v1/load_lora_adapter", lora_name="kept", lora_path=str(ADAPTERS / "sql"))
    changes = cluster.status()["changes"]
    ray.kill(actor_of("ledger"))
    assert wait_for("the ledger's return", lambda: _is_everywhere(cluster, "kept"))
    assert cluster.status()["changes"] == changes
    cluster.change("/v1/unload_lora_adapter", lora_name="kept")
    assert cluster.status()["changes"] == changes + 1
    assert json.loads(cluster.client.get("/v1/models").text)["data"]
