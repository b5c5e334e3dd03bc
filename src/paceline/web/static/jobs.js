// The table of jobs: the server filters and sorts, and the page asks for the rows that it shows.
import { get, listen, news, query } from "./api.js";
import { clock, moment, number, span, spoken, t, whole } from "./i18n.js";
import { Command } from "./forms.js";
import { html, Icon, isTyping, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const ROW = 46, CARD = 88; // heights in pixels, of a row and of a job on a narrow screen
const ONE_LINE = 40; // letters of a name that fit beside each other on a narrow screen
const SKETCHED = 30_000; // milliseconds after which the losses of a job that runs are asked for again
const NARROW = matchMedia("(max-width: 700px)");
const PAGE = 100; // rows that are asked for at once
const STEPS = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 };
const STATES = ["PENDING", "STARTING", "RUNNING", "RESTARTING", "SUSPENDED", "SUCCEEDED", "FAILED", "STOPPED", "LOST"];
const UNSORTED = { q: "", state: [], target: "", sort: "-created", group: "", in: "", columns: "" };
const FIELDS = "name,state,backend,framework,kind,nodes,ranks,progress,devices,allocated,created,started,finished,error,waiting,restarts,user,hangs";

const since = (iso) => (iso ? (Date.now() - Date.parse(iso)) / 1000 : null);
const lossOf = (job) => Object.entries(job.progress?.metrics ?? {}).find(([name]) => name.toLowerCase().includes("loss"))?.[1];

export function share(progress) {
  if (!progress?.epochs) return null;
  return Math.min(1, (progress.epoch + (progress.steps ? progress.step / progress.steps : 0)) / progress.epochs);
}

function Done({ job }) {
  if (job.state === "SUCCEEDED") return ""; // it is all done
  const part = share(job.progress);
  if (part == null) return job.progress ? `${t("step")} ${whole(job.progress.step)}` : "";
  return html`<progress max="1" value=${part} aria-label=${t("done")}></progress> ${Math.round(100 * part)} %`;
}

const keyOf = (job) => `${job.backend}/${job.name}/${job.created}`;
const losses = new Map(); // job → when they were asked for, and the losses

// The losses of the jobs that are shown, asked for once they have stood still; those of jobs that run again and again.
function useLosses(jobs) {
  const [, draw] = useState(0);
  const wanted = jobs.filter((job) => job && lossOf(job) !== undefined && losses.get(keyOf(job))?.asked !== (job.finished ?? Math.floor(Date.now() / SKETCHED)));
  useEffect(() => {
    if (!wanted.length) return;
    const timer = setTimeout(() => {
      for (const target of new Set(wanted.map((job) => job.backend))) {
        const those = wanted.filter((job) => job.backend === target).slice(0, PAGE);
        those.forEach((job) => losses.set(keyOf(job), { asked: job.finished ?? Math.floor(Date.now() / SKETCHED), values: losses.get(keyOf(job))?.values }));
        get(`/api/losses?${query({ target, names: those.map((job) => job.name).join(",") })}`).then((it) => {
          those.forEach((job) => { if (it.losses[job.name]) losses.get(keyOf(job)).values = it.losses[job.name]; });
          draw((n) => n + 1);
        }, () => those.forEach((job) => losses.delete(keyOf(job))));
      }
    }, 150);
    return () => clearTimeout(timer);
  }, [wanted.map(keyOf).join()]);
}

