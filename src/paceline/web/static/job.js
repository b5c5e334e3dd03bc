// All about a job, as web/views.py gives it: for the page and for the report.
import { pieces } from "./ansi.js";
import { Chart, COLOURS, RankMap, smoothed } from "./charts.js";
import { clockOf, dayOf, moment, number, size, span, t, whole, zoned } from "./i18n.js";
import { Timeline } from "./timeline.js";
import { html, useMemo, useState } from "./ui.js";

const rate = (value) => (value == null ? "" : `${size(value)}/s`);
rate.isBytes = true;
const percent = (value) => (value == null ? "" : `${number(value, 3)} %`);
const watts = (value) => (value == null ? "" : `${number(value, 3)} W`);
const degrees = (value) => (value == null ? "" : `${number(value, 3)} °C`);
// title → figures of views.py, and how they are shown
const USE = [
  ["GPUs in use", ["gpu"], percent], ["GPU memory", ["gpu_memory"], size], ["CPU cores", ["cpu", "load"], number], ["Memory", ["memory", "memory_used"], size],
  ["Network", ["received", "sent"], rate], ["Disk", ["read", "written"], rate], ["Power", ["power"], watts], ["Temperature", ["temperature"], degrees],
];
const LABELS = { cpu: "this job", load: "the machines", memory: "this job", memory_used: "the machines", gpu: "mean", gpu_memory: "sum", power: "sum", temperature: "most" };
export const PARTS = /^(data|forward_backward|sync|optimizer|checkpoint|total)_seconds$/;

const LOSSES = [/^(train[_/.-]?)?loss$/i, /loss/i];
export const lossOf = (names) => LOSSES.map((like) => names.find((name) => like.test(name))).find(Boolean);

const Section = ({ title, children, open = true }) => html`<details class="section" open=${open}><summary><h2>${t(title)}</h2></summary>${children}</details>`;

export function Line({ text }) {
  return html`<div>${pieces(text).map(([part, style]) => html`<span class=${[style.bold && "bold", style.dim && "dim", typeof style.color === "number" && `ansi-color-${style.color}`].filter(Boolean).join(" ")}>${part}</span>`)}${"\n"}</div>`;
}

// What matters most: why it is as it is, and what to do.
function Said({ job, hangs }) {
  const said = [["error", job.error, "bad"], hangs ? ["hangs", job.waiting, "bad"] : ["waiting", job.waiting, "waits"], ["advice", job.advice, "good"], ...job.slow.map((line) => ["slow", line, "waits"])];
  return said.filter(([, value]) => value).map(([key, value, kind]) => html`<p class="said ${kind}"><span class="weak">${t(key)}</span> ${value}</p>`);
}

// How far it is, and how long it will take.
function Progress({ job, done }) {
  const it = job.progress;
  if (!it) return null;
  const left = job.state === "RUNNING" && it.seconds_left != null && t("{time} left", { time: span(it.seconds_left) });
  const words = [done != null && `${Math.floor(100 * done)} %`, it.epochs && `${t("epoch")} ${Math.min(it.epoch + 1, it.epochs)}/${it.epochs}`, `${t("step")} ${whole(it.step)}${it.epochs && it.steps ? `/${whole(it.steps)}` : ""}`].filter(Boolean);
  return html`<div class="progress">${done != null && html`<progress max="1" value=${done} aria-label=${t("progress")}></progress>`}<span>${words.join(" · ")}</span>${left && html`<b>${left}</b>`}</div>`;
}

