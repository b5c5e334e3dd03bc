// The machines of all targets, one row each: each target is asked for itself, so that none waits for another.
import { get, listen, news, onSeen, query } from "./api.js";
import { clock, number, size, spoken, t, whole } from "./i18n.js";
import { html, useCallback, useEffect, useRef, useState } from "./ui.js";

const EVERY = 5000, CURVES = 60_000, SLOW = 10_000; // milliseconds
const EACH = 20; // milliseconds more between two looks for each machine
const MOST = 100; // rows at once, and machines whose curves are asked for
const SQUARES = 16; // devices that are drawn
const MANY = 12; // machines from which on there is a filter
const TAKES_NONE = /down|drain|fail|maint|unk|inval|\*|not ready|cordoned|pressure/i;
const KINDS = ["silent", "unavailable", "in use", "free"];
const MARKS = { silent: "LOST", unavailable: "SUSPENDED", "in use": "RUNNING", free: "SUCCEEDED" }; // whose shape and colour a kind has

// An area of 60 points; where nothing is known there is none.
function Area({ values, label }) {
  if (!values?.some((value) => value != null)) return "";
  let path = "";
  values.forEach((value, at) => {
    if (value == null) return;
    const y = (20 - 19 * Math.min(1, value)).toFixed(1);
    if (values[at - 1] == null) path += `M${at},20`;
    path += `L${at},${y}L${at + 1},${y}`;
    if (values[at + 1] == null) path += `L${at + 1},20Z`;
  });
  return html`<svg class="area" viewBox=${`0 0 ${values.length} 20`} preserveAspectRatio="none" role="img" aria-label=${label}><path d=${path} /></svg>`;
}

// What of a machine is in use: measured, or else what jobs have asked for; nothing is said where nobody knows it.
function Part({ node, used, all, show, unit, title, curve }) {
  if (!all || node.silent) return "";
  const label = t("{what}: the last hour", { what: t(title) });
  if (!node.measured && !used) return html`<span class="weak">${show(all)}${unit && ` ${t(unit)}`}, ${t("not measured")}</span>`;
  return html`<${Area} values=${curve} label=${label} /><div class=${node.measured ? "" : "weak"}>${show(used)} ${t("of")} ${show(all)}${unit && ` ${t(unit)}`}${!node.measured && ` ${t("asked for")}`}</div>`;
}

// A square a device, filled where a job has it.
function Devices({ node }) {
  const { device_count: all, allocated_count: used, devices, allocated } = node;
  const names = devices.length === all ? devices : Array.from({ length: all }, (_, at) => (at < used ? true : null));
  return html`${all <= SQUARES && !node.silent && html`<svg class="squares" viewBox=${`0 0 ${10 * all} 10`} width=${10 * all} height="10" aria-hidden="true">${names.map((name, at) => html`
    <rect class=${name === true || allocated[name] ? "held" : ""} x=${10 * at + 1} y="1" width="7" height="8" rx="1">${allocated[name] && html`<title>${name}: ${allocated[name].join(", ")}</title>`}</rect>`)}</svg>`}
    <div>${whole(used)} ${t("of")} ${whole(all)} ${t(node.slots ? "slots" : "devices")}</div>`;
}

const hrefOf = (it) => `#/jobs/${encodeURIComponent(it.target)}/${encodeURIComponent(it.name)}`;

// Names that follow each other as ranges: `0-3, 6`, `cuda:0-3`.
function ranges(names) {
  const runs = [];
  for (const name of names) {
    const [, stem, digits] = name.match(/^(.*?)(\d*)$/s), last = runs.at(-1);
    if (digits && last?.stem === stem && Number(digits) === last.end + 1) last.end += 1;
    else runs.push({ stem, text: name, begin: Number(digits), end: Number(digits) });
  }
  return runs.map(({ text, begin, end }) => (end > begin ? `${text}-${end}` : text)).join(", ");
}

function Holder({ it, slots }) {
  const count = it.devices.length || it.count;
  const facts = [
    it.devices.length > 0 && t(slots ? "slots {list}" : "devices {list}", { list: ranges(it.devices) }),
    !it.devices.length && count > 0 && t(count === 1 ? "1 device" : "{n} devices", { n: whole(count) }),
    !count && it.ranks > 0 && t(it.ranks === 1 ? "1 rank" : "{n} ranks", { n: whole(it.ranks) }), it.user, it.since && t("since {time}", { time: clock(it.since) }), it.until && t("until {time} by its time limit", { time: clock(it.until) }),
  ].filter(Boolean);
  return html`<div class="holder">${it.target ? html`<a href=${hrefOf(it)}>${it.name}</a>` : html`<b>${it.name}</b>`} <span class="weak">${facts.join(" · ")}</span></div>`;
}

