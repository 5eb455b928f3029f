// A choice that is made is a question that is asked: the address has it, without what says nothing.

function address(form) {
  const asked = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value) asked.append(name, value);
  const query = String(asked);
  return new URL(form.action).pathname + (query ? `?${query}` : "");
}

export function startFilters() {
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submits]")) location.assign(address(event.target.form));
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-in-address]")) history.replaceState(null, "", address(event.target.form));
  });
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || !event.target.matches(".filters")) return;
    event.preventDefault();
    location.assign(address(event.target));
  });
}
