// The page: which view is shown, and what all of them share.
import { follow, get, listen, news, pathOf, post, query, signIn, text } from "./api.js";
import { Comparison, MOST } from "./compare.js";
import { Delete, Resubmit, Resume, Scale, Stop, Submit, Suspend } from "./forms.js";
import { choose, current, LANGUAGES, learn, t } from "./i18n.js";
import { Facts, Overview } from "./job.js";
import { hrefOf, Jobs, leftAt } from "./jobs.js";
import { Logs } from "./logs.js";
import { Machines } from "./machines.js";
import { isWanted, Notifications, notify } from "./notify.js";
import { html, Icon, isTyping, render, useEffect, useMemo, useRef, useState } from "./ui.js";

const REFRESH = 10_000; // milliseconds
const KEPT = 20; // answers
// In these states more is known of a job alone than of it among all, so a change may be no news.
const UNSETTLED = { PENDING: 2_000, STARTING: 1_000, RESTARTING: 1_000, RUNNING: REFRESH, SUSPENDED: REFRESH };
const DIALOGS = { stop: Stop, suspend: Suspend, resume: Resume, resubmit: Resubmit, scale: Scale, delete: Delete };
const TITLES = {
  stop: "Stop", suspend: "Suspend", resume: "Resume", resubmit: "Resubmit", scale: "Scale", delete: "Delete", tensorboard: "TensorBoard",
};

// A part of the address; one that is not valid stays as it is, and names nothing.
function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const onChange = () => setHash(location.hash);
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  const [path, search] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), search: new URLSearchParams(search) };
}

function Online() {
  const [, draw] = useState(0);
  useEffect(() => listen(() => draw((n) => n + 1)), []);
  useEffect(() => { document.body.classList.toggle("offline", !news.isOnline); }, [news.isOnline]);
  return html`<div role="status">${!news.isOnline && html`<p class="banner">${news.status === 401 ? t("Open the address that paceline web has printed.") : t("Connection lost; trying again…")}</p>`}</div>`;
}

function setTheme(name) {
  localStorage.setItem("paceline.theme", name);
  document.documentElement.style.colorScheme = name;
}

const KEYS = [["/", "search"], ["j k ↓ ↑", "the next job, the one before"], ["Enter", "open it"], ["Esc", "back, or close"], ["g j", "Jobs"], ["g m", "Machines"], ["g s", "Submit"], ["?", "these keys"]];

