// Rows keep their places as long as somebody points at them or is at one with the keyboard: nobody clicks on a
// job that has just moved under the pointer. When they leave, the next update brings the true order.

const table = () => document.querySelector("#fleet .jobs");
let before = [];

const held = () => Boolean(table()?.matches(":hover, :focus-within"));
const rows = (place = table()) => [...(place?.querySelectorAll("tr[id]") ?? [])];

/** Within a group: a job stands under its project. */
function restore(group) {
  const now = rows(group);
  const known = new Map(now.map((row) => [row.id, row]));
  const wanted = before.filter((id) => known.has(id)).map((id) => known.get(id));
  wanted.push(...now.filter((row) => !before.includes(row.id)));
  const focused = document.activeElement;
  wanted.forEach((row, place) => {
    const there = rows(group)[place];
    if (there !== row) there.before(row);
  });
  if (focused !== document.activeElement) focused.focus({ preventScroll: true });
}

export function startOrder() {
  const fleet = document.querySelector(".fleet");
  if (!fleet) return;
  const tell = () => fleet.toggleAttribute("data-held", held());
  for (const name of ["pointerover", "pointerleave", "focusin", "focusout"]) fleet.addEventListener(name, tell);
  document.addEventListener("htmx:before:swap", () => (before = held() ? rows().map((row) => row.id) : []));
  document.addEventListener("htmx:after:swap", () => {
    if (before.length) for (const group of table()?.tBodies ?? []) restore(group);
    tell();
  });
}
