// Dialogs: modal, closed by Escape, a click beside them or their own buttons; focus returns to where it was.

import { html, signal, useEffect, useRef } from "../vendor/preact.js";
import { t } from "../strings.js";
import { Icon } from "./icons.js";

/** @typedef {{title: string, content: any, onClose?: () => void}} Shown */

/** @type {import("../vendor/preact.js").Signal<Shown | null>} */
const shown = signal(null);

/** Shows a dialog in place of the one before. @param {Shown} dialog */
export const showDialog = (dialog) => (shown.value = dialog);

export function closeDialog() {
  const onClose = shown.value?.onClose;
  shown.value = null;
  onClose?.();
}

/** Whether the user agreed. @param {{title: string, text: string, action: string}} question @returns {Promise<boolean>} */
export function confirmed({ title, text, action }) {
  return new Promise((resolve) => {
    let answer = false;
    const agree = () => {
      answer = true;
      closeDialog();
    };
    const content = html`<p>${text}</p>
      <div class="actions"><button type="button" onClick=${closeDialog}>${t.cancel}</button
      ><button type="button" class="danger" onClick=${agree}>${action}</button></div>`;
    showDialog({ title, content, onClose: () => resolve(answer) });
  });
}

/** The one dialog of the page. */
export function Dialog() {
  const element = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const now = shown.value;
  useEffect(() => {
    if (now !== null && !element.current?.open) element.current?.showModal();
  }, [now]);
  if (now === null) return null;
  const onClick = (/** @type {MouseEvent} */ event) => event.target === element.current && closeDialog();
  const onCancel = (/** @type {Event} */ event) => {
    event.preventDefault();
    closeDialog();
  };
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onClick=${onClick} onCancel=${onCancel}>
    <div class="dialog-body">
      <header><h2 id="dialog-title">${now.title}</h2>
        <button type="button" class="quiet" aria-label=${t.close} title=${t.close} onClick=${closeDialog}><${Icon} name="cross" /></button></header>
      ${now.content}
    </div>
  </dialog>`;
}