// A curve without axes: from the first to the last step, from the lowest to the highest value.
function Spark({ values, label }) {
  if (!(values?.length > 1)) return "";
  const low = Math.min(...values), height = Math.max(...values) - low || 1;
  const points = values.map((value, at) => `${((60 * at) / (values.length - 1)).toFixed(1)},${(17 - (15 * (value - low)) / height).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 60 18" preserveAspectRatio="none" role="img" aria-label=${label}><polyline points=${points} /></svg>`;
}

function Loss({ job }) {
  const value = lossOf(job), { values } = losses.get(keyOf(job)) ?? {};
  if (value === undefined) return "";
  if (value === null) return html`<span class="loss odd"><${Spark} values=${values} label="NaN" />NaN</span>`;
  const label = values && t("{low} to {high}, last {last}", { low: number(Math.min(...values)), high: number(Math.max(...values)), last: number(value) });
  return html`<span class="loss" title=${label}><${Spark} values=${values} label=${label} />${number(value)}</span>`;
}

// How far a job is that runs, and how long others took.
function Progress({ job }) {
  if (job.state === "RUNNING" && job.progress) {
    const below = [job.progress.seconds_left != null && t("{time} left", { time: span(job.progress.seconds_left) }), job.progress.samples_per_second != null && `${number(job.progress.samples_per_second, 3)} ${t("samples/s")}`];
    return html`<${Done} job=${job} /><span class="weak below">${below.filter(Boolean).join(" · ")}</span>`;
  }
  const took = COLUMNS.duration[1](job);
  return took && html`${took}${job.restarts > 0 && html`<span class="weak below">${t(job.restarts === 1 ? "1 restart" : "{n} restarts", { n: job.restarts })}</span>`}`;
}

const several = { targets: false, users: false }; // whether these jobs have several

// What stands below the name in the usual columns.
function aboutOf(job) {
  const devices = job.devices.length || job.allocated;
  return [several.targets && job.backend, several.users && job.user, t(job.ranks === 1 ? "1 rank" : "{n} ranks", { n: whole(job.ranks) }),
    job.nodes > 1 && t("{n} nodes", { n: whole(job.nodes) }), devices > 0 && t(devices === 1 ? "1 device" : "{n} devices", { n: whole(devices) })].filter(Boolean).join(" · ");
}

export const State = ({ of, hangs }) => html`<span class="state state-${of} ${hangs ? "hangs" : ""}">${t(of)}${hangs && ` · ${t("hangs")}`}</span>`;

// Jobs that are chosen to be compared, as the address of the comparison names them.
const picked = new Set();
const idOf = (job) => `${job.backend}/${job.name}`;
const Pick = ({ job }) => html`<input type="checkbox" class="pick" aria-label=${t("Compare {name}", { name: job.name })} checked=${picked.has(idOf(job))}
  onChange=${(event) => { picked[event.target.checked ? "add" : "delete"](idOf(job)); event.target.dispatchEvent(new CustomEvent("pick", { bubbles: true })); }} />`;
const Picked = ({ clear }) => picked.size > 0 && html`<span class="buttons"><a class="button" href="#/compare?${new URLSearchParams([...picked].map((it) => ["job", it]))}">${t("Compare {n}", { n: picked.size })}</a>
  <button type="button" onClick=${() => { picked.clear(); clear(); }}>${t("None")}</button></span>`;

// key → title, what is shown, the server's name for sorting
const COLUMNS = {
  name: ["name", (job) => html`<${Pick} job=${job} /><a href=${hrefOf(job)} title=${job.name}>${job.name}</a><span class="weak below">${aboutOf(job)}</span>`, "name"],
  state: ["state", (job) => html`<${State} of=${job.state} hangs=${job.hangs} />`, "state"],
  target: ["target", (job) => job.backend, "backend"],
  user: ["user", (job) => job.user || "", "user"],
  kind: ["kind", (job) => job.kind || job.framework || "", "kind"],
  progress: ["progress", (job) => html`<${Progress} job=${job} />`, "progress"],
  nodes: ["nodes", (job) => whole(job.nodes), "nodes"],
  ranks: ["ranks", (job) => whole(job.ranks), "ranks"],
  done: ["done", (job) => html`<${Done} job=${job} />`, "progress"],
  left: ["left", (job) => (job.state === "RUNNING" ? span(job.progress?.seconds_left) : ""), "left"],
  loss: ["loss", (job) => html`<${Loss} job=${job} />`, "loss"],
  speed: ["samples/s", (job) => (job.state === "RUNNING" ? number(job.progress?.samples_per_second) : ""), "speed"],
  devices: ["devices", (job) => job.devices.length || job.allocated || "", "devices"],
  age: ["age", (job) => html`<span title=${moment(job.created)}>${span(since(job.created))}<span class="weak started">${clock(job.created)}</span></span>`, "created"],
  duration: ["duration", (job) => (job.started ? span(since(job.started) - (since(job.finished) ?? 0)) : ""), "duration"],
  restarts: ["restarts", (job) => job.restarts || "", "restarts"],
  why: ["why", (job) => html`<span class=${job.name.length > ONE_LINE ? "two" : "two three"} title=${job.error || job.waiting}>${job.error || job.waiting || ""}</span>`, null],
};
// What a card says below the name: why a job waits or failed, or else its numbers.
COLUMNS.about = ["why", (job) => (job.error || job.waiting ? COLUMNS.why[1](job) : html`<span class="weak">${[
  several.users && job.user, t(job.ranks === 1 ? "1 rank" : "{n} ranks", { n: whole(job.ranks) }), COLUMNS.duration[1](job),
].filter(Boolean).join(" · ")}</span>${lossOf(job) !== undefined && html`<div class="weak">${t("loss")} <${Loss} job=${job} /></div>`}`), null];
const TABLE = Object.keys(COLUMNS).filter((key) => key !== "about");
const CARDS = ["name", "state", "age", "about"]; // on a narrow screen
const USUAL = ["name", "state", "progress", "loss", "age", "why"]; // those that are empty for all jobs are left out

export const hrefOf = (job) => `#/jobs/${encodeURIComponent(job.backend)}/${encodeURIComponent(job.name)}`;

// What somebody has chosen, by the address or before; null for the columns in which these jobs have something.
function chosenColumns(search) {
  const stored = search.get("columns")?.split(",") ?? JSON.parse(localStorage.getItem("paceline.columns") || "null");
  const known = stored?.filter((key) => TABLE.includes(key));
  return known?.length ? known : null;
}

function usualColumns(found) {
  return USUAL.filter((key) => !["loss", "why"].includes(key) || found.has?.includes(key));
}

export const leftAt = { view: "#/jobs" }; // where Esc goes back to

// The filter is a part of the address, so that it can be kept as a bookmark and sent to others.
function filterOf(search) {
  const given = Object.fromEntries(Object.keys(UNSORTED).filter((key) => search.has(key)).map((key) => [key, search.get(key)]));
  return { ...UNSORTED, ...given, state: given.state ? given.state.split(",") : [] };
}

let lastFound = { total: null, pages: {}, counts: {}, targets: [] };

// The rows of a query, page by page; what is shown stays until its successor has come.
function useRows(asked, first, last) {
  const [found, setFound] = useState(() => (lastFound.asked === asked || !news.isOnline ? lastFound : { ...lastFound, total: null, pages: {}, groups: [] }));
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
      setFound((before) => (lastFound = { ...answers[0], asked, pages: before.asked === asked ? { ...before.pages, ...pages } : pages }));
    } catch { /* the stream of changes says that the server is gone, and when it is back */ }
    it.running = false;
    if (it.again) { it.again = false; it.load(); }
  }, [asked, first, last]);
  state.current.load = load;
  useEffect(() => { load(); }, [load]);
  useEffect(() => listen(() => state.current.load(true)), []);
  return found;
}

