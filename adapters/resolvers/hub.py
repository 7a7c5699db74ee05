"""Adapters in repositories of the Hugging Face hub: `owner/name`, `owner/name/folder`, either with `@revision`.

A revision is pinned to its commit before anything is downloaded, so the files are of one state and lists can say which.
Files land in huggingface_hub's own cache, which other programs share and which is never cleaned from here; an adapter
that is in it is served without a network. Honours HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN as that package does.
"""

from __future__ import annotations

import logging
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapters.errors import AdapterFilesNotFound, SourceUnreachable
from adapters.files import is_wanted
from adapters.folder import CONFIG_NAME
from adapters.located import Located
from adapters.resolvers.progress import Downloads, Progress

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
_ADDRESS = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<folder>[\w.-]+(?:/[\w.-]+)*))?(?:@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True)
class HubAddress:
    """`folder` is "" for the top of the repository; `revision` is a branch, tag, commit, or None for the main branch."""

    repo: str
    folder: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        path = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"{path}@{self.revision}" if self.revision else path


def parse_hub_address(text: str) -> HubAddress | None:
    """The address that a text is, or None where it is something else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or any(part in (".", "..") for part in re.split(r"[/@]", text)):
        return None
    return HubAddress(match["repo"], match["folder"] or "", match["revision"])


class HubSource:
    """Adapters of listed repositories: the name is `owner/name` or `owner/name/folder`.

    The revision is the one that the list gives, never one from a name: clients must not choose it, since anyone may
    propose changes to a repository.
    """

    label = "Hugging Face hub"

    def __init__(self, repos: Sequence[HubAddress], downloads: Downloads) -> None:
        self._repos = tuple(repos)
        self._downloads = downloads

    def find(self, lora_name: str) -> Located | None:
        """The adapter from the first listed repository whose name begins the adapter's."""
        for repo in self._repos:
            if lora_name != repo.repo and not lora_name.startswith(f"{repo.repo}/"):
                continue
            address = parse_hub_address(lora_name)
            if address is None or address.revision is not None:
                return None
            try:
                return fetch_from_hub(replace(address, revision=repo.revision), self._downloads)
            except AdapterFilesNotFound as error:
                log.info("event=not_on_hub adapter=%s reason=%r", lora_name, error.message)
                return None
        return None

    def close(self) -> None:
        """Downloads end through `Downloads.close`; other waits are short."""


def fetch_from_hub(address: HubAddress, downloads: Downloads) -> Located:
    """The adapter's files in the local cache, downloaded where they are not there yet.

    Raises `AdapterFilesNotFound` where there is no such repository, revision or adapter, or the hub gives no access;
    `SourceUnreachable` where the hub cannot be reached and the cache has no copy.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        found = _from_cache(address)
        if found is None:
            raise AdapterFilesNotFound(
                f"{address} is not in the local cache, and HF_HUB_OFFLINE keeps the hub from being asked; download it "
                "beforehand or unset HF_HUB_OFFLINE"
            )
        return found
    try:
        commit, sizes = _look_up(address)
    except SourceUnreachable as error:
        found = _from_cache(address)
        if found is None:
            raise
        log.warning("event=hub_unreachable source=%s effect=cached_copy_used reason=%r", address, error.message)
        return found
    if f"{_prefix(address)}{CONFIG_NAME}" not in sizes:
        raise AdapterFilesNotFound(f"{address} holds no {CONFIG_NAME}; name the folder of the repository that does")
    snapshot = _download(address, commit, sizes, downloads)
    _note_revision(address, snapshot)
    return _located(address, commit, snapshot)


def _look_up(address: HubAddress) -> tuple[str, dict[str, int]]:
    """The commit behind an address, and the adapter's files with their bytes."""
    from huggingface_hub import HfApi

    with _hub_faults(address):
        found = HfApi().model_info(address.repo, revision=address.revision, files_metadata=True, timeout=TIMEOUT_S)
    prefix = _prefix(address)
    sizes = {
        file.rfilename: int(file.size or 0)
        for file in found.siblings or ()
        if file.rfilename.startswith(prefix) and is_wanted(file.rfilename[len(prefix) :])
    }
    assert found.sha is not None, "the hub names the commit of every revision"
    return found.sha, sizes


