// Two or more jobs beside each other: their curves over each other, and what differs between them. For the page and the report.
import { COLOURS, Patch } from "./charts.js";
import { number, size, span, t, whole } from "./i18n.js";
import { lossOf, Metrics, PARTS } from "./job.js";
import { html, useMemo, useState } from "./ui.js";

export const MOST = COLOURS.length; // jobs
// What a setting of a job file is about; others are resources.
const ABOUT = [
  ["Code", /^(script|module|command|code|sync_mode|working_dir|framework)\b/], ["Arguments", /^args\b/], ["Data", /^(data|volumes?|mounts?|checkpoint\w*|resume_from)\b/],
  ["Environment", /^(env|environment|image|python|setup|conda|venv|modules)\b/],
];

const mean = (values) => {
  const known = (values ?? []).filter((value) => value != null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};
const seconds = ({ started, finished }) => (started ? ((finished ? Date.parse(finished) : Date.now()) - Date.parse(started)) / 1000 : null);
const changed = (diff) => diff && `+${diff.match(/^\+(?!\+\+)/gm)?.length ?? 0} −${diff.match(/^-(?!--)/gm)?.length ?? 0}`;

// A key of a job file in words; a user's own names stay as they are.
const TITLES = { max_restarts: "Restarts after failures", time_limit: "Time limit", devices: "Devices per node" };
const titled = (key) => (/^(args|env)\./.test(key) ? key.replace(/^\w+\./, "") : key.startsWith("labels.") ? t("label {name}", { name: key.slice(7) }) : t(TITLES[key] ?? key.replaceAll("_", " ")));

const UNKNOWN = Symbol("unknown"); // it differs from nothing
const lastOf = (last, name, show) => (last?.[name] === null && Object.hasOwn(last, name) ? "NaN" : show(valueOf(last, name)));
const valueOf = (values, key) => (values && Object.hasOwn(values, key) ? values[key] : null);

// [about, name, a text of each job, or null if that is not known]
function rowsOf(views) {
  const all = (of) => [...new Set(views.flatMap((view) => Object.keys(of(view) ?? {})))];
  const metrics = all((view) => view.metrics?.last).filter((name) => !PARTS.test(name)), loss = lossOf(metrics);
  const row = (about, name, of) => [about, name, views.map(of).map((it) => (it === UNKNOWN ? null : String(it ?? "")))];
  const used = (name, show) => row("Result", t(name === "cpu" ? "CPU cores" : "GPUs in use"), (view) => { const value = mean(view.use?.total.values[name]); return value == null ? UNKNOWN : show(number(value, 3)); });
  const settings = all((view) => view.settings).filter((key) => !["ranks", "nodes", "backend"].includes(key)).map((key) => {
    const about = ABOUT.find(([, like]) => like.test(key))?.[0] ?? "Resources";
    return row(about, titled(key), (view) => (view.file ? valueOf(view.settings, key) : UNKNOWN));
  });
  const software = all((view) => view.software).map((name) => row("Environment", name, (view) => (Object.keys(view.software).length ? valueOf(view.software, name) : UNKNOWN)));
  return [
    row("Result", t("state"), ({ job }) => job.state), row("Result", t("duration"), ({ job }) => span(seconds(job))),
    row("Result", t("step"), (view) => view.metrics?.step.at(-1) ?? view.job.progress?.step), row("Result", t("samples/s"), ({ job }) => number(job.progress?.samples_per_second)),
    ...(loss ? [row("Result", `${loss} (${t("lowest")})`, (view) => number(Math.min(...(valueOf(view.metrics?.values, loss) ?? []).filter((it) => it != null), Infinity)).replace("∞", ""))] : []),
    ...metrics.map((name) => row("Result", name === "sent_bytes" ? t("bytes sent") : name, (view) => lastOf(view.metrics?.last, name, name === "sent_bytes" ? size : number))),
    used("cpu", (it) => it), used("gpu", (it) => `${it} %`), row("Result", t("restarts"), ({ job }) => job.restarts || ""), row("Result", t("error"), ({ job }) => job.error),
    row("Code", t("commit"), ({ job, origin }) => job.code?.commit ?? origin?.commit ?? UNKNOWN), row("Code", t("branch"), ({ origin }) => origin?.branch ?? UNKNOWN),
    row("Code", t("source"), ({ job }) => job.code?.source), row("Code", t("Changes since the commit"), ({ origin }) => (origin ? changed(origin.diff) : UNKNOWN)),
    ...settings.filter(([about]) => about === "Code"), ...settings.filter(([about]) => about === "Arguments"),
    ...(views.some((view) => !view.file) ? [row("Arguments", t("command"), ({ job }) => job.command)] : []),
    ...settings.filter(([about]) => about === "Environment"), ...software, ...settings.filter(([about]) => about === "Data"),
    row("Resources", t("target"), ({ job }) => job.backend), row("Resources", t("ranks"), ({ job }) => whole(job.ranks)), row("Resources", t("nodes"), ({ job }) => whole(job.nodes)),
    row("Resources", t("devices"), ({ job }) => job.devices.join(", ")), ...settings.filter(([about]) => about === "Resources"),
  ].filter(([, , values]) => values.some(Boolean));
}

// A text, with the words marked that not all others have. What was measured always differs, and has no marks.
function Marked({ text, others }) {
  if (text == null) return html`<span class="weak">${t("unknown")}</span>`;
  if (!text) return html`<span class="weak">–</span>`;
  const known = others.map((other) => new Set(other.split(/\s+/)));
  return text.split(/(\s+)/).map((word) => (word.trim() && !known.every((it) => it.has(word)) ? html`<mark>${word}</mark>` : word));
}

// The changes of the code, with the lines marked that not all others have.
function Changes({ views }) {
  const diffs = views.map((view) => view.origin?.diff ?? "");
  if (new Set(diffs).size < 2) return null;
  const known = diffs.map((diff) => new Set(diff.split("\n")));
  return html`<details class="section"><summary><h2>${t("Changes since the commit")}</h2></summary>${views.map((view, index) => diffs[index] && html`<h3>${view.job.name}</h3>
    <pre class="diff" tabindex="0">${diffs[index].split("\n").map((line) => html`${/^[+-]/.test(line) && !known.every((it) => it.has(line)) ? html`<mark>${line}</mark>` : line}${"\n"}`)}</pre>`)}</details>`;
}

// `title` shows the name of a job, above its column.
export function Comparison({ views, title }) {
  const [isAll, setAll] = useState(false);
  const logged = useMemo(() => views.map((view, index) => ({ name: view.job.name, metrics: view.metrics, colour: COLOURS[index % MOST] })).filter((it) => it.metrics?.step.length), [views]);
  const rows = useMemo(() => rowsOf(views), [views]);
  const isMixed = (values) => new Set(values.filter((it) => it != null)).size > 1;
  const differing = rows.filter(([, , values]) => isMixed(values));
  const shown = isAll ? rows : differing;
  return html`${logged.length > 0 && html`<${Metrics} jobs=${logged} isOne=${false} />`}
    <div class="bar"><h2>${t("What differs")}</h2> ${rows.length > differing.length && html`<label><input type="checkbox" checked=${isAll} onChange=${() => setAll(!isAll)} /> ${t("also {n} rows that are equal", { n: rows.length - differing.length })}</label>`}</div>
    <div class="scroll-x" tabindex="0"><table class="compared"><thead><tr><td></td>${views.map((view, index) => html`<th scope="col"><${Patch} colour=${COLOURS[index % MOST]} /> ${title(view, index)}</th>`)}</tr></thead>
      ${["Result", "Code", "Arguments", "Environment", "Data", "Resources"].map((about) => [about, shown.filter((row) => row[0] === about)]).filter(([, some]) => some.length).map(([about, some]) => html`<tbody>
        <tr><th colspan=${views.length + 1} scope="rowgroup" class="about">${t(about)}</th></tr>
        ${some.map(([, name, values]) => html`<tr><th scope="row">${name}</th>${values.map((text, index) => html`<td>${about === "Result" && name === t("state") ? html`<span class="state state-${text}">${t(text)}</span>` : html`<${Marked} text=${text} others=${about !== "Result" && isMixed(values) ? values.filter((it, other) => other !== index && it != null) : []} />`}</td>`)}</tr>`)}</tbody>`)}</table></div>
    ${differing.length === 0 && html`<p class="weak">${t("Nothing that is known of them differs.")}</p>`}
    <${Changes} views=${views} />`;
}
