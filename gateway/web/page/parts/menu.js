// Menus: a button and a list of choices, by mouse, touch or arrow keys.

import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";

/** @typedef {{id: string, label: any, hint?: any, isChosen?: boolean, action: () => void}} Choice */

/** `hasText`: the button says by itself what it is. @param {{label: string, button: any, choices: Choice[], class?: string, hasText?: boolean}} props */
export function Menu({ label, button, choices, class: kind = "", hasText = false }) {
  const [isOpen, setOpen] = useState(false);
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const items = root.current?.querySelectorAll("[role^=menuitem]");
    const chosen = [...(items ?? [])].find((item) => item.getAttribute("aria-checked") === "true") ?? items?.[0];
    /** @type {HTMLElement | undefined} */ (chosen)?.focus();
    const outside = (/** @type {Event} */ event) => !root.current?.contains(/** @type {Node} */ (event.target)) && setOpen(false);
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, [isOpen]);
  const close = () => {
    setOpen(false);
    root.current?.querySelector("button")?.focus();
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (!isOpen) return;
    const items = /** @type {HTMLElement[]} */ ([...(root.current?.querySelectorAll("[role^=menuitem]") ?? [])]);
    const at = items.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (event.key === "Escape" || event.key === "Tab") close();
    if (to !== undefined) items[(to + items.length) % items.length]?.focus();
    if (to !== undefined || event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
    }
  };
  const item = (/** @type {Choice} */ choice) => html`<button
    type="button" key=${choice.id} role=${choice.isChosen === undefined ? "menuitem" : "menuitemradio"} tabindex="-1"
    aria-checked=${choice.isChosen === undefined ? undefined : String(choice.isChosen)}
    onClick=${() => {
      close();
      choice.action();
    }}><span class="menu-label">${choice.label}</span>${choice.hint ? html`<span class="menu-hint">${choice.hint}</span>` : null}</button>`;
  return html`<div class=${`menu ${kind}`} ref=${root} onKeyDown=${onKeyDown}>
    <button type="button" class="menu-button quiet" aria-haspopup="menu" aria-expanded=${String(isOpen)} aria-label=${hasText ? undefined : label} title=${label}
      onClick=${() => setOpen(!isOpen)}>${button}</button>
    ${isOpen ? html`<div class="menu-list" role="menu" aria-label=${label}>${choices.map(item)}</div>` : null}
  </div>`;
}