def _download(address: HubAddress, commit: str, sizes: dict[str, int], downloads: Downloads) -> Path:
    """The snapshot's folder in the cache, with every file of `sizes` in it."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = {name: try_to_load_from_cache(address.repo, name, revision=commit) for name in sizes}
    missing = [name for name, path in cached.items() if not isinstance(path, str)]
    paths = {name: Path(path) for name, path in cached.items() if isinstance(path, str)}
    if missing:
        with downloads.track(str(address)) as progress, _hub_faults(address):
            progress.expect(sum(sizes[name] for name in missing))
            bar = _bar_class(progress)
            for name in missing:
                paths[name] = Path(hf_hub_download(address.repo, name, revision=commit, tqdm_class=bar))
    config = f"{_prefix(address)}{CONFIG_NAME}"
    return paths[config].parents[config.count("/")]


def _note_revision(address: HubAddress, snapshot: Path) -> None:
    """Write down in the cache which commit a branch or tag was, for when the hub cannot be asked."""
    revision = address.revision or "main"
    if revision == snapshot.name:
        return
    note = snapshot.parent.parent / "refs" / revision
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_name(f"{note.name}.{uuid.uuid4().hex}")
        partial.write_text(snapshot.name)
        partial.replace(note)
    except OSError as error:
        log.warning("event=hub_revision_not_noted source=%s reason=%r", address, error.strerror)


def _bar_class(progress: Progress) -> Any:
    """A progress bar that draws nothing and counts bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            progress.add(int(n or 0))

    return Bar


def _from_cache(address: HubAddress) -> Located | None:
    """The copy in the local cache: of the commit, or of what the branch or tag was when it was last looked up."""
    from huggingface_hub import try_to_load_from_cache

    config = f"{_prefix(address)}{CONFIG_NAME}"
    path = try_to_load_from_cache(address.repo, config, revision=address.revision)
    if not isinstance(path, str):
        return None
    snapshot = Path(path).parents[config.count("/")]
    return _located(address, snapshot.name, snapshot)


def _located(address: HubAddress, commit: str, snapshot: Path) -> Located:
    return Located(snapshot / address.folder, str(address), commit)


def _prefix(address: HubAddress) -> str:
    return f"{address.folder}/" if address.folder else ""


class _hub_faults:
    """Turns the hub's errors into ours; their texts hold addresses and request ids."""

    def __init__(self, address: HubAddress) -> None:
        self._address = address

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        repo, revision = self._address.repo, self._address.revision
        if isinstance(error, GatedRepoError):
            raise AdapterFilesNotFound(
                f"{repo} is gated on the hub; accept its conditions there and set HF_TOKEN"
            ) from error
        if isinstance(error, RevisionNotFoundError):
            raise AdapterFilesNotFound(f"{repo} has no revision {revision!r} on the hub") from error
        if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
            raise AdapterFilesNotFound(
                f"{repo} is no folder here and no repository of the hub that this server may read; give the adapter's "
                "folder, or check the id, and set HF_TOKEN for a private repository"
            ) from error
        if isinstance(error, (HfHubHTTPError, *transport_errors())):
            raise SourceUnreachable(
                f"{repo} is no folder here, and the Hugging Face hub cannot be reached; check the network or HF_ENDPOINT "
                "and try again, or give a folder"
            ) from error


def transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP packages that huggingface_hub may use raise; which of them it uses depends on its version."""
    names = (("httpx2", "HTTPError"), ("httpx", "HTTPError"), ("requests", "RequestException"))
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
