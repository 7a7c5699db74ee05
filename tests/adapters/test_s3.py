"""Adapters in S3, against a real S3 server: whole or absent on disk, shared between processes, and deleted when unused."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from adapters.errors import AdapterFilesNotFound, SourceUnreachable, StorageFull
from adapters.located import Located
from adapters.resolvers import LoRAResolver, LoRAResolverRegistry, Sources
from adapters.resolvers.cache import IN_USE, PARTIAL, DownloadCache
from adapters.resolvers.progress import Downloads
from adapters.resolvers.s3 import S3, parse_s3_address
from engine import Engine, LoRARequest, SamplingParams
from engine.request import TextPrompt

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 3_000_000}
OTHERS = {"adapter_model.bin": b"pickle", "optimizer.pt": b"x", "checkpoint-1/adapter_config.json": b"{}"}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of a server of this module's own, which the environment names."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"), ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"), ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_CONFIG_FILE", os.devnull),
        ):  # fmt: skip
            environment.setenv(name, value)
        made = boto3.session.Session().client("s3")
        yield made
        made.close()
    server.stop()


@pytest.fixture
def s3(client: Any) -> Iterator[Any]:
    """The client, with an empty bucket called `loras`."""
    client.create_bucket(Bucket="loras")
    yield client
    for item in client.list_objects_v2(Bucket="loras").get("Contents", ()):
        client.delete_object(Bucket="loras", Key=item["Key"])
    client.delete_bucket(Bucket="loras")


def put(s3: Any, prefix: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        s3.put_object(Bucket="loras", Key=f"{prefix}/{name}", Body=content)


def sources(tmp_path: Path, *specs: str) -> Sources:
    return Sources(specs, base_model_name="my-base", download_dir=tmp_path / "downloads")


def read(found: Located) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in found.folder.iterdir() if path.name != IN_USE}


def landed(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "downloads").iterdir() if path.is_dir()]


def give_back(found: Located) -> None:
    assert found.lease is not None
    found.lease.release()


def test_an_address_gives_the_adapters_files_alone_and_they_go_when_unused(s3: Any, tmp_path: Path) -> None:
    put(s3, "team/sql", ADAPTER | OTHERS)
    mine = sources(tmp_path)
    first, second = mine.locate("s3://loras/team/sql"), mine.locate("s3://loras/team/sql/")
    assert read(first) == ADAPTER and first.folder == second.folder and first.source == "s3://loras/team/sql"
    give_back(first)
    give_back(first)
    assert read(second) == ADAPTER
    give_back(second)
    assert landed(tmp_path) == []


def test_new_content_at_an_address_lands_beside_the_old(s3: Any, tmp_path: Path) -> None:
    put(s3, "sql", ADAPTER)
    old = sources(tmp_path).locate("s3://loras/sql")
    put(s3, "sql", {"adapter_model.safetensors": b"new"})
    new = sources(tmp_path).locate("s3://loras/sql")
    assert read(old) == ADAPTER and read(new)["adapter_model.safetensors"] == b"new"
    give_back(old)
    assert landed(tmp_path) == [new.folder]


def test_what_is_not_there_says_so(s3: Any, tmp_path: Path) -> None:
    put(s3, "no-config", {"adapter_model.safetensors": b"w"})
    for address in ("s3://loras/none", "s3://loras/no-config", "s3://no-such-bucket/x"):
        with pytest.raises(AdapterFilesNotFound, match="no adapter was found"):
            sources(tmp_path).locate(address)


def test_a_server_that_does_not_answer_is_a_503_without_its_address(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(SourceUnreachable, match="S3 cannot be reached") as caught:
        sources(tmp_path).locate("s3://loras/sql")
    assert "127.0.0.1" not in caught.value.message


@pytest.mark.parametrize(
    ("variable", "value"), [("AWS_PROFILE", "secret-profile"), ("AWS_ENDPOINT_URL", "secret-host:9000")]
)
def test_settings_that_boto3_refuses_are_a_503_that_names_none_of_them(
    variable: str, value: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SourceUnreachable, match="AWS settings") as caught:
        sources(tmp_path).locate("s3://loras/sql")
    assert value not in caught.value.message


def test_a_name_is_the_path_below_the_resolvers_prefix(s3: Any, tmp_path: Path) -> None:
    put(s3, "all/sql", ADAPTER)
    put(s3, "all/team/sql", ADAPTER)
    (source,) = sources(tmp_path, "s3://loras/all").resolvers
    for name in ("sql", "team/sql"):
        found = source.find(name)
        assert found is not None and found.source == f"s3://loras/all/{name}"
    assert source.find("team") is None and source.find("other") is None


class Interrupted:
    """A client whose objects stop in the middle, or that meets a full disk's caller."""

    def __init__(self, client: Any, fault: Exception) -> None:
        self._client, self._fault = client, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_object(self, **words: Any) -> dict[str, Any]:
        answer = self._client.get_object(**words)
        body, fault = answer["Body"], self._fault

        class Body:
            num_reads = 0

            def read(self, length: int) -> bytes:
                self.num_reads += 1
                if self.num_reads > 1:
                    raise fault
                return body.read(length)  # type: ignore[no-any-return]

            def __enter__(self) -> Body:
                return self

            def __exit__(self, *_: object) -> None:
                body.close()

        return answer | {"Body": Body()}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(ConnectionResetError("secret"), SourceUnreachable), (OSError(28, "No space left on device"), StorageFull)],
)
def test_a_download_that_breaks_off_leaves_nothing(fault: Exception, kind: Any, s3: Any, tmp_path: Path) -> None:
    put(s3, "sql", ADAPTER)
    broken = S3(DownloadCache(tmp_path / "downloads"), Downloads(), lambda: Interrupted(s3, fault))
    address = parse_s3_address("s3://loras/sql")
    assert address is not None
    with pytest.raises(kind) as caught:
        broken.fetch(address)
    assert "secret" not in caught.value.message and landed(tmp_path) == []


