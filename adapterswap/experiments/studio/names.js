// Chromium gives the keyboard's focus to lists that scroll, which Gradio then replaces: Tab would lead nowhere.
// Accessible names for buttons and links that Gradio calls "Remove 0", "Clear" or by a file's size.
const nameOf = (control) => {
  if (control.matches("a[download]")) return `Download ${control.download}`;
  const list = control.closest(".block").querySelector("[role=combobox]").ariaLabel;
  const item = control.matches(".remove-all") ? "all" : control.closest(".token").textContent.trim();
  return `Remove ${item} from ${list}`;
};
const rename = () => {
  for (const control of document.querySelectorAll(".token-remove, a[download]")) {
    control.title = control.ariaLabel = nameOf(control);
  }
  for (const list of document.querySelectorAll("[id$=-options]")) list.tabIndex = -1;
};
new MutationObserver(rename).observe(document.body, { childList: true, subtree: true, characterData: true });
rename();