// The keys of all views, and the dialog that shows them.
function Keys() {
  const it = useRef();
  useEffect(() => {
    let before = "";
    const onKey = (event) => {
      if (isTyping(event)) return;
      const view = before === "g" && { j: "jobs", m: "machines", s: "submit" }[event.key];
      if (view) location.hash = `#/${view}`;
      else if (event.key === "Escape" && !/^(#\/?(jobs)?(\?.*)?)?$/.test(location.hash)) location.hash = leftAt.view;
      else if (event.key === "?") it.current.showModal();
      before = event.key;
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  return html`<button type="button" class="button" aria-label=${t("Keys")} title=${t("Keys")} onClick=${() => it.current.showModal()}>?</button>
    <dialog ref=${it} aria-labelledby="keys-title"><h2 id="keys-title">${t("Keys")}</h2>
      <dl class="known-keys">${KEYS.map(([keys, what]) => html`<dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${t(what)}</dd>`)}</dl>
      <p class="buttons"><button type="button" autofocus onClick=${() => it.current.close()}>${t("Close")}</button></p></dialog>`;
}

function Header({ view }) {
  const link = (name, title) => html`<a href="#/${name}" aria-current=${view === name ? "page" : undefined}>${t(title)}</a>`;
  return html`<header><nav aria-label="paceline"><span class="brand"><${Icon} /><b>paceline</b></span> ${link("jobs", "Jobs")} ${link("machines", "Machines")} ${link("submit", "Submit")}</nav>
    <div class="buttons"><${Keys} /><details class="menu"><summary class="button" aria-label=${t("Settings")} title=${t("Settings")}>⚙</summary><div><${Notifications} />
    <label>${t("Theme")} <select value=${localStorage.getItem("paceline.theme") || ""} onChange=${(event) => setTheme(event.target.value)}>
      ${[["", "system"], ["light", "light"], ["dark", "dark"]].map(([value, title]) => html`<option value=${value}>${t(title)}</option>`)}</select></label>
    <label>${t("Language")} <select value=${current()} onChange=${(event) => choose(event.target.value)}>
      ${Object.entries(LANGUAGES).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label></div></details></div></header>`;
}

// Answers of jobs that were looked at last, for the time in which the server is away.
const kept = new Map();
function keep(path, answer) {
  kept.delete(path);
  kept.set(path, answer);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  return answer;
}
const keptOf = (path) => (news.isOnline ? null : kept.get(path) ?? null);

// What is known of a job, asked for again when it has changed.
function useJob(target, name) {
  const [view, setView] = useState(() => keptOf(pathOf(target, name)));
  const [error, setError] = useState(null);
  useEffect(() => {
    let timer, state, isGone = false;
    const look = async () => {
      try {
        const it = await get(pathOf(target, name));
        if (isGone) return;
        state = it.job.state;
        setView(keep(pathOf(target, name), it));
        setError(null);
      } catch (failure) {
        if (isGone) return;
        if (failure.status) setError(failure.message);
      }
      clearTimeout(timer);
      if (state in UNSETTLED) timer = setTimeout(look, UNSETTLED[state]);
    };
    look();
    const end = listen((changed) => { if (!changed || changed.some(([on, job]) => on === target && job === name)) look(); });
    return () => { isGone = true; clearTimeout(timer); end(); };
  }, [target, name]);
  return [view, error];
}

// What its report shows, asked for again while it changes.
function LiveOverview({ job }) {
  const path = pathOf(job.backend, job.name);
  const [view, setView] = useState(() => keptOf(`${path}/view`));
  const [error, setError] = useState(null);
  useEffect(() => {
    let timer, isGone = false;
    const look = () => get(`${path}/view`).then((it) => isGone || (setView(keep(`${path}/view`, it)), setError(null)), (failure) => isGone || (failure.status && setError(failure.message)))
      .then(() => { if (!isGone && job.state in UNSETTLED) timer = setTimeout(look, REFRESH); });
    look();
    return () => { isGone = true; clearTimeout(timer); };
  }, [path, job.state, job.attempt]);
  return html`${error && html`<p class="warning">${error}</p>`}${view ? html`<${Overview} view=${view} />` : html`<${Facts} job=${job} />`}`;
}

// Jobs beside each other; which ones is in the address: `job=TARGET/NAME` for each.
function Compare({ search }) {
  const asked = [...new Set(search.getAll("job"))], shown = asked.slice(0, MOST);
  const [views, setViews] = useState({});
  const [error, setError] = useState(null);
  const href = (jobs) => `#/compare?${new URLSearchParams(jobs.map((it) => ["job", it]))}`;
  useEffect(() => {
    let timer, isGone = false;
    const look = async (jobs) => {
      const found = await Promise.all(jobs.map((it) => get(`${pathOf(it.slice(0, it.lastIndexOf("/")), it.slice(it.lastIndexOf("/") + 1))}/view`).then((view) => [it, view], (failure) => setError(failure.message))));
      if (isGone) return;
      setViews((before) => ({ ...before, ...Object.fromEntries(found.filter(Boolean)) }));
      const running = found.filter((it) => it?.[1].job.state === "RUNNING").map(([it]) => it);
      if (running.length) timer = setTimeout(look, REFRESH, running);
    };
    setError(null);
    look(shown);
    return () => { isGone = true; clearTimeout(timer); };
  }, [asked.join()]);
  const add = async (event) => {
    event.preventDefault();
    const field = event.target.elements.other;
    try {
      const found = await get(`/api/jobs?${query({ q: field.value, limit: 500, fields: "name,backend" })}`);
      const match = found.jobs.find((it) => it.name === field.value);
      if (!match) throw new Error(t("No job matches."));
      field.value = "";
      setError(null);
      location.hash = href([...asked, `${match.backend}/${match.name}`]);
    } catch (failure) { setError(failure.message); }
  };
  const known = useMemo(() => shown.map((it) => views[it]).filter(Boolean), [views, asked.join()]);
  return html`<div class="bar"><h1>${t("Compare")}</h1><form class="bar" onSubmit=${add}><input name="other" aria-label=${t("name")} placeholder=${t("name")} /><button>${t("Add")}</button></form>
      ${asked.map((it) => html`<a class="button" href=${href(asked.filter((other) => other !== it))} aria-label=${t("Without {name}", { name: it })}>${it.slice(it.lastIndexOf("/") + 1)} ×</a>`)}</div>
    ${error && html`<p class="warning" role="alert">${error}</p>`}
    ${asked.length > MOST && html`<p class="warning">${t("The first {n} of {all} jobs are compared.", { n: MOST, all: asked.length })}</p>`}
    ${known.length > 1 ? html`<${Comparison} views=${known} title=${(view) => html`<a href=${hrefOf(view.job)}>${view.job.name}</a>`} />` : html`<p class="weak" role="status">${shown.length > 1 && !error ? t("Loading…") : t("Add another job to compare them.")}</p>`}`;
}

async function download(job) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await text(`${pathOf(job.backend, job.name)}/report`)], { type: "text/html" }));
  link.download = `${job.name}.html`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function Job({ target, name, tab, isReadOnly }) {
  const [view, error] = useJob(target, name);
  const [dialog, setDialog] = useState(null);
  const [board, setBoard] = useState(null);
  if (!view && !error && !news.isOnline) return html`<h1>${name}</h1><p class="weak" role="status">${t("Nothing is known of this job yet; it is shown when the server is back.")}</p>`;
  if (!view) return html`<p class=${error ? "error" : "weak"} role=${error ? "alert" : "status"}>${error || t("Loading…")}</p>${!error && html`<div class="skeleton" aria-hidden="true"></div>`}`;
  const { job, can } = view;
  const Chosen = DIALOGS[dialog];
  const act = (action) => {
    if (action !== "tensorboard") return setDialog(action);
    setBoard({ notes: [t("Loading…")] });
    post(`${pathOf(target, name)}/tensorboard`).then(setBoard, (failure) => setBoard({ notes: [failure.message] }));
  };
  const here = `#/jobs/${encodeURIComponent(target)}/${encodeURIComponent(name)}`;
  const tabs = [["", "Overview"], ["logs", "Logs"]];
  return html`<div class="bar"><h1>${job.name}</h1> <span class="state state-${job.state}">${t(job.state)}</span> <span class="weak">${job.backend}</span>
      <span class="buttons">${can.map((action) => html`<button type="button" class=${["stop", "delete"].includes(action) && "danger"} onClick=${() => act(action)}>${t(TITLES[action])}</button>`)}
        <button type="button" onClick=${() => download(job).catch((failure) => setBoard({ notes: [failure.message] }))}>${t("Report")}</button>
        <a class="button" href="#/compare?job=${encodeURIComponent(`${target}/${name}`)}">${t("Compare")}</a>
        ${!isReadOnly && html`<a class="button" href="#/submit?from=${encodeURIComponent(target)}/${encodeURIComponent(name)}">${t("Use in a new job")}</a>`}</span></div>
    ${error && html`<p class="warning">${error}</p>`}
    ${board && html`<p role="status">${board.url && html`<a href=${board.url} target="_blank" rel="noopener noreferrer">${board.url}</a>`} ${board.notes.map((note) => html`<span class="weak">${note} </span>`)}</p>`}
    <nav class="tabs" aria-label=${job.name}>${tabs.map(([key, title]) => html`<a href="${here}${key && `/${key}`}" aria-current=${(tab ?? "") === key ? "page" : undefined}>${t(title)}</a>`)}</nav>
    ${tab === "logs" ? html`<${Logs} job=${job} key=${`${job.backend}/${job.name}/${job.created}`} />` : html`<${LiveOverview} job=${job} />`}
    ${Chosen && html`<${Chosen} view=${view} close=${() => setDialog(null)} />`}`;
}

function App({ about }) {
  const { parts, search } = useRoute();
  const [view = "jobs", target, name, tab] = parts;
  useEffect(() => { document.title = name ? `${name} – paceline` : "paceline"; }, [name]);
  const from = search.get("from")?.split("/").map((part) => part);
  const skip = (event) => { event.preventDefault(); document.querySelector("main").focus(); };
  return html`<a class="skip" href="#/" onClick=${skip}>${t("Skip to the content")}</a><${Header} view=${view} /><${Online} /><main class="view-${name ? "job" : view}" tabindex="-1">
    ${view === "compare" ? html`<${Compare} search=${search} />` : view === "machines" ? html`<${Machines} />` : view === "submit" ? html`<${Submit} about=${about} from=${from} />`
      : name ? html`<${Job} target=${target} name=${name} tab=${tab} isReadOnly=${about.read_only} key=${`${target}/${name}`} />` : html`<${Jobs} search=${search} />`}</main>`;
}

setTheme(localStorage.getItem("paceline.theme") || "");
addEventListener("hashchange", () => location.hash.startsWith("#token=") && location.reload());
const page = document.getElementById("page");
try {
  const chinese = current() === "zh" && fetch("zh.json").then((answer) => answer.json()).then(learn, () => {}); // else it is told in English
  await signIn();
  await chinese;
  render(html`<${App} about=${await get("/api/about")} />`, page);
  notify();
  follow(isWanted);
} catch (error) {
  render(html`<p class="banner" role="alert">${error.status === 401 ? t("Open the address that paceline web has printed.") : error.message}</p>`, page);
}
