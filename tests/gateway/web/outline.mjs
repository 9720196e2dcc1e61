// Outline of markdown as the page would draw it: reads {documents: [...], step} from its input, writes for each the
// outline, and the outline of the same text grown by `step` characters at a time, with the first prefix that differs
// from the same prefix lexed as a whole.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const page = pathToFileURL(`${process.argv[2]}/`);
const { Markdown } = await import(new URL("text/markdown.js", page));
const { GrowingText, lex } = await import(new URL("text/lexer.js", page));
const { documents, step } = JSON.parse(readFileSync(0, "utf8"));

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("\u00a0", "&nbsp;");
const SILENT = new Set(["key", "children", "dir", "tabIndex", "tabindex", "rel", "target", "title"]);

function outline(node) {
  if (node === null || node === undefined || node === false) return "";
  if (Array.isArray(node)) return node.map(outline).join("");
  if (typeof node !== "object") return escaped(String(node));
  const { type, props } = node;
  if (typeof type === "function") {
    // A button, which needs a page around it.
    if (!type.prototype?.render) return "";
    const component = new type(props);
    component.props = props;
    component.componentDidMount?.();
    return outline(component.render());
  }
  const attributes = Object.entries(props).filter(([name, value]) => !SILENT.has(name) && value !== undefined && typeof value !== "function");
  return `<${type}${attributes.map(([name, value]) => ` ${name}="${value}"`).join("")}>${outline(props.children)}</${type}>`;
}

const drawn = (text, isOpen = false) => outline({ type: Markdown, props: { text, isOpen } });

function grown(text) {
  const growing = new GrowingText();
  const has = (tokens) => tokens.some((token) => token.type === "def");
  let differs = null;
  for (let end = step; end < text.length; end += step) {
    const prefix = text.slice(0, end);
    const tokens = growing.update(prefix);
    const whole = lex(prefix);
    const kinds = (each) => JSON.stringify(each.map(({ type, raw }) => [type, raw]));
    if (differs === null && !has(whole) && kinds(tokens) !== kinds(whole)) differs = prefix;
  }
  return { tokens: JSON.stringify(growing.finish(text)) === JSON.stringify(lex(text)), differs };
}

// The first look loads the libraries for formulas and code, as in the page.
for (const text of documents) drawn(text);
await Promise.all([import(new URL("vendor/katex.js", page)), import(new URL("vendor/lowlight.js", page))]);
await new Promise((resolve) => setTimeout(resolve));
console.log(JSON.stringify(documents.map((text) => ({ outline: drawn(text), ...grown(text) }))));
