// What this browser remembers. Storage may be forbidden: then a choice lasts for the page.

export function remembered(key) {
  try {
    return localStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

export function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // as above
  }
}
