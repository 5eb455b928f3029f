// The code of a link that works once stands behind its #, which browsers send to nobody. Here it goes into the form.

const field = document.querySelector("[data-from-address]");
const code = decodeURIComponent(location.hash.slice(1));
if (code) {
  field.value = code;
  field.closest(".code-field").hidden = true;
  history.replaceState(null, "", location.pathname);
}
