// Messages of a conversation: text, reasoning, calls of tools, numbers, and what can be done with them.

import { Component, html, useEffect, useState } from "../vendor/preact.js";
import { CopyButton } from "../parts/copy.js";
import { Icon } from "../parts/icons.js";
import { readFile } from "../history/database.js";
import { children } from "../history/tree.js";
import { t } from "../strings.js";
import { count, duration, rate } from "../text/format.js";
import { Markdown } from "../text/markdown.js";
import * as conversations from "./conversations.js";
import { Progress } from "./progress.js";
import { Why } from "./why.js";

/**
 * @typedef {import("../history/database.js").Message} MessageRecord
 * @typedef {import("./answer.js").Answer} Answer
 */

/** Shorter phases are not shown. */
const SHOWN_MS = 10;

/** @param {{name: string, label: string, onClick: () => void, isOff?: boolean}} props */
const Action = ({ name, label, onClick, isOff }) =>
  html`<button type="button" class="quiet" aria-label=${label} title=${label} onClick=${onClick} disabled=${isOff}><${Icon} name=${name} /></button>`;

/** One message. It is drawn again only when its record, its answer or its place among its siblings changes.
 * @extends {Component<{message: MessageRecord, messages: Map<string, MessageRecord>, answer?: Answer, isBusy: boolean, isLast: boolean}, {isEdited: boolean}>} */
export class Message extends Component {
  state = { isEdited: false };

  /** @param {any} next @param {any} state */
  shouldComponentUpdate(next, state) {
    const now = this.props;
    return (
      next.message !== now.message || next.answer !== now.answer || next.isBusy !== now.isBusy || next.isLast !== now.isLast ||
      next.messages.size !== now.messages.size || state.isEdited !== this.state.isEdited
    );
  }

  render() {
    const { answer, messages, isBusy, isLast } = this.props;
    const message = answer?.message.value ?? this.props.message;
    const done = () => this.setState({ isEdited: false });
    const edit = () => this.setState({ isEdited: true });
    const isAssistant = message.role === "assistant";
    const name = isAssistant ? message.model || t.assistant : message.role === "tool" ? t.toolResult : t.you;
    return html`<article class=${`message ${message.role}`} aria-label=${name} data-id=${message.id}>
      <header><span class="author">${name}</span></header>
      ${this.state.isEdited
        ? html`<${Editor} message=${message} onDone=${done} />`
        : html`<${Content} message=${message} answer=${answer} isLast=${isLast} />`}
      ${this.state.isEdited || (answer && !answer.isOver) ? null : html`<footer>
        <${Siblings} message=${message} messages=${messages} isBusy=${isBusy} />
        ${isAssistant ? html`<${Action} name="again" label=${t.again} isOff=${isBusy} onClick=${() => conversations.askAgain(message)} />` : null}
        ${message.role === "tool" ? null : html`<${Action} name="edit" label=${t.edit} isOff=${isBusy} onClick=${edit} />`}
        <${CopyButton} text=${() => message.text} />
        ${isAssistant && isLast && message.finish !== "tool_calls" ? html`<${Action} name="onward" label=${t.goOn} isOff=${isBusy} onClick=${() => conversations.goOn(message)} />` : null}
        <${Action} name="trash" label=${t.deleteMessage} isOff=${isBusy} onClick=${() => conversations.removeMessage(message)} />
        <${Numbers} message=${message} /></footer>`}
    </article>`;
  }
}

/** @param {{message: MessageRecord, answer?: Answer, isLast: boolean}} props */
function Content({ message, answer, isLast }) {
  const isOpen = answer !== undefined && !answer.isOver;
  if (message.role === "user") return html`<${Files} ids=${message.files} /><div class="said" dir="auto">${message.text}</div>`;
  if (message.role === "tool") return html`<pre class="result" dir="ltr" tabindex="0">${message.text}</pre>`;
  const phase = answer?.phase.value;
  return html`
    ${message.reasoning ? html`<${Reasoning} message=${message} isOpen=${isOpen && phase === "thinking"} />` : null}
    ${message.text ? html`<${Markdown} text=${message.text} isOpen=${isOpen} />` : null}
    ${message.calls.map((call) => html`<${Call} key=${call.id} call=${call} message=${message} isOpen=${isOpen} isLast=${isLast} />`)}
    ${isOpen ? html`<${Progress} answer=${answer} />` : html`<${Ending} message=${message} isLast=${isLast} />`}`;
}

/** @param {{message: MessageRecord, isOpen: boolean}} props */
function Reasoning({ message, isOpen }) {
  const { reasoning_ms: ms, reasoning_tokens: tokens } = message.timings;
  const label = isOpen ? t.thinking : ms === undefined ? t.thought : t.thoughtFor(duration(ms / 1000), tokens ? t.tokens(count(tokens)) : "");
  return html`<details class="reasoning">
    <summary><${Icon} name="thought" /><span>${label}</span></summary>
    <${Markdown} text=${message.reasoning} isOpen=${isOpen} />
  </details>`;
}

