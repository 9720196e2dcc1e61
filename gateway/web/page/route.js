// Route of the page: the part behind `#/`, so that it works below any path of a proxy.

import { signal } from "./vendor/preact.js";

export const PAGES = /** @type {const} */ (["chat", "decide", "models", "requests", "keys", "logs", "settings"]);

/** @returns {{page: string, id: string}} */
function read() {
  const [page = "", id = ""] = location.hash.replace(/^#\/?/, "").split("/");
  return PAGES.includes(/** @type {any} */ (page)) ? { page, id: safely(id) } : { page: "chat", id: "" };
}

/** @param {string} text */
function safely(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

export const route = signal(read());

/** @param {string} page @param {string} [id] */
export const place = (page, id = "") => `#/${page}${id ? `/${encodeURIComponent(id)}` : ""}`;

/** @param {string} page @param {string} [id] @param {boolean} [isReplaced] without a step in the history */
export function go(page, id = "", isReplaced = false) {
  if (isReplaced) history.replaceState(null, "", place(page, id));
  else history.pushState(null, "", place(page, id));
  route.value = read();
}

window.addEventListener("hashchange", () => (route.value = read()));
window.addEventListener("popstate", () => (route.value = read()));
