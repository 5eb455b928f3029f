// Dialogs are filled by the server; here they only open and close.

const restore = () => document.querySelector("#restore-dialog");

function ask(url) {
  htmx.ajax("GET", url, { target: "#restore-dialog", swap: "innerHTML" });
}

export function startDialogs() {
  document.addEventListener("htmx:after:swap", (event) => {
    const dialog = restore();
    if (dialog && event.detail.ctx.target === dialog && dialog.children.length && !dialog.open) dialog.showModal();
  });
  document.addEventListener("holdfast:ordered", () => restore()?.close());
  document.addEventListener("holdfast:restore", (event) => {
    ask(`/jobs/${document.querySelector("[data-job]").dataset.job}/restore?checkpoint=${event.detail}`);
  });
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) document.querySelector(opener.dataset.open).showModal();
    const closer = event.target.closest("dialog [data-close]");
    if (closer) {
      event.preventDefault();
      closer.closest("dialog").close();
    }
    // a click on the backdrop reaches the dialog itself
    if (event.target.matches("dialog[open]")) event.target.close();
  });
}
