"""The page of `qspec show` in a real browser, against a server that plays recorded answers."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from test.tools.show.answers import EVIL, HTML, SKY, long
from test.tools.show.browser import Page, shown
from test.tools.show.upstream import Script, upstream


def test_an_answer_appears_while_it_is_streamed_with_the_source_of_each_token(page: Page) -> None:
    goes_on = threading.Event()
    script = Script(SKY.first, SKY.passes, goes_on=goes_on)
    with upstream(script) as server, shown(server.url) as show:
        page.open(show.url).ask("Why?", finished=False)
        page.until(lambda: len(page.tokens()) == 4)
        assert not page.is_idle()
        page.point_at(page.all(".token[data-index]")[2])
        page.until(lambda: page.all(".details h3"))
        assert page.text(".details h3") == "Token 3: ␣is"
        assert "The passes come with the end of the answer." in page.text(".details")
        goes_on.set()
        page.until(page.is_idle)
        assert page.text(".details h3") == "Pass 1 of 4: tokens 2 to 4"
        assert page.tokens() == SKY.tokens
        assert page.text(".tokens") == SKY.text
        assert (
            page.text(".legend")
            == "queue 2guess 1prompt 0output 1step 1head 0jacobi 0second 0target 5"
        )
        assert re.match(r"10 tokens in 4 passes · accept length 2\.25 · ", page.text(".summary"))
        assert page.text("#about") == f"/models/<tiny> at {server.url}"
        assert page.complaints() == []


def test_pointing_at_a_token_shows_its_pass(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url).ask("Why is")
        page.point_at(page.all(".token[data-index]")[2])
        page.until(lambda: page.all(".details h3"))
        assert page.text(".details h3") == "Pass 1 of 4: tokens 2 to 4"
        assert page.text(".facts") == (
            "5 rows · 24 ms · pipeline queue · with 1 other request, 9 rows in all"
        )
        assert page.text(".match") == "Matched 2 tokens of the context: Why␣is"
        assert page.text(".outcome") == (
            "Accepted: ␣sky ␣is. Not accepted: ␣red ␣wine. Then the target's own: ␣blue."
        )
        nodes = page.script(
            "return [...document.querySelectorAll('.node')].map((node) => [node.classList[1], "
            "[...node.querySelectorAll('text')].map((text) => text.textContent).join(' ')])"
        )
        assert nodes == [
            ["root", "The"],
            ["accepted", "␣sky ✓ 80 % queue"],
            ["accepted", "␣is ✓ 80 % queue"],
            ["rejected", "␣red ✗ 31 % prompt"],
            ["rejected", "␣wine ✗ 7 % prompt"],
            ["own", "␣blue target"],
        ]
        label = page.one(".tree").get_attribute("aria-label")
        assert label == "4 drafted tokens in 2 branches"
        marked = page.all(".token.same-pass")
        assert [span.get_attribute("data-index") for span in marked] == ["1", "2", "3"]
        # The prompt's token is the only part of the matched text that the answer has.
        assert [span.text for span in page.all(".token.matched")] == ["The"]


def test_the_answer_can_be_walked_through_with_the_keyboard(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url).ask("Why is")
        page.one("#save").click()
        page.press(Keys.TAB, Keys.TAB)  # The switch for letters, then the answer.
        assert page.focused() == "0"
        assert "A pass over the prompt gave this token" in page.text(".details")
        for key, index, title in (
            (Keys.ARROW_RIGHT, "1", "Pass 1 of 4"),
            (Keys.ARROW_DOWN, "4", "Pass 2 of 4"),
            (Keys.ARROW_DOWN, "5", "Pass 3 of 4"),
            (Keys.ARROW_LEFT, "4", "Pass 2 of 4"),
            (Keys.ARROW_UP, "1", "Pass 1 of 4"),
            (Keys.END, "9", "Pass 4 of 4"),
        ):
            page.press(key)
            assert page.focused() == index
            assert page.text(".details h3").startswith(title)
        # Only one token is a stop of the Tab key.
        assert len(page.all(".token[tabindex='0']")) == 1


def test_a_token_is_readable_without_colour(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url).ask("Why is")
        styles = page.script(
            "return [...document.querySelectorAll('.token.sample')].map((one) => "
            "getComputedStyle(one)).map((one) => one.textDecorationLine + one.textDecorationStyle)"
        )
        assert len(styles) == len(set(styles)) == 9
        page.one("#letters").click()
        letters = page.script(
            "return [...document.querySelectorAll('.token.run[data-index]')].map("
            "(one) => getComputedStyle(one, '::before').content)"
        )
        assert [text for text in letters if text in {'"q"', '"s"', '"o"', '"g"'}] == [
            *('"q"', '"s"', '"o"', '"g"')
        ]


def test_the_timeline_has_all_passes_and_leads_to_each(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url).ask("Why is")
        slider = page.one(".slider")
        assert slider.get_attribute("aria-valuemax") == "4"
        assert page.text(".scale") == "04 passes, at most 4 tokens each87 ms"
        page.point_at(slider)  # At 43.5 ms; the second pass is from 24 to 44 ms.
        page.until(lambda: slider.get_attribute("aria-valuenow") == "2")
        assert page.text(".details h3").startswith("Pass 2 of 4")
        page.script("arguments[0].focus()", slider)
        page.press(Keys.ARROW_RIGHT)
        assert page.text(".details h3").startswith("Pass 3 of 4")
        assert slider.get_attribute("aria-valuetext") == "pass 3 of 4: 4 tokens, 23 ms"
        assert [figure.text.splitlines()[0] for figure in page.all("figcaption")] == [
            "Match rate: 71 %",
            "Accept length: 2.25",
        ]


def test_the_same_answer_without_speculation_stands_beside_it(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url).ask("Why is", compare=True)
        asked = [body["sampling_params"].pop("custom_params") for body in server.asked]
        assert asked[0]["qspec_return_trace"] is True
        assert asked[1] == {"qspec_enabled": False}
        assert server.asked[0] == server.asked[1]
        assert page.text(".plain-answer .tokens") == SKY.text
        assert "The texts are identical." in page.text(".ratio")
        assert [cell.text for cell in page.all("tbody tr:nth-child(3) td")] == ["10", "10"]


def test_a_saved_answer_opens_offline_and_shows_the_same(page: Page, downloads: Path) -> None:
    file = downloads / "downloads" / "qspec-answer.html"
    file.unlink(missing_ok=True)
    with upstream(HTML) as server, shown(server.url) as show:
        page.open(show.url).ask(f"Say {EVIL}", compare=True)
        tokens = page.tokens()
        page.one("#save").click()
        page.until(file.exists)
    text = file.read_text()
    # The names of SVG and of the server are no addresses that the file loads.
    assert set(re.findall(r"https?://[\w.:]+", text)) == {"http://www.w3.org", server.url}
    page.open(file.as_uri())
    assert page.driver.title == "An answer of qspec show"
    assert page.tokens() == tokens
    assert page.text(".asked-text") == f"Say {EVIL}"
    page.point_at(page.all(".token[data-index]")[1])
    page.until(lambda: page.all(".details h3"))
    assert "Pass 1 of 1" in page.text(".details h3")
    assert "The texts are identical." in page.text(".ratio")
    assert page.complaints() == []


def test_text_with_html_in_it_is_text(page: Page) -> None:
    with upstream(HTML) as server, shown(server.url, [EVIL, "Hello"]) as show:
        page.open(show.url).ask(EVIL)
        page.point_at(page.all(".token[data-index]")[1])
        page.until(lambda: page.all(".tree"))
        assert page.driver.title == "qspec show"
        assert page.tokens() == HTML.tokens
        assert EVIL.replace(" ", "␣") in page.text(".details")
        assert not page.all("#place img, #place script")
        assert page.complaints() == []


@pytest.mark.parametrize("compare", [False, True])
def test_of_a_server_that_dies_the_part_that_came_stays(page: Page, compare: bool) -> None:
    with upstream(Script(SKY.first, SKY.passes, dies=True)) as server, shown(server.url) as show:
        page.open(show.url).ask("Why?", compare=compare)
        assert page.tokens() == SKY.tokens[:-1]
        words = "closed the connection before its answer was complete|ended the answer early"
        assert re.search(words, page.text(".error"))
        # Nothing follows an answer that failed.
        assert len(server.asked) == 1
        page.one("#save").click()


def test_a_refusal_of_the_server_is_shown_as_text(page: Page) -> None:
    refusal = (400, "max_new_tokens is <b>7</b>")
    with upstream(Script("", [], refusal=refusal)) as server, shown(server.url) as show:
        page.open(show.url).ask("Why?")
        assert page.text(".error") == (
            f"{server.url} refused the request (HTTP 400): max_new_tokens is <b>7</b>"
        )


def test_an_ended_command_is_named(page: Page) -> None:
    with upstream(SKY) as server:
        with shown(server.url) as show:
            page.open(show.url)
        page.ask("Why?")
        assert page.text(".error") == "the command qspec show does not answer; it may have ended"


def test_stop_ends_the_request_to_the_server(page: Page) -> None:
    goes_on = threading.Event()
    endless = Script("x", long(40_000).passes, goes_on=goes_on, incremental=True)
    with upstream(endless) as server, shown(server.url) as show:
        page.open(show.url).ask("Why?", finished=False)
        page.until(lambda: len(page.tokens()) == 5)
        page.one("#stop").click()
        page.until(page.is_idle)
        assert page.text(".error") == "You stopped the answer."
        assert len(page.tokens()) == 5
        goes_on.set()
        page.until(lambda: server.left)
        assert server.left[0] < 10_000


def test_an_answer_of_two_thousand_tokens_is_whole_and_can_be_pointed_at(page: Page) -> None:
    script = long(2000)
    with upstream(script) as server, shown(server.url) as show:
        page.open(show.url).ask("Why?")
        assert page.text(".tokens") == script.text
        page.point_at(page.all(".token[data-index='1999']")[0])
        page.until(lambda: page.all(".details h3"))
        assert page.text(".details h3") == "Pass 500 of 500: tokens 1998 to 2001"
        assert page.one(".slider").get_attribute("aria-valuemax") == "500"


@pytest.mark.parametrize("width", [400, 768, 1200])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    with upstream(SKY) as server, shown(server.url, ["word " * 50]) as show:
        page.open(show.url, width=width).ask("Why?", compare=True)
        page.script("document.querySelector('.token[data-index=\"2\"]').focus()")
        page.until(lambda: page.all(".tree"))
        assert page.script("return document.documentElement.scrollWidth") <= width
        assert page.script("return document.querySelector('.chart').clientWidth") >= 250


def test_a_prompt_can_be_picked_from_the_file(page: Page) -> None:
    with upstream(SKY) as server, shown(server.url, ["One?", EVIL]) as show:
        page.open(show.url)
        page.until(lambda: len(page.all("option")) == 3)
        page.all("option")[2].click()
        assert page.named("prompt").get_attribute("value") == EVIL


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(page: Page, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    read = (
        "const style = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['paper', 'ink', 'soft', 'bad', 'queue', 'step', 'guess', "
        "'prompt', 'output'].map((name) => [name, style.getPropertyValue('--' + name)]))"
    )
    with upstream(SKY) as server, shown(server.url) as show:
        page.open(show.url)
        # A starved browser may apply the style sheet after the page has loaded.
        page.until(lambda: page.script(read)["paper"])
        colors = page.script(read)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    paper = colors.pop("paper")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    assert not {name: value for name, value in colors.items() if contrast(value, paper) < 4.5}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    """The relative luminance of a color such as #1a2b3c."""
    parts = [int(color.strip()[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
