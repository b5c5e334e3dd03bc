// All about a job, as web/views.py gives it: for the page and for the report.
import { pieces } from "./ansi.js";
import { Chart, COLOURS, RankMap, smoothed } from "./charts.js";
import { moment, number, size, span, spoken, t, whole, zoned } from "./i18n.js";
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

const Section = ({ title, children, open = true }) => html`<details class="section" open=${open}><summary><h2>${t(title)}</h2></summary>${children}</details>`;

export function Line({ text }) {
  return html`<div>${pieces(text).map(([part, style]) => html`<span class=${[style.bold && "bold", style.dim && "dim", typeof style.color === "number" && `ansi-color-${style.color}`].filter(Boolean).join(" ")}>${part}</span>`)}${"\n"}</div>`;
}

// What is known in a glance: state, times, progress, command.
export function Facts({ job }) {
  const steps = job.progress && `${job.progress.epochs ? `${t("epoch")} ${job.progress.epoch + 1}/${job.progress.epochs}, ` : ""}${t("step")} ${whole(job.progress.step)}`;
  const end = job.finished ? Date.parse(job.finished) : job.state === "RUNNING" ? Date.now() : null;
  const chips = [
    ["progress", steps], ["left", job.state === "RUNNING" && span(job.progress?.seconds_left)], ["samples/s", job.progress?.samples_per_second && number(job.progress.samples_per_second)],
    ["duration", job.started && end ? span((end - Date.parse(job.started)) / 1000) : ""], ["ranks", job.ranks], ["nodes", job.nodes > 1 && job.nodes], ["devices", job.devices.join(", ")],
    ["restarts", job.max_restarts ? `${job.restarts} ${t("of")} ${job.max_restarts}` : job.restarts || ""], ["checkpoint", job.checkpoint && `${t("step")} ${whole(job.checkpoint.step)}`],
    ["exit code", job.exit_code ? job.exit_code : ""], ["environment", job.environment], ["target", job.backend],
    ["labels", Object.entries(job.labels).map(([name, value]) => `${name}=${value}`).join(" ")],
    ["created", moment(job.created)], ["started", moment(job.started)], ["finished", moment(job.finished)],
  ];
  const said = [["error", job.error, "bad"], ["waiting", job.waiting, "waits"], ["advice", job.advice, "good"], ...job.slow.map((line) => ["slow", line, "waits"])];
  return html`${said.filter(([, value]) => value).map(([key, value, kind]) => html`<p class="said ${kind}"><span class="weak">${t(key)}</span> ${value}</p>`)}
    <dl class="glance">${chips.filter(([, value]) => value).map(([key, value]) => html`<div><dt>${t(key)}</dt><dd>${value}</dd></div>`)}</dl>
    <dl class="facts">${[["command", job.command], ["folder", job.working_dir]].filter(([, value]) => value).map(([key, value]) => html`<dt>${t(key)}</dt><dd><code>${value}</code></dd>`)}</dl>`;
}

function Story({ events }) {
  return html`<div class="scroll-x" tabindex="0"><table><thead><tr><th>${t("time")}</th><th>${t("event")}</th><th>${t("node")}</th><th>${t("details")}</th></tr></thead><tbody>
    ${events.map((event) => html`<tr><td class="nowrap">${moment(event.time)}</td><td title=${event.details}>${event.event}</td><td>${event.host}</td><td class="wrap">${event.sentence ? t(...event.sentence) : event.details}</td></tr>`)}</tbody></table></div>`;
}

// What the script has logged; `jobs` are [{name, metrics}], laid over each other.
export function Metrics({ jobs }) {
  const [isLog, setLog] = useState(false);
  const [weight, setWeight] = useState(0);
  const [isTime, setTime] = useState(false);
  const charts = useMemo(() => {
    const all = [...new Set(jobs.flatMap((it) => Object.keys(it.metrics.values)))];
    const parts = all.filter((name) => PARTS.test(name)), own = all.filter((name) => !parts.includes(name));
    const several = jobs.length > 1 ? parts.map((name) => ({ name, ...overlaid(jobs, name, isTime, weight) })) : parts.length ? [{ name: t("Seconds of a step"), ...together(jobs[0], parts, isTime, weight) }] : [];
    return [...own.filter((name) => name !== "sent_bytes").map((name) => ({ name, ...overlaid(jobs, name, isTime, weight) })), ...several,
      ...own.filter((name) => name === "sent_bytes").map((name) => ({ name, show: size, ...overlaid(jobs, name, isTime, weight) }))];
  }, [jobs, isTime, weight]);
  return html`<form class="bar" onSubmit=${(event) => event.preventDefault()}>
      <label><input type="checkbox" checked=${isLog} onChange=${() => setLog(!isLog)} /> ${t("Logarithmic")}</label>
      <label><input type="checkbox" checked=${isTime} onChange=${() => setTime(!isTime)} /> ${t("Over time")}</label>
      <label>${t("Smoothing")} <input type="range" min="0" max="0.95" step="0.05" value=${weight} onInput=${(event) => setWeight(Number(event.target.value))} /></label>
      <span class="weak">${t("Drag to zoom; double-click shows all.")}</span></form>
    <div class="charts">${charts.map((it) => html`<${Chart} key=${it.name} title=${it.name} x=${it.x} series=${it.series} isTime=${isTime && jobs.length === 1} isLog=${isLog} show=${it.show} sync=${`metrics-${jobs[0].name}`} />`)}</div>`;
}

