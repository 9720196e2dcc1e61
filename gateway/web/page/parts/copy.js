// Button that copies a text and says whether it could.

import { html, useEffect, useState } from "../vendor/preact.js";
import { t } from "../strings.js";
import { copy } from "../text/clipboard.js";
import { Icon } from "./icons.js";

/** @param {{text: () => string, label?: string}} props */
export function CopyButton({ text, label = t.copy }) {
  const [state, setState] = useState("");
  useEffect(() => {
    if (!state) return undefined;
    const timer = setTimeout(() => setState(""), 1500);
    return () => clearTimeout(timer);
  }, [state]);
  const onClick = async () => setState((await copy(text())) ? "done" : "failed");
  const said = state === "done" ? t.copied : state === "failed" ? t.copyFailed : label;
  return html`<button type="button" class="quiet copy" onClick=${onClick} aria-label=${said} title=${said}>
    <${Icon} name=${state === "done" ? "check" : state === "failed" ? "cross" : "copy"} />
    <span role="status" class="off-screen">${state ? said : ""}</span>
  </button>`;
}
