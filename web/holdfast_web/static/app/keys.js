const inField = (event) => event.target.closest?.("input, select, textarea, [contenteditable]");

export function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (inField(event) || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "?") document.querySelector("#keys")?.showModal();
    else if (event.key === "/") {
      const field = document.querySelector('[data-hotkey="/"]');
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  });
}
