"""The list of stored adapters, in SQLite: which name points to which folder, earlier versions, pins.

A row is written only after its folder is complete on disk, and deleted before its folder is, so a kill at any moment
leaves a stored adapter whole or absent. Knows nothing of what the folders hold. Thread-safe. Owned by `vault`.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.errors import AdapterStoreFault

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    folder TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    source TEXT NOT NULL,
    base_model_name TEXT,
    report TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY,
    folder TEXT NOT NULL REFERENCES versions (folder),
    pinned INTEGER NOT NULL DEFAULT 0
);
"""


@dataclass(frozen=True)
class CatalogRow:
    """A stored version. `folder` is a folder's name in the store; `report` is `AdapterReport.to_dict()`."""

    name: str
    folder: str
    digest: str
    source: str
    base_model_name: str | None
    report: dict[str, Any]
    created: float
    is_pinned: bool = False
    is_current: bool = True


class Catalog:
    """The catalogue file. Raises `AdapterStoreFault` where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        with _faults():
            self._db = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
            # a commit returns after the bytes are on disk
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise AdapterStoreFault(
                    f"the adapter catalogue has format {version}, newer than this program's {SCHEMA_VERSION}; "
                    "update the program or choose another --adapter-dir"
                )
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def put(self, row: CatalogRow, *, num_kept: int) -> list[str]:
        """Point `row.name` to a new version; returns folders that are no longer listed.

        Of earlier versions, `num_kept - 1` are kept: the one that the name pointed to, then the newest; none with the
        same content.
        """
        with self._transaction() as db:
            previous = db.execute("SELECT folder FROM adapters WHERE name = ?", (row.name,)).fetchone()
            db.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    row.folder, row.name, row.digest, row.source, row.base_model_name, json.dumps(row.report),
                    row.created,
                ),
            )  # fmt: skip
            db.execute(
                "INSERT INTO adapters VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET folder = ?, pinned = ?",
                (row.name, row.folder, row.is_pinned, row.folder, row.is_pinned),
            )
            old = db.execute(
                "SELECT folder, digest FROM versions WHERE name = ? AND folder != ? "
                "ORDER BY folder = ? DESC, created DESC, rowid DESC",
                (row.name, row.folder, previous and previous[0]),
            ).fetchall()
            kept = [folder for folder, digest in old if digest != row.digest][: num_kept - 1]
            folders = [folder for folder, _ in old if folder not in kept]
            db.executemany("DELETE FROM versions WHERE folder = ?", [(folder,) for folder in folders])
            return folders

    def point(self, name: str, folder: str) -> None:
        """Make an earlier version the current one."""
        with self._transaction() as db:
            db.execute("UPDATE adapters SET folder = ? WHERE name = ?", (folder, name))

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        """Remember a pin; nothing happens where the name is not stored."""
        with self._transaction() as db:
            db.execute("UPDATE adapters SET pinned = ? WHERE name = ?", (is_pinned, name))

    def remove(self, name: str) -> list[str]:
        """Forget a name and its versions; returns their folders."""
        with self._transaction() as db:
            db.execute("DELETE FROM adapters WHERE name = ?", (name,))
            folders = [folder for (folder,) in db.execute("SELECT folder FROM versions WHERE name = ?", (name,))]
            db.execute("DELETE FROM versions WHERE name = ?", (name,))
            return folders

    def current(self) -> list[CatalogRow]:
        """The version that each name points to, oldest first."""
        return self._rows("WHERE a.folder = v.folder ORDER BY v.created, v.rowid")

    def versions(self, name: str) -> list[CatalogRow]:
        """All versions of a name, newest first."""
        return self._rows("WHERE v.name = ? ORDER BY v.created DESC, v.rowid DESC", name)

    def folders(self) -> set[str]:
        """Every folder that is listed."""
        with self._lock, _faults():
            return {folder for (folder,) in self._db.execute("SELECT folder FROM versions")}

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _rows(self, where: str, *parameters: str) -> list[CatalogRow]:
        query = (
            "SELECT v.name, v.folder, v.digest, v.source, v.base_model_name, v.report, v.created, a.pinned, "
            f"a.folder = v.folder FROM versions v JOIN adapters a ON a.name = v.name {where}"
        )
        with self._lock, _faults():
            rows = self._db.execute(query, parameters).fetchall()
            return [
                CatalogRow(
                    name=row[0], folder=row[1], digest=row[2], source=row[3], base_model_name=row[4],
                    report=json.loads(row[5]), created=row[6], is_pinned=bool(row[7]), is_current=bool(row[8]),
                )
                for row in rows
            ]  # fmt: skip

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


@contextmanager
def _faults() -> Iterator[None]:
    """Database errors become one of our own, without paths."""
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        raise AdapterStoreFault(
            f"the adapter catalogue cannot be used ({error}); move catalog.sqlite3 out of --adapter-dir to begin anew, "
            "or choose another --adapter-dir"
        ) from error