// One chart's columns: all jobs over one x. Over time, several jobs begin at 0, in seconds.
function overlaid(jobs, name, isTime, weight) {
  const of = jobs.filter((it) => Object.hasOwn(it.metrics.values, name));
  const xs = of.map(({ metrics }) => (!isTime ? metrics.step : jobs.length === 1 ? metrics.time : metrics.time.map((time) => time - metrics.time[0])));
  const x = of.length === 1 ? xs[0] : [...new Set(xs.flat())].sort((a, b) => a - b);
  const series = of.flatMap((it, index) => {
    const at = new Map(xs[index].map((value, place) => [value, it.metrics.values[name][place]]));
    const values = x.map((value) => at.get(value) ?? null);
    const ink = COLOURS[jobs.indexOf(it) % COLOURS.length], label = jobs.length === 1 ? name : it.name;
    return weight ? [{ label: `${label} (${t("as logged")})`, values, colour: ink, faint: true }, { label, values: smoothed(values, weight), colour: ink }] : [{ label, values, colour: ink }];
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
  return html`<div class="scroll-x" tabindex="0"><table><thead><tr><th>${t("rank")}</th><th>${t("name")}</th><th>${t("node")}</th><th>${t("state")}</th><th>${t("exit code")}</th></tr></thead><tbody>
    ${job.instances.map((it) => html`<tr><td>${it.rank}</td><td>${it.name}</td><td>${it.node}</td><td><span class="state state-${it.state}">${t(it.state)}</span></td><td>${it.exit_code ?? ""}</td></tr>`)}</tbody></table></div>`;
}

function Origin({ view }) {
  const { job, origin } = view;
  const code = [["source", job.code?.source], ["ref", job.code?.ref], ["commit", job.code?.commit ?? origin?.commit], ["branch", origin?.branch],
    ...Object.entries(view.software)].filter(([, value]) => value);
  return html`${code.length > 0 && html`<dl class="facts">${code.map(([key, value]) => html`<dt>${t(key)}</dt><dd>${value}</dd>`)}</dl>`}
    ${view.file && html`<h3>${t("Job file")}</h3><pre tabindex="0">${view.file}</pre>`}
    ${origin?.diff && html`<h3>${t("Changes since the commit")}</h3><pre class="diff" tabindex="0">${origin.diff}</pre>`}`;
}

// Everything but the live logs; `others` are views of jobs whose metrics are laid over.
export function Overview({ view, others = [] }) {
  const { job } = view;
  const jobs = useMemo(() => [view, ...others].filter((it) => it.metrics?.step.length).map((it) => ({ name: it.job.name, metrics: it.metrics })), [view, others]);
  return html`<${Facts} job=${job} />
    ${jobs.length > 0 && job.state !== "FAILED" && html`<${Section} title="Metrics"><${Metrics} jobs=${jobs} /><//>`}
    ${view.why.length > 1 && html`<${Section} title="Why"><pre class="why" tabindex="0">${view.why.slice(1).map((line) => zoned(spoken(line))).join("\n").trim()}</pre><//>`}
    ${jobs.length > 0 && job.state === "FAILED" && html`<${Section} title="Metrics"><${Metrics} jobs=${jobs} /><//>`}
    ${view.use && html`<${Section} title="Use"><${Use} use=${view.use} name=${job.name} /><//>`}
    <${Section} title="Events"><${Story} events=${view.events} /><//>
    ${job.instances.length > 0 && html`<${Section} title="Ranks" open=${job.instances.length <= 16}><${Ranks} job=${job} /><//>`}
    ${view.logs.length > 0 && html`<${Section} title="Last lines" open=${view.logs.length <= 4}>${view.logs.map((it) => html`<h3>${t("rank")} ${it.rank}</h3><pre class="last" tabindex="0">${it.lines.map((text) => html`<${Line} text=${text} />`)}</pre>`)}<//>`}
    ${(view.file || view.origin || job.code) && html`<${Section} title="Job file and code" open=${false}><${Origin} view=${view} /><//>`}
    ${view.missing.length > 0 && html`<${Section} title="What is missing"><ul>${view.missing.map((line) => html`<li class="warning">${line}</li>`)}</ul><//>`}`;
}