const kindOf = (node) => (node.silent ? "silent" : TAKES_NONE.test(node.state) ? "unavailable" : node.holders.length || node.allocated_count ? "in use" : "free");

function said(node) {
  if (!node.silent) return node.state && !/^(ready|idle|mixed|allocated)$/.test(node.state) ? node.state : "";
  const why = node.why ? html`<div>${spoken(node.why)}</div>` : "";
  return html`${why}${node.silent.since ? t("since {time}", { time: clock(node.silent.since) }) : t("not since {time}, when this page's server began", { time: clock(node.silent.asked) })}`;
}

function Name({ node }) {
  const about = [...node.names.slice(1), node.address, ...node.partitions, ...node.roles].filter(Boolean);
  return html`<b>${node.name}</b>${node.here && html` <span class="weak">${t("this machine")}</span>`}
    <div class="weak">${[node.targets.join(", "), ...about].join(" · ")}</div>`;
}

function Gpus({ node, curve }) {
  if (!node.gpus.length || node.silent) return "";
  const known = node.gpus.filter((it) => it.use != null), mean = known.reduce((sum, it) => sum + it.use, 0) / known.length;
  const used = node.gpus.reduce((sum, it) => sum + (it.memory_used ?? 0), 0), all = node.gpus.reduce((sum, it) => sum + (it.memory ?? 0), 0);
  const each = node.gpus.map((it) => [`${it.index}: ${it.name}`, it.use != null && `${number(it.use, 3)} %`, it.memory_used != null && `${size(it.memory_used)} ${t("of")} ${size(it.memory)}`,
    it.temperature != null && `${number(it.temperature, 3)} °C`, it.power != null && `${number(it.power, 3)} W`].filter(Boolean).join(" "));
  return html`<${Area} values=${curve} label=${t("{what}: the last hour", { what: t("GPUs") })} />
    ${all > 0 && html`<div class="weak">${size(used)} ${t("of")} ${size(all)}</div>`}<details><summary>${known.length > 0 && `${number(mean, 2)} %`}</summary>${each.map((line) => html`<div>${line}</div>`)}</details>`;
}

// title → what is shown of a machine, and what it is sorted by; a column that is empty for all of them is left out
const COLUMNS = {
  state: [(node) => html`<span class="state state-${MARKS[kindOf(node)]}">${t(node.silent ? "does not answer" : kindOf(node))}</span><div class="weak">${said(node)}</div>`, (node) => KINDS.indexOf(kindOf(node))],
  devices: [(node) => (node.device_count ? html`<${Devices} node=${node} />` : ""), (node) => node.allocated_count - node.device_count],
  "held by": [(node) => (node.holders.length ? node.holders.map((it) => html`<${Holder} it=${it} slots=${node.slots} />`) : ""), (node) => -node.holders.length],
  CPU: [(node) => html`<${Part} node=${node} used=${node.load} all=${node.cores} show=${(it) => number(it, 3)} unit="cores" title="CPU" curve=${node.curves?.cpu} />`, (node) => -(node.cores && node.load / node.cores)],
  memory: [(node) => html`<${Part} node=${node} used=${node.memory_used} all=${node.memory} show=${size} title="memory" curve=${node.curves?.memory} />
    ${node.disk > 0 && !node.silent && html`<div class="weak">${t("disk")} ${size(node.disk_used)} ${t("of")} ${size(node.disk)}</div>`}`, (node) => -(node.memory && node.memory_used / node.memory)],
  GPUs: [(node) => (node.gpus.length ? html`<${Gpus} node=${node} curve=${node.curves?.gpu} />` : ""), null],
};

// Why a machine does not answer: the line that names it. It stands in its row, and nowhere else.
const whyOf = (answer, name) => answer.warnings.find((line) => line.split(/[\s:,;]+/).includes(name))?.replace("; what it has is not shown", "");

