// Clipboard, also where the page came by plain HTTP from another machine and browsers hide their own.

/** Whether the text was copied. @param {string} text @returns {Promise<boolean>} */
export async function copy(text) {
  if (window.isSecureContext && navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // No permission, or no focus: the way below may still work.
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "off-screen";
  area.setAttribute("aria-hidden", "true");
  // Inside a dialog: one that is modal makes everything outside it inert.
  const active = document.activeElement;
  (active?.closest("dialog") ?? document.body).append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } finally {
    area.remove();
    if (active instanceof HTMLElement) active.focus({ preventScroll: true });
  }
}
