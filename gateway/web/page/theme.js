// Theme: as the system has it, light or dark.

import { effect, signal } from "./vendor/preact.js";

const KEY = "mlxd.theme";
export const THEMES = /** @type {const} */ (["auto", "light", "dark"]);

function stored() {
  try {
    return localStorage.getItem(KEY) ?? "auto";
  } catch {
    return "auto";
  }
}

export const theme = signal(stored());

effect(() => {
  document.documentElement.dataset.theme = theme.value;
  try {
    localStorage.setItem(KEY, theme.value);
  } catch {
    // It holds until the tab is closed.
  }
});

export function nextTheme() {
  theme.value = THEMES[(THEMES.indexOf(/** @type {any} */ (theme.value)) + 1) % THEMES.length] ?? "auto";
}
