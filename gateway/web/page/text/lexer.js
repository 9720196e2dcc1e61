// Lexer of markdown with formulas, and the incremental form of it for an answer that grows.

import { Lexer, Marked } from "../vendor/marked.js";

/** @typedef {import("../vendor/marked.js").Token} Token */
/** @typedef {{ type: "formula", raw: string, source: string, isBlock: boolean }} Formula */

// A `$` opens a formula where no space follows, and closes it where no space precedes and no digit follows: "$5 and $6"
// is money. A backtick ends the search, so that code keeps its text.
const DOLLARS = /^\$(?![\s$])((?:\\[^\n]|[^\\$\n`])+?)(?<!\s)\$(?!\d)/;
const DOUBLE = /^\$\$((?:\\[^]|[^\\$]|\$(?!\$))+?)\$\$/;
const PARENTHESES = /^\\\(((?:\\(?!\))[^]|[^\\\n]|\n(?!\s*\n))+?)\\\)/;
const BRACKETS = /^\\\[((?:\\(?!\])[^]|[^\\])+?)\\\]/;
// Alone on its lines; a single `$` must never start a block, which would cut paragraphs in two.
const BLOCK = /^ {0,3}(?:\$\$((?:\\[^]|[^\\$]|\$(?!\$))+?)\$\$|\\\[((?:\\(?!\])[^]|[^\\])+?)\\\])[ \t]*(?:\n|$)/;
const BLOCK_START = /(?:^|\n) {0,3}(?:\$\$|\\\[)/;
const INLINE_START = /\$|\\\(|\\\[/;

/** @param {string} raw @param {string} source @param {boolean} isBlock @returns {Formula} */
const formula = (raw, source, isBlock) => ({ type: "formula", raw, source: source.trim(), isBlock });

const marked = new Marked({ gfm: true });
marked.use({
  extensions: [
    {
      name: "formula",
      level: "block",
      start: (text) => {
        const at = text.search(BLOCK_START);
        return at < 0 ? undefined : at;
      },
      tokenizer: (text) => {
        const match = BLOCK.exec(text);
        return match ? formula(match[0], match[1] ?? match[2] ?? "", true) : undefined;
      },
    },
    {
      name: "formula",
      level: "inline",
      start: (text) => {
        const at = text.search(INLINE_START);
        return at < 0 ? undefined : at;
      },
      tokenizer: (text) => {
        for (const [pattern, isBlock] of /** @type {const} */ ([[DOUBLE, true], [BRACKETS, true], [DOLLARS, false], [PARENTHESES, false]])) {
          const match = pattern.exec(text);
          if (match && match[1]?.trim()) return formula(match[0], match[1], isBlock);
        }
        return undefined;
      },
    },
  ],
});

/** Tokens of a whole text. @param {string} source @returns {Token[]} */
export function lex(source) {
  return new Lexer({ ...marked.defaults }).lex(source);
}

/** Whether tokens define links, which earlier text may use. @param {Token[]} tokens */
const hasDefinitions = (tokens) => tokens.some((token) => token.type === "def");

/**
 * Tokens of a text that grows: only its end is lexed again, and tokens before that stay the same objects, by which a
 * view knows that they need no work.
 */
export class GrowingText {
  constructor() {
    /** @type {Token[]} */
    this.tokens = [];
    this.source = "";
  }

  /** Tokens of `text`, which usually begins with the text of the call before. @param {string} text */
  update(text) {
    const source = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (source === this.source) return this.tokens;
    const kept = source.startsWith(this.source) ? this.#settled() : [];
    const from = kept.reduce((sum, token) => sum + token.raw.length, 0);
    const tail = lex(source.slice(from));
    const length = tail.reduce((sum, token) => sum + token.raw.length, from);
    this.source = source;
    // Where the tokens do not add up to the text, the kept part cannot be trusted either.
    this.tokens = length === source.length ? [...kept, ...tail] : lex(source);
    return this.tokens;
  }

  /** Tokens of the finished text: links may be defined at its end. @param {string} text */
  finish(text) {
    this.update(text);
    if (!hasDefinitions(this.tokens)) return this.tokens;
    this.tokens = lex(this.source);
    return this.tokens;
  }

  /** All tokens before the last two blocks: more text can still change those. */
  #settled() {
    let blocks = 0;
    let at = this.tokens.length;
    while (at > 0 && blocks < 2) {
      at -= 1;
      if (this.tokens[at]?.type !== "space") blocks += 1;
    }
    return this.tokens.slice(0, at);
  }
}
