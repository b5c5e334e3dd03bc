// Notifications of the browser while nobody sees the page: a job has ended, has failed, or hangs.
import { get, listen, onSeen, pathOf, query } from "./api.js";
import { t } from "./i18n.js";
import { html, useState } from "./ui.js";

const KEY = "paceline.notifications";
const isPossible = "Notification" in window && window.isSecureContext; // else browsers have none, or refuse them
const began = Date.now();
const told = new Map(); // job → what was told of it last
let hiddenSince = began;
onSeen(() => { if (document.hidden) hiddenSince = Date.now(); });

export const isWanted = () => isPossible && Notification.permission === "granted" && localStorage.getItem(KEY) === "on";

// What has happened to a job of which is told, in words; null if nothing has.
function eventOf({ job, hangs }) {
  if (hangs) return t("{name} hangs", { name: job.name });
  if (!job.finished || Date.parse(job.finished) < began) return null;
  return job.state === "FAILED" ? t("{name} has failed", { name: job.name }) : t("{name} has ended: {state}", { name: job.name, state: t(job.state) });
}

function show(title, job) {
  // Tabs that are all hidden show it once: they give it the same tag.
  const it = new Notification(title, { body: `${job.backend}\n${job.error || job.waiting || ""}`, tag: `paceline/${job.backend}/${job.name}` });
  it.onclick = () => {
    window.focus();
    location.hash = `#/jobs/${encodeURIComponent(job.backend)}/${encodeURIComponent(job.name)}`;
    it.close();
  };
}

async function look([target, name]) {
  const view = await get(pathOf(target, name)).catch(() => null); // it is deleted, or its target does not answer
  const event = view && eventOf(view), key = `${target}/${name}/${view?.job.created}`;
  if (!view || told.get(key) === event) return;
  told.set(key, event);
  if (event && document.hidden) show(event, view.job);
}

// The jobs that may have ended or hung while the server did not tell which: after a reconnection, or many changes.
async function anyOf() {
  const { jobs } = await get(`/api/jobs?${query({ limit: 500, fields: "name,backend,finished,hangs" })}`).catch(() => ({ jobs: [] }));
  return jobs.filter(({ finished, hangs }) => hangs || Date.parse(finished) >= hiddenSince).map(({ backend, name }) => [backend, name]);
}

export const notify = () =>
  listen(async (changed) => { if (isWanted() && document.hidden) (changed ?? (await anyOf())).forEach(look); });

// Asks the user for the permission, which browsers grant only to whoever has clicked.
export function Notifications() {
  const [isOn, setOn] = useState(isWanted());
  if (!isPossible || (Notification.permission === "denied" && !isOn)) return null;
  const toggle = async () => {
    if (!isOn && (await Notification.requestPermission()) !== "granted") return setOn(false);
    localStorage.setItem(KEY, isOn ? "off" : "on");
    setOn(isWanted());
  };
  return html`<button type="button" aria-pressed=${String(isOn)} onClick=${toggle}>${t(isOn ? "Notifications: on" : "Notifications: off")}</button> `;
}