// One row a machine, of what all targets say: what the same machine is called elsewhere, and which jobs it has there.
function merged(found) {
  const rows = new Map();
  for (const [target, answer] of Object.entries(found)) {
    for (const it of answer.nodes ?? []) {
      const curves = answer.curves?.[it.name], before = rows.get(it.key), node = it.silent ? { ...it, why: whyOf(answer, it.name) } : it;
      if (!before) {
        rows.set(node.key, { ...node, curves, targets: [target], names: [node.name] });
        continue;
      }
      const base = before.silent && !node.silent ? node : before;
      const held = new Set([...Object.keys(before.allocated), ...Object.keys(node.allocated)]).size;
      const more = before.device_count >= node.device_count ? before : node;
      rows.set(node.key, { ...base, curves: { ...curves, ...before.curves }, targets: [...before.targets, target], names: [...new Set([...before.names, node.name])],
        device_count: more.device_count, slots: more.slots, allocated_count: Math.min(more.device_count, held || Math.max(before.allocated_count, node.allocated_count)),
        holders: [...before.holders, ...node.holders.filter((it) => !before.holders.some((other) => other.name === it.name && other.since === it.since))] });
    }
  }
  return [...rows.values()];
}

// Asks for the machines of a target again and again; those that are shown have curves.
function Look({ name, shown, put }) {
  const asked = useRef(), again = useRef(() => {});
  asked.current = shown;
  useEffect(() => { // others are shown: they lack details
    const timer = setTimeout(() => again.current(), 300);
    return () => clearTimeout(timer);
  }, [shown]);
  useEffect(() => {
    let timer, isGone = false, curvesAt = -Infinity, had = "", nodes = 0, isRunning = false;
    const look = async () => {
      clearTimeout(timer);
      if (document.hidden || isRunning) return;
      isRunning = true;
      const waits = setTimeout(() => put(name, { slow: true }), SLOW);
      const { current } = asked, wants = current !== had || Date.now() - curvesAt > CURVES;
      try {
        const answer = await get(`/api/machines?${query({ target: name, shown: current || 1, curves: wants ? 1 : "" })}`);
        if (isGone) return;
        if (wants) [curvesAt, had] = [Date.now(), current];
        nodes = answer.nodes.length;
        put(name, { ...answer, error: null, slow: false });
      } catch (failure) { if (failure.status) put(name, { error: failure.message, slow: false }); } // else the banner says it
      finally { clearTimeout(waits); isRunning = false; }
      if (!isGone) timer = setTimeout(look, Math.max(EVERY, EACH * nodes));
    };
    again.current = () => asked.current !== had && look();
    look();
    const ends = [onSeen(look), () => clearTimeout(timer)];
    return () => { isGone = true; ends.forEach((end) => end()); };
  }, [name]);
  return null;
}

