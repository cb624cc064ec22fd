// Sends requests to the studio's own route and shows each line of the response: the strip first, then the answers. A new
// request ends the one before; if that one had not drawn its strip, the new one does. A moved slider is sent at once.
// Gradio reports it a frame later; that event is ignored if it holds the same values.
const place = (name) => element.querySelector("#" + name);
const visitor = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
const sliders = JSON.parse(place("written").dataset.sliders); // id → place among the values
let going = null;
let owed = false;
let last = null;
let known = null; // the page's values, and whether answers follow the composition
let early = null; // values that were sent before Gradio's event
let rewrite = null;
const end = () => {
  if (going) going.abort();
  going = null;
};
// Screen readers announce the answers once they are complete.
const announce = () => {
  const written = place("written");
  written.ariaBusy = String(written.querySelector(".answers[aria-busy=true]") !== null);
};
const settled = () => {
  place("written").querySelectorAll(".cursor").forEach((cursor) => cursor.remove());
  place("written").querySelector(".answers")?.setAttribute("aria-busy", "false");
  announce();
};
const problem = (text) => {
  const box = document.createElement("div");
  box.className = "problem";
  box.setAttribute("role", "alert");
  box.textContent = text;
  place("written").replaceChildren(box);
};
const show = (line) => {
  for (const [name, content] of Object.entries(JSON.parse(line))) {
    if (place(name)) {
      place(name).innerHTML = content;
      if (name === "written") announce();
    }
    else if (name !== "address") document.dispatchEvent(new CustomEvent("studio:" + name, { detail: content }));
    else {
      history.replaceState(null, "", content + location.hash);
      owed = false;
    }
  }
};
const ask = async ({ draw, answer, values }) => {
  end();
  last = { visitor, draw: draw || owed, answer, values };
  owed = last.draw;
  if (draw) {
    clearTimeout(rewrite);
    rewrite = setTimeout(() => trigger("submit"), 200); // update Export, but only after the first tokens
  }
  const mine = (going = new AbortController());
  try {
    const response = await fetch("studio/answer", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(last),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error(await response.text());
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done || mine.signal.aborted) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.forEach(show);
    }
  } catch (error) {
    if (!mine.signal.aborted) problem(error instanceof TypeError ? "The studio does not respond. Is it still running?" : error.message);
  }
};
document.addEventListener("studio:know", (event) => (known = event.detail));
document.addEventListener("studio:ask", (event) => {
  known = event.detail;
  if (known.draw && JSON.stringify(known.values) === early) return;
  early = null;
  ask(known);
});
document.addEventListener("input", (event) => {
  const index = event.target.type === "range" ? sliders[event.target.closest("[id^=set-]")?.id] : undefined;
  if (known === null || index === undefined) return;
  const values = known.values.with(index, Number(event.target.value));
  known = { ...known, values };
  early = JSON.stringify(values);
  ask({ draw: true, answer: known.auto, values });
}, { capture: true });
document.addEventListener("studio:stop", () => {
  end();
  settled();
  if (owed) ask({ ...last, answer: false });
});