/** JSON with its indents, where it is JSON. @param {string} text */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** @param {{call: import("../history/database.js").Call, message: MessageRecord, isOpen: boolean, isLast: boolean}} props */
function Call({ call, message, isOpen, isLast }) {
  const [text, setText] = useState("");
  const given = conversations.branch.value.find((each) => each.role === "tool" && each.call_id === call.id);
  const wantsResult = !isOpen && !given && message.finish === "tool_calls" && (isLast || conversations.branch.value.at(-1)?.role === "tool");
  const onSubmit = (/** @type {Event} */ event) => {
    event.preventDefault();
    conversations.giveResult(message, call.id, text);
  };
  return html`<details class="call" open=${wantsResult || undefined}>
    <summary><${Icon} name="tool" /><code>${call.name}</code><span class="call-arguments">${call.arguments}</span></summary>
    <pre dir="ltr" tabindex="0">${isOpen ? call.arguments : pretty(call.arguments)}</pre>
    ${wantsResult ? html`<form onSubmit=${onSubmit}><label>${t.giveResult}<textarea rows="2" value=${text}
      onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea></label><button type="submit">${t.sendResult}</button></form>` : null}
  </details>`;
}

/** Why an answer ended where it did, when that is not its end. @param {{message: MessageRecord, isLast: boolean}} props */
function Ending({ message, isLast }) {
  const goOn = () => conversations.goOn(message);
  if (message.state === "failed") {
    return html`<div class="ending bad" role="alert"><${Icon} name="warning" /><span>${message.error}</span>
      ${isLast ? html`<button type="button" onClick=${goOn}>${message.text ? t.goOn : t.retry}</button>` : null}</div>`;
  }
  if (message.state === "stopped") return html`<div class="ending">${t.stopped}</div>`;
  if (message.finish === "length") {
    return html`<div class="ending"><span>${t.cutByLength}</span>${isLast ? html`<button type="button" onClick=${goOn}>${t.goOn}</button>` : null}</div>`;
  }
  if (!message.text && !message.calls.length && message.state === "whole") return html`<div class="ending">${t.emptyAnswer}</div>`;
  return null;
}

/** @param {{message: MessageRecord}} props */
function Numbers({ message }) {
  const { tokens, rate: perSecond, ttft_ms: ttft, prompt, cached, request, waits } = message.timings;
  if (tokens === undefined) return null;
  const parts = [t.tokens(count(tokens)), perSecond === undefined ? "" : t.perSecond(rate(perSecond)), ttft === undefined ? "" : t.firstAfter(duration(ttft / 1000))];
  const spent = Object.entries(waits ?? {}).filter(([, ms]) => ms >= SHOWN_MS);
  const title = [
    t.promptTokens(count(prompt ?? 0), count(cached ?? 0)),
    ...spent.map(([name, ms]) => `${t.phases[name]}: ${duration(ms / 1000)}`),
  ].join("\n");
  return html`<span class="numbers" title=${title}>${parts.filter(Boolean).join(" · ")}</span>
    ${request ? html`<${Why} request=${request} />` : null}`;
}

/** @param {{message: MessageRecord, messages: Map<string, MessageRecord>, isBusy: boolean}} props */
function Siblings({ message, messages, isBusy }) {
  const all = children(messages.values(), message.parent);
  if (all.length < 2) return null;
  const at = all.findIndex((each) => each.id === message.id);
  const show = (/** @type {number} */ to) => conversations.showBranch(/** @type {MessageRecord} */ (all[to]).id);
  return html`<span class="siblings" role="group" aria-label=${t.branches}>
    <${Action} name="left" label=${t.branchBefore} isOff=${isBusy || at === 0} onClick=${() => show(at - 1)} />
    <span>${at + 1}/${all.length}</span>
    <${Action} name="right" label=${t.branchAfter} isOff=${isBusy || at === all.length - 1} onClick=${() => show(at + 1)} /></span>`;
}

/** @param {{message: MessageRecord, onDone: () => void}} props */
function Editor({ message, onDone }) {
  const [text, setText] = useState(message.text);
  const onSubmit = (/** @type {Event} */ event) => {
    event.preventDefault();
    onDone();
    if (text !== message.text || message.role === "user") conversations.edit(message, text);
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") onDone();
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) onSubmit(event);
  };
  return html`<form class="editor" onSubmit=${onSubmit} onKeyDown=${onKeyDown}>
    <textarea value=${text} dir="auto" aria-label=${t.edit} rows=${Math.min(12, text.split("\n").length + 1)} ref=${focusOnce}
      onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea>
    <div class="actions"><button type="button" onClick=${onDone}>${t.cancel}</button>
      <button type="submit" class="primary">${message.role === "user" ? t.send : t.save}</button></div>
  </form>`;
}

/** @param {HTMLElement | null} element */
function focusOnce(element) {
  if (element && !element.dataset.focused) {
    element.dataset.focused = "yes";
    element.focus();
  }
}

/** @param {{ids: string[]}} props */
function Files({ ids }) {
  if (!ids.length) return null;
  return html`<div class="files">${ids.map((id) => html`<${StoredFile} key=${id} id=${id} />`)}</div>`;
}

/** @param {{id: string}} props */
function StoredFile({ id }) {
  const [file, setFile] = useState(/** @type {{name: string, url: string} | null} */ (null));
  useEffect(() => {
    let url = "";
    let isOver = false;
    readFile(id).then((stored) => {
      if (!stored || isOver) return;
      if (stored.type.startsWith("image/")) url = URL.createObjectURL(new Blob([stored.bytes], { type: stored.type }));
      setFile({ name: stored.name, url });
    }, () => {});
    return () => {
      isOver = true;
      if (url) URL.revokeObjectURL(url);
    };
  }, [id]);
  if (file === null) return null;
  if (file.url) return html`<img src=${file.url} alt=${file.name} />`;
  return html`<span class="chip"><${Icon} name="file" />${file.name}</span>`;
}
