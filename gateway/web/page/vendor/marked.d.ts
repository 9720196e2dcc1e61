export { Marked, Lexer } from "marked";
export type { Token, Tokens, TokenizerExtension } from "marked";
