"""The page without a mouse, without colours and with a screen reader: contrast, names of controls, the keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.contrast import faint_texts

Visit = Callable[..., Any]
EVERYTHING = "?bottom=2&top=1&bottom_transition=1&give=mlp.4=base"
CONTROLS = ("button", "checkbox", "combobox", "link", "radio", "slider", "spinbutton", "switch", "tab", "textbox")

VAGUE = re.compile(r'\s*- (?:button|link) "(?:Remove \d+|Clear|[\d.]+ (?:B|KB|MB)\b.*)"')  # Gradio's own names


def panels(page: Any) -> Any:
    """Each panel by name, with everything that it can show."""
    page.get_by_role("button", name=re.compile(r"^Options\b")).click()
    yield "Try"
    page.get_by_role("tab", name="Export").click()
    page.locator("#copy-2").wait_for()
    page.get_by_role("button", name="Export the model card").click()
    page.locator("#made a[download]").wait_for()
    yield "Export"
    page.get_by_role("tab", name="Analyze").click()
    page.locator("#measured table").first.wait_for()
    page.locator("#suggest").click()
    page.locator("#suggested h4").wait_for()
    yield "Analyze"
    page.get_by_role("tab", name="Evaluate").click()
    page.locator("#evaluate").click()
    page.locator("#evaluated td").first.wait_for()
    yield "Evaluate"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_and_every_control_has_a_name(visit: Visit, scheme: str) -> None:
    """On all panels, with clicked layers, a blend, an error and results; and no panel is wider than a phone."""
    page = visit(EVERYTHING, scheme=scheme)
    page.locator("#scores .score").first.wait_for()
    for panel in panels(page):
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)  # colours of buttons fade
        assert faint_texts(page) == [], panel
        nameless = [
            line for line in page.locator("body").aria_snapshot().splitlines()
            if re.match(rf"\s*- (?:{'|'.join(CONTROLS)})\b(?! \")", line)
        ]  # fmt: skip
        assert nameless == [], panel
        vague = [line for line in page.locator("body").aria_snapshot().splitlines() if VAGUE.match(line)]
        assert vague == [], panel
        page.set_viewport_size({"width": 380, "height": 900})
        page.wait_for_function("document.documentElement.scrollWidth === 380")
        page.set_viewport_size({"width": 1280, "height": 900})
    buttons = [button.get_attribute("aria-label") for button in page.locator("#set-language [role=button]").all()]
    assert buttons == ["Remove language from Language expert", "Remove all from Language expert"]
    page = visit("?bottom=5&top=5", scheme=scheme)
    page.locator("#problem .problem").wait_for()
    assert [line for line in faint_texts(page) if "problem" in line] == []


def test_the_page_works_with_only_the_keyboard(visit: Visit) -> None:
    """Tab moves from the strip to the first control and to a tab's panel; the focus is always visible."""
    page = visit("?bottom=1&top=0")
    page.locator("[data-cell='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('give=attention.0')")
    page.wait_for_function("document.activeElement.dataset.cell === '0.attention'")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        shown = page.evaluate(
            """() => {
              const e = document.activeElement;
              const name = e.ariaLabel || e.labels?.[0]?.innerText || e.innerText || e.closest('label')?.innerText;
              return [(name || '').trim().slice(0, 60), e.tagName, e.matches(':focus-visible')];
            }"""
        )
        seen.append(shown)
        if shown[0] == "Evaluate":
            break
    names = [name for name, *_ in seen]
    assert {"Use the paper's layers", "Undo clicks", "Task expert", "range slider for Bottom layers", "Try"} <= {*names}
    # Leaving a combobox takes a second Tab, for its list.
    assert [name for name, tag, visible in seen if not visible and tag != "BODY"] == []


def test_answers_are_announced_when_they_are_whole(visit: Visit) -> None:
    page = visit("?bottom=1&top=0")
    written = page.locator("#written")
    assert (written.get_attribute("aria-live"), written.get_attribute("aria-busy")) == ("polite", "false")
