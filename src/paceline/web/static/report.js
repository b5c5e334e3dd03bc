// The report: the views of some jobs, from the data in the file itself.
import { Comparison } from "./compare.js";
import { heard, learn, moment, t } from "./i18n.js";
import { Overview } from "./job.js";
import { html, Icon, render, useState } from "./ui.js";

const { version, time, jobs, sentences } = JSON.parse(document.getElementById("data").textContent);
learn(sentences);
heard(jobs);

function Report() {
  const [shown, setShown] = useState(jobs.length > 1 ? -1 : 0);
  const tabs = jobs.length > 1 ? [[-1, t("Compare")], ...jobs.map((view, index) => [index, view.job.name])] : [];
  return html`<header><nav aria-label="paceline"><span class="brand"><${Icon} /><b>paceline</b></span> ${tabs.map(([index, title]) => html`<button type="button" aria-pressed=${shown === index} onClick=${() => setShown(index)}>${title}</button>`)}</nav>
      <span class="weak">${t("made {time} by paceline {version}", { time: moment(time), version })}</span></header>
    <main class="report">${shown < 0 ? html`<h1>${t("Compare")}</h1><${Comparison} views=${jobs} title=${(view, index) => html`<button type="button" class="plain" onClick=${() => setShown(index)}>${view.job.name}</button>`} />` : html`<div class="bar"><h1>${jobs[shown].job.name}</h1> <span class="state state-${jobs[shown].job.state}">${t(jobs[shown].job.state)}</span> <span class="weak">${jobs[shown].job.backend}</span></div><${Overview} view=${jobs[shown]} key=${shown} />`}</main>`;
}

render(html`<${Report} />`, document.getElementById("page"));
