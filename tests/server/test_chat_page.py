"""The chat page in a real headless browser, over models that say what a test tells them to and over tiny real ones."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Script
from server_running import Running

import polytoken
from polytoken.testkit.acceptance import NEARLY_FREE
from polytoken.testkit.tiny import write_checkpoint

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
PATIENCE = 60_000  # milliseconds; the machine may be busy
browsing = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page in a browser of its own, without cookies or storage of others.

    Attributes:
        faults: uncaught errors of its scripts, and what it was refused by its own policy.
        asked: addresses that it asked for.
    """

    def __init__(self, browser: Any, url: str, **words: Any) -> None:
        self.context = browser.new_context(**words)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.faults: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def _note(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # an answer that is no success
            self.faults.append(message.text)

    def ask(self, text: str = "hello", *, wait: bool = True) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        if wait:
            self.settled()

    def settled(self) -> None:
        self.page.locator("#send", has_text="Send").wait_for()

    def says(self, text: str) -> Any:
        found = self.page.locator("#talk").get_by_text(text)
        found.first.wait_for()
        return found

    def until(self, expression: str) -> None:
        """Wait for it to hold. Not `wait_for_function`, which the page's own policy forbids."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def answer(self, status: int, body: str) -> None:
        """Have the next chats answered so, in place of the server."""
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body))

    def text(self, place: str) -> str:
        return str(self.page.locator(place).inner_text())


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    visits: list[Visit] = []

    def open_page(server: Running, path: str = "/", **words: Any) -> Visit:
        visits.append(Visit(browser, server.url + path, **words))
        return visits[-1]

    yield open_page
    for each in visits:
        assert each.faults == []
        assert all(address.startswith(("http://127.0.0.1:", "data:")) for address in each.asked)
        each.context.close()


def test_the_page_and_the_description_are_served(scripted: Running) -> None:
    status, text, headers = scripted.request("GET", "/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "unsafe" not in headers["content-security-policy"]
    assert "//" not in text.replace("</", "")  # nothing from elsewhere
    for name in re.findall(r'/static/([\w.]+)"', text):
        assert scripted.request("GET", f"/static/{name}")[0] == 200
    assert scripted.request("GET", "/static/other")[0] == 404
    assert scripted.request("GET", "/static/index.html")[0] == 404

    record = scripted.request("GET", "/openapi.json")[1]
    assert record["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"] is True
    fork = record["paths"]["/admin/sessions/{name}/fork"]["post"]
    assert {"200", "401", "404", "409"} <= set(fork["responses"])
    assert fork["parameters"][0] == {
        "name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1},
    }  # fmt: skip
    assert "max_completion_tokens" in scripted.request("GET", "/docs")[1]


def test_every_path_is_described_and_nothing_else(scripted: Running) -> None:
    routes: set[tuple[str, str]] = set()
    for route in scripted.app.routes:
        path = route.path.replace(":path", "")
        routes |= {(path, method.lower()) for method in route.methods - {"HEAD"}}
    described = {
        (path, method)
        for path, methods in scripted.request("GET", "/openapi.json")[1]["paths"].items()
        for method in methods
    }
    pages = {"/", "/static/{name}", "/docs", "/openapi.json", "/v1/embeddings"}
    assert described == {item for item in routes if item[0] not in pages}


@browsing
def test_a_conversation_streams_with_folded_reasoning_and_numbers(
    scripted: Running, script: Script, visit: Any
) -> None:
    begin = "<think>hidden</think>Answer {}. more"
    script.says = lambda prompt: begin.format(prompt.count("user")) + " more" * 4
    script.hold = len(scripted.state.pool.loaded["scripted"].tokenizer.encode(begin, add_special_tokens=False))
    seen = visit(scripted)
    for number in (1, 2):
        script.gate = threading.Event()
        seen.ask(wait=False)
        seen.says(f"Answer {number}.")
        assert seen.text("#send") == "Stop"  # text is there before the answer has ended
        script.gate.set()
        seen.settled()
    assert seen.page.locator("details.reasoning").count() == 2
    assert not seen.page.locator("details.reasoning div").first.is_visible()  # folded
    seen.page.locator("details.reasoning summary").first.click()
    assert seen.text("details.reasoning div >> nth=0") == "hidden"
    assert seen.text("#yield") == "1.00"
    assert float(seen.text("#rate")) > 0
    assert seen.page.locator("#strip i").count() > 10
    assert "complete" in seen.page.locator("#spoken").text_content()
    seen.page.click("#fresh")
    assert seen.page.locator(".turn").count() == 0


@browsing
def test_nothing_a_model_says_becomes_markup(scripted: Running, script: Script, visit: Any) -> None:
    """The model, its reasoning, a title and an error are all untrusted."""
    lines = [HOSTILE, f"**{HOSTILE}** `{HOSTILE}`", f"- {HOSTILE}", "[x](javascript:window.hacked=3)", f"# {HOSTILE}",
             f"```{HOSTILE}\n{HOSTILE}\n```", f"|{HOSTILE}|b|\n|-|-|\n|{HOSTILE}|c|"]  # fmt: skip
    script.says = lambda prompt: f"<think>{HOSTILE}</think>" + "\n\n".join(lines)
    seen = visit(scripted)
    seen.ask(HOSTILE)
    assert seen.page.locator("#talk").get_by_text("onerror").count() > len(lines)
    fault = '{"error": {"message": "' + HOSTILE.replace('"', "'") + '", "code": "x"}}'
    seen.answer(400, fault)
    seen.ask("again")
    assert "<img" in seen.text("div.error")
    assert seen.page.locator("main img, main script, main a, nav img, nav script").count() == 0
    assert seen.page.evaluate("window.hacked") is None


@browsing
def test_markdown_is_shown(scripted: Running, script: Script, visit: Any) -> None:
    script.says = lambda prompt: (
        "# Head\n\nSome **bold** `code`.\n\n1. one\n2. two\n\n```py\nx = 1\n\ny = 2\n```\n\nend"
    )
    seen = visit(scripted)
    seen.ask()
    assert [seen.text(f".body {name}") for name in ("h3", "strong", "p code", "li >> nth=1")] == [
        "Head", "bold", "code", "two",
    ]  # fmt: skip
    assert seen.text(".code pre") == "x = 1\n\ny = 2"


@browsing
def test_an_answer_is_stopped_with_a_key_and_with_the_button(scripted: Running, script: Script, visit: Any) -> None:
    script.says = lambda prompt: f"answer {script.opened} " + "word " * 800
    seen = visit(scripted)
    for number, stop in enumerate((lambda: seen.page.keyboard.press("Escape"), lambda: seen.page.click("#send"))):
        gate = script.held(40)
        seen.ask(wait=False)
        seen.says(f"answer {number} word")
        stop()
        seen.settled()
        seen.page.locator("footer", has_text="stopped").nth(number).wait_for()
        seen.until("fetch('/admin/requests').then(r => r.json()).then(r => r.data.length === 0)")
        gate.set()
    assert seen.page.locator("div.error").count() == 0


@browsing
def test_errors_are_shown_and_can_be_tried_again(scripted: Running, script: Script, visit: Any) -> None:
    """A refusal, a failure in the middle, a stream that breaks off, and no server at all."""
    seen = visit(scripted)
    seen.page.fill("[name=top_p]", "2")
    seen.ask()
    assert "top_p" in seen.text("div.error")
    seen.page.fill("[name=top_p]", "")
    seen.page.click("div.error button")
    seen.says("ok")
    assert seen.page.locator("div.error").count() == 0

    script.says, gate = lambda prompt: "word " * 800, script.held(40)
    seen.ask("cancel me", wait=False)
    seen.says("word word")
    (turn,) = scripted.request("GET", "/admin/requests")[1]["data"]
    scripted.post(f"/admin/requests/{turn['id']}/cancel", None)
    gate.set()
    seen.settled()
    assert "cancelled" in seen.text("div.error")
    assert "word word" in seen.text(".assistant .body >> nth=-1")  # what had come stays

    seen.page.click("#fresh")
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    for body, told in ((half, "broke off"), ("data: {nonsense\n\n", "no JSON")):
        seen.answer(200, body)
        seen.ask("break")
        assert told in seen.text("div.error >> nth=-1")
    seen.page.route("**/v1/chat/completions", lambda route: route.abort())
    seen.page.route("**/health", lambda route: route.abort())
    seen.ask("gone")
    assert "cannot be reached" in seen.text("div.error >> nth=-1")
    seen.page.locator("#state", has_text="offline").wait_for()
    seen.page.unroute_all()
    seen.page.locator("#state", has_text="ready").wait_for()  # it looks again by itself

    script.says = lambda prompt: "ok"
    seen.page.reload(wait_until="networkidle")  # the list is drawn again when the sessions are known
    seen.page.locator("#talk-list .talk", has_text="break").click()
    seen.page.locator("#talk", has_text="not answered").wait_for()
    with seen.page.expect_request("**/v1/chat/completions") as sent:
        seen.ask("at last")
    (message,) = sent.value.post_data_json["messages"]  # what got no answer is part of the next question
    assert message["content"].split("\n\n") == ["break", "break", "gone", "at last"]
    seen.says("ok")


@browsing
def test_a_canvas_settles_on_the_page(canvas: Running, visit: Any) -> None:
    seen = visit(canvas)
    seen.page.wait_for_selector(".canvas-only:visible")  # the lane's own setting
    seen.page.fill("[name=max_tokens]", "12")
    seen.page.evaluate(OBSERVE)
    seen.ask()
    frames = seen.page.evaluate("window.frames")
    assert len({caption for _, caption in frames}) > 1
    assert all(0 < cells <= 6 for cells, _ in frames)
    assert re.fullmatch(r"denoise \d+: \d of \d positions sure.*; \d+ tokens settled", frames[-1][1])
    assert seen.page.evaluate("window.weak") == []
    assert seen.page.locator(".canvas").count() == 0  # the text has taken its place
    assert "denoises" in seen.text("#numbers")


@browsing
def test_drafts_are_shown_by_depth(tmp_path: Path, visit: Any) -> None:
    path = write_checkpoint(tmp_path, "qwen3_5", acceptance=NEARLY_FREE).path
    with Running({"hybrid": polytoken.load(path)}) as server:
        seen = visit(server)
        seen.page.fill("[name=max_tokens]", "40")
        seen.ask()
        rows = seen.page.locator("#depths .bar")
        assert rows.count() == 3
        assert re.fullmatch(r"1\s+\d+%", rows.first.inner_text())
        assert float(seen.text("#yield")) > 1
        assert "mtp" in seen.text("#numbers")


@browsing
def test_conversations_are_resumed_forked_and_cleared(tiny: Running, visit: Any) -> None:
    tiny.request("DELETE", "/admin/sessions")
    body = {"messages": [{"role": "user", "content": "From elsewhere"}], "max_tokens": 4}
    tiny.request("POST", "/v1/chat/completions", body, headers={"x-session-id": "other client"})
    seen = visit(tiny)
    rows = seen.page.locator("#talk-list li")
    seen.page.fill("[name=max_tokens]", "6")
    for text in ("first talk", "second talk"):
        seen.ask(text)
        seen.page.locator("#talk-list li", has_text=text).get_by_text("tokens").wait_for()
        seen.page.click("#fresh")
    assert rows.count() == 3
    rows.filter(has_text="From elsewhere").locator(".talk").click()
    assert seen.says("From elsewhere").count() == 1

    seen.page.reload()  # they outlive the visit
    seen.page.locator("#talk-list li", has_text="first talk").get_by_text("tokens").wait_for()
    rows.filter(has_text="first talk").locator(".talk").click()
    seen.ask("go on")
    assert seen.page.locator(".turn.user").count() == 2
    assert int(seen.page.locator("dt:text('from cache') + dd").inner_text()) > 0

    before = tiny.request("GET", "/admin/sessions")[1]["data"]
    rows.filter(has_text="first talk").get_by_role("button", name="Fork").click()
    seen.until("document.querySelectorAll('#talk-list li').length === 4")
    seen.until("!document.querySelector('#talk-list').textContent.includes('no state')")
    assert len(tiny.request("GET", "/admin/sessions")[1]["data"]) == len(before) + 1
    assert seen.page.locator(".turn.user").count() == 2

    second = rows.filter(has_text="second talk")
    second.hover()
    second.get_by_role("button", name="Clear").click()
    seen.until("document.querySelectorAll('#talk-list li').length === 3")
    seen.page.on("dialog", lambda dialog: dialog.accept())
    seen.page.click("#clear-all")
    seen.until("document.querySelectorAll('#talk-list li').length === 0")
    seen.until("fetch('/admin/sessions').then(r => r.json()).then(r => r.data.length === 0)")


@browsing
def test_the_list_of_conversations_keeps_its_rows(scripted: Running, script: Script, visit: Any) -> None:
    """A click that began before the list was drawn again, and ended behind that, went nowhere."""
    seen = visit(scripted)
    for text in ("first talk", "second talk"):
        seen.ask(text)
        seen.page.click("#fresh")
    rows = seen.page.locator("#talk-list li")
    assert [row.split("\n")[0] for row in rows.all_inner_texts()] == ["second talk", "first talk"]
    seen.page.evaluate("window.rows = [...document.querySelectorAll('#talk-list li')]")
    box = rows.filter(has_text="first talk").locator(".talk").bounding_box()
    seen.page.mouse.move(box["x"] + 20, box["y"] + 5)
    seen.page.mouse.down()
    with seen.page.expect_response("**/admin/sessions"):
        seen.page.evaluate("document.getElementById('model').dispatchEvent(new Event('change'))")  # draws it anew
    seen.page.mouse.up()
    seen.says("first talk")
    assert seen.page.evaluate("window.rows.every((row) => row.isConnected)")

    seen.ask("once more")  # it is the newest now, and the same row
    seen.until("document.querySelector('#talk-list li').textContent.startsWith('first talk')")
    assert seen.page.evaluate("window.rows.every((row) => row.isConnected)")
    assert rows.count() == 2
    assert rows.first.get_attribute("class") == "current"
    rows.first.hover()
    rows.first.get_by_role("button", name="Clear: first talk").click()
    seen.until("document.querySelectorAll('#talk-list li').length === 1")
    assert seen.page.evaluate("window.rows[0].isConnected && !window.rows[1].isConnected")


@browsing
def test_memory_is_shown_and_a_key_is_asked_for(tmp_path: Path, tiny_path: Path, visit: Any) -> None:
    with Running({"m": polytoken.load(tiny_path)}, api_keys=("user",), admin_keys=("boss",)) as server:
        seen = visit(server)
        for key, admin in (("user", False), ("boss", True)):
            if admin:
                seen.page.click("#show-key")
            seen.page.locator("#key-dialog").wait_for()
            seen.page.fill("#key", key)
            seen.page.keyboard.press("Enter")
            seen.page.wait_for_selector("#model option", state="attached")
            if admin:
                seen.page.get_by_text("Weights").wait_for()
                assert "of 512 MiB" in seen.text("#memory")
            else:
                seen.page.get_by_text("Shown to those who hold the admin key.").wait_for()
        seen.page.fill("[name=max_tokens]", "4")
        seen.ask()
        assert seen.page.locator("div.error").count() == 0


@browsing
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_it_fits_a_phone(scripted: Running, script: Script, visit: Any, path: str) -> None:
    script.says = lambda prompt: "A " + "long" * 60 + "\n\n```\n" + "wide " * 60 + "\n```"
    seen = visit(scripted, path, viewport={"width": 360, "height": 740})
    if path == "/":
        seen.ask()
        seen.page.evaluate("document.getElementById('glance').textContent = '1111.1/s, 11.11/forward'")
        assert seen.page.evaluate(APART)
        for button, room in (("#show-talks", "#talks"), ("#show-panel", "#panel")):
            assert not seen.page.locator(room).is_visible()
            seen.page.click(button)
            assert seen.page.locator(room).is_visible()
            seen.page.keyboard.press("Escape")
            assert not seen.page.locator(room).is_visible()
    width = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollHeight <= {} "
    assert seen.page.evaluate(width.format("innerHeight" if path == "/" else "1e9"))


@browsing
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_and_controls_have_names(
    scripted: Running, script: Script, visit: Any, scheme: str
) -> None:
    """WCAG AA: 4.5 to 1 for everything that is read."""
    script.says = lambda prompt: "<think>x</think>An `answer`.\n\n```\ncode\n```"
    seen = visit(scripted, color_scheme=scheme)
    seen.ask()
    weak = seen.page.evaluate(CONTRAST)
    assert weak == []
    nameless = seen.page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")]
        .filter(each => !(each.textContent.trim() || each.getAttribute("aria-label") || each.labels?.length))
        .map(each => each.outerHTML)""")
    assert nameless == []