// What is known in a glance, in one line; the rest below.
export function Facts({ job }) {
  const end = job.finished ? Date.parse(job.finished) : job.state === "RUNNING" ? Date.now() : null;
  const chips = [
    ["duration", job.started && end ? span((end - Date.parse(job.started)) / 1000) : ""], ["ranks", whole(job.ranks)], ["nodes", job.nodes > 1 && whole(job.nodes)],
    ["devices", job.devices.join(", ") || job.allocated || ""], ["samples/s", job.progress?.samples_per_second && number(job.progress.samples_per_second)],
    ["restarts", job.max_restarts ? `${job.restarts} ${t("of")} ${job.max_restarts}` : job.restarts || ""], ["checkpoint", job.checkpoint && `${t("step")} ${whole(job.checkpoint.step)}`],
    ["exit code", job.exit_code ? job.exit_code : ""], ["environment", job.environment],
    ["labels", Object.entries(job.labels).map(([name, value]) => `${name}=${value}`).join(" ")],
  ];
  const rest = [["folder", job.working_dir], ["target", job.backend], ["created", moment(job.created)], ["started", moment(job.started)], ["finished", moment(job.finished)]];
  return html`<dl class="glance">${chips.filter(([, value]) => value).map(([key, value]) => html`<div><dt>${t(key)}</dt><dd>${value}</dd></div>`)}</dl>
    ${job.command && html`<details class="facts-more"><summary><code>${job.command}</code></summary><dl class="facts">${rest.filter(([, value]) => value).map(([key, value]) => html`<dt>${t(key)}</dt><dd>${value}</dd>`)}</dl></details>`}`;
}

// The lines of `why`: frames of libraries are folded, the user's line stands out.
const Told = ({ blocks }) => html`<div class="why" tabindex="0">${blocks.map(({ kind, text, count, of }) => (kind === "folded"
  ? html`<details><summary>${t(count === 1 ? "1 frame of {of}" : "{n} frames of {of}", { n: count, of: of.join(", ") })}</summary><pre>${text}</pre></details>`
  : kind === "at" ? html`<pre class="at"><mark>${text}</mark></pre>` : html`<pre>${zoned(text)}</pre>`))}</div>`;

// Events, a row each; checkpoints that follow each other share one.
function Story({ events }) {
  const rows = [];
  for (const event of events) {
    const last = rows.at(-1);
    if (event.event === "checkpoint" && last?.[0].event === "checkpoint" && last[0].host === event.host) last.push(event);
    else rows.push([event]);
  }
  const told = (event) => (event.sentence ? t(...event.sentence) : `${event.event}: ${event.details}`);
  const hasHosts = events.some((event) => event.host);
  const when = (event, before) => html`${dayOf(event.time) !== (before && dayOf(before.time)) && html`<span class="day">${dayOf(event.time)}</span> `}${clockOf(event.time)}`;
  const until = (event, before) => (dayOf(event.time) === dayOf(before.time) ? clockOf(event.time) : moment(event.time));
  return html`<div class="scroll-x" tabindex="0"><table class="events"><thead><tr><th>${t("time")}</th>${hasHosts && html`<th>${t("node")}</th>`}<th>${t("event")}</th></tr></thead><tbody>
    ${rows.map((some, at) => html`<tr><td class="nowrap" title=${moment(some[0].time)}>${when(some[0], rows[at - 1]?.[0])}</td>${hasHosts && html`<td>${some[0].host}</td>`}<td class="wrap" title=${`${some[0].event} ${some[0].details}`}>${some.length === 1 ? told(some[0])
      : html`<details><summary>${t("{n} times until {time}", { n: whole(some.length), time: until(some.at(-1), some[0]) })}: ${told(some[0])} – ${told(some.at(-1))}</summary>${some.map((event) => html`<div>${until(event, some[0])} ${told(event)}</div>`)}</details>`}</td></tr>`)}</tbody></table></div>`;
}

