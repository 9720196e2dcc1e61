// Composer: the box for the next message, its attachments, Send and Stop.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { go } from "../route.js";
import { modelNamed, takesImages } from "../server/models.js";
import { t } from "../strings.js";
import { count } from "../text/format.js";
import { attach, attachments, chooseAttachments, detach } from "./attachments.js";
import * as conversations from "./conversations.js";
import { keepDraft, readDraft } from "./drafts.js";

/** @param {{id: string, model: string, isBusy: boolean}} props */
export function Composer({ id, model, isBusy }) {
  const [text, setText] = useState(() => readDraft(id));
  const box = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const seesImages = takesImages(model);
  useEffect(() => {
    setText(readDraft(id));
    // On a phone the keyboard would cover what one came to read.
    if (matchMedia("(hover: hover)").matches) box.current?.focus();
  }, [id]);
  const canSend = !isBusy && model !== "" && (text.trim() !== "" || attachments.value.length > 0);
  const send = async () => {
    if (!canSend) return;
    const files = attachments.value;
    attachments.value = [];
    setText("");
    keepDraft(id, "");
    const kept = await conversations.send(text.trim(), files);
    if (!id) go("chat", kept, true);
  };
  const onInput = (/** @type {any} */ event) => {
    setText(event.target.value);
    keepDraft(id, event.target.value);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    // An input method takes Enter to choose a word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || !matchMedia("(hover: hover)").matches) return;
    event.preventDefault();
    send();
  };
  const onPaste = (/** @type {ClipboardEvent} */ event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    attach(files, seesImages);
  };
  const onSubmit = (/** @type {Event} */ event) => {
    event.preventDefault();
    send();
  };
  return html`<form class="composer" onSubmit=${onSubmit} onDragOver=${(/** @type {Event} */ event) => event.preventDefault()} onDrop=${(/** @type {DragEvent} */ event) => {
    event.preventDefault();
    attach(event.dataTransfer?.files ?? [], seesImages);
  }}>
    <${Attached} />
    <textarea ref=${box} id="message-box" rows="1" dir="auto" value=${text} placeholder=${t.messagePlaceholder} aria-label=${t.messagePlaceholder}
      onInput=${onInput} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
    <div class="composer-bar">
      <button type="button" class="quiet" aria-label=${seesImages ? t.attachAny : t.attachText} title=${seesImages ? t.attachAny : t.attachText}
        onClick=${() => chooseAttachments(seesImages)}><${Icon} name="attach" /></button>
      <${Context} model=${model} />
      <span class="spring"></span>
      <kbd class="faint">${isBusy ? t.stopKey : t.sendKey}</kbd>
      ${isBusy
        ? html`<button type="button" class="round stop" aria-label=${t.stop} title=${t.stop} onClick=${conversations.stop}><${Icon} name="stop" /></button>`
        : html`<button type="submit" class="round primary" aria-label=${t.send} title=${t.send} disabled=${!canSend}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}

/** Tokens of the conversation beside the model's context. @param {{model: string}} props */
function Context({ model }) {
  const context = modelNamed(model)?.context_length;
  const last = conversations.branch.value.findLast((message) => message.timings.prompt !== undefined)?.timings;
  if (!context || !last) return null;
  const used = (last.prompt ?? 0) + (last.tokens ?? 0);
  return html`<span class=${used > context * 0.9 ? "context full" : "context"} title=${t.contextUsed}>${count(used)} / ${count(context)}</span>`;
}

/** @param {{file: import("./attachments.js").Attachment}} props */
function Thumbnail({ file }) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([file.bytes], { type: file.type }));
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [file]);
  return url ? html`<img class="thumbnail" src=${url} alt="" />` : html`<${Icon} name="image" />`;
}

function Attached() {
  const files = attachments.value;
  if (!files.length) return null;
  return html`<div class="files">${files.map((file) => html`<span class="chip" key=${file}>
    ${file.type.startsWith("image/") ? html`<${Thumbnail} file=${file} />` : html`<${Icon} name="file" />`}${file.name}
    <button type="button" class="quiet" aria-label=${t.detach(file.name)} onClick=${() => detach(file)}><${Icon} name="cross" /></button></span>`)}</div>`;
}