export function Jobs({ search: given }) {
  const [filter, setFilter] = useState(() => filterOf(given));
  const [chosen, setChosen] = useState(() => chosenColumns(given));
  const [isNarrow, setNarrow] = useState(NARROW.matches);
  const [[first, last], setRange] = useState([0, 60]);
  const [, tick] = useState(0);
  const box = useRef(), search = useRef();
  const asked = query({ ...filter, columns: "", state: filter.state.join(",") });
  const found = useRows(asked, first, last);
  Object.assign(several, { targets: found.targets.length > 1, users: !!found.has?.includes("user") });
  const height = isNarrow ? CARD : ROW;
  const columns = isNarrow ? CARDS : chosen ?? usualColumns(found);

  const change = (what) => {
    setFilter((before) => ({ ...before, ...what }));
    box.current?.scrollTo(0, 0);
  };
  useEffect(() => { // a link or a step in the history; what is chosen here changes the address without this event
    const onAddress = () => {
      if (!/^(#\/?(jobs)?(\?.*)?)?$/.test(location.hash)) return;
      const next = new URLSearchParams(location.hash.split("?")[1]);
      change({ ...filterOf(next) });
      setChosen(chosenColumns(next));
    };
    addEventListener("hashchange", onAddress);
    return () => removeEventListener("hashchange", onAddress);
  }, []);
  useEffect(() => {
    const changed = Object.entries(filter).filter(([key, value]) => String(value) !== String(UNSORTED[key]));
    leftAt.view = `#/jobs${changed.length ? `?${query(Object.fromEntries(changed))}` : ""}`;
    history.replaceState(history.state, "", leftAt.view);
  }, [filter]);
  const onScroll = useCallback(() => {
    const top = Math.max(0, Math.floor(box.current.scrollTop / height) - 10);
    setRange([top, top + Math.ceil(box.current.clientHeight / height) + 20]);
  }, [height]);
  useLayoutEffect(onScroll, [height]);
  useEffect(() => {
    const onWidth = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", onWidth);
    return () => NARROW.removeEventListener("change", onWidth);
  }, []);
  useEffect(() => {
    addEventListener("resize", onScroll);
    const timer = setInterval(() => tick((n) => n + 1), 5000); // ages
    const onKey = (event) => {
      if (isTyping(event)) return;
      const to = event.key === "/" ? search.current : event.target === document.body && STEPS[event.key] && box.current.querySelector("tr.job a");
      if (!to) return;
      event.preventDefault();
      to.focus();
    };
    addEventListener("keydown", onKey);
    return () => { removeEventListener("resize", onScroll); removeEventListener("keydown", onKey); clearInterval(timer); };
  }, [onScroll]);

  const rows = [];
  for (let index = first; index <= Math.min(last, (found.total ?? 0) - 1); index++) {
    rows.push([index, found.pages[Math.floor(index / PAGE)]?.[index % PAGE]]);
  }
  useLosses((isNarrow || columns.includes("loss")) && !filter.group ? rows.map(([, job]) => job) : []);
  const onArrows = (event) => {
    const step = STEPS[event.key];
    const row = event.target.closest("tr[aria-rowindex]");
    if (!step || !row) return;
    event.preventDefault();
    const next = (step > 0 ? row.nextElementSibling : row.previousElementSibling)?.querySelector("a");
    next?.focus();
  };

  return html`
    <h1 class="unseen">${t("Jobs")}</h1>
    <${Summary} found=${found} show=${(state) => change({ ...UNSORTED, state })} />
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
        })}><${State} of=${state} /> ${whole(found.counts[state] ?? 0)}</button>`)}</span>
      ${filter.in && html`<button type="button" aria-label=${t("All groups")} title=${t("All groups")} onClick=${() => change({ in: "" })}>${filter.in.slice(filter.in.indexOf(":") + 1)} ×</button>`}
      <select aria-label=${t("Group by")} value=${filter.group} onChange=${(event) => change({ group: event.target.value })}>
        <option value="">${t("Not grouped")}</option><option value="name">${t("Grouped by name")}</option><option value="command">${t("Grouped by command")}</option>
        ${(found.labels ?? []).map((name) => html`<option value="label:${name}">${t("Grouped by {label}", { label: name })}</option>`)}
      </select>
      ${!isNarrow && !filter.group && html`<${Columns} chosen=${columns} set=${(next) => { setChosen(next); change({ columns: next?.join() ?? "" }); }} />`}
      <${Picked} clear=${() => tick((n) => n + 1)} />
      <span class="weak" role="status" id="total">${found.total == null ? t("Loading…") : t(found.total === 1 ? "1 job" : "{n} jobs", { n: whole(found.total) })}</span>
    </form>
    <${Problems} found=${found} />
    ${filter.group && html`<${Groups} found=${found} show=${(name) => change({ in: `${filter.group.split(":")[0]}:${name}`, group: "" })} />`}
    <div class="scroll" hidden=${!!filter.group} ref=${box} onScroll=${onScroll} onKeyDown=${onArrows} onpick=${() => tick((n) => n + 1)} tabindex="-1">
      <table class=${chosen ? "rows" : "rows usual"} aria-rowcount=${found.total ?? -1}>
        <thead><tr>${columns.map((key) => html`<${Title} name=${key} sort=${filter.sort} set=${(sort) => change({ sort })} />`)}</tr></thead>
        <tbody>
          <tr class="gap" aria-hidden="true"><td style=${{ height: `${first * height}px` }}></td></tr>
          ${rows.map(([index, job]) => html`<tr key=${index} aria-rowindex=${index + 2} class=${job && hasChanged(job) ? "job changed" : "job"}>
            ${columns.map((key) => html`<td class="col-${key}">${job ? COLUMNS[key][1](job) : "…"}</td>`)}</tr>`)}
          <tr class="gap" aria-hidden="true"><td style=${{ height: `${Math.max(0, (found.total ?? 0) - 1 - last) * height}px` }}></td></tr>
        </tbody>
      </table>
      ${found.total === 0 && (asked === "sort=-created" ? html`<${Empty} />` : html`<p class="empty weak">${t("No job matches.")}</p>`)}
      ${found.total === null && html`<div class="skeleton" aria-hidden="true"></div>`}
    </div>`;
}

// What stands there before the first job.
const Empty = () => html`<div class="empty"><${Icon} /><h2>${t("No jobs yet.")}</h2><p class="weak">${t("Start one in a terminal, or with a job file on the page Submit. It appears here by itself.")}</p>
  <${Command} line="paceline submit -n 2 train.py" title="" /></div>`;

const states = new Map(); // job → its state, and when that has changed while the page was open

function hasChanged(job) {
  const key = `${job.backend}/${job.name}`, before = states.get(key);
  if (before?.state !== job.state) states.set(key, { state: job.state, time: before ? Date.now() : 0 });
  return Date.now() - states.get(key).time < 2000;
}

// What stands above all jobs: each number shows the jobs that it counts.
function Summary({ found, show }) {
  const it = found.summary;
  if (!it) return html`<div class="tiles"></div>`;
  const tile = (count, title, of, states, kind) => html`<button type="button" class="tile ${count ? kind : ""}" onClick=${() => show(states)}>
    <b>${whole(count)}</b> ${title}<span class="weak two">${of}</span></button>`;
  const told = (pairs, all) => {
    const others = all - pairs.reduce((sum, [, count]) => sum + count, 0);
    return [...pairs.map(([why, count]) => `${whole(count)} × ${why}`), pairs.length > 0 && others > 0 && t("{n} others", { n: whole(others) })].filter(Boolean).join("; ");
  };
  return html`<div class="tiles">
    ${tile(it.running, t("running"), [onDevices(it), it.hung && t(it.hung === 1 ? "1 hangs" : "{n} hang", { n: whole(it.hung) })].filter(Boolean).join(" · "), ["RUNNING"], it.hung ? "bad" : "busy")}
    ${tile(it.waiting, t("waiting"), told(it.reasons, it.waiting), ["PENDING", "STARTING", "RESTARTING", "SUSPENDED"], "waits")}
    ${tile(it.failed, t("failed in 24 hours"), told(it.causes, it.failed), ["FAILED", "LOST"], "bad")}</div>`;
}

// On how many devices jobs run, of how many there are where they run, if that is known.
function onDevices({ devices, devices_all: all, devices_kind: kind }) {
  if (!devices) return "";
  if (all >= devices) return t(kind === "slots" ? "on {n} of {all} slots" : "on {n} of {all} devices", { n: whole(devices), all: whole(all) });
  return t(devices === 1 ? "on 1 device" : "on {n} devices", { n: whole(devices) });
}

// Jobs that belong together: those of one name, of one command, or of one value of a label.
function Groups({ found, show }) {
  return html`<div class="scroll"><table class="rows groups"><thead><tr>${["group", "jobs", "state", "best loss", "age"].map((title) => html`<th scope="col">${t(title)}</th>`)}</tr></thead>
    <tbody>${(found.groups ?? []).map((it) => html`<tr class="group"><td><button type="button" class="plain" onClick=${() => show(it.group)}>${it.group}</button></td>
      <td data-title=${t("jobs")}>${whole(it.jobs)}</td><td class="states">${STATES.filter((state) => it.states[state]).map((state) => html`<${State} of=${state} /> ${whole(it.states[state])} `)}</td>
      <td data-title=${t("best loss")}>${number(it.loss)}</td><td data-title=${t("age")}>${span(since(it.created))}</td></tr>`)}</tbody></table>
    ${found.groups?.length === 0 && html`<p class="weak">${t("No job matches.")}</p>`}
    ${found.groups_total > found.groups?.length && html`<p class="weak">${t("The newest {n} of {all} groups; filter for others.", { n: found.groups.length, all: whole(found.groups_total) })}</p>`}</div>`;
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
    const next = TABLE.filter((it) => (it === key ? !chosen.includes(key) : chosen.includes(it)));
    if (!next.length) return;
    localStorage.setItem("paceline.columns", JSON.stringify(next));
    set(next);
  };
  const onToggle = (event) => event.target.classList.toggle("from-left", event.target.getBoundingClientRect().left < innerWidth / 2);
  return html`<details class="menu" onToggle=${onToggle}><summary>${t("Columns")}</summary><div>${TABLE.map((key) => html`
    <label><input type="checkbox" checked=${chosen.includes(key)} onChange=${() => toggle(key)} /> ${t(COLUMNS[key][0])}</label>`)}
    <button type="button" onClick=${() => { localStorage.removeItem("paceline.columns"); set(null); }}>${t("As usual")}</button></div></details>`;
}

function Problems({ found }) {
  const lines = [found.problem, ...found.targets.flatMap((it) => [it.error && `${it.name}: ${it.error}`, ...it.warnings])].filter(Boolean);
  return html`<div role="status">${lines.map((line) => html`<p class="warning">${spoken(line)}</p>`)}</div>`;
}
