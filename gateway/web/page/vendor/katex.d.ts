import type { KatexOptions } from "katex";
export interface MathTree { type?: string; text?: string; attributes?: Record<string, string>; children?: MathTree[]; classes?: string[]; }
export declare function tree(source: string, options: KatexOptions): MathTree;
