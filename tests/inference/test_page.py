"""The chat page in a real browser: by keyboard, as text, from this server only."""

import re
import shutil
import threading
from collections.abc import Iterator

import pytest

from megatoken.inference.app import PAGE, build_policy
from tests.cli.browser import Browser
from tests.inference.served import Served, serve
from tests.processes import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")
ANSWERS = "[...document.querySelectorAll('.turn.model p')].map(p => p.textContent)"
IDLE = "!document.getElementById('send').disabled"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a page of Chromium; skip without it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with Browser(program or pytest.skip("no Chromium on this machine")) as opened:
        yield opened


def open_page(browser: Browser, served: Served) -> None:
    browser.resize(320)
    browser.open(f"http://localhost:{served.port}/")
    browser.wait_for("document.title !== 'megatoken' || !document.getElementById('error').hidden")
    browser.evaluate("document.getElementById('temperature').value = '0'")


def say(browser: Browser, text: str) -> None:
    browser.write(text)
    browser.press("Enter")
    browser.wait_for("document.querySelectorAll('.turn.user').length > 0")


def test_the_policy_allows_the_page_s_own_script_and_style_alone():
    page = PAGE.read_text()
    assert not re.search(
        r"(inner|outer)HTML|insertAdjacentHTML|document\.write|https?://|\son\w+=|style=", page
    )
    policy = build_policy(page)
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}='; style-src 'sha256-[\w+/]{43}='$", policy)


def test_a_conversation_by_keyboard(browser: Browser, served: Served):
    open_page(browser, served)
    assert browser.evaluate("document.activeElement.id") == "text"
    attack = "<img src=x onerror=alert(1)>"
    say(browser, attack)
    browser.wait_for(IDLE)
    answer = served.chat(attack, temperature=0, top_k=50)
    expected = answer["choices"][0]["message"]["content"]
    assert browser.evaluate(ANSWERS) == [expected]
    assert browser.evaluate("document.querySelector('.turn.user p').textContent") == attack
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= 320
    assert browser.evaluate("document.activeElement.id") == "text"
    say(browser, "again")
    browser.wait_for(f"{IDLE} && document.querySelectorAll('.turn.model').length === 2")
    assert "oldest 2" in browser.evaluate("document.getElementById('turns').textContent")
    requests = browser.list_requests()
    assert requests
    assert all(url.startswith((f"http://localhost:{served.port}/", "data:")) for url in requests)
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate(ANSWERS) == []
    assert browser.evaluate("document.activeElement.id") == "text"


def test_an_answer_is_stopped_by_escape_and_its_row_is_free(browser: Browser, served: Served):
    model = served.engine.model
    letter = 100 * model.head.weight[ord("e")].detach()
    steps, gate = [], threading.Event()

    def write_e(_module, _inputs, hidden):
        steps.append(len(steps) < 9 or gate.wait())
        return letter.expand_as(hidden)

    hook = model.norm.register_forward_hook(write_e)
    try:
        open_page(browser, served)
        say(browser, "long")
        browser.wait_for(f"({ANSWERS})[0]?.startsWith('eee')")
        [row] = served.engine._running.values()
        browser.press("Escape")
        browser.wait_for(IDLE)
        wait_until(lambda: row.is_cancelled)
    finally:
        gate.set()
        hook.remove()
    wait_until(lambda: served.engine.counts == (0, 0))
    assert len(steps) == 10  # of more than 100


def test_errors_are_said_and_the_message_stays(browser: Browser, served: Served):
    open_page(browser, served)
    browser.write("a" * 300)
    browser.press("Enter")
    browser.wait_for("!document.getElementById('error').hidden")
    assert browser.evaluate("document.getElementById('text').value.length") == 300
    assert browser.evaluate(ANSWERS) == []


def test_a_key_is_asked_for_and_a_model_without_a_template_continues(browser: Browser):
    with serve(chat=False, api_key="open-sesame") as started:
        open_page(browser, started)
        assert browser.evaluate("document.activeElement.id") == "key"
        browser.write("open-sesame")
        browser.press("Tab")
        browser.wait_for("document.title === 'tiny'")
        assert browser.evaluate("document.getElementById('error').hidden")
        browser.evaluate("document.getElementById('text').focus()")
        say(browser, "once")
        browser.wait_for(f"{IDLE} && ({ANSWERS})[0]")
        assert browser.evaluate(ANSWERS)[0]
