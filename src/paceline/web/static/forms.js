// What changes jobs: each says what will happen, and the command line that does the same.
import { get, pathOf, post, text } from "./api.js";
import { size, t, whole } from "./i18n.js";
import { html, useEffect, useRef, useState } from "./ui.js";

export function Command({ line, title = t("The same on the command line") }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => navigator.clipboard?.writeText(line).then(() => setCopied(true));
  return html`${title && html`<p class="weak">${title}</p>`}
    <pre class="command"><code>${line}</code> <button type="button" onClick=${copy}>${t(isCopied ? "Copied" : "Copy")}</button></pre>`;
}

// A dialog with a button that does something; what goes wrong stands in it.
function Dialog({ title, label, isDanger, act, close, command, isReady = true, children }) {
  const it = useRef();
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => { if (!it.current.open) it.current.showModal(); }, []);
  const run = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try { await act(); close(); } catch (failure) { setError(failure.message); }
    setBusy(false);
  };
  return html`<dialog ref=${it} onClose=${close} aria-labelledby="dialog-title"><form onSubmit=${run}>
    <h2 id="dialog-title">${title}</h2>${children}
    ${command && html`<${Command} line=${command} />`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <p class="buttons"><button class=${isDanger ? "danger" : "main"} disabled=${isBusy || !isReady}>${label}</button>
      <button type="button" onClick=${close}>${t("Cancel")}</button></p>
  </form></dialog>`;
}

export function Stop({ view, close }) {
  const { job, commands } = view;
  const [now, setNow] = useState(false);
  return html`<${Dialog} title=${t("Stop {name}", { name: job.name })} label=${t("Stop")} isDanger close=${close}
    command=${now ? commands.stop_now : commands.stop} act=${() => post(`${pathOf(job.backend, job.name)}/stop`, { now })}>
    <p>${now ? t("Its ranks are killed. What they have not saved is lost.")
      : t("Its ranks get SIGTERM. A script that uses the library saves a checkpoint, and has {s} s for it.", { s: job.grace })}</p>
    <label><input type="checkbox" checked=${now} onChange=${() => setNow(!now)} /> ${t("Stop at once; nothing is saved")}</label>
  </${Dialog}>`;
}

export function Suspend({ view, close }) {
  const { job, commands } = view;
  return html`<${Dialog} title=${t("Suspend {name}", { name: job.name })} label=${t("Suspend")} close=${close}
    command=${commands.suspend} act=${() => post(`${pathOf(job.backend, job.name)}/suspend`)}>
    <p>${t("Its ranks end, and its devices are given back, until it is resumed.")} ${job.checkpoint ? t("It has saved step {step}; a script that uses the library saves again.", { step: whole(job.checkpoint.step) })
      : t("No checkpoint of it is known: unless its script saves, it begins anew then.")}</p>
  </${Dialog}>`;
}

export function Resume({ view, close }) {
  const { job, commands } = view;
  return html`<${Dialog} title=${t("Resume {name}", { name: job.name })} label=${t("Resume")} close=${close}
    command=${commands.resume} act=${() => post(`${pathOf(job.backend, job.name)}/resume`)}>
    <p>${job.checkpoint ? t("It goes on from step {step}, once it has its devices again.", { step: whole(job.checkpoint.step) }) : t("No checkpoint of it is known: it begins anew, once it has its devices again.")}</p>
  </${Dialog}>`;
}

export function Delete({ view, close }) {
  const { job, commands } = view;
  const [contents, setContents] = useState({});
  const path = pathOf(job.backend, job.name);
  useEffect(() => { get(`${path}/contents`).then(setContents, () => {}); }, []);
  const act = async () => {
    await post(`${path}/delete`, { created: job.created });
    location.hash = "#/jobs";
  };
  return html`<${Dialog} title=${t("Delete {name}", { name: job.name })} label=${t("Delete")} isDanger close=${close} command=${commands.delete} act=${act}>
    <p>${contents.size == null ? t("Removes its folder with logs and checkpoints. This cannot be undone.")
      : t("Removes its folder with logs and checkpoints: {n} checkpoints, {size}. This cannot be undone.", { n: contents.checkpoints, size: size(contents.size) })}</p>
  </${Dialog}>`;
}

export function Scale({ view, close }) {
  const { job, commands } = view;
  const [nodes, setNodes] = useState(1);
  return html`<${Dialog} title=${t("Scale {name}", { name: job.name })} label=${t("Scale")} close=${close} isReady=${nodes !== 0}
    command=${`${nodes < 0 ? commands.scalein : commands.scaleout} --nnodes ${Math.abs(nodes)}`} act=${() => post(`${pathOf(job.backend, job.name)}/scale`, { nodes })}>
    <p>${t("Nodes are added or removed; its ranks start again from the last checkpoint.")}</p>
    <label>${t("Nodes to add (negative: to remove)")} <input type="number" step="1" required value=${nodes}
      onInput=${(event) => setNodes(Math.trunc(Number(event.target.value)))} /></label>
  </${Dialog}>`;
}

