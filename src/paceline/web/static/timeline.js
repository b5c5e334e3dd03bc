// The life of a job as one bar of time, as web/timeline.py gives it.
import { moment, number, span, t, whole } from "./i18n.js";
import { html, useState } from "./ui.js";

const KINDS = ["running", "starting", "waiting", "suspended", "unknown", "hung"]; // later ones are drawn over earlier ones
const MARKS = { restart: "↻", checkpoint: "▴", stop: "■" };
const COUNTED = { restart: ["1 restart", "{n} restarts"], checkpoint: ["1 checkpoint", "{n} checkpoints"], stop: ["asked to stop", "asked to stop"] };
const HEIGHT = 26, ABOVE = 16, BELOW = 9; // of the bar, and of marks above and below it, in pixels

const counted = (kind, n) => t(COUNTED[kind][n === 1 ? 0 : 1], { n: whole(n) });
const took = (seconds) => (seconds < 10 ? t("{n}s", { n: number(seconds, 2) }) : span(seconds));

// Lines in different directions tell the kinds apart without colours.
const Patterns = () => html`<defs>${KINDS.map((kind) => html`<pattern id="part-${kind}" class="part-${kind}" width="8" height="8" patternUnits="userSpaceOnUse">
  <rect width="8" height="8" />${{ starting: html`<path d="M2 0V8M6 0V8" />`, waiting: html`<path d="M-1 9L9 -1M-1 1L1 -1M7 9L9 7" />`, suspended: html`<path d="M0 2H8M0 6H8" />`,
    unknown: html`<path d="M3 4h2" />`, hung: html`<path d="M0 0L8 8M0 8L8 0" />` }[kind]}</pattern>`)}</defs>`;

export function Timeline({ of }) {
  const [tip, setTip] = useState(null);
  const has = (kind) => of.marks.some((it) => it.kind === kind);
  const top = has("restart") || has("stop") ? ABOVE : 0, height = top + HEIGHT + (has("checkpoint") ? BELOW : 0);
  const at = (seconds) => (100 * seconds) / of.seconds;
  const clock = (seconds) => moment(1000 * (of.begin + seconds));
  const nameOf = (part) => (part.kind === "running" && of.attempts > 1 ? t("attempt {n}", { n: part.attempt }) : t(part.kind));
  const told = (part) => `${nameOf(part)}: ${took(part.seconds)}, ${clock(part.at)} – ${clock(part.at + part.seconds)}`;
  const marked = (mark) => [mark.count > 1 ? counted(mark.kind, mark.count) : { restart: t("restart"), checkpoint: t("saved step {step}", { step: mark.about }), stop: t("asked to stop") }[mark.kind],
    clock(mark.at), mark.kind === "restart" && mark.about].filter(Boolean).join(", ");
  const parts = of.parts.toSorted((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
  const onMove = (event) => {
    const box = event.currentTarget.getBoundingClientRect(), x = (event.clientX - box.left) / box.width, near = (6 / box.width) * of.seconds, seconds = x * of.seconds;
    const mark = of.marks.filter((it) => Math.abs(it.at - seconds) < near).sort((a, b) => Math.abs(a.at - seconds) - Math.abs(b.at - seconds))[0];
    const part = parts.findLast((it) => seconds >= it.at && seconds <= it.at + Math.max(it.seconds, 0.0025 * of.seconds));
    setTip(mark || part ? { x: Math.min(100, Math.max(0, 100 * x)), text: [mark && marked(mark), part && told(part)].filter(Boolean) } : null);
  };
  let shown = -Infinity; // where the last sign is, which is left out where it would lie upon another one
  const isFree = (mark) => at(mark.at) - shown > 3.5 && ((shown = at(mark.at)), true);
  const kinds = Object.entries(of.totals), marks = Object.entries(of.counts);
  const words = [...kinds.map(([kind, seconds]) => `${t(kind)} ${took(seconds)}`), ...marks.map(([kind, n]) => counted(kind, n))];
  return html`<figure class="timeline" aria-label=${t("Bar of time")}>
    <svg width="100%" height=${height} role="img" aria-label=${`${clock(0)} – ${clock(of.seconds)}: ${words.join(", ")}`} onPointerMove=${onMove} onPointerLeave=${() => setTip(null)}>
      <${Patterns} />
      ${parts.map((part) => html`<svg x="${at(part.at)}%" y=${top} width="${Math.max(0.25, at(part.seconds))}%" height=${HEIGHT}>
        <rect width="100%" height="100%" fill="url(#part-${part.kind})" />${at(part.seconds) > 6 && html`<text class="part-${part.kind}" x="8" y="18">${nameOf(part)}: ${took(part.seconds)}</text>`}</svg>`)}
      ${of.marks.map((mark) => html`<svg class="mark-${mark.kind}" x="${at(mark.at)}%" overflow="visible">${mark.kind === "checkpoint" ? html`<path d="M0 ${top + HEIGHT + 1}l4 7h-8z" />`
        : html`<path d="M-0.75 ${top - 4}h1.5v${HEIGHT + 4}h-1.5z" />${isFree(mark) && html`<text text-anchor=${at(mark.at) > 98 ? "end" : at(mark.at) < 2 ? "start" : "middle"} y="11">${MARKS[mark.kind]}</text>`}`}</svg>`)}
    </svg>
    ${tip && html`<div class="tip" style=${{ top: `${height}px`, left: `${tip.x}%`, transform: `translateX(-${tip.x}%)` }}>${tip.text.map((line) => html`<div>${line}</div>`)}</div>`}
    <div class="ends weak"><span>${clock(0)}</span><span>${of.is_over ? clock(of.seconds) : t("now")}</span></div>
    <figcaption>${kinds.map(([kind, seconds]) => html`<span><svg class="key" width="16" height="12" aria-hidden="true"><rect width="16" height="12" fill="url(#part-${kind})" /></svg> ${t(kind)} ${took(seconds)}</span>`)}
      ${marks.map(([kind, n]) => html`<span><b class="mark-${kind}" aria-hidden="true">${MARKS[kind]}</b> ${counted(kind, n)}</span>`)}</figcaption></figure>`;
}
