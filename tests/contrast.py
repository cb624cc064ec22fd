"""The contrast between the text of a page and its background, as a browser draws it."""

from __future__ import annotations

from typing import Any

__all__ = ["LEAST", "faint_texts"]

LEAST = 4.5
"""The contrast that WCAG 2 asks for text of any size (level AA)."""

# Each background is drawn over the one below it on a canvas, which blends translucent colours and parses any notation.
# A text's shadow counts as its background. Over an element's own gradient, the text is compared with each of its
# colours; gradients of outer elements may be shadows at an edge, and are left out.
_FAINT = """(least) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = (...colours) => {
    for (const colour of ["#fff", ...colours]) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const colour = /(?:rgba?|hsla?|color|oklab|oklch|lab|lch)\\([^()]*\\)|#[0-9a-f]+/g;
  const grounds = (node) => {
    const {backgroundImage, textShadow} = getComputedStyle(node);
    const plain = lineage(node).map((one) => getComputedStyle(one).backgroundColor);
    const shadow = textShadow.match(colour);
    const stops = backgroundImage.includes("gradient") ? backgroundImage.match(colour) : [];
    return shadow ? [[shadow[0]]] : [plain, ...stops.map((stop) => [...plain, stop])];
  };
  const lineage = (node) => node ? [...lineage(node.parentElement), node] : [];
  const exempt = (node) => lineage(node).some((one) => one.disabled || one.ariaDisabled === "true");
  const holdsText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())
    || (node.matches("textarea, input:not([type=checkbox], [type=radio], [type=range], [type=file])") && node.value);
  const faint = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName) || !holdsText(node)) continue;
    if (!node.checkVisibility({opacityProperty: true, visibilityProperty: true}) || exempt(node)) continue;
    const box = node.getBoundingClientRect();
    if (box.width <= 1 || box.height <= 1) continue;
    for (const layers of grounds(node)) {
      const [a, b] = [luminance(...layers, getComputedStyle(node).color), luminance(...layers)];
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < least) { faint.push(`${contrast.toFixed(2)} ${node.outerHTML.slice(0, 160)}`); break; }
    }
  }
  return faint;
}"""


def faint_texts(page: Any) -> list[str]:
    """The visible elements of a page whose text has less contrast than `LEAST`, with that contrast.

    Disabled controls are exempt, as in WCAG.
    """
    result: list[str] = page.evaluate(_FAINT, LEAST)
    return result
