const DONE_MS = 1500;
const TO_DO_MS = 6000;

/** Whether it is in the clipboard: plain HTTP has none, and a browser may refuse. Then it is selected, to be copied by hand. */
async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

export function startCopying() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const done = await copied(document.querySelector(button.dataset.copy));
    button.textContent = done ? "Copied" : "Selected: copy it with your keys";
    setTimeout(() => (button.textContent = "Copy"), done ? DONE_MS : TO_DO_MS);
  });
}