// What the script has logged; `jobs` are [{name, metrics, colour}], laid over each other. What people look at first is larger.
export function Metrics({ jobs, isOne = jobs.length === 1 }) {
  const [isLog, setLog] = useState(false);
  const [weight, setWeight] = useState(0);
  const [isTime, setTime] = useState(false);
  const [first, others] = useMemo(() => {
    const all = [...new Set(jobs.flatMap((it) => Object.keys(it.metrics.values)))];
    const parts = all.filter((name) => PARTS.test(name)), own = all.filter((name) => !parts.includes(name) && name !== "sent_bytes");
    const chart = (name, show) => ({ name, show, ...overlaid(jobs, isOne, name, isTime, weight) });
    const paced = jobs.map(({ metrics, ...it }) => ({ ...it, metrics: { ...metrics, values: { pace: metrics.values.total_seconds ?? paceOf(metrics) } } }));
    const pace = { name: t("Seconds of a step"), ...(parts.length && isOne ? together(jobs[0], parts, isTime, weight) : overlaid(paced, isOne, "pace", isTime, weight, t("a step"))) };
    const loss = lossOf(own) ?? own[0];
    return [[...(loss ? [chart(loss)] : []), pace], [...own.filter((name) => name !== loss).map((name) => chart(name)), ...(!isOne ? parts.filter((name) => name !== "total_seconds").map((name) => chart(name)) : []),
      ...all.filter((name) => name === "sent_bytes").map((name) => ({ ...chart(name, size), name: t("bytes sent") }))]];
  }, [jobs, isTime, weight]);
  const drawn = (charts) => charts.map((it) => html`<${Chart} key=${it.name} title=${it.name} x=${it.x} series=${it.series} isTime=${isTime && isOne} isLog=${isLog} show=${it.show} sync=${`metrics-${jobs[0].name}`} />`);
  return html`<div class="charts pair">${drawn(first)}</div>
    <form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <label><input type="checkbox" checked=${isLog} onChange=${() => setLog(!isLog)} /> ${t("Logarithmic")}</label>
      <label><input type="checkbox" checked=${isTime} onChange=${() => setTime(!isTime)} /> ${t("Over time")}</label>
      <label>${t("Smoothing")} <input type="range" min="0" max="0.95" step="0.05" value=${weight} onInput=${(event) => setWeight(Number(event.target.value))} /></label>
      <span class="weak">${t("Drag to zoom; double-click shows all.")}</span></form>
    ${others.length > 0 && html`<details class="section" open=${others.length <= 6}><summary><h2>${t("More metrics")} <span class="weak">${whole(others.length)}</span></h2></summary><div class="charts">${drawn(others)}</div></details>`}`;
}

// Seconds of a step, from the times of the lines that were logged.
function paceOf({ time, step }) {
  return step.map((it, place) => (place && it > step[place - 1] ? (time[place] - time[place - 1]) / (it - step[place - 1]) : null));
}

// One chart's columns: all jobs over one x. Over time, several jobs begin at 0, in seconds.
function overlaid(jobs, isOne, name, isTime, weight, title = name) {
  const of = jobs.filter((it) => Object.hasOwn(it.metrics.values, name));
  const xs = of.map(({ metrics }) => (!isTime ? metrics.step : isOne ? metrics.time : metrics.time.map((time) => time - metrics.time[0])));
  const x = of.length === 1 ? xs[0] : [...new Set(xs.flat())].sort((a, b) => a - b);
  const series = of.flatMap((it, index) => {
    // Several lines may have one step, as at the end of an epoch, and each has some of the metrics.
    const at = new Map(xs[index].map((value, place) => [value, it.metrics.values[name][place]]).filter(([, value]) => value !== null));
    const values = x.map((value) => at.get(value) ?? null);
    const isOdd = it.metrics.last[name] === null; // NaN, or infinite
    const ink = it.colour ?? COLOURS[0], label = isOne ? title : it.name;
    return weight ? [{ label: `${label} (${t("as logged")})`, values, colour: ink, faint: true }, { label, values: smoothed(values, weight), colour: ink, isOdd }] : [{ label, values, colour: ink, isOdd }];
  });
  return { x, series };
}

// The parts of a step of one job, in one chart.
function together({ metrics }, names, isTime, weight) {
  const series = names.map((name) => ({ label: name.replace(/_seconds$/, ""), values: smoothed(metrics.values[name], weight) }));
  return { x: isTime ? metrics.time : metrics.step, series };
}

export function Use({ use, name }) {
  const [of, setOf] = useState("");
  const node = use.nodes.find((it) => it.of === of);
  const curves = node ?? use.total, x = node ? use.node_time : use.time;
  const charts = useMemo(() => USE.map(([title, keys, show]) => ({ title, show, series: keys.filter((key) => curves.values[key]).map((key) => ({ label: t(LABELS[key] ?? key), values: curves.values[key] })) }))
    .filter((it) => it.series.length), [curves]);
  return html`${use.ranks && html`<${RankMap} ranks=${use.ranks} />`}
    ${use.nodes.length > 0 && html`<p><label>${t("node")} <select value=${of} onChange=${(event) => setOf(event.target.value)}><option value="">${t("all together")}</option>
      ${use.nodes.map((it) => html`<option value=${it.of}>${it.of}</option>`)}</select></label></p>`}
    <div class="charts">${charts.map((it) => html`<${Chart} key=${it.title} title=${t(it.title)} x=${x} series=${it.series} isTime=${true} show=${it.show} sync=${`use-${name}`} low=${0} />`)}</div>`;
}

