// Settings of clients: the address, and what a client of a given name needs.

import { html, useEffect, useState } from "../vendor/preact.js";
import { CopyButton } from "../parts/copy.js";
import { notify } from "../parts/notice.js";
import { address, apiAddress, sentence } from "../server/http.js";
import { models } from "../server/models.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { Code } from "../text/code.js";

/** @typedef {{client: string, files: {path: string, form: string, text: string}[], command: string, note: string, clients: string[]}} ClientSetup */

export function Connect() {
  const [client, setClient] = useState("claude");
  const [model, setModel] = useState("");
  const [setup, setSetup] = useState(/** @type {ClientSetup | null} */ (null));
  const named = model || (models.value[0]?.id ?? "");
  useEffect(() => {
    if (!named) return;
    const query = new URLSearchParams({ client, model: named, url: address("").href.replace(/\/$/, "") });
    sessionJson(`connect?${query}`).then(setSetup, (error) => notify(sentence(error), true));
  }, [client, named]);
  const option = (/** @type {string} */ name, /** @type {string} */ chosen) => html`<option value=${name} selected=${name === chosen}>${name}</option>`;
  return html`<section aria-labelledby="clients-title"><h2 id="clients-title">${t.connect}</h2><p class="faint">${t.connectText}</p>
    <div class="secret"><code>${apiAddress()}</code><${CopyButton} text=${apiAddress} /></div>
    <div class="filters connect"><label>${t.client}<select onChange=${(/** @type {any} */ event) => setClient(event.target.value)}>${(setup?.clients ?? [client]).map((name) => option(name, client))}</select></label>
      <label>${t.column.model}<select onChange=${(/** @type {any} */ event) => setModel(event.target.value)}>${models.value.map(({ id }) => option(id, named))}</select></label></div>
    ${setup ? html`<p class="faint note">${setup.note} ${setup.files.length ? t.connectHow(setup.client) : ""}</p>
      ${setup.files.map((file) => html`<p key=${file.path}><code>${file.path}</code></p><${Code} key=${file.text} text=${file.text} language=${file.form} />`)}
      ${setup.command ? html`<p class="faint">${t.thenStart}</p><${Code} text=${setup.command} language="bash" />` : null}` : null}
  </section>`;
}
