// The machines of all targets, what is in use, and by whom: each target for itself, so that none waits for another.
import { get, query } from "./api.js";
import { number, size, t, whole } from "./i18n.js";
import { html, useEffect, useState } from "./ui.js";

const EVERY = 5000; // milliseconds
const KEPT = 120; // points of a curve

function Curve({ values, label }) {
  const points = values.map((value, index) => (value == null ? "" : `${values[index - 1] == null ? "M" : "L"}${index},${(20 - 19 * Math.min(1, value)).toFixed(1)}`)).join("");
  return html`<svg class="curve" viewBox="0 0 ${KEPT} 20" preserveAspectRatio="none" role="img" aria-label=${label}><path d=${points} /></svg>`;
}

function Part({ used, all, show, curve, label }) {
  if (!all) return "";
  return html`<meter min="0" max="1" value=${Math.min(1, used / all)} aria-label=${label}></meter> ${show(used)} ${t("of")} ${show(all)}
    ${curve?.length > 1 && html`<${Curve} values=${curve} label=${label} />`}`;
}

function jobsOf(node) {
  return Object.entries(node.jobs).map(([job, count]) => `${job}: ${count}`).join(", ");
}

function gpu(it) {
  const parts = [it.use != null && `${number(it.use, 3)} %`, it.memory_used != null && `${size(it.memory_used)} ${t("of")} ${size(it.memory)}`,
    it.temperature != null && `${number(it.temperature, 3)} °C`, it.power != null && `${number(it.power, 3)} W`];
  return `${it.index}: ${parts.filter(Boolean).join(" ")}`;
}

// title → what is shown of a machine; a column that is empty for all of them is left out
const COLUMNS = {
  state: (node) => node.state,
  devices: (node) => (node.device_count ? `${whole(node.allocated_count)} ${t("of")} ${whole(node.device_count)}` : ""),
  jobs: jobsOf,
  CPU: (node, curves) => html`<${Part} used=${node.load} all=${node.cores} show=${(it) => number(it, 3)} curve=${curves?.cpu} label="CPU" />`,
  memory: (node, curves) => html`<${Part} used=${node.memory_used} all=${node.memory} show=${size} curve=${curves?.memory} label=${t("memory")} />`,
  disk: (node) => (node.disk ? html`<${Part} used=${node.disk_used} all=${node.disk} show=${size} label=${t("disk")} />` : ""),
  GPUs: (node) => (node.gpus.length ? node.gpus.map((it) => html`<div>${gpu(it)}</div>`) : ""),
};

function Target({ name }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [curves, setCurves] = useState({});
  useEffect(() => {
    let timer, isGone = false, isFirst = true;
    const look = async () => {
      try {
        const answer = await get(`/api/machines?${query({ target: name, curves: isFirst ? 1 : "" })}`);
        if (isGone) return;
        isFirst = false;
        setFound(answer);
        setError(null);
        setCurves((before) => Object.fromEntries(answer.nodes.map((node) => [node.name, {
          cpu: [...(before[node.name]?.cpu ?? answer.curves?.[node.name]?.cpu ?? []), node.cores ? node.load / node.cores : 0].slice(-KEPT),
          memory: [...(before[node.name]?.memory ?? answer.curves?.[node.name]?.memory ?? []), node.memory ? node.memory_used / node.memory : 0].slice(-KEPT),
        }])));
      } catch (failure) { setError(failure.message); }
      if (!isGone) timer = setTimeout(look, EVERY);
    };
    look();
    return () => { isGone = true; clearTimeout(timer); };
  }, [name]);
  const nodes = found?.nodes ?? [];
  const all = nodes.reduce((sum, node) => sum + node.device_count, 0), used = nodes.reduce((sum, node) => sum + node.allocated_count, 0);
  const columns = Object.keys(COLUMNS).filter((title) => nodes.some((node) => COLUMNS[title](node) !== ""));
  return html`<section><h2>${name}</h2>
    ${error && html`<p class="warning">${error}</p>`}${found?.warnings.map((line) => html`<p class="warning">${line}</p>`)}
    ${!found && !error && html`<p class="weak">${t("Loading…")}</p>`}
    ${all > 0 && html`<p>${t("{used} of {all} devices in use", { used: whole(used), all: whole(all) })}</p>`}
    ${nodes.length > 0 && html`<div class="scroll-x" tabindex="0"><table><thead><tr>${["node", ...columns].map((title) => html`<th scope="col">${t(title)}</th>`)}</tr></thead>
      <tbody>${nodes.map((node) => html`<tr key=${node.name}><th scope="row">${node.name}</th>
        ${columns.map((title) => html`<td>${COLUMNS[title](node, curves[node.name])}</td>`)}</tr>`)}</tbody></table></div>`}
  </section>`;
}

export function Machines() {
  const [targets, setTargets] = useState(null);
  useEffect(() => { get("/api/jobs?limit=0").then((it) => setTargets(it.targets), () => {}); }, []);
  return html`<h1>${t("Machines")}</h1>${targets === null ? html`<p class="weak">${t("Loading…")}</p>` : targets.map((it) => html`<${Target} key=${it.name} name=${it.name} />`)}`;
}
