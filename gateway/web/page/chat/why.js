// Why an answer took its time: the daemon's explanation of its request, for a session.

import { html, useState } from "../vendor/preact.js";
import { isAdmin } from "../server/credentials.js";
import { sentence } from "../server/http.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";

/** @param {{request: string}} props the id of a request that has ended */
export function Why({ request }) {
  const [causes, setCauses] = useState(/** @type {string[] | null} */ (null));
  if (!isAdmin.value) return null;
  const explain = (/** @type {any} */ event) => {
    if (!event.target.open || causes !== null) return;
    sessionJson(`requests/${encodeURIComponent(request)}/why`).then(
      (found) => setCauses(found.causes.map((/** @type {{text: string}} */ cause) => cause.text)),
      (error) => setCauses([sentence(error)]),
    );
  };
  return html`<details class="why" onToggle=${explain}>
    <summary>${t.why}</summary>
    ${causes === null ? null : html`<ul>${causes.map((text) => html`<li key=${text}>${text}</li>`)}</ul>`}
  </details>`;
}