def test_an_adapter_that_changes_while_it_is_downloaded_is_not_mixed(s3: Any, tmp_path: Path) -> None:
    put(s3, "sql", ADAPTER)

    class Changing(Interrupted):
        def get_object(self, **words: Any) -> dict[str, Any]:
            put(s3, "sql", {"adapter_model.safetensors": b"other"})
            return s3.get_object(**words)  # type: ignore[no-any-return]

    changing = S3(DownloadCache(tmp_path / "downloads"), Downloads(), lambda: Changing(s3, OSError()))
    address = parse_s3_address("s3://loras/sql")
    assert address is not None
    with pytest.raises(SourceUnreachable, match="changed in S3"):
        changing.fetch(address)
    assert landed(tmp_path) == []


def test_an_engine_serves_an_adapter_from_s3_and_deletes_the_files_when_it_is_unloaded(
    s3: Any, tiny_engine: Engine, speech_adapters: dict[str, Path]
) -> None:
    put(s3, "style", {path.name: path.read_bytes() for path in speech_adapters["style"].iterdir()})
    info = tiny_engine.adapters.load("from-s3", "s3://loras/style")
    assert info.source == "s3://loras/style" and info.generation == tiny_engine.adapters.get("style").generation
    (answer,) = tiny_engine.start_sync(TextPrompt("hello"), SamplingParams(max_tokens=2), lora="from-s3")
    assert list(answer)[-1].finish_reason is not None
    downloads = Path(str(tiny_engine.config.adapter_dir)) / "downloads"
    assert any(path.is_dir() for path in downloads.iterdir())
    tiny_engine.adapters.unload("from-s3")
    assert not any(path.is_dir() for path in downloads.iterdir())


# The folder of downloads


