// Markdown as virtual nodes: a component a block, drawn again only when its own source changes. Nothing becomes HTML text:
// a tag in an answer is text, and only the elements that this file names can appear.

import { Component, h, html } from "../vendor/preact.js";
import { Code } from "./code.js";
import { decodeEntities } from "./entities.js";
import { Formula } from "./formula.js";
import { GrowingText } from "./lexer.js";
import { safeAddress } from "./links.js";

/** @typedef {import("./lexer.js").Token} Token */
/** @typedef {any} Any */

/** @param {Token[] | undefined} tokens @returns {Any[]} */
const inline = (tokens) => (tokens ?? []).map(inlineNode);

/** @param {Any} token @returns {Any} */
function inlineNode(token) {
  switch (token.type) {
    case "text":
      return token.tokens ? inline(token.tokens) : decodeEntities(token.text);
    case "escape":
      return token.text;
    case "strong":
      return h("strong", null, inline(token.tokens));
    case "em":
      return h("em", null, inline(token.tokens));
    case "del":
      return h("del", null, inline(token.tokens));
    case "codespan":
      return h("code", { dir: "ltr" }, token.text);
    case "br":
      return h("br", null);
    case "link":
      return link(token, inline(token.tokens));
    case "image":
      // Never loaded: an address in an answer could carry what was said to another machine.
      return link(token, [h("span", { class: "image-mark" }, "▧ "), decodeEntities(token.text) || token.href]);
    case "formula":
      return h(Formula, { source: token.source, raw: token.raw, isBlock: token.isBlock });
    case "checkbox":
      return h("span", { class: "task-box" }, token.checked ? "☑ " : "☐ ");
    default:
      return token.raw;
  }
}

/** @param {Any} token @param {Any[]} children */
function link(token, children) {
  const href = safeAddress(decodeEntities(token.href));
  if (href === null) return h("span", { class: "dead-link" }, children, token.type === "link" && token.href ? ` (${token.href})` : null);
  const kind = token.type === "image" ? "image-link" : undefined;
  return h("a", { href, class: kind, title: token.title || href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** @param {Any} token @returns {Any} */
function blockNode(token) {
  switch (token.type) {
    case "heading":
      // The page's own headings are the levels above.
      return h(`h${Math.min(6, token.depth + 2)}`, { dir: "auto", class: `heading-${token.depth}` }, inline(token.tokens));
    case "paragraph":
      return h("p", { dir: "auto" }, inline(token.tokens));
    case "text":
      return token.tokens ? inline(token.tokens) : decodeEntities(token.text);
    case "code":
      return h(Code, { text: token.text, language: (token.lang ?? "").match(/^\S*/)?.[0] ?? "" });
    case "blockquote":
      return h("blockquote", { dir: "auto" }, token.tokens.map(blockNode));
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "hr":
      return h("hr", null);
    case "formula":
      return h(Formula, { source: token.source, raw: token.raw, isBlock: true });
    case "html":
      return h("p", { dir: "auto", class: "raw-html" }, token.raw.trimEnd());
    case "space":
    case "def":
      return null;
    default:
      return inlineNode(token);
  }
}

/** @param {Any} token */
function list(token) {
  const items = token.items.map((/** @type {Any} */ item) => {
    // The lexer puts a checkbox into the item's first line or before it, by version and looseness of the list.
    const hasBox = item.tokens.some((/** @type {Any} */ each) => each.type === "checkbox" || each.tokens?.[0]?.type === "checkbox");
    const box = item.task && !hasBox ? h("span", { class: "task-box" }, item.checked ? "☑ " : "☐ ") : null;
    return h("li", { dir: "auto", class: item.task ? "task" : undefined }, box, item.tokens.map(blockNode));
  });
  return token.ordered ? h("ol", { start: token.start === 1 ? undefined : token.start }, items) : h("ul", null, items);
}

/** @param {Any} token */
function table(token) {
  /** @param {Any} cell @param {string} element */
  const cells = (cell, element) => h(element, { dir: "auto", class: cell.align ? `align-${cell.align}` : undefined }, inline(cell.tokens));
  const head = h("thead", null, h("tr", null, token.header.map((/** @type {Any} */ cell) => cells(cell, "th"))));
  const rows = token.rows.map((/** @type {Any[]} */ row) => h("tr", null, row.map((cell) => cells(cell, "td"))));
  return h("div", { class: "table-scroll", tabIndex: 0, role: "group" }, h("table", null, head, h("tbody", null, rows)));
}

/** One block. Tokens that were not lexed again are the same objects. @extends {Component<{token: Token, isOpen: boolean}>} */
class Block extends Component {
  /** @param {{token: Token, isOpen: boolean}} next */
  shouldComponentUpdate(next) {
    return next.isOpen !== this.props.isOpen || (next.token !== this.props.token && next.token.raw !== this.props.token.raw);
  }

  render() {
    const { token, isOpen } = this.props;
    if (token.type !== "code") return blockNode(token);
    const { text, lang } = /** @type {Any} */ (token);
    return h(Code, { text, language: (lang ?? "").match(/^\S*/)?.[0] ?? "", isOpen });
  }
}

/** A text with its blocks; `isOpen` while more of it is written. @extends {Component<{text: string, isOpen?: boolean}>} */
export class Markdown extends Component {
  #text = new GrowingText();

  /** @param {{text: string, isOpen?: boolean}} next */
  shouldComponentUpdate(next) {
    return next.text !== this.props.text || next.isOpen !== this.props.isOpen;
  }

  render() {
    const { text, isOpen = false } = this.props;
    const tokens = isOpen ? this.#text.update(text) : this.#text.finish(text);
    const last = tokens.length - 1;
    return html`<div class="markdown">${tokens.map((token, at) =>
      token.type === "space" || token.type === "def" ? null : h(Block, { key: at, token, isOpen: isOpen && at === last }),
    )}</div>`;
  }
}
