// What the page is made of: Preact, with htm in place of JSX.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Component, Fragment, render } from "./vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);

export const Icon = () => html`<svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="7" fill="#1f56c4" /><path d="M5 22h22M5 16h16M5 10h10" stroke="#fff" stroke-width="3" stroke-linecap="round" /></svg>`;
export const isTyping = (event) => event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName) || document.querySelector("dialog[open]");
