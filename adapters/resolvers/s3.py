"""Adapters in S3: `s3://bucket/prefix` is the folder of one adapter, or, for a resolver, the folder of all of them.

Talks to S3 through boto3, which takes credentials, region and endpoint (AWS_ENDPOINT_URL) as usual. What was listed is
what is downloaded: each object is asked for by its ETag, and a complete download is kept under a key of all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.errors import AdapterFilesNotFound, SourceUnreachable
from adapters.files import is_wanted
from adapters.folder import CONFIG_NAME
from adapters.located import Located
from adapters.resolvers.cache import DownloadCache
from adapters.resolvers.progress import Downloads, Progress

log = logging.getLogger(__name__)

SCHEME = "s3://"
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
MAX_ATTEMPTS = 2
CHUNK_LEN = 1 << 20
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ABSENT = frozenset({"NoSuchBucket", "NoSuchKey", "404"})
_DENIED = frozenset({"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})


@dataclass(frozen=True)
class S3Address:
    """`prefix` is without slashes at its ends, "" for the whole bucket."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    def child(self, name: str) -> S3Address:
        """The address below this one."""
        return S3Address(self.bucket, f"{self.prefix}/{name}" if self.prefix else name)


@dataclass(frozen=True)
class _Object:
    name: str
    key: str
    etag: str
    num_bytes: int


def parse_s3_address(text: str) -> S3Address | None:
    """The address that a text is, or None where it is something else or malformed."""
    if not text.startswith(SCHEME):
        return None
    bucket, _, prefix = text[len(SCHEME) :].partition("/")
    prefix = prefix.strip("/")
    if _BUCKET.fullmatch(bucket) is None or any(ord(letter) < 32 for letter in prefix):
        return None
    return S3Address(bucket, prefix)


class S3:
    """Fetches adapters; one client for all threads, made when it is first needed.

    Args:
        cache: where downloads land.
        downloads: shows them.
        make_client: makes a boto3 S3 client.
    """

    def __init__(
        self, cache: DownloadCache, downloads: Downloads, make_client: Callable[[], Any] | None = None
    ) -> None:
        self._cache = cache
        self._downloads = downloads
        self._make_client = make_client or _boto3_client
        self._lock = threading.Lock()
        self._made: Any = None

    def fetch(self, address: S3Address) -> Located:
        """The adapter's files on this machine.

        Raises `AdapterFilesNotFound` where no adapter lies there, `SourceUnreachable` where S3 cannot be reached or
        gives no access.
        """
        client = self._client()
        with _s3_faults():
            objects = _list(client, address)
        if not any(item.name == CONFIG_NAME for item in objects):
            raise AdapterFilesNotFound(f"no adapter was found at {address}: it holds no {CONFIG_NAME}")
        listing = [address.bucket, address.prefix, [(item.name, item.etag, item.num_bytes) for item in objects]]
        key = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:40]
        folder, lease = self._cache.get(key, lambda target: self._download(address, objects, target))
        return Located(folder, str(address), lease=lease)

    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    def _download(self, address: S3Address, objects: list[_Object], target: Path) -> None:
        with self._downloads.track(str(address)) as progress:
            progress.expect(sum(item.num_bytes for item in objects))
            for item in objects:
                self._download_one(address.bucket, item, target / item.name, progress)

    def _download_one(self, bucket: str, item: _Object, path: Path, progress: Progress) -> None:
        with _s3_faults():
            answer = self._client().get_object(Bucket=bucket, Key=item.key, IfMatch=item.etag)
        num_bytes = 0
        with open(path, "xb") as output, answer["Body"] as body:
            while True:
                with _s3_faults():
                    chunk = body.read(CHUNK_LEN)
                if not chunk:
                    break
                output.write(chunk)
                num_bytes += len(chunk)
                progress.add(len(chunk))
        if num_bytes != item.num_bytes:
            raise SourceUnreachable(f"S3 sent {num_bytes} of {item.num_bytes} bytes of {item.name}; try again")


class S3Source:
    """Adapters below a prefix: the name is the rest of the path, slashes and all."""

    label = "S3"

    def __init__(self, root: S3Address, s3: S3) -> None:
        self._root = root
        self._s3 = s3

    def find(self, lora_name: str) -> Located | None:
        """The adapter of that name, if the prefix holds one."""
        try:
            return self._s3.fetch(self._root.child(lora_name))
        except AdapterFilesNotFound:
            return None

    def close(self) -> None:
        """Downloads end through `Downloads.close`; other waits are short."""


def _list(client: Any, address: S3Address) -> list[_Object]:
    """The adapter's files directly below the prefix, by name."""
    prefix = f"{address.prefix}/" if address.prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=address.bucket, Prefix=prefix, Delimiter="/", PaginationConfig={"MaxItems": 5000}
    )
    found = [item for page in pages for item in page.get("Contents", ())]
    objects = [
        _Object(item["Key"][len(prefix) :], item["Key"], item["ETag"], int(item["Size"]))
        for item in found
        if is_wanted(item["Key"][len(prefix) :])
    ]
    return sorted(objects, key=lambda item: item.name)


def _boto3_client() -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError as error:
        raise SourceUnreachable("addresses in S3 need the package boto3; install it") from error

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"max_attempts": MAX_ATTEMPTS, "mode": "standard"},
    )
    try:
        return boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        log.warning("event=s3_settings_refused reason=%r", str(error))
        fault = "S3 cannot be asked: the server's AWS settings are not valid; the server's log says which"
        raise SourceUnreachable(fault) from error


@contextmanager
def _s3_faults() -> Iterator[None]:
    """Turns S3's errors into ours; their texts hold addresses and request ids."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _ABSENT:
            raise AdapterFilesNotFound("no adapter was found there: S3 has no such bucket or object") from error
        if code in _DENIED:
            raise SourceUnreachable("S3 gives no access; check the server's AWS credentials") from error
        if code in ("PreconditionFailed", "412"):
            raise SourceUnreachable("the adapter changed in S3 while it was downloaded; try again") from error
        raise SourceUnreachable(f"S3 answered with the error {code[:40]!r}; try again") from error
    except (NoCredentialsError, NoRegionError) as error:
        raise SourceUnreachable("S3 cannot be asked without AWS credentials and a region; set them") from error
    except (BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
        raise SourceUnreachable("S3 cannot be reached; check the network or AWS_ENDPOINT_URL and try again") from error
