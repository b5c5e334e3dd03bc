// The table of jobs: the server filters and sorts, and the page asks for the rows that it shows.
import { get, listen, news, query } from "./api.js";
import { number, span, t, whole } from "./i18n.js";
import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const ROW = 34; // height in pixels
const PAGE = 100; // rows that are asked for at once
const STATES = ["PENDING", "STARTING", "RUNNING", "RESTARTING", "SUSPENDED", "SUCCEEDED", "FAILED", "STOPPED", "LOST"];
const FIELDS = "name,state,backend,framework,kind,nodes,ranks,progress,devices,allocated,created,started,finished,error,waiting,restarts";

const since = (iso) => (iso ? (Date.now() - Date.parse(iso)) / 1000 : null);
const lossOf = (job) => Object.entries(job.progress?.metrics ?? {}).find(([name]) => name.toLowerCase().includes("loss"))?.[1];

export function share(progress) {
  if (!progress?.epochs) return null;
  return Math.min(1, (progress.epoch + (progress.steps ? progress.step / progress.steps : 0)) / progress.epochs);
}

function Done({ job }) {
  const part = share(job.progress);
  if (part == null) return job.progress ? `step ${whole(job.progress.step)}` : "";
  return html`<progress max="1" value=${part} aria-label=${t("done")}></progress> ${Math.round(100 * part)} %`;
}

// key → title, what is shown, the server's name for sorting, whether a narrow screen shows it
const COLUMNS = {
  name: ["name", (job) => html`<a href=${hrefOf(job)} title=${job.name}>${job.name}</a>`, "name", true],
  state: ["state", (job) => html`<span class="state state-${job.state}">${job.state}</span>`, "state", true],
  target: ["target", (job) => job.backend, "backend"],
  kind: ["kind", (job) => job.kind || job.framework || "", "kind"],
  nodes: ["nodes", (job) => whole(job.nodes), "nodes"],
  ranks: ["ranks", (job) => whole(job.ranks), "ranks"],
  done: ["done", (job) => html`<${Done} job=${job} />`, "progress", true],
  left: ["left", (job) => (job.state === "RUNNING" ? span(job.progress?.seconds_left) : ""), "left"],
  loss: ["loss", (job) => number(lossOf(job)), "loss"],
  speed: ["samples/s", (job) => number(job.progress?.samples_per_second), "speed"],
  devices: ["devices", (job) => job.devices.length || job.allocated || "", "devices"],
  age: ["age", (job) => span(since(job.created)), "created", true],
  duration: ["duration", (job) => (job.started ? span(since(job.started) - (since(job.finished) ?? 0)) : ""), "duration"],
  restarts: ["restarts", (job) => job.restarts || "", "restarts"],
  why: ["why", (job) => html`<span title=${job.error || job.waiting}>${job.error || job.waiting || ""}</span>`, null],
};
const USUAL = Object.keys(COLUMNS).filter((key) => !["duration", "restarts", "nodes"].includes(key));

export const hrefOf = (job) => `#/jobs/${encodeURIComponent(job.backend)}/${encodeURIComponent(job.name)}`;

function chosenColumns() {
  const stored = JSON.parse(localStorage.getItem("paceline.columns") || "null");
  if (stored) return stored.filter((key) => key in COLUMNS);
  return innerWidth < 700 ? USUAL.filter((key) => COLUMNS[key][3]) : USUAL;
}

// The rows of a query, page by page; what is shown stays until its successor has come.
function useRows(asked, first, last) {
  const [found, setFound] = useState({ total: null, pages: {}, counts: {}, targets: [] });
  const state = useRef({});
  const load = useCallback(async (isNew) => {
    const it = state.current;
    const wanted = [];
    for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page++) wanted.push(page);
    const key = `${asked} ${wanted}`;
    if (it.running) return void (it.again = true);
    if (!isNew && it.key === key && it.version === news.version) return;
    it.running = true;
    try {
      const answers = await Promise.all(
        wanted.map((page) => get(`/api/jobs?${asked}&${query({ fields: FIELDS, offset: page * PAGE, limit: PAGE })}`)),
      );
      const pages = Object.fromEntries(wanted.map((page, index) => [page, answers[index].jobs]));
      Object.assign(it, { key, version: news.version });
      setFound((before) => ({ ...answers[0], asked, pages: before.asked === asked ? { ...before.pages, ...pages } : pages }));
    } catch { /* the stream of changes says that the server is gone, and when it is back */ }
    it.running = false;
    if (it.again) { it.again = false; it.load(); }
  }, [asked, first, last]);
  state.current.load = load;
  useEffect(() => { load(); }, [load]);
  useEffect(() => listen(() => state.current.load(true)), []);
  return found;
}

