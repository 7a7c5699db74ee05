"""Updates and scaling under a real Ray Serve, last because they change the cluster for good."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.ray.world import ADAPTERS, Cluster, Reply, wait_for


def test_an_update_replaces_all_replicas_and_no_request_notices(deployed: Cluster) -> None:
    deployed.change("/v1/load_lora_adapter", lora_name="early", lora_path=str(ADAPTERS / "sql"))
    before = deployed.replicas()
    is_over = threading.Event()

    def keep_asking(_: int) -> list[Reply]:
        replies = []
        while not is_over.is_set():
            replies.append(deployed.ask("early", stream=True))
        return replies

    with ThreadPoolExecutor(2) as pool:
        asking = pool.map(keep_asking, range(2))
        try:
            deployed.deploy("--min-replicas", "1", "--max-replicas", "2", "--max-num-seqs", "32", "--target-requests", "3",
                            "--upscale-delay", "1", "--downscale-delay", "2")  # fmt: skip
            wait_for("the end of the old ones", lambda: not deployed.replicas() & before)
        finally:
            is_over.set()
        replies = [reply for replies in asking for reply in replies]
    assert {reply.replica for reply in replies} & before and {reply.replica for reply in replies} - before
    assert all(reply.status == 200 and not reply.is_cut for reply in replies)
    assert len({reply.text for reply in replies}) == 1
    print(f"rolling update: {len(replies)} answers while {len(before)} replicas were replaced, none lost")


def test_replicas_come_with_load_and_go_without(deployed: Cluster) -> None:
    wait_for("one replica", lambda: len(deployed.replicas()) == 1)
    is_over = threading.Event()

    def keep_asking(_: int) -> set[int]:
        statuses = set()
        while not is_over.is_set():
            statuses.add(deployed.ask("early", max_tokens=64).status)
        return statuses

    with ThreadPoolExecutor(12) as pool:
        asking = pool.map(keep_asking, range(12))
        try:
            wait_for("a second replica", lambda: len(deployed.replicas()) == 2)
        finally:
            is_over.set()
        assert set().union(*asking) == {200}
    wait_for("one replica again", lambda: len(deployed.replicas()) == 1)
    # What was loaded at run time is on whichever has stayed.
    assert deployed.ask("early").status == 200
