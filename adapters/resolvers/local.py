"""A folder whose sub-folders are adapters: `local:DIR` knows `sql` where `DIR/sql/adapter_config.json` is."""

from __future__ import annotations

import logging
from pathlib import Path

from adapters.errors import InvalidSource
from adapters.folder import CONFIG_NAME, is_under
from adapters.located import Located

log = logging.getLogger(__name__)


class LocalSource:
    """Adapters below a folder; a name with slashes is a path below it, and links that lead out of it are not followed."""

    label = "local folder"

    def __init__(self, root: Path) -> None:
        """Raises `InvalidSource` where `root` is no folder."""
        self._shown_root = root
        self._root = root.expanduser().absolute()
        if not self._root.is_dir():
            raise InvalidSource(f"--lora-resolver local:{root}: there is no such folder; make it or name another",
                                param="lora_resolver")  # fmt: skip

    def find(self, lora_name: str) -> Located | None:
        """The folder of that name, if it holds an adapter."""
        folder = self._root / lora_name
        if not (folder / CONFIG_NAME).is_file():
            return None
        if not is_under(folder, [self._root]):
            log.warning("event=adapter_outside_resolver_folder adapter=%s effect=not_served", lora_name)
            return None
        return Located(folder, str(self._shown_root / lora_name))

    def close(self) -> None:
        """Nothing is ever waited for."""
