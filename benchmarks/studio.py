"""How fast the studio's page follows a slider, in headless Chromium on this machine.

    python benchmarks/studio.py --lab lab-run          # what `make demo` wrote
    python benchmarks/studio.py --lab lab-run --json

A key moves the slider of bottom layers. Measured from the key to the redrawn strip, and to the first token of the
answers on the page; beside them the model's own first token for the same prompt and compositions, in this process.
The goals: a strip within 100 ms, and a first token at most 50 ms after the model's own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from typing import Any

from playwright.sync_api import sync_playwright

from adapterswap.experiments.studio.choice import first_choice, from_address
from adapterswap.experiments.studio.html import COLUMNS, columns
from adapterswap.experiments.studio.server import serve_page
from adapterswap.experiments.studio.workspace import Workspace

# Resolves with the milliseconds from a key that moves the slider to the new strip and to the first new token.
_WATCH = """([cell, letter]) => new Promise((resolve) => {
  const strip = document.querySelector('#strip'), written = document.querySelector('#written');
  let began = null, drawn = null;
  written.querySelector('.answers').dataset.old = 'yes';
  const look = () => {
    if (began === null) return;
    const now = performance.now() - began;
    if (drawn === null && strip.querySelector(`[data-cell="${cell}"]`).textContent === letter) drawn = now;
    const texts = [...written.querySelectorAll('.answers:not([data-old]) .written')];
    if (drawn !== null && texts.some((one) => one.innerText.trim())) { observer.disconnect(); resolve([drawn, now]); }
  };
  const observer = new MutationObserver(look);
  for (const one of [strip, written]) observer.observe(one, {subtree: true, childList: true, characterData: true});
  document.addEventListener('keydown', () => (began = performance.now()), {once: true, capture: true});
})"""


def own_first_token(workspace: Workspace, query: str, prompt: str) -> float:
    """Milliseconds from setting the compositions to the first token, without a page."""
    shown = columns(workspace, from_address(query, first_choice(list(workspace.experts))), list(COLUMNS))
    answers = workspace.answers(prompt, [one.composition for one in shown], max_new_tokens=24, chat=False)
    *_, last = answers
    assert last.first_seconds is not None
    return 1000 * last.first_seconds


def measure(lab: str, repeats: int) -> dict[str, Any]:
    workspace = Workspace.of_lab(lab, device="cpu")
    urls: list[str] = []
    end = serve_page(workspace, on_ready=urls.append, wait=False)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    found: dict[str, list[float]] = {"strip": [], "first token": [], "the model's own first token": []}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{urls[0]}?bottom=1&top=0")
        page.locator("#scores .score").first.wait_for()
        prompt = page.locator("#prompt textarea").input_value()
        slider = page.get_by_role("slider", name="Bottom layers")
        slider.focus()
        for number in range(repeats + 2):
            up = number % 2 == 0
            page.evaluate(f"window.result = ({_WATCH})(['1.mlp', '{'l' if up else 'm'}'])" + "; null")
            page.keyboard.press("ArrowRight" if up else "ArrowLeft")
            strip, token = page.evaluate("window.result")
            page.locator("#written .answers[aria-busy=false]").wait_for()
            time.sleep(1.0)  # the scores of the lab's problems
            own = own_first_token(workspace, f"?bottom={2 if up else 1}&top=0", prompt)
            if number >= 2:  # the first ones warm up
                for name, value in zip(found, (strip, token, own), strict=True):
                    found[name].append(value)
        browser.close()
    end()
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", default="lab-run")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.lab, options.repeats)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, numbers in found.items():
        print(f"{name:30}{numbers['median']:7.0f} ms  ({numbers['least']:.0f} to {numbers['most']:.0f})")
    later = found["first token"]["median"] - found["the model's own first token"]["median"]
    print(f"{'the page adds':30}{later:7.0f} ms")


if __name__ == "__main__":
    main()
