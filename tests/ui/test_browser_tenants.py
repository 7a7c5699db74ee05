"""A visitor whose key is for some adapters: no screen tells of the others, in words or in counts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from api.settings import ServerSettings
from engine import Engine
from tests.ui.live import ChatPage, serving

# Names of others' adapters, as words; the embedded model's own name ends in one of them.
OTHERS = re.compile(r"(?<![\w-])(speech|pirate)(?![\w-])")
TABS = ("Chat", "Transcribe", "Compare", "Adapters", "Status")


def write_tenants(path: Path, key: str, *adapters: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()
    path.write_text(json.dumps({"tenants": [{"name": "ana", "key_sha256": digest, "adapters": adapters}]}))
    return path


def test_a_key_for_one_adapter_hears_of_no_other_on_any_screen(
    embedded: Engine, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    tenants = write_tenants(tmp_path / "tenants.json", "a-key", "sql")
    settings = ServerSettings(tenants=str(tenants), admin_key="root").resolve()
    with serving(embedded, settings) as server:
        page = open_page(http_credentials={"username": "ana", "password": "a-key"})
        chat = ChatPage(page).open(server.url)
        # Others work meanwhile: what they ran is in no plot, bar or count of this visitor.
        root = open_page(http_credentials={"username": "x", "password": "root"}).request
        for adapter in ("speech", "pirate", "pirate"):
            body = {"model": adapter, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            assert root.post(f"{server.url}v1/chat/completions", data=body).ok
        expect(page.locator("#adapter-card")).not_to_be_empty()
        assert OTHERS.findall(page.content()) == []
        chat.choose_adapter("sql")
        assert chat.ask("List all notes").startswith("sql")
        for tab in TABS:
            page.get_by_role("tab", name=tab).click()
            if tab == "Adapters":
                expect(page.locator("#adapters-table")).to_contain_text("sql")
                expect(page.locator("#adapters-memory [data-tier=gpu]")).to_contain_text("MB")
                expect(page.locator("#adapters-memory")).to_contain_text("your adapters: 1")
                expect(page.locator("#adapters-memory")).not_to_contain_text(re.compile("[0-9] of [0-9]"))
            if tab == "Status":
                expect(page.locator("#status-plots figure")).to_have_count(1)
                expect(page.locator("#status-plots")).not_to_contain_text(re.compile("Others|Base model|evictions"))
                expect(page.locator("#status-figures dl > div")).to_have_count(1)
                expect(page.locator("#status-figures")).to_contain_text(re.compile(r"Requests\s*\d+ to your adapters"))
                expect(page.locator("#status-setup a")).to_have_count(2)
            found = OTHERS.findall(page.content())
            assert found == [], f"{tab}: {found}"
        admin = open_page(http_credentials={"username": "x", "password": "root"})
        ChatPage(admin).open(server.url)
        admin.get_by_label("Adapter", exact=True).click()
        assert set(OTHERS.findall(admin.content())) == {"speech", "pirate"}