export function Jobs() {
  const [filter, setFilter] = useState(() => ({ q: "", state: [], target: "", sort: "-created", ...history.state?.filter }));
  const [columns, setColumns] = useState(chosenColumns);
  const [[first, last], setRange] = useState([0, 60]);
  const [, tick] = useState(0);
  const box = useRef(), search = useRef();
  const asked = query({ ...filter, state: filter.state.join(",") });
  const found = useRows(asked, first, last);

  const change = (what) => {
    setFilter((before) => ({ ...before, ...what }));
    box.current?.scrollTo(0, 0);
  };
  useEffect(() => history.replaceState({ ...history.state, filter }, ""), [filter]);
  const onScroll = useCallback(() => {
    const top = Math.max(0, Math.floor(box.current.scrollTop / ROW) - 10);
    setRange([top, top + Math.ceil(box.current.clientHeight / ROW) + 20]);
  }, []);
  useLayoutEffect(onScroll, []);
  useEffect(() => {
    addEventListener("resize", onScroll);
    const timer = setInterval(() => tick((n) => n + 1), 5000); // ages
    const onKey = (event) => {
      if (event.key === "/" && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) {
        event.preventDefault();
        search.current.focus();
      }
    };
    addEventListener("keydown", onKey);
    return () => { removeEventListener("resize", onScroll); removeEventListener("keydown", onKey); clearInterval(timer); };
  }, []);

  const rows = [];
  for (let index = first; index <= Math.min(last, (found.total ?? 0) - 1); index++) {
    rows.push([index, found.pages[Math.floor(index / PAGE)]?.[index % PAGE]]);
  }
  const onArrows = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest("tr[aria-rowindex]");
    if (!step || !row) return;
    event.preventDefault();
    const next = (step > 0 ? row.nextElementSibling : row.previousElementSibling)?.querySelector("a");
    next?.focus();
  };

  return html`
    <h1 class="unseen">${t("Jobs")}</h1>
    <form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}>
      <input ref=${search} type="search" aria-label=${t("Search")} placeholder=${`${t("Search")}  /`} value=${filter.q}
        onInput=${(event) => change({ q: event.target.value })} />
      ${found.targets.length > 1 && html`<select aria-label=${t("target")} value=${filter.target} onChange=${(event) => change({ target: event.target.value })}>
        <option value="">${t("All targets")}</option>
        ${found.targets.map((it) => html`<option value=${it.name}>${it.name}</option>`)}
      </select>`}
      <span class="chips">${STATES.filter((state) => found.counts[state] || filter.state.includes(state)).map((state) => html`
        <button type="button" aria-pressed=${filter.state.includes(state)} onClick=${() => change({
          state: filter.state.includes(state) ? filter.state.filter((it) => it !== state) : [...filter.state, state],
        })}><span class="state state-${state}">${state}</span> ${whole(found.counts[state] ?? 0)}</button>`)}</span>
      <${Columns} chosen=${columns} set=${setColumns} />
      <span class="weak" role="status" id="total">${found.total == null ? t("Loading…") : t(found.total === 1 ? "1 job" : "{n} jobs", { n: whole(found.total) })}</span>
    </form>
    <${Problems} found=${found} />
    <div class="scroll" ref=${box} onScroll=${onScroll} onKeyDown=${onArrows} tabindex="-1">
      <table class="rows" aria-rowcount=${found.total ?? -1}>
        <thead><tr>${columns.map((key) => html`<${Title} name=${key} sort=${filter.sort} set=${(sort) => change({ sort })} />`)}</tr></thead>
        <tbody>
          <tr class="gap" aria-hidden="true"><td style=${{ height: `${first * ROW}px` }}></td></tr>
          ${rows.map(([index, job]) => html`<tr key=${index} aria-rowindex=${index + 2} class="job">
            ${columns.map((key) => html`<td class="col-${key}">${job ? COLUMNS[key][1](job) : "…"}</td>`)}</tr>`)}
          <tr class="gap" aria-hidden="true"><td style=${{ height: `${Math.max(0, (found.total ?? 0) - 1 - last) * ROW}px` }}></td></tr>
        </tbody>
      </table>
      ${found.total === 0 && html`<p class="weak">${asked === "sort=-created" ? t("No jobs yet. Start one with: {command}", { command: "paceline submit SCRIPT" }) : t("No job matches.")}</p>`}
    </div>
    <p class="weak keys">${t("Keys: / search, ↑ ↓ rows, Enter opens, Esc back")}</p>`;
}

function Title({ name, sort, set }) {
  const [title, , key] = COLUMNS[name];
  if (!key) return html`<th scope="col" class="col-${name}">${t(title)}</th>`;
  const isIt = sort.replace("-", "") === key, isDown = sort.startsWith("-");
  return html`<th scope="col" class="col-${name}" aria-sort=${isIt ? (isDown ? "descending" : "ascending") : undefined}>
    <button type="button" class="plain" onClick=${() => set(isIt && !isDown ? `-${key}` : isIt ? "-created" : key)}>
      ${t(title)}${isIt ? (isDown ? " ↓" : " ↑") : ""}</button></th>`;
}

function Columns({ chosen, set }) {
  const toggle = (key) => {
    const next = Object.keys(COLUMNS).filter((it) => (it === key ? !chosen.includes(key) : chosen.includes(it)));
    if (!next.length) return;
    localStorage.setItem("paceline.columns", JSON.stringify(next));
    set(next);
  };
  return html`<details class="menu"><summary>${t("Columns")}</summary><div>${Object.keys(COLUMNS).map((key) => html`
    <label><input type="checkbox" checked=${chosen.includes(key)} onChange=${() => toggle(key)} /> ${t(COLUMNS[key][0])}</label>`)}</div></details>`;
}

function Problems({ found }) {
  const lines = [found.problem, ...found.targets.flatMap((it) => [it.error && `${it.name}: ${it.error}`, ...it.warnings])].filter(Boolean);
  return html`<div role="status">${lines.map((line) => html`<p class="warning">${line}</p>`)}</div>`;
}
