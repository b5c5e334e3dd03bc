// Asks the server: JSON, log lines, and which jobs have changed.
import { heard, spoken } from "./i18n.js";

const KEY = "paceline.key";

export class Failure extends Error {
  constructor(status, why) { super(why); this.status = status; }
}

// The token stands behind #, and is gone from the address once it has been exchanged.
export async function signIn() {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  localStorage.setItem(KEY, (await post("/api/session", { token })).key);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, "X-Paceline-Key": localStorage.getItem(KEY) || "" };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const refusal = await answer.json().catch(() => ({}));
  throw new Failure(answer.status, spoken(refusal.error) || `${answer.status} ${answer.statusText}`);
}

export const get = async (path, options) => heard(await (await ask(path, options)).json());
export const text = async (path, options) => (await ask(path, options)).text();
export const post = async (path, body = {}) =>
  heard(await (await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json());

export const pathOf = (target, name) => `/api/jobs/${encodeURIComponent(target)}/${encodeURIComponent(name)}`;
export const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value != null)).toString();

// Calls `each` with every line of an answer that does not end; several lines at once, as they come.
export async function lines(path, signal, each) {
  const reader = (await ask(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    if (parts.length) each(parts);
  }
}

// -- what has changed: one stream for all tabs, which comes back by itself. A browser has six connections to a server, so
// a tab that nobody sees holds none.

const listeners = new Set();
const channel = new BroadcastChannel("paceline.changes");
export const news = { isOnline: true, version: 0, status: undefined };

function tell(changed) {
  for (const listener of [...listeners]) listener(changed);
}

// A listener gets which jobs have changed: [target, name] each; null if anything may have.
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function take({ isOnline, status, version = news.version, changed }) {
  const isFirst = !news.version;
  Object.assign(news, { isOnline, status, version });
  tell(isFirst && !changed ? [] : changed);
}

channel.onmessage = ({ data }) => take(data);

function share(it) {
  channel.postMessage(it);
  take(it);
}

export const onSeen = (call) => {
  document.addEventListener("visibilitychange", call);
  return () => document.removeEventListener("visibilitychange", call);
};

// Reads the stream for all tabs, until this one is hidden.
async function lead(signal) {
  for (let wait = 500; !signal.aborted; wait = Math.min(wait * 1.5, 5000)) {
    let status, isFirst = true;
    try {
      await lines("/api/changes", signal, (several) => {
        wait = 500;
        for (const line of several) {
          if (!line.startsWith("data: ")) continue;
          const { version, changed } = JSON.parse(line.slice(6));
          share({ isOnline: true, version, changed: isFirst ? null : changed });
          isFirst = false;
        }
      });
    } catch (error) {
      status = error.status;
    }
    if (signal.aborted) return;
    share({ isOnline: false, status, changed: [] });
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// `isWanted`: whether this tab goes on while it is hidden.
export function follow(isWanted) {
  let stop = null;
  const onChange = () => {
    if (document.hidden) return isWanted() ? undefined : void stop?.abort();
    if (stop) tell(null);
    if (stop && !stop.signal.aborted) return;
    stop = new AbortController();
    const { signal } = stop;
    if (navigator.locks) navigator.locks.request("paceline.changes", { signal }, () => lead(signal)).catch(() => {}); // it was hidden meanwhile
    else lead(signal); // without TLS, at an address that is not this machine's
  };
  onSeen(onChange);
  onChange();
}
