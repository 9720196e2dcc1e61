// Vendored libraries of the page: bundles the packages that package-lock.json pins into gateway/web/page/vendor, with
// their licences and a manifest of sizes and SHA-256 digests, which tests/web/test_vendored.py compares with the files.
// Usage, in deploy/web: npm ci && npm run vendor

import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(here, "../../gateway/web/page/vendor");

/** Languages whose grammars are in lowlight.js: few enough for 30 kB, and those that models write most. */
const LANGUAGES = [
  "bash", "cpp", "css", "diff", "go", "java", "javascript", "json",
  "markdown", "python", "rust", "sql", "swift", "typescript", "xml", "yaml",
];

/** Source of each bundle. `types` is the text of its declarations, where the package's own serve tsc as they are. */
const BUNDLES = {
  "preact.js": {
    packages: ["preact", "htm", "@preact/signals", "@preact/signals-core"],
    source: `
      import { h } from "preact";
      import htm from "htm";
      export { h, render, Component, Fragment, createRef } from "preact";
      export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
      export { signal, computed, effect, batch, untracked } from "@preact/signals";
      export const html = htm.bind(h);`,
    types: `
      import type { VNode } from "preact";
      export { h, render, Component, Fragment, createRef } from "preact";
      export type { VNode, ComponentChildren, ComponentChild } from "preact";
      export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
      export { signal, computed, effect, batch, untracked } from "@preact/signals";
      export type { Signal, ReadonlySignal } from "@preact/signals";
      export declare function html(strings: TemplateStringsArray, ...values: any[]): VNode<any>;`,
  },
  "marked.js": {
    packages: ["marked"],
    source: `export { Marked, Lexer } from "marked";`,
    types: `export { Marked, Lexer } from "marked";\nexport type { Token, Tokens, TokenizerExtension } from "marked";`,
  },
  "idb.js": {
    packages: ["idb"],
    source: `export { openDB } from "idb";`,
    types: `export { openDB } from "idb";\nexport type { IDBPDatabase, DBSchema } from "idb";`,
  },
  "eventsource-parser.js": {
    packages: ["eventsource-parser"],
    source: `export { createParser } from "eventsource-parser";`,
    types: `export { createParser } from "eventsource-parser";`,
  },
  "lowlight.js": {
    packages: ["lowlight", "highlight.js", "devlop"],
    source: `
      import { createLowlight } from "lowlight";
      ${LANGUAGES.map((name) => `import ${name} from "highlight.js/lib/languages/${name}";`).join("\n")}
      export const lowlight = createLowlight({ ${LANGUAGES.join(", ")} });
      lowlight.registerAlias({ bash: ["sh", "shell", "zsh", "console"], xml: ["html", "svg"], cpp: ["c"], typescript: ["tsx"] });`,
    types: `import { createLowlight } from "lowlight";\nexport declare const lowlight: ReturnType<typeof createLowlight>;`,
  },
  "katex.js": {
    packages: ["katex"],
    // The tree, not the HTML text: the page makes elements of it itself.
    source: `import katex from "katex";\nexport const tree = katex.__renderToDomTree;`,
    types: `
      import type { KatexOptions } from "katex";
      export interface MathTree { type?: string; text?: string; attributes?: Record<string, string>; children?: MathTree[]; classes?: string[]; }
      export declare function tree(source: string, options: KatexOptions): MathTree;`,
  },
  "uplot.js": {
    packages: ["uplot"],
    source: `export { default } from "uplot";`,
    types: `export { default } from "uplot";`,
  },
};

/** Files taken as they are. */
const COPIES = { "uplot.css": { packages: ["uplot"], path: "uplot/dist/uPlot.min.css" } };

/** @param {string} name */
async function about(name) {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const file = (await readdir(folder)).find((entry) => /^licen[sc]e/i.test(entry));
  return { name, version, license, text: file ? await readFile(join(folder, file), "utf8") : "" };
}

const digest = (/** @type {Uint8Array} */ bytes) => createHash("sha256").update(bytes).digest("hex");

async function main() {
  await rm(out, { recursive: true, force: true });
  await mkdir(join(out, "licences"), { recursive: true });
  /** @type {Record<string, { sha256: string, bytes: number, packages: string[] }>} */
  const files = {};
  const versions = new Map();
  const note = async (/** @type {string} */ file, /** @type {Uint8Array} */ bytes, /** @type {string[]} */ names) => {
    await writeFile(join(out, file), bytes);
    for (const name of names) if (!versions.has(name)) versions.set(name, await about(name));
    const packages = names.map((name) => `${name} ${versions.get(name).version} (${versions.get(name).license})`);
    files[file] = { sha256: digest(bytes), bytes: bytes.length, packages };
  };
  for (const [file, { packages, source, types }] of Object.entries(BUNDLES)) {
    const { outputFiles } = await build({
      stdin: { contents: source, resolveDir: here }, bundle: true, minify: true, write: false, format: "esm",
      target: "es2022", legalComments: "none", define: { "process.env.NODE_ENV": '"production"' },
    });
    await note(file, outputFiles[0].contents, packages);
    const text = types.trim().split("\n").map((line) => line.trim()).join("\n") + "\n";
    await writeFile(join(out, file.replace(/\.js$/, ".d.ts")), text);
  }
  for (const [file, { packages, path }] of Object.entries(COPIES)) {
    await note(file, await readFile(join(here, "node_modules", path)), packages);
  }
  for (const { name, text } of versions.values()) {
    if (!text) throw new Error(`${name} has no licence file`);
    await writeFile(join(out, "licences", `${name.replaceAll("/", "-").replace("@", "")}.txt`), text);
  }
  await writeFile(join(out, "manifest.json"), JSON.stringify(files, null, 2) + "\n");
}

await main();
