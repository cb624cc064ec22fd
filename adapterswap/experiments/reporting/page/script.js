"use strict";
// Pressing a heading sorts its table by that column: best first, then reversed. Rows without a value stay last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const table = heading.closest("table");
    const first = heading.dataset.first;
    const next = heading.getAttribute("aria-sort") === first ? (first === "descending" ? "ascending" : "descending") : first;
    for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", next);
    const column = Number(heading.dataset.column);
    const sign = next === "descending" ? -1 : 1;
    const body = table.tBodies[0];
    const keyed = Array.from(body.rows, (row) => [row, row.cells[column].dataset.value]);
    const isText = heading.dataset.kind === "text";
    keyed.sort(([, a], [, b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (isText ? a.localeCompare(b, "en") : Number(a) - Number(b));
    });
    body.append(...keyed.map(([row]) => row));
  });
}