def test_two_processes_that_land_the_same_content_share_it(tmp_path: Path) -> None:
    caches = [DownloadCache(tmp_path / "downloads") for _ in range(2)]
    both_in = threading.Barrier(2)
    found: list[Any] = []

    def fetch(target: Path) -> None:
        (target / "x").write_text("content")
        both_in.wait(20)

    threads = [threading.Thread(target=lambda c=cache: found.append(c.get("key", fetch))) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first, first_lease), (second, second_lease) = found
    assert first == second and landed(tmp_path) == [first]
    first_lease.release()
    assert (second / "x").read_text() == "content"
    second_lease.release()
    assert landed(tmp_path) == []


def test_a_start_clears_what_killed_processes_left_and_nothing_that_is_in_use(tmp_path: Path) -> None:
    root = tmp_path / "downloads"
    kept, lease = DownloadCache(root).get("kept", lambda target: (target / "x").touch())
    for name, age_days in ((f"{PARTIAL}dead", 0), ("forgotten", 40), ("recent", 2)):
        (root / name).mkdir()
        (root / name / IN_USE).touch()
        then = (root / name / IN_USE).stat().st_mtime - age_days * 86400
        os.utime(root / name / IN_USE, (then, then))
    os.utime(kept / IN_USE, (0, 0))
    other = DownloadCache(root).get("other", lambda target: (target / "x").touch())
    assert {path.name for path in landed(tmp_path)} == {"kept", "recent", other[0].name}
    lease.release()


# The example of a user's class that vLLM's documentation has, with other imports


class S3LoRAResolver(LoRAResolver):
    def __init__(self):  # type: ignore[no-untyped-def]
        self.s3 = s3fs.S3FileSystem()
        self.s3_path_format = os.getenv("S3_PATH_TEMPLATE")
        self.local_path_format = os.getenv("LOCAL_PATH_TEMPLATE")

    async def resolve_lora(self, base_model_name, lora_name):  # type: ignore[no-untyped-def]
        s3_path = self.s3_path_format.format(base_model_name=base_model_name, lora_name=lora_name)
        local_path = self.local_path_format.format(base_model_name=base_model_name, lora_name=lora_name)

        # Download the LoRA from S3 to the local path
        await self.s3._get(
            s3_path, local_path, recursive=True, maxdepth=1
        )  # fmt: skip

        lora_request = LoRARequest(
            lora_name=lora_name,
            lora_path=local_path,
            lora_int_id=abs(hash(lora_name)),
        )
        return lora_request  # noqa: RET504


def test_the_known_example_of_a_users_class_finds_adapters_in_s3(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3, "my-base/sql", ADAPTER)
    monkeypatch.setenv("S3_PATH_TEMPLATE", "loras/{base_model_name}/{lora_name}")
    monkeypatch.setenv("LOCAL_PATH_TEMPLATE", str(tmp_path / "{base_model_name}" / "{lora_name}"))
    s3fs.S3FileSystem.clear_instance_cache()
    s3_resolver = S3LoRAResolver()
    LoRAResolverRegistry.register_resolver("s3_resolver", s3_resolver)
    try:
        (source,) = sources(tmp_path).resolvers
        found = source.find("sql")
        assert found is not None and found.folder == tmp_path / "my-base" / "sql" and read(found) == ADAPTER
        assert source.find("absent") is None
        asyncio.run_coroutine_threadsafe(s3_resolver.s3._s3.close(), source._loop).result(120)  # type: ignore[attr-defined]
        source.close()
    finally:
        LoRAResolverRegistry.unregister_resolver("s3_resolver")


def test_a_lease_that_is_collected_while_its_thread_holds_the_lock_is_given_back_later(tmp_path: Path) -> None:
    cache = DownloadCache(tmp_path)
    has_ended = threading.Event()

    def collect() -> None:
        folder, lease = cache.get("one", lambda target: None)
        with cache._root_lock():  # The garbage collector may run anywhere in here.
            lease.release()
            assert folder.is_dir()
        assert not folder.exists()
        has_ended.set()

    threading.Thread(target=collect, daemon=True).start()
    assert has_ended.wait(120), "the thread waits for itself"