function Ranks({ job }) {
  const columns = [["rank", (it) => it.rank], ["name", (it) => it.name], ["node", (it) => it.node], ["state", (it) => html`<span class="state state-${it.state}">${t(it.state)}</span>`], ["exit code", (it) => it.exit_code ?? ""]]
    .filter(([, of]) => job.instances.some((it) => !["", null, undefined].includes(of(it))));
  return html`<div class="scroll-x" tabindex="0"><table class="ranks"><thead><tr>${columns.map(([title]) => html`<th class="of-${title.replace(" ", "-")}">${t(title)}</th>`)}</tr></thead><tbody>
    ${job.instances.map((it) => html`<tr>${columns.map(([title, of]) => html`<td class="of-${title.replace(" ", "-")}">${of(it)}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Origin({ view }) {
  const { job, origin } = view;
  const code = [["source", job.code?.source], ["ref", job.code?.ref], ["commit", job.code?.commit ?? origin?.commit], ["branch", origin?.branch],
    ...Object.entries(view.software)].filter(([, value]) => value);
  return html`${code.length > 0 && html`<dl class="facts">${code.map(([key, value]) => html`<dt>${t(key)}</dt><dd>${value}</dd>`)}</dl>`}
    ${view.file && html`<h3>${t("Job file")}</h3><pre tabindex="0">${view.file}</pre>`}
    ${origin?.diff && html`<h3>${t("Changes since the commit")}</h3><pre class="diff" tabindex="0">${origin.diff}</pre>`}`;
}

// Everything but the live logs.
export function Overview({ view }) {
  const { job } = view;
  const jobs = useMemo(() => (view.metrics?.step.length ? [{ name: job.name, metrics: view.metrics }] : []), [view]);
  const metrics = jobs.length > 0 && html`<${Metrics} jobs=${jobs} />`, isFailed = job.state === "FAILED";
  return html`<${Said} job=${job} hangs=${view.hangs} /><${Progress} job=${job} done=${job.state === "SUCCEEDED" ? null : view.done} /><${Timeline} of=${view.timeline} />
    <${Facts} job=${job} />
    ${!isFailed && metrics}
    ${view.told.length > 0 && html`<${Section} title=${job.error || job.waiting || view.timeline.totals.hung ? "Why" : "Remarks"}><${Told} blocks=${view.told} /><//>`}
    ${isFailed && metrics && html`<${Section} title="Metrics">${metrics}<//>`}
    ${view.use && html`<${Section} title="Use"><${Use} use=${view.use} name=${job.name} /><//>`}
    <${Section} title="Events"><${Story} events=${view.events} /><//>
    ${job.instances.length > 0 && html`<${Section} title="Ranks" open=${job.instances.length <= 16}><${Ranks} job=${job} /><//>`}
    ${view.logs.length > 0 && html`<${Section} title="Last lines" open=${view.logs.length <= 4}>${view.logs.map((it) => html`<h3>${t("rank")} ${it.rank}</h3><pre class="last" tabindex="0">${it.lines.map((text) => html`<${Line} text=${text} />`)}</pre>`)}<//>`}
    ${(view.file || view.origin || job.code) && html`<${Section} title="Job file and code" open=${false}><${Origin} view=${view} /><//>`}
    ${view.missing.length > 0 && html`<${Section} title="What is missing"><ul>${view.missing.map((line) => html`<li class="warning">${line}</li>`)}</ul><//>`}`;
}

// On paper all sections are open, and the colours are light.
let screen = null;
addEventListener("beforeprint", () => {
  const root = document.documentElement, closed = [...document.querySelectorAll("details.section:not([open])")];
  screen ??= { scheme: root.style.colorScheme, closed };
  root.style.colorScheme = "light";
  for (const it of closed) it.open = true;
});
addEventListener("afterprint", () => {
  if (!screen) return;
  document.documentElement.style.colorScheme = screen.scheme;
  for (const it of screen.closed) it.open = false;
  screen = null;
});
