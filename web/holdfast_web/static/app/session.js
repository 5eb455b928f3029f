// The end of a sign-in: the page stays, with what was typed, under a banner that leads to the sign-in page.

const CHECK_MS = 5000;
const KEY = "holdfast-typed";
const TYPED = "form[method=post] :is(input:not([type=hidden], [type=password], [type=file]), select, textarea)";
let timer = 0;

/** Return the status of a request to the server; 0 if there is no answer. */
export async function statusOf(path) {
  const request = { cache: "no-store", headers: { Accept: "application/json" }, signal: AbortSignal.timeout(5000) };
  return fetch(path, request).then((response) => response.status, () => 0);
}

const signIn = () => `/login?next=${encodeURIComponent(location.pathname + location.search)}`;

/** Show the banner, in an open dialog if there is one, since everything else is inert then. */
function showSignedOut() {
  const banner = document.querySelector("#signed-out");
  const place = document.querySelector("dialog[open]") ?? document.querySelector("#signed-out-place");
  if (banner.parentElement !== place) place.prepend(banner);
  banner.querySelector("a").href = signIn();
  banner.hidden = false;
  document.body.dataset.signedOut = "";
  timer ||= setInterval(checkSession, CHECK_MS);
}

/** Remove the banner after a sign-in in another tab. */
function showSignedIn() {
  document.querySelector("#signed-out").hidden = true;
  delete document.body.dataset.signedOut;
  clearInterval(timer);
  timer = 0;
  document.dispatchEvent(new CustomEvent("holdfast:refresh-now"));
}

/** Ask whether the browser is still signed in; return the status. */
export async function checkSession() {
  const status = document.hidden ? 0 : await statusOf("/session");
  if (status === 401) showSignedOut();
  else if (timer && status && status < 400) showSignedIn();
  return status;
}

// ---- typed values: a sign-in page in the same tab gives them back

const isTyped = (field) =>
  field.matches("[type=checkbox], [type=radio]") ? field.checked !== field.defaultChecked
    : field.matches("select") ? field.selectedOptions[0] !== ([...field.options].find((option) => option.defaultSelected) ?? field.options[0])
      : field.value !== field.defaultValue;

// the attribute: in a form with buttons named "action", form.action is these
const nameOf = (field) => [field.form.getAttribute("action"), field.name, field.type === "radio" ? field.value : ""].join(" ");

function typedFields() {
  const fields = [...document.querySelectorAll(TYPED)].filter(isTyped);
  return Object.fromEntries(fields.map((field) => [nameOf(field), field.matches("[type=checkbox], [type=radio]") ? field.checked : field.value]));
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY));
  } catch {
    return null;
  }
}

function store(kept) {
  try {
    if (kept) sessionStorage.setItem(KEY, JSON.stringify(kept));
    else sessionStorage.removeItem(KEY);
  } catch {
    // without storage the values are lost
  }
}

let typed = {};

/** Fill in typed values, also into a form that is shown later. */
function fillIn() {
  for (const field of Object.keys(typed).length ? document.querySelectorAll(TYPED) : []) {
    const value = typed[nameOf(field)];
    if (value === undefined) continue;
    delete typed[nameOf(field)];
    if (typeof value === "boolean") field.checked = value;
    else field.value = value;
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

function startTypedValues() {
  const kept = stored();
  if (document.querySelector('form[action="/login"]')) {
    if (kept) store({ ...kept, signedOut: true });
    return;
  }
  store(null);
  if (kept?.signedOut && kept.path === location.pathname) typed = kept.fields;
  fillIn();
  document.addEventListener("htmx:after:swap", fillIn);
  addEventListener("pagehide", () => {
    const fields = typedFields();
    if (Object.keys(fields).length) store({ path: location.pathname, fields });
  });
}

export function startSession() {
  startTypedValues();
  document.addEventListener("htmx:response:error", (event) => event.detail.ctx.response.status === 401 && showSignedOut());
  document.addEventListener("holdfast:stream-refused", checkSession);
  document.addEventListener("visibilitychange", () => timer && checkSession());
}
