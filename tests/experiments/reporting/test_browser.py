"""The page in headless Chromium: sorting, figures, phone widths, no requests, and no code from model outputs.

Skipped where Chromium or playwright is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contrast import faint_texts

from .conftest import Written

Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, written: Written) -> Iterator[Open]:
    """`show(width, scheme)` is the report's page; any request or error of the page fails the test."""
    said: list[str] = []
    pages = []

    def opened(width: int = 1200, scheme: str = "light", **options: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: said.append(request.url))
        page.goto((written.folder / "report.html").as_uri())
        pages.append(page)
        return page

    yield opened
    requested = [line for line in said if not line.endswith("/report.html")]
    for page in pages:
        page.close()
    assert requested == []


def column(page: Any, number: int) -> list[str]:
    cells = page.locator("#target-1 table").first.locator(f"tbody tr > :nth-child({number + 1})")
    return [value for value in cells.evaluate_all("cells => cells.map(cell => cell.dataset.value)") if value]


@pytest.mark.sampled(3)  # each width, in one of the schemes
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_without_errors(show: Open, width: int, scheme: str) -> None:
    page = show(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("h1").inner_text() == "run"
    assert page.title() == "run: adapterswap report"
    wide = page.locator(".scroll").first
    assert wide.evaluate("box => getComputedStyle(box).overflowX") == "auto"
    if width == 360:
        assert wide.evaluate("box => box.scrollWidth > box.clientWidth")  # the table, in its own box
        wide.evaluate("box => { box.scrollLeft = 200 }")
        assert page.locator("#target-1 tbody th").first.bounding_box()["x"] < 40  # the method's name stays


@pytest.mark.parametrize("width", [360, 1200])
def test_a_heading_sorts_by_click_and_by_keyboard(show: Open, width: int) -> None:
    page = show(width)
    before = column(page, 3)
    heading = page.locator("#target-1 thead th", has_text="mean").first
    assert heading.get_attribute("aria-sort") == "none"
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(page, 3) == sorted(before, key=float, reverse=True) != before
    heading.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(page, 3) == sorted(before, key=float)
    name = page.locator("#target-1 thead th", has_text="method").first
    name.get_by_role("button").focus()
    page.keyboard.press("Space")
    assert heading.get_attribute("aria-sort") == "none"
    assert column(page, 0) == sorted(column(page, 0), key=str.lower)


def test_missing_values_sort_last(show: Open) -> None:
    page = show()
    button = page.locator("#target-1 thead th", has_text="difference").get_by_role("button")
    for _ in range(2):
        button.click()
        last = page.locator("#target-1 table").first.locator("tbody tr").last
        assert last.locator("th").inner_text() == "task expert"


def test_every_figure_is_drawn(show: Open) -> None:
    page = show()
    images = page.locator("figure img")
    assert images.count() == 7
    assert images.evaluate_all("images => images.every(image => image.complete && image.naturalWidth > 100)")


def test_outputs_are_text(show: Open, written: Written) -> None:
    page = show()
    (found,) = written.report.disagreements
    assert found.examples
    assert page.locator(".example").count() == len(found.examples)
    text = page.locator(".output pre").first.inner_text()
    raw = found.examples[0].outputs[0].text
    assert "\u202e" in raw  # a character that turns the direction of what follows, which the page writes out
    assert text == raw.replace("\u202e", r"\u202e")
    assert "<script>" in text
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == page.locator("figure > img[src^='data:image/svg+xml']").count()
    assert page.title() != "owned"
    question = page.locator(".question").first
    assert (question.get_attribute("lang"), question.get_attribute("dir")) == ("sw", "auto")


def test_an_injected_script_would_not_run(browser: Any, written: Written) -> None:
    """The content security policy, should escaping ever fail."""
    page = browser.new_page()
    page.route("**/report.html", lambda route: route.fulfill(
        body=written.page.replace("</main>", '<script>document.title="owned"</script></main>'), content_type="text/html"
    ))  # fmt: skip
    page.goto("http://localhost/report.html")
    assert page.title() != "owned"
    assert page.evaluate("document.scripts.length") == 2
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(show: Open, scheme: str) -> None:
    page = show(scheme=scheme)
    assert faint_texts(page) == []
