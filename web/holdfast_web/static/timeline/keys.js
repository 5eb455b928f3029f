// Keys of the timeline; letters work from anywhere on the page, arrows where the timeline has the focus.

const LETTERS = {
  w: "zoom-in", s: "zoom-out", a: "pan-left", d: "pan-right", "[": "stall-before", "]": "stall-after", n: "failure",
  h: "axis", e: "branches", l: "live", r: "restore", c: "copy", t: "table", 0: "fit", Escape: "clear",
};
const ARROWS = { ArrowLeft: "previous", ArrowRight: "next" };

export function startKeys(root, act) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea, dialog, [contenteditable]");
    if (typing || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const onPoints = event.key === "Enter" && event.target.closest?.("[role=listbox]");
    const name = LETTERS[event.key] ?? (root.contains(event.target) ? ARROWS[event.key] : null) ?? (onPoints ? "restore" : null);
    if (!name) return;
    // Enter held down must not go on to press what has the focus in the dialog that it opens.
    if (onPoints && event.repeat) return;
    event.preventDefault();
    act(name);
  });
}