const byName = new Intl.Collator(undefined, { numeric: true }).compare;
export function Machines() {
  const [targets, setTargets] = useState(null);
  const [found, setFound] = useState({});
  const [, draw] = useState(0);
  const [{ q, kind, target, sort, most }, setFilter] = useState({ q: "", kind: "", target: "", sort: "", most: MOST });
  const change = (what) => setFilter((before) => ({ ...before, most: MOST, ...what }));
  const put = useCallback((name, answer) => setFound((before) => ({ ...before, [name]: { ...before[name], ...answer, curves: { ...before[name]?.curves, ...answer.curves } } })), []);
  useEffect(() => {
    const ask = () => targets === null && get("/api/jobs?limit=0").then((it) => setTargets(it.targets.map((one) => one.name)), () => {});
    ask();
    return listen(() => { ask(); draw((n) => n + 1); }); // the server is gone, or back
  }, [targets]);
  const machines = merged(Object.fromEntries((targets ?? []).filter((name) => found[name]).map((name) => [name, found[name]])));
  const counts = Object.fromEntries(KINDS.map((it) => [it, machines.filter((node) => kindOf(node) === it).length]));
  const words = q.toLowerCase().split(" ").filter(Boolean);
  const matching = machines.filter((node) => (!kind || kindOf(node) === kind) && (!target || node.targets.includes(target))
    && words.every((word) => [...node.names, ...node.targets, node.state, ...node.partitions, ...node.holders.map((it) => `${it.name} ${it.user ?? ""}`)].join(" ").toLowerCase().includes(word)));
  const by = COLUMNS[sort]?.[1] ?? (() => 0);
  const trouble = (node) => Math.min(2, KINDS.indexOf(kindOf(node))); // comes first
  matching.sort((one, other) => by(one) - by(other) || trouble(one) - trouble(other) || other.here - one.here || byName(one.name, other.name));
  const rows = matching.slice(0, most);
  const shownOf = (name) => (found[name]?.nodes?.length > MOST ? rows.filter((node) => node.targets.includes(name)).map((node) => node.names[0]).slice(0, MOST).join(",") : "");
  const columns = Object.keys(COLUMNS).filter((title) => title === "state" || rows.some((node) => !["", null].includes(COLUMNS[title][0](node))));
  const sum = (key, of) => of.reduce((total, node) => total + node[key], 0);
  const real = machines.filter((node) => !node.slots && !node.silent), slots = machines.filter((node) => node.slots && !node.silent);
  const lines = (targets ?? []).flatMap((name) => [found[name]?.error, ...(found[name]?.warnings ?? []).filter((line) => !found[name].nodes.some((node) => node.silent && whyOf({ warnings: [line] }, node.name)))].filter(Boolean).map((line) => [name, line]));
  const missing = (targets ?? []).filter((name) => !found[name]?.nodes && !found[name]?.error);
  const isDone = targets !== null && !missing.length;
  const title = (name) => html`<th scope="col" aria-sort=${sort === name ? "ascending" : undefined}>${COLUMNS[name] && !COLUMNS[name][1] ? t(name)
    : html`<button type="button" class="plain" onClick=${() => change({ sort: sort === name ? "" : name })}>${t(name)}${sort === name ? " ↓" : ""}</button>`}</th>`;
  return html`<h1>${t("Machines")}</h1>${(targets ?? []).map((name) => html`<${Look} key=${name} name=${name} shown=${shownOf(name)} put=${put} />`)}
    <p class="weak" role="status">${[machines.length > 0 && t(machines.length === 1 ? "1 machine" : "{n} machines", { n: whole(machines.length) }),
      sum("device_count", real) > 0 && t("{used} of {all} devices in use", { used: whole(sum("allocated_count", real)), all: whole(sum("device_count", real)) }),
      sum("device_count", slots) > 0 && t("{used} of {all} slots in use", { used: whole(sum("allocated_count", slots)), all: whole(sum("device_count", slots)) }),
      targets === null && t("Loading…"), ...missing.map((name) => t(found[name]?.slow ? "{target} has not answered yet" : "asking {target}…", { target: name }))].filter(Boolean).join(" · ")}</p>
    ${lines.map(([name, line]) => html`<p class="warning">${line.includes(name) ? spoken(line) : `${name}: ${spoken(line)}`}</p>`)}
    ${(machines.length >= MANY || q || kind || target) && html`<form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}>
      <input type="search" aria-label=${t("Search")} placeholder=${t("Search")} value=${q} onInput=${(event) => change({ q: event.target.value })} />
      ${targets.length > 1 && html`<select aria-label=${t("target")} value=${target} onChange=${(event) => change({ target: event.target.value })}><option value="">${t("All targets")}</option>${targets.map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
      <span class="chips">${KINDS.filter((it) => counts[it] || it === kind).map((it) => html`<button type="button" aria-pressed=${kind === it} onClick=${() => change({ kind: kind === it ? "" : it })}>
        <span class="state state-${MARKS[it]}">${t(it === "silent" ? "does not answer" : it)}</span> ${whole(counts[it])}</button>`)}</span></form>`}
    ${rows.length > 0 && html`<div class="scroll-x" tabindex="0"><table class="machines ${news.isOnline ? "" : "stale"}"><thead><tr>${["machine", ...columns].map(title)}</tr></thead>
      <tbody>${rows.map((node) => html`<tr key=${node.key}><th scope="row"><${Name} node=${node} /></th>
        ${columns.map((name) => html`<td class="of-${name.replace(" ", "-")}" data-title=${t(name)}>${COLUMNS[name][0](node)}</td>`)}</tr>`)}</tbody></table></div>`}
    ${matching.length > rows.length && html`<p><button type="button" onClick=${() => change({ most: most + MOST })}>${t("Show {n} more of {all}", { n: Math.min(MOST, matching.length - rows.length), all: whole(matching.length) })}</button></p>`}
    ${isDone && machines.length > 0 && !matching.length && html`<p class="weak">${t("No machine matches.")}</p>`}
    ${isDone && !machines.length && !lines.length && html`<p class="weak">${t("No machine. Name some in paceline.toml, or submit a job with --hosts.")}</p>`}`;
}
