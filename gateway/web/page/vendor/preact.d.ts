import type { VNode } from "preact";
export { h, render, Component, Fragment, createRef } from "preact";
export type { VNode, ComponentChildren, ComponentChild } from "preact";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { signal, computed, effect, batch, untracked } from "@preact/signals";
export type { Signal, ReadonlySignal } from "@preact/signals";
export declare function html(strings: TemplateStringsArray, ...values: any[]): VNode<any>;
