import { createLowlight } from "lowlight";
export declare const lowlight: ReturnType<typeof createLowlight>;
