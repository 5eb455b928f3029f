// Keyboard shortcuts: letters work on the whole page, arrow keys in the focused timeline

const LETTERS = {
  w: "zoom-in", s: "zoom-out", a: "pan-left", d: "pan-right", "[": "stall-before", "]": "stall-after", n: "failure", ",": "note-before", ".": "note-after", m: "annotate",
  h: "axis", e: "branches", l: "live", r: "restore", c: "copy", t: "table", g: "machine", 0: "fit", Escape: "clear",
};
const ARROWS = { ArrowLeft: "previous", ArrowRight: "next" };
const SHIFTED = { ArrowLeft: "other-previous", ArrowRight: "other-next" };

export function startKeys(root, act) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea, dialog, [contenteditable]");
    if (typing || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const onPoints = event.key === "Enter" && event.target.closest?.("[role=listbox]");
    const name = LETTERS[event.key] ?? (root.contains(event.target) ? (event.shiftKey ? SHIFTED : ARROWS)[event.key] : null) ?? (onPoints ? "restore" : null);
    if (!name) return;
    // a held Enter must not press a button in the dialog that it opens
    if (onPoints && event.repeat) return;
    event.preventDefault();
    act(name);
  });
}
