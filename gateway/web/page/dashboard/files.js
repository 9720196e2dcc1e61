// Models on this disk: configured ones and those that were only downloaded, with whether each fits.

import { html, useEffect, useState } from "../vendor/preact.js";
import { liveModels, pulls } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, count } from "../text/format.js";

/** @typedef {{name: string, path: string, state: string, size_bytes: number, memory_bytes: number, context: number, fits: boolean | null, verdict: string}} ModelFiles */

export function Files() {
  const [files, setFiles] = useState(/** @type {ModelFiles[] | null} */ (null));
  const [failure, setFailure] = useState("");
  const finished = pulls.value.filter((pull) => pull.state === "done").length;
  useEffect(() => {
    sessionJson("models").then((answer) => setFiles(answer.models), (error) => setFailure(sentence(error)));
  }, [finished, liveModels.value.length]);
  if (files === null) return failure ? html`<p class="bad">${failure}</p>` : null;
  return html`<section aria-labelledby="files-title"><h2 id="files-title">${t.onDisk}</h2>
    <div class="table-scroll" tabindex="0" role="group" aria-labelledby="files-title"><table><thead><tr><th scope="col">${t.column.model}</th><th scope="col" class="number">${t.column.size}</th>
      <th scope="col" class="number">${t.column.memory}</th><th scope="col" class="number">${t.column.context}</th><th scope="col">${t.column.fits}</th></tr></thead>
      <tbody>${files.map((file) => html`<tr key=${file.name + file.path}><th scope="row">${file.name}${file.state === "not configured" ? html`<span class="faint"> ${t.notConfigured}</span>` : null}</th>
        <td class="number">${file.size_bytes ? bytes(file.size_bytes) : "–"}</td><td class="number">${file.memory_bytes ? bytes(file.memory_bytes) : "–"}</td>
        <td class="number">${file.context ? count(file.context) : "–"}</td><td class=${file.fits === false ? "warn" : ""}>${file.verdict}</td></tr>`)}</tbody></table></div>
  </section>`;
}
