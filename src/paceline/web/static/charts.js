// Curves over time or steps, and the map of ranks over time.
import { moment, number, size, t, ticks } from "./i18n.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 170;
const BYTES = Array.from({ length: 45 }, (_, power) => 2 ** power);
export const COLOURS = ["#0a6ed1", "#d1480a", "#1a8f4c", "#8e3fc0", "#b58900", "#c2185b", "#00838f", "#6d4c41"];
// Okabe and Ito's colours, which people with any vision can tell apart, in an order in which neighbours differ in brightness.
// Idle is often the largest part, and the dimmest: the style sheet has it, dark and light.
const SHARES = { compute: "#009e73", idle: "", script: "#d55e00", logging: "#f0e442", checkpoint: "#cc79a7", other: "#555d66", data: "#e69f00", exchange: "#0072b2", evaluation: "#56b4e9" };

const wants = (query) => matchMedia(query).matches;
// The colour that a variable of the style sheet stands for, dark or light.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Draws again when the reader switches between dark and light.
function useScheme() {
  const [, draw] = useState(0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)"), on = () => draw((n) => n + 1);
    media.addEventListener("change", on);
    const watch = new MutationObserver(on);
    watch.observe(document.documentElement, { attributes: true, attributeFilter: ["style"] });
    return () => { media.removeEventListener("change", on); watch.disconnect(); };
  }, []);
  return `${wants("(prefers-color-scheme: dark)")} ${document.documentElement.style.colorScheme}`;
}

// Exponential moving mean, without the bias of its beginning; gaps stay gaps.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 1;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    norm *= weight;
    return mean / (1 - norm);
  });
}

export function extent(columns) {
  let low = Infinity, high = -Infinity, last = null;
  for (const values of columns) for (const value of values) if (value != null) { low = Math.min(low, value); high = Math.max(high, value); last = value; }
  return low <= high ? { low, high, last } : null;
}

// One chart: `series` are [{label, values, colour?, faint?}], all over `x`; `isTime`: x is seconds since the epoch.
export function Chart({ title, x, series, isTime, show = number, isLog = false, sync, low }) {
  const box = useRef(), drawn = useRef();
  const scheme = useScheme();
  const known = extent(series.map((it) => it.values));
  const isBytes = show === size || show.isBytes;
  const data = useMemo(() => [x, ...series.map((it) => (isLog ? it.values.map((value) => (value > 0 ? value : null)) : it.values))], [x, series, isLog]);
  useLayoutEffect(() => {
    if (!known) return;
    const ink = colour("--text-weak"), line = colour("--line");
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    const plot = new uPlot({
      width: Math.max(160, box.current.clientWidth), height: HEIGHT,
      cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false } },
      legend: { live: true },
      scales: { x: { time: isTime, range: (it, least, most) => (it.data[0].length === 1 ? [least - 30, least + 30] : [least, most]) }, y: { distr: isLog ? 3 : 1, range: isLog || low == null ? undefined : (_, least, most) => [Math.min(low, least), most > low ? most * 1.05 : low + 1] } },
      axes: [isTime ? { ...axis, space: 76, values: (_, times, place, space, step) => ticks(times, step) } : axis, { ...axis, size: 76, incrs: isBytes ? BYTES : undefined, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : show(tick))) }],
      series: [{ label: isTime ? t("time") : t("step"), value: isTime ? (_, time) => (time == null ? "–" : moment(1000 * time)) : undefined },
        ...series.map((it, index) => ({ label: it.label, stroke: it.colour ?? COLOURS[index % COLOURS.length], width: it.faint ? 1 : 1.6, alpha: it.faint ? 0.35 : 1, spanGaps: true, points: { show: x.length === 1 }, value: (_, value) => (value == null ? "–" : show(value)) }))],
    }, data, box.current);
    drawn.current = { plot, data };
    const resized = new ResizeObserver(() => plot.setSize({ width: Math.max(160, box.current.clientWidth), height: HEIGHT }));
    resized.observe(box.current);
    return () => { resized.disconnect(); plot.destroy(); drawn.current = null; };
  }, [JSON.stringify(series.map((it) => [it.label, it.faint])), !known, scheme, isTime, isLog]);
  useLayoutEffect(() => { // new values: what the reader has zoomed into stays
    const it = drawn.current;
    if (!it || it.data === data) return;
    const { min, max } = it.plot.scales.x, before = it.data[0];
    const isWhole = min <= before[0] && max >= before.at(-1);
    it.data = data;
    it.plot.setData(data, isWhole);
    if (!isWhole) it.plot.redraw();
  }, [data]);
  if (!known && !series.some((it) => it.isOdd)) return null;
  const words = series.filter((it) => !it.faint).map((it) => {
    const own = extent([it.values]);
    const last = it.isOdd ? "NaN" : own && show(own.last);
    const seen = own && own.low !== own.high ? t("{low} to {high}, last {last}", { low: show(own.low), high: show(own.high), last }) : last;
    return seen && `${series.length > 1 ? `${it.label}: ` : ""}${seen}`;
  }).filter(Boolean).join("; ");
  return html`<figure class="chart"><figcaption><b>${title}</b> <span class=${series.some((it) => it.isOdd) ? "odd" : "weak"}>${series.length < 3 && words}</span></figcaption>
    <div ref=${box} role="img" aria-label=${`${title}: ${words}`}></div></figure>`;
}

const bytesOf = (text) => Uint8Array.from(atob(text), (it) => it.charCodeAt(0));

