"""From a body's `messages` to the engine's `Message`s, with media that are given by address fetched where that is allowed.

Called by the routes that take messages.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from api.messages import MediaRules, read_messages

if TYPE_CHECKING:
    from api.service import Service
    from engine.request import Message


async def read_conversation(raw: object, service: Service) -> list[Message]:
    """Read `messages`; raises `InvalidRequest` or `MediaError` that names the part at fault.

    Nothing is fetched before all messages are found to be right. The files of a request are fetched one after another, and
    together are no larger than one upload may be.
    """
    max_bytes = service.engine.config.max_upload_mb << 20
    rules = MediaRules(service.engine.modalities, max_bytes, service.media_urls)
    messages = await asyncio.to_thread(read_messages, raw, rules)
    if not rules.wanted:
        return messages
    fetched: dict[str, bytes] = {}
    for url, param in rules.wanted.items():
        left = max_bytes - sum(map(len, fetched.values()))
        fetched[url] = await service.media_urls.fetch(url, param, max_bytes=left)
    return await asyncio.to_thread(read_messages, raw, replace(rules, fetched=fetched))
