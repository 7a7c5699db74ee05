"""Where adapters come from: the door to folders, the Hugging Face hub, S3, and users' own classes.

`Sources.locate` turns an address (`--lora-modules`, `/v1/load_lora_adapter`) into a folder; `Sources.resolvers` are what
`--lora-resolver` names, for `Resolution` to ask. Owned by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapters.errors import InvalidSource
from adapters.located import Located
from adapters.resolvers.base import LoRAResolver, LoRAResolverRegistry, Source
from adapters.resolvers.cache import DownloadCache
from adapters.resolvers.custom import CustomSource, load_resolver
from adapters.resolvers.hub import HubAddress, HubSource, fetch_from_hub, parse_hub_address
from adapters.resolvers.local import LocalSource
from adapters.resolvers.progress import DownloadInfo, Downloads
from adapters.resolvers.resolution import Resolution
from adapters.resolvers.s3 import S3, SCHEME, S3Source, parse_s3_address
from adapters.storage import raise_if_full

__all__ = ["DownloadInfo", "LoRAResolver", "LoRAResolverRegistry", "Resolution", "Source", "Sources", "check_spec"]

ALLOWED_SPECS = "local:DIR, hub:OWNER/REPO[,OWNER/REPO], s3://BUCKET/PREFIX or package.module:Class"


class Sources:
    """The sources of one engine.

    Args:
        specs: items of `--lora-resolver`; resolvers that were registered in this process come after them.
        base_model_name: what users' classes are told of the base model.
        download_dir: where downloads land whose source has no cache of its own.

    Raises `InvalidSource` where an item cannot be used.

    Attributes:
        resolvers: what to ask for unknown names, in order.
        downloads: those under way.
    """

    def __init__(self, specs: Sequence[str], *, base_model_name: str, download_dir: Path) -> None:
        self.downloads = Downloads()
        self._base_model_name = base_model_name
        self._s3 = S3(DownloadCache(download_dir), self.downloads)
        self.resolvers: list[Source] = [self._make(spec) for spec in specs]
        asked = [source.resolver for source in self.resolvers if isinstance(source, CustomSource)]
        self.resolvers += [self._custom(one) for one in LoRAResolverRegistry.snapshot().values() if one not in asked]

    def locate(self, address: str) -> Located:
        """The folder behind a path (`~` is the home folder), a hub id, or an `s3://` address, fetched where need be.

        A folder of this machine wins over a hub id of the same spelling; whatever is none of the three is taken as a
        path, which need not exist. Raises `AdapterFilesNotFound`, `SourceUnreachable` or `StorageFull`.
        """
        if address.startswith(SCHEME):
            s3_address = parse_s3_address(address)
            if s3_address is None:
                raise InvalidSource(f"{address[:200]!r} is not of the form s3://BUCKET/PREFIX", param="lora_path")
            return self._s3.fetch(s3_address)
        folder = Path(address).expanduser()
        hub_address = parse_hub_address(address)
        if hub_address is None or folder.exists():
            return Located(folder, address)
        try:
            return fetch_from_hub(hub_address, self.downloads)
        except OSError as error:
            raise_if_full(error, "downloads")
            raise

    def close(self) -> None:
        """End downloads at their next bytes."""
        self.downloads.close()

    def _make(self, spec: str) -> Source:
        check_spec(spec)
        kind, _, rest = spec.partition(":")
        if kind == "local":
            return LocalSource(Path(rest))
        if kind == "hub":
            return HubSource(_hub_repos(spec), self.downloads)
        if kind == "s3":
            root = parse_s3_address(spec)
            assert root is not None, "the check above saw to that"
            return S3Source(root, self._s3)
        return self._custom(load_resolver(spec))

    def _custom(self, resolver: LoRAResolver) -> CustomSource:
        return CustomSource(resolver, self._base_model_name, self.locate)


def check_spec(spec: str) -> None:
    """Raise `InvalidSource` where an item of `--lora-resolver` is malformed; nothing is opened or imported."""
    kind, colon, rest = spec.partition(":")
    if kind == "local":
        is_good = bool(rest.strip())
    elif kind == "hub":
        is_good = bool(_hub_repos(spec))
    elif kind == "s3":
        is_good = parse_s3_address(spec) is not None
    else:
        is_good = bool(colon) and rest.isidentifier() and all(part.isidentifier() for part in kind.split("."))
    if not is_good:
        raise InvalidSource(f"--lora-resolver {spec}: not understood; write {ALLOWED_SPECS}", param="lora_resolver")


def _hub_repos(spec: str) -> list[HubAddress]:
    """The repositories of a `hub:` item, each perhaps with a revision; empty where one is malformed."""
    words = [word.strip() for word in spec.partition(":")[2].split(",") if word.strip()]
    found = [parse_hub_address(word) for word in words]
    repos = [address for address in found if address is not None and not address.folder]
    return repos if len(repos) == len(words) else []
