/* A table that is wider than its place scrolls, so the keyboard must reach it. The theme wraps tables as the page loads. */
"use strict";

function nameWideTables() {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (frame.scrollWidth > frame.clientWidth) {
      frame.tabIndex = 0;
      frame.setAttribute("role", "region");
      frame.setAttribute("aria-label", "Table");
    } else {
      frame.removeAttribute("tabindex");
      frame.removeAttribute("role");
      frame.removeAttribute("aria-label");
    }
  }
}

window.addEventListener("load", nameWideTables);
window.addEventListener("resize", nameWideTables);
