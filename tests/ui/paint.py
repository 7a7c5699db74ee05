"""How soon a visitor sees something: first paint, a page that can be used, the first words of an answer.

    python -m tests.ui.paint [--visits 5]

Runs the embedded model in a process of its own and a real browser beside it, with an empty cache for each visit. Prints one
JSON object: milliseconds of each visit, and their medians. The machine does everything at once: server, model and browser.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

from benchmarks.server import running_server
from tests.ui.live import ChatPage, launch

# When the first letter of an answer is on the page, by the page's own clock; Send was pressed at `window.sentAt`.
WATCH_ANSWER = """() => {
  const send = document.querySelector('[data-testid="submit-button"]');
  send.addEventListener('click', () => { window.sentAt = performance.now(); }, true);
  new MutationObserver(() => {
    const rows = [...document.querySelectorAll('#chatbot [data-testid="bot"]')];
    const words = rows.filter((each) => !each.closest('.thought-group'));
    if (window.sentAt && !window.seenAt && words.some((each) => each.innerText.trim())) {
      requestAnimationFrame(() => { window.seenAt ??= performance.now(); });
    }
  }).observe(document.querySelector('#chatbot'), { childList: true, subtree: true, characterData: true });
}"""
PAINTS = (
    """() => Object.fromEntries(performance.getEntriesByType('paint').map((each) => [each.name, each.startTime]))"""
)


def visit(browser: Browser, url: str) -> dict[str, float]:
    """One visit of a newcomer; milliseconds from the page's request, and from Send for the answer's first words."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    chat = ChatPage(page).open(url)
    usable = page.evaluate("performance.now()")
    paints: dict[str, float] = page.evaluate(PAINTS)
    page.evaluate(WATCH_ANSWER)
    chat.submit("Hello!")
    page.wait_for_function("window.seenAt")
    first_words = page.evaluate("window.seenAt - window.sentAt")
    expect(chat.receipts).to_have_count(1)
    context.close()
    seen = {
        "first_paint_ms": paints["first-paint"], "first_content_ms": paints["first-contentful-paint"],
        "usable_ms": usable, "first_words_ms": first_words,
    }  # fmt: skip
    return {key: round(value, 1) for key, value in seen.items()}


def measure(num_visits: int) -> dict[str, Any]:
    """All visits, one after another, after one that warms the server up."""
    with (
        tempfile.TemporaryDirectory() as place,
        running_server(["--adapter-dir", place]) as server,
        sync_playwright() as playwright,
    ):
        expect.set_options(timeout=60_000)
        browser = launch(playwright)
        visit(browser, server.url)
        visits = [visit(browser, server.url) for _ in range(num_visits)]
        browser.close()
    medians = {key: round(statistics.median(each[key] for each in visits), 1) for key in visits[0]}
    return {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "medians": medians, "visits": visits}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--visits", type=int, default=5)
    sys.stdout.write(json.dumps(measure(parser.parse_args().visits)) + "\n")


if __name__ == "__main__":
    main()