# No part of the page's head covers the next one, not even with text that runs out of its box.
APART = """() => {
  const parts = [...document.querySelector("header").children].filter((part) => part.checkVisibility());
  const spans = parts.map((part) => {
    const range = document.createRange();
    range.selectNodeContents(part);
    const [box, text] = [part.getBoundingClientRect(), range.getBoundingClientRect()];
    if (getComputedStyle(part).overflow === "hidden" || !part.textContent) return [box.left, box.right];
    if (part.id !== "glance") return [box.left, box.right];
    return [Math.min(box.left, text.left), Math.max(box.right, text.right)];
  });
  return spans.every(([left], index) => !index || left >= spans[index - 1][1]);
}"""

CONTRAST = """() => {
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (...layers) => {
    paint.fillStyle = "#fff"; paint.fillRect(0, 0, 1, 1);
    for (const layer of layers) { paint.fillStyle = layer; paint.fillRect(0, 0, 1, 1); }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (parts) => {
    const [r, g, b] = parts.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const weak = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !each.checkVisibility() || each.closest(".hidden, :disabled")) continue;
    const layers = [];
    for (let at = each; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
    const behind = light(rgb(...layers));
    const front = light(rgb(...layers, getComputedStyle(each).color));
    const ratio = (Math.max(front, behind) + 0.05) / (Math.min(front, behind) + 0.05);
    if (ratio < 4.5) weak.push([each.tagName, each.className, each.textContent.slice(0, 30), ratio]);
  }
  return weak;
}"""

OBSERVE = f"""() => {{ window.frames = []; window.weak = []; const weak = {CONTRAST};
  new MutationObserver(() => {{
    const box = document.querySelector(".canvas");
    if (!box) return;
    window.frames.push([box.querySelectorAll("span").length, box.querySelector("figcaption").textContent]);
    window.weak.push(...weak());
  }}).observe(document.getElementById("talk"), {{subtree: true, childList: true}});
}}"""
