// Notices: short sentences about what was done, which go after a while.

import { html, signal } from "../vendor/preact.js";
import { t } from "../strings.js";
import { Icon } from "./icons.js";

const SHOWN_MS = 6_000;
let next = 0;

/** @type {import("../vendor/preact.js").Signal<{id: number, text: string, isBad: boolean}[]>} */
const notices = signal([]);

/** @param {string} text @param {boolean} [isBad] */
export function notify(text, isBad = false) {
  const id = (next += 1);
  notices.value = [...notices.value.slice(-3), { id, text, isBad }];
  setTimeout(() => dismiss(id), isBad ? SHOWN_MS * 2 : SHOWN_MS);
}

/** @param {number} id */
const dismiss = (id) => (notices.value = notices.value.filter((notice) => notice.id !== id));

export function Notices() {
  return html`<div class="notices" aria-live="polite">${notices.value.map(
    ({ id, text, isBad }) => html`<div key=${id} class=${isBad ? "notice bad" : "notice"}><span>${text}</span>
      <button type="button" class="quiet" aria-label=${t.close} onClick=${() => dismiss(id)}><${Icon} name="cross" /></button></div>`,
  )}</div>`;
}
