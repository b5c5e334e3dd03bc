// The report: the views of some jobs, from the data in the file itself.
import { heard, learn, moment, number, span, t } from "./i18n.js";
import { Metrics, Overview, PARTS } from "./job.js";
import { html, Icon, render, useState } from "./ui.js";

const { version, time, jobs, sentences } = JSON.parse(document.getElementById("data").textContent);
learn(sentences);
heard(jobs);

const mean = (values) => {
  const known = (values ?? []).filter((value) => value != null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

function compared() {
  const names = [...new Set(jobs.flatMap((view) => Object.keys(view.metrics?.last ?? {})))].filter((name) => !PARTS.test(name));
  const seconds = (job) => (job.started && job.finished ? (Date.parse(job.finished) - Date.parse(job.started)) / 1000 : null);
  return [
    ["state", (view) => html`<span class="state state-${view.job.state}">${t(view.job.state)}</span>`],
    ["duration", (view) => span(seconds(view.job))], ["ranks", (view) => `${view.job.ranks} / ${view.job.nodes}`],
    ["restarts", (view) => view.job.restarts || ""], ["step", (view) => view.metrics?.step.at(-1) ?? view.job.progress?.step ?? ""],
    ["samples/s", (view) => number(view.job.progress?.samples_per_second)],
    ...names.map((name) => [name, (view) => (view.metrics && Object.hasOwn(view.metrics.last, name) ? number(view.metrics.last[name]) : "")]),
    ["CPU cores", (view) => number(mean(view.use?.total.values.cpu), 3)],
    ["GPUs in use", (view) => { const value = mean(view.use?.total.values.gpu); return value == null ? "" : `${number(value, 3)} %`; }],
    ["command", (view) => html`<code>${view.job.command}</code>`],
  ];
}

function Comparison() {
  const logged = jobs.filter((view) => view.metrics?.step.length).map((view) => ({ name: view.job.name, metrics: view.metrics }));
  return html`<div class="scroll-x" tabindex="0"><table><thead><tr><td></td>${jobs.map((view) => html`<th scope="col">${view.job.name}</th>`)}</tr></thead>
      <tbody>${compared().map(([title, of]) => [title, jobs.map(of)]).filter(([, values]) => values.some((value) => value !== "")).map(([title, values]) => html`
        <tr><th scope="row">${t(title)}</th>${values.map((value) => html`<td>${value}</td>`)}</tr>`)}</tbody></table></div>
    ${logged.length > 0 && html`<h2>${t("Metrics")}</h2><${Metrics} jobs=${logged} />`}`;
}

function Report() {
  const [shown, setShown] = useState(jobs.length > 1 ? -1 : 0);
  const tabs = jobs.length > 1 ? [[-1, t("Compare")], ...jobs.map((view, index) => [index, view.job.name])] : [];
  return html`<header><nav aria-label="paceline"><span class="brand"><${Icon} /><b>paceline</b></span> ${tabs.map(([index, title]) => html`<button type="button" aria-pressed=${shown === index} onClick=${() => setShown(index)}>${title}</button>`)}</nav>
      <span class="weak">${t("made {time} by paceline {version}", { time: moment(time), version })}</span></header>
    <main class="report">${shown < 0 ? html`<h1>${t("Compare")}</h1><${Comparison} />` : html`<h1>${jobs[shown].job.name}</h1><${Overview} view=${jobs[shown]} key=${shown} />`}</main>`;
}

render(html`<${Report} />`, document.getElementById("page"));
