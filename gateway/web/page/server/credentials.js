// Credentials of this visitor: a session that `mlxctl ui` opened, or a pasted API key. Never in a cookie, never in an URL.

import { computed, signal } from "../vendor/preact.js";

const SESSION = "mlxd.session";
const KEY = "mlxd.key";

/** @param {() => Storage} storage @param {string} name */
function read(storage, name) {
  try {
    return storage().getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** @param {() => Storage} storage @param {string} name @param {string} value */
function write(storage, name, value) {
  try {
    if (value) storage().setItem(name, value);
    else storage().removeItem(name);
  } catch {
    // A browser without storage keeps it until the tab is closed.
  }
}

const tab = () => window.sessionStorage;
const browser = () => window.localStorage;

/** Token of the administrator's session, which all tabs of this browser share; mlxd honours it after a restart too. */
export const session = signal(read(browser, SESSION));
/** API key: of this tab, or of this browser where its owner chose that. */
export const apiKey = signal(read(tab, KEY) || read(browser, KEY));
export const isAdmin = computed(() => session.value !== "");

/** @param {string} token */
export function keepSession(token) {
  session.value = token;
  write(browser, SESSION, token);
}

// A log-in or log-out in another tab is one of this tab too.
window.addEventListener("storage", (event) => {
  if (event.key === SESSION || event.key === null) session.value = read(browser, SESSION);
});

/** @param {string} key @param {boolean} isRemembered */
export function keepKey(key, isRemembered) {
  apiKey.value = key;
  write(tab, KEY, key);
  write(browser, KEY, isRemembered ? key : "");
}

/** Header of requests to /v1: the key, where there is one, counts for its own usage. @returns {Record<string, string>} */
export function authorization() {
  const secret = apiKey.value || session.value;
  return secret ? { authorization: `Bearer ${secret}` } : {};
}

/** @returns {Record<string, string>} */
export const sessionAuthorization = () => (session.value ? { authorization: `Bearer ${session.value}` } : {});