// Ranks × time, as views.py packs them: a byte for each cell; 255 is unknown. The shares of a cell lie upon each other.
export function RankMap({ ranks }) {
  const canvas = useRef();
  const [share, setShare] = useState("");
  const [told, setTold] = useState("");
  const scheme = useScheme();
  const columns = ranks.time.length, rows = ranks.rank.length, height = Math.max(4, Math.min(20, Math.floor(480 / rows)));
  const cells = useMemo(() => Object.fromEntries(Object.entries(ranks.shares).map(([name, text]) => [name, bytesOf(text)])), [ranks]);
  const names = Object.keys(SHARES).filter((name) => cells[name]);
  const inks = useMemo(() => ({ ...SHARES, idle: colour("--idle") }), [scheme]);
  // the rows of each node, and where its name has space
  const groups = useMemo(() => {
    const found = [];
    ranks.node.forEach((node, row) => (found.at(-1)?.node === node ? found.at(-1).rows++ : found.push({ node, first: row, rows: 1 })));
    let free = 0;
    for (const group of found) if (group.first * height >= free) { group.isNamed = true; free = group.first * height + 15; }
    return found;
  }, [ranks, height]);
  useLayoutEffect(() => {
    if (!names.length) return;
    const context = canvas.current.getContext("2d"), ground = colour("--bg-raised"), gap = height >= 8 ? 1 : 0;
    const fill = (ink, column, top, bottom) => { context.fillStyle = ink; context.fillRect(column, top, 1, bottom - top); };
    context.clearRect(0, 0, columns, rows * height);
    for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
      const cell = row * columns + column, top = row * height, space = height - gap;
      if (names.every((name) => cells[name][cell] === 255)) continue;
      const part = (name) => cells[name][cell] / 254;
      fill(ground, column, top, top + space);
      if (share) {
        context.globalAlpha = part(share);
        fill(inks[share], column, top, top + space);
        context.globalAlpha = 1;
        continue;
      }
      let sum = 0;
      for (const name of names) {
        const from = Math.round(top + space * sum);
        sum += part(name);
        fill(inks[name], column, from, Math.round(top + space * Math.min(1, sum)));
      }
    }
  }, [ranks, share, scheme]);
  if (!names.length) return null;
  const onMove = (event) => {
    const at = event.currentTarget.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.floor(((event.clientX - at.left) / at.width) * columns));
    const row = Math.min(rows - 1, Math.floor(((event.clientY - at.top) / at.height) * rows));
    const cell = row * columns + column;
    const parts = names.filter((name) => cells[name][cell] !== 255 && cells[name][cell] > 1).map((name) => `${t(name)} ${Math.round(cells[name][cell] / 2.54)} %`);
    setTold([`${t("rank")} ${ranks.rank[row]}`, ranks.node[row], `${moment(1000 * ranks.time[column])}: ${parts.join(", ") || t("unknown")}`].filter(Boolean).join(", "));
  };
  const mean = (name, row) => {
    const known = [...cells[name].subarray(row * columns, (row + 1) * columns)].filter((it) => it !== 255);
    return known.length ? `${Math.round(known.reduce((sum, it) => sum + it, 0) / known.length / 2.54)} %` : "";
  };
  return html`<figure class="chart wide"><figcaption class="bar"><b>${t("What the ranks spend their time on")}</b>
      <span class="chips"><button type="button" aria-pressed=${share === ""} onClick=${() => setShare("")}>${t("all")}</button>
      ${names.map((name) => html`<button type="button" aria-pressed=${share === name} onClick=${() => setShare(name)}><${Patch} colour=${inks[name]} /> ${t(name)}</button>`)}</span></figcaption>
    <div class="mapped">${groups.some((it) => it.node) && html`<div class="hosts" aria-hidden="true">${groups.map((it) => html`<div style=${{ height: `${it.rows * height}px` }} title=${it.node}>${it.isNamed && it.node}</div>`)}</div>`}
      <canvas ref=${canvas} class="map" width=${columns} height=${rows * height} style=${{ height: `${rows * height}px` }} role="img" aria-label=${t("What the ranks spend their time on")} onPointerMove=${onMove}></canvas></div>
    <div class="ends weak"><span>${moment(1000 * (ranks.time[0] - (ranks.time[1] - ranks.time[0] || 0)))}</span><span>${moment(1000 * ranks.time.at(-1))}</span></div>
    <p class="weak" role="status">${told || (rows === 1 ? `${t("rank")} ${ranks.rank[0]}` : `${t("ranks")} ${ranks.rank[0]}–${ranks.rank[rows - 1]}`)}</p>
    <details><summary>${t("As a table")}</summary><div class="scroll-x" tabindex="0"><table><thead><tr><th>${t("rank")}</th><th>${t("node")}</th>${names.map((name) => html`<th>${t(name)}</th>`)}<th>${t("CPU")}</th><th>${t("memory")}</th><th>${t("steps/s")}</th></tr></thead>
      <tbody>${ranks.rank.map((rank, row) => html`<tr><td>${rank}</td><td>${ranks.node[row]}</td>${names.map((name) => html`<td>${mean(name, row)}</td>`)}<td>${number(ranks.cpu[row])}</td><td>${size(ranks.memory[row])}</td><td>${number(ranks.steps[row])}</td></tr>`)}</tbody></table></div></details></figure>`;
}

export const Patch = ({ colour: fill }) => html`<svg class="patch" viewBox="0 0 1 1" aria-hidden="true"><rect width="1" height="1" fill=${fill} /></svg>`;
