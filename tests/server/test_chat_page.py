"""The chat page in a real headless browser: streamed text, folded reasoning, numbers, and nothing from elsewhere."""

from __future__ import annotations

import shutil

import pytest
from scripted import Script
from server_running import Running

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


def test_the_page_and_the_description_are_served(scripted: Running) -> None:
    status, text, headers = scripted.request("GET", "/")
    assert (status, headers["content-security-policy"].split(";")[0]) == (200, "default-src 'self'")
    assert "//" not in text.replace("</", "")  # nothing from elsewhere
    assert scripted.request("GET", "/static/page.js")[0] == 200
    assert scripted.request("GET", "/static/other")[0] == 404
    record = scripted.request("GET", "/openapi.json")[1]
    assert record["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"] is True
    assert "max_completion_tokens" in scripted.request("GET", "/docs")[1]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_conversation_in_a_browser(scripted: Running, script: Script) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    script.says = lambda prompt: f"<think>hidden</think>Answer <b>{prompt.count('user')}</b>."
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(scripted.url, timeout=60_000)
        page.wait_for_selector("#model option", state="attached", timeout=60_000)
        for number in (1, 2):
            page.fill("#text", "hello")
            page.click("#send")
            page.get_by_text(f"Answer <b>{number}</b>.").wait_for(timeout=60_000)
            page.locator("#send", has_text="Send").wait_for(timeout=60_000)
        assert page.locator("details summary").count() == 2
        assert not page.locator("details span").first.is_visible()  # folded
        page.wait_for_selector("text=tokens/forward", timeout=60_000)
        page.click("#fresh")
        assert page.locator(".turn").count() == 0
        browser.close()
    assert faults == []
