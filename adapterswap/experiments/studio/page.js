// The strip of layers: a click or Enter assigns a layer, arrow keys move, and the focus survives a redraw.
const cells = () => [...element.querySelectorAll("button[data-cell]")];
let last = null;
const settle = () => {
  const all = cells();
  const chosen = all.find((cell) => cell.dataset.cell === last) || all[0];
  all.forEach((cell) => (cell.tabIndex = cell === chosen ? 0 : -1));
  return chosen;
};
element.addEventListener("click", (event) => {
  const cell = event.target.closest("button[data-cell]");
  if (!cell) return;
  last = cell.dataset.cell;
  trigger("select", { cell: last });
});
element.addEventListener("keydown", (event) => {
  const cell = event.target.closest("button[data-cell]");
  if (!cell || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
  event.preventDefault();
  const columns = [...element.querySelectorAll(".layer")];
  const column = cell.closest(".layer");
  const row = [...column.querySelectorAll("button")].indexOf(cell);
  let place = columns.indexOf(column);
  let next = row;
  if (event.key === "ArrowLeft") place -= 1;
  if (event.key === "ArrowRight") place += 1;
  if (event.key === "Home") place = 0;
  if (event.key === "End") place = columns.length - 1;
  if (event.key === "ArrowUp") next -= 1;
  if (event.key === "ArrowDown") next += 1;
  const buttons = columns[Math.max(0, Math.min(place, columns.length - 1))].querySelectorAll("button");
  const target = buttons[Math.max(0, Math.min(next, buttons.length - 1))];
  last = target.dataset.cell;
  settle();
  target.focus();
});
let focused = false;
element.addEventListener("focusin", () => (focused = true));
element.addEventListener("focusout", (event) => {
  if (event.relatedTarget) focused = false;
});
const drawn = () => {
  const chosen = settle();
  if (focused && chosen && document.activeElement === document.body) chosen.focus({ preventScroll: true });
};
watch("value", drawn);
document.addEventListener("studio:strip", (event) => {
  props.value = event.detail;
  requestAnimationFrame(drawn);
});
settle();
