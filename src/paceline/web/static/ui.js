// What the page is made of: Preact, with htm in place of JSX.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Component, Fragment, render } from "./vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendor/hooks.js";
export const html = htm.bind(h);
