// The theme: as the system has it, until somebody chooses light or dark here.

import { remember } from "./memory.js";

const NEXT = { system: "light", light: "dark", dark: "system" };
const WORDS = { system: "as the system", light: "light", dark: "dark" };
const root = document.documentElement;

const announce = () => document.dispatchEvent(new CustomEvent("holdfast:theme"));

function show(button) {
  const name = `Theme: ${WORDS[root.dataset.theme ?? "system"]}`;
  button.setAttribute("aria-label", name);
  button.title = name;
}

function choose(theme) {
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  remember("holdfast-theme", theme);
  announce();
}

export function startTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
  const button = document.querySelector("[data-theme-toggle]");
  show(button);
  button.addEventListener("click", () => {
    choose(NEXT[root.dataset.theme ?? "system"]);
    show(button);
  });
}
