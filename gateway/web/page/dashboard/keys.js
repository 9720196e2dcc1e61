// API keys: made, rotated and revoked; a secret is shown once.

import { html, useEffect, useState } from "../vendor/preact.js";
import { CopyButton } from "../parts/copy.js";
import { closeDialog, confirmed, showDialog } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { notify } from "../parts/notice.js";
import { sentence } from "../server/http.js";
import { models } from "../server/models.js";
import { order, sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { count, day } from "../text/format.js";

/**
 * @typedef {{name: string, prefix: string, role: string, is_disabled: boolean, models: string[], rpm: number, tpm: number, concurrency: number,
 *   expires: number | null, created: number, last_used: number, requests: number, prompt_tokens: number, completion_tokens: number, running: number,
 *   rejections: Record<string, number>}} Key
 */

const DAY_S = 86_400;
const REFRESH_MS = 5_000;

export function Keys() {
  const [keys, setKeys] = useState(/** @type {Key[] | null} */ (null));
  const [isOpen, setOpen] = useState(false);
  const read = () =>
    sessionJson("keys").then(
      (answer) => {
        setKeys(answer.keys);
        setOpen(answer.is_open);
      },
      (error) => notify(sentence(error), true),
    );
  useEffect(() => {
    read();
    const timer = setInterval(() => document.visibilityState === "visible" && read(), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const change = async (/** @type {string} */ verb, /** @type {Key} */ key) => {
    const { name } = key;
    if (!(await confirmed({ title: t.keyQuestion(verb, name), text: t.keyText(verb), action: t.keyVerb(verb) }))) return;
    try {
      const answer = await order(`keys/${verb}`, { name });
      if (verb === "rotate") showSecret(answer);
    } catch (error) {
      notify(sentence(error), true);
    }
    await read();
  };
  const create = () => showDialog({ title: t.newKeyTitle, content: html`<${KeyOrder} onDone=${read} />` });
  const c = t.column;
  return html`<section aria-labelledby="keys-title"><h2 id="keys-title">${t.apiKeys}<button type="button" class="primary" onClick=${create}><${Icon} name="plus" />${t.newKeyTitle}</button></h2>
    ${isOpen ? html`<p class="empty">${t.keysOpen}</p>` : null}
    ${keys && !keys.length && !isOpen ? html`<p class="empty">${t.keysNone}</p>` : null}
    ${keys?.length
      ? html`<div class="table-scroll" tabindex="0" role="group" aria-labelledby="keys-title"><table><thead><tr><th scope="col">${c.name}</th><th scope="col">${c.key}</th><th scope="col">${c.models}</th><th scope="col">${c.limits}</th>
          <th scope="col">${c.expires}</th><th scope="col">${c.used}</th><th scope="col" class="number">${c.tokens}</th><th scope="col" class="number">${c.rejected}</th><th><span class="off-screen">${c.actions}</span></th></tr></thead>
          <tbody>${keys.map((key) => html`<${Row} key=${key.name} apiKey=${key} onChange=${change} />`)}</tbody></table></div>`
      : null}</section>`;
}

/** @param {{apiKey: Key, onChange: (verb: string, key: Key) => void}} props */
function Row({ apiKey: key, onChange }) {
  const rejected = Object.values(key.rejections).reduce((sum, number) => sum + number, 0);
  const isExpired = key.expires !== null && key.expires * 1000 < Date.now();
  return html`<tr><th scope="row">${key.name}${key.role === "user" ? null : html` <span class="chip small">${t.role(key.role)}</span>`}</th><td><code>${key.prefix}…</code></td>
    <td>${key.models.length ? key.models.join(", ") : t.allModels}</td><td>${limits(key)}</td>
    <td class=${isExpired ? "warn" : ""}>${key.is_disabled ? t.disabled : key.expires === null ? t.never : day(key.expires)}</td><td>${key.last_used ? day(key.last_used) : t.notUsed}</td>
    <td class="number">${count(key.prompt_tokens + key.completion_tokens)}</td><td class="number">${rejected ? html`<span title=${JSON.stringify(key.rejections)}>${count(rejected)}</span>` : "0"}</td>
    <td class="verbs">${key.role === "admin" ? html`<span class="faint">${t.adminKey}</span>` : html`<button type="button" onClick=${() => onChange("rotate", key)}>${t.keyVerb("rotate")}</button>
      <button type="button" onClick=${() => onChange("revoke", key)}>${t.keyVerb("revoke")}</button>`}</td></tr>`;
}

/** @param {Key} key */
function limits(key) {
  const parts = [key.rpm ? t.rpm(count(key.rpm)) : "", key.tpm ? t.tpm(count(key.tpm)) : "", key.concurrency ? t.atOnce(count(key.concurrency)) : ""];
  return parts.filter(Boolean).join(", ") || t.none;
}

/** @param {{secret: string, key: Key}} answer */
function showSecret({ secret, key }) {
  const content = html`<p>${t.secretText}</p><div class="secret"><code>${secret}</code><${CopyButton} text=${() => secret} /></div>
    <div class="actions"><button type="button" class="primary" onClick=${closeDialog}>${t.close}</button></div>`;
  showDialog({ title: t.secretTitle(key.name), content });
}

/** @param {HTMLElement | null} element */
const focusOnce = (element) => element?.focus();

/** @param {{onDone: () => Promise<unknown>}} props */
function KeyOrder({ onDone }) {
  const [failure, setFailure] = useState("");
  const onSubmit = async (/** @type {any} */ event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const number = (/** @type {string} */ name) => Number(form.get(name)) || 0;
    const days = number("days");
    try {
      const answer = await order("keys/create", {
        name: String(form.get("name")).trim(),
        role: form.get("role"),
        models: form.getAll("models"),
        rpm: number("rpm"),
        tpm: number("tpm"),
        concurrency: number("concurrency"),
        expires: days ? Date.now() / 1000 + days * DAY_S : null,
      });
      await onDone();
      showSecret(answer);
    } catch (error) {
      setFailure(sentence(error));
    }
  };
  const numbers = /** @type {const} */ (["rpm", "tpm", "concurrency", "days"]);
  const served = models.value.filter((model) => !model.parent);
  return html`<form class="key-order" onSubmit=${onSubmit}>
    <label>${t.column.name}<input name="name" required maxlength="64" autocomplete="off" ref=${focusOnce} /></label>
    <label>${t.roleLabel}<select name="role"><option value="user">${t.role("user")}</option><option value="metrics">${t.role("metrics")}</option></select></label>
    <fieldset><legend>${t.keyModels}</legend>${served.map((model) => html`<label class="check" key=${model.id}><input type="checkbox" name="models" value=${model.id} />${model.id}</label>`)}</fieldset>
    <div class="fields">${numbers.map((name) => html`<label key=${name}>${t.keyField(name)}<input type="number" name=${name} min="1" step="1" placeholder=${t.none} /></label>`)}</div>
    ${failure ? html`<p class="bad" role="alert">${failure}</p>` : null}
    <div class="actions"><button type="button" onClick=${closeDialog}>${t.cancel}</button><button type="submit" class="primary">${t.create}</button></div></form>`;
}
