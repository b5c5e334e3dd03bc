// Asks the server: JSON, log lines, and which jobs have changed.
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
  const said = await answer.json().catch(() => ({}));
  throw new Failure(answer.status, said.error || `${answer.status} ${answer.statusText}`);
}

export const get = async (path, options) => (await ask(path, options)).json();
export const text = async (path, options) => (await ask(path, options)).text();
export const post = async (path, body = {}) =>
  (await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();

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

// -- what has changed: one stream for the whole page, which comes back by itself

const listeners = new Set();
export const news = { isOnline: true, version: 0, error: null };

function tell(changed) {
  for (const listener of [...listeners]) listener(changed);
}

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 1.5, 5000)) {
    try {
      await lines("/api/changes", undefined, (several) => {
        wait = 500;
        for (const line of several) {
          if (!line.startsWith("data: ")) continue;
          const { version, changed } = JSON.parse(line.slice(6));
          const isBack = !news.isOnline || version < news.version;
          Object.assign(news, { isOnline: true, error: null, version });
          tell(isBack ? null : changed);
        }
      });
    } catch (error) {
      news.error = error instanceof Failure ? error : null;
    }
    news.isOnline = false;
    tell([]);
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