function DryRun({ answer }) {
  return html`${answer.notes.map((note) => html`<p class="warning">${note}</p>`)}
    <details open><summary>${t("What would be started")}: ${answer.target}</summary><pre class="dry-run" tabindex="0">${answer.text}</pre></details>
    <${Command} line=${answer.command} />`;
}

// A form whose dry run stands before its start; a change of the form makes another dry run necessary.
function useDryRun(path, body) {
  const [answer, setAnswer] = useState(null);
  const key = JSON.stringify(body);
  return {
    shown: answer?.key === key ? answer : null,
    tryIt: async () => setAnswer({ ...(await post(path, { ...body, dry_run: true })), key }),
    start: async () => {
      const job = await post(path, body);
      location.hash = `#/jobs/${encodeURIComponent(job.target)}/${encodeURIComponent(job.name)}`;
    },
  };
}

const NUMBERS = { ranks: "Ranks per node", nodes: "Nodes", devices: "Devices per node", max_restarts: "Restarts after failures" };

export function Resubmit({ view, close }) {
  const { job } = view;
  const [given, setGiven] = useState({});
  const set = (name, value) => setGiven((before) => ({ ...before, [name]: value || undefined }));
  const { fresh, on, time_limit, env, args } = given;
  const body = { fresh, on, time_limit, env, args };
  for (const name in NUMBERS) if (given[name]) body[name] = Number(given[name]);
  const { shown, tryIt, start } = useDryRun(`${pathOf(job.backend, job.name)}/resubmit`, body);
  const [error, setError] = useState(null);
  const tries = () => tryIt().then(() => setError(null), (failure) => setError(failure.message));
  return html`<${Dialog} title=${t("Resubmit {name}", { name: job.name })} label=${t("Resubmit")} close=${close} act=${start} isReady=${!!shown}>
    <p>${job.checkpoint ? t("Runs again, from its newest checkpoint, with these changes.") : t("Runs again, with these changes. No checkpoint of it is known, so it begins anew.")}</p>
    <div class="fields">
      ${Object.entries(NUMBERS).map(([name, title]) => html`<label>${t(title)} <input type="number" min="0" placeholder=${t("unchanged")} onInput=${(event) => set(name, event.target.value)} /></label>`)}
      <label>${t("Time limit")} <input placeholder=${t("unchanged")} title="2h" onInput=${(event) => set("time_limit", event.target.value)} /></label>
      <label>${t("Target")} <input placeholder=${job.backend} onInput=${(event) => set("on", event.target.value)} /></label>
      <label>${t("Arguments")} <input placeholder=${t("unchanged")} onInput=${(event) => set("args", event.target.value)} /></label>
      <label>${t("Variables (NAME=VALUE, a line each)")} <textarea rows="2" onInput=${(event) => set("env", event.target.value)}></textarea></label>
      <label><input type="checkbox" onChange=${(event) => set("fresh", event.target.checked)} /> ${t("Begin anew, without its checkpoints")}</label>
    </div>
    <p><button type="button" onClick=${tries}>${t("Dry run")}</button> ${!shown && html`<span class="weak">${t("Try it with a dry run first.")}</span>`}</p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${shown && html`<${DryRun} answer=${shown} />`}
  </${Dialog}>`;
}

const EXAMPLE = "script: train.py\nranks: 2\n";

export function Submit({ about, from }) {
  const [file, setFile] = useState(EXAMPLE);
  const [on, setOn] = useState("");
  const [targets, setTargets] = useState([]);
  const [error, setError] = useState(null);
  const { shown, tryIt, start } = useDryRun("/api/submit", { file, on: on || undefined });
  const guard = (act) => act().then(() => setError(null), (failure) => setError(failure.message));
  useEffect(() => { get("/api/jobs?limit=0").then((it) => setTargets(it.targets), () => {}); }, []);
  useEffect(() => { if (from) guard(() => text(`${pathOf(...from)}/file`).then(setFile)); }, [from?.join("/")]);
  return html`<h1>${t("Submit")}</h1>
    <p class="weak">${t("Submitted from the folder {folder}, as user {user} on {host}.", about)}</p>
    ${about.read_only && html`<p class="warning">${t("This server is read-only.")}</p>`}
    <form class="submit" onSubmit=${(event) => { event.preventDefault(); guard(start); }}>
      <p class="bar"><label>${t("Target")} <select value=${on} onChange=${(event) => setOn(event.target.value)}>
        <option value="">${t("as the file says")}</option>${targets.map((it) => html`<option value=${it.name}>${it.name}</option>`)}</select></label>
        <label class="button">${t("Open a file")}<input type="file" class="unseen" accept=".yaml,.yml,.json" onChange=${(event) => event.target.files[0]?.text().then(setFile)} /></label></p>
      <label>${t("Job file")}<textarea class="file" rows="14" spellcheck="false" value=${file} onInput=${(event) => setFile(event.target.value)}></textarea></label>
      <p class="buttons"><button type="button" disabled=${about.read_only} onClick=${() => guard(tryIt)}>${t("Dry run")}</button>
        <button class="main" disabled=${!shown || about.read_only}>${t("Submit")}</button>
        ${!shown && html`<span class="weak">${t("Try it with a dry run first.")}</span>`}</p>
    </form>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${shown && html`<${DryRun} answer=${shown} />`}`;
}
