// Drafts: what was typed and not sent, by conversation, in this tab.

const PREFIX = "mlxd.draft.";

/** @param {string} id */
export function readDraft(id) {
  try {
    return sessionStorage.getItem(PREFIX + id) ?? "";
  } catch {
    return "";
  }
}

/** @param {string} id @param {string} text */
export function keepDraft(id, text) {
  try {
    if (text) sessionStorage.setItem(PREFIX + id, text);
    else sessionStorage.removeItem(PREFIX + id);
  } catch {
    // It stays in the box, which is enough until a reload.
  }
}
