// Light and dark: the system's choice until somebody makes one here.

const dark = matchMedia("(prefers-color-scheme: dark)");

const announce = () => document.dispatchEvent(new CustomEvent("holdfast:theme"));

export function startTheme() {
  const root = document.documentElement;
  dark.addEventListener("change", announce);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("holdfast-theme", root.dataset.theme);
    } catch {
      // storage may be forbidden: the choice lasts for this page
    }
    announce();
  });
}
