"""The page at /: its text, and its use in headless Chromium if the machine has one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import Running, until
from tests.server.stand_in import CountingEngine
from tests.slow import slow

BROWSER_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER_PROGRAM = next(filter(None, map(shutil.which, BROWSER_NAMES)), None)
PHONE_WIDTH_PX = 390


def test_page_needs_nothing_else(server: Running) -> None:
    answer = httpx.get(server.url)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"(https?:)?//[a-z]", answer.text.split("<script>")[0])
    ids = set(re.findall(r'id="(\w+)"', answer.text))
    assert set(re.findall(r'at\("(\w+)"\)', answer.text)) == ids - {"rate"}
    assert ".innerHTML" not in answer.text
    inputs = re.findall(r"<(?:input|textarea)", answer.text)
    assert len(inputs) == len(re.findall(r"<label>.*?<(?:input|textarea)", answer.text))


class Browser:
    """A Chromium browser that is controlled through its debugging pipe: JSON messages, each
    followed by a zero byte.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest, self._number, self._session = b"", 0, ""

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the browser's debugging protocol and waits for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._receive, 1 << 16)
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Opens a page of a phone's size."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=PHONE_WIDTH_PX,
            height=844,
            deviceScaleFactor=1,
            mobile=True,
        )
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, text: str = "", shift: bool = False) -> None:
        """Presses a key."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            more: dict[str, Any] = {"modifiers": 8 if shift else 0}
            more |= {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )


@contextlib.contextmanager
def chromium(folder: str) -> Iterator[Browser]:
    """Yields a headless browser."""
    assert BROWSER_PROGRAM
    read_commands, send = os.pipe()
    receive, write_answers = os.pipe()

    def take_places() -> None:  # the browser reads descriptor 3 and writes 4
        first, second = os.dup(read_commands), os.dup(write_answers)
        os.dup2(first, 3)
        os.dup2(second, 4)

    words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [BROWSER_PROGRAM, *words, f"--user-data-dir={folder}"],
        preexec_fn=take_places,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(send, receive)
    finally:
        process.kill()
        process.wait()
        for end in (read_commands, send, receive, write_answers):
            os.close(end)


def show_iterations(browser: Browser) -> None:
    """Opens the list of the device's iterations by keyboard alone."""
    focused = "document.activeElement.id"
    for _ in range(6):
        if browser.value(focused) != "last":
            browser.press("Tab", shift=True)
    assert browser.value(focused) == "last"
    browser.press("Enter", "\r")
    assert browser.value("at('last').parentElement.open")
    lines = browser.value("[...at('launches').rows].map((row) => row.innerText.split('\\t'))")
    assert re.fullmatch(r"\d+\.\d\d", lines[0][0])
    assert lines[0][1:] == ["1 x decode, 1 of 4 rows", "10,000"]
    assert [line[1:] for line in lines[-2:]] == [
        ["1 x decode, 1 of 4 rows", "7,500"],
        ["1 x chunk of 16 tokens", "2,500"],
    ]
    assert browser.value("at('last').textContent") == f"Device: {', '.join(lines[0][1:])} us"
    assert browser.value("document.documentElement.scrollWidth") <= PHONE_WIDTH_PX
    bars = "[...document.querySelectorAll('#iterations rect')].map((bar) => bar.className.baseVal)"
    assert set(browser.value(bars)) == {"prompt", "decode"}


@slow
@pytest.mark.skipif(BROWSER_PROGRAM is None, reason="no Chromium on this machine")
def test_chat_by_keyboard_on_a_phone(
    server: Running, engine: CountingEngine, tmp_path: Any
) -> None:
    engine.step_s = 0.01
    with chromium(str(tmp_path)) as browser:
        browser.open(server.url)
        until(lambda: browser.value("document.title") == "noah", "the page has the model's name")
        assert browser.value("document.documentElement.scrollWidth") <= PHONE_WIDTH_PX
        assert browser.value("document.activeElement.id") == "message"
        browser.call("Input.insertText", text="Who <b>is</b> it?")
        browser.press("Enter", "\r")
        idle = "!running && document.querySelectorAll('article').length"
        until(lambda: browser.value(idle) == 2, "the answer is whole")
        user, answer = browser.value(
            "[...document.querySelectorAll('article')].map((a) => a.textContent)"
        )
        assert user == "Who <b>is</b> it?"
        asked = {"messages": [{"role": "user", "content": user}]}
        same = httpx.post(f"{server.url}/v1/chat/completions", json=asked).json()
        assert same["choices"][0]["message"]["content"] == answer

        strokes = "document.querySelectorAll('#timeline path').length"
        until(lambda: browser.value(strokes) > 0, "the timeline shows the answer's tokens")

        show_iterations(browser)
        browser.value("at('message').focus()")

        # Escape stops an answer and frees its slot.
        engine.step_s = 0.1
        browser.call("Input.insertText", text="More")
        browser.press("Enter", "\r")
        busy = "document.querySelectorAll('#slots .busy').length"
        until(lambda: browser.value(busy) == 1, "the page shows a busy slot")
        browser.press("Escape")
        until(lambda: engine.stats().running == 0, "the slot is free")
        until(lambda: browser.value(busy) == 0, "the page shows that it is free")
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.call("Emulation.setEmulatedMedia", features=dark)
        back = "getComputedStyle(document.body).backgroundColor"
        assert browser.value(back) == "rgb(20, 22, 26)"
