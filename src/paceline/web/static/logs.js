// The logs of a job, live: the page holds the lines that it shows and some around them, however long the log is.
import { pieces, shortened } from "./ansi.js";
import { lines, listen, onSeen, pathOf, query } from "./api.js";
import { spoken, t, whole } from "./i18n.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const ROW = 18; // height in pixels
const KEPT = 100_000; // lines
const STEP = 5_000; // lines that are asked for at once
const LONGEST = 20_000; // characters of a line that are shown
const MOST = 64 << 20; // characters

// Lines as they come, the last ones of them; lines that come in pieces are put together.
export class Lines {
  constructor() {
    this.all = [];
    this.dropped = 0; // lines that were here before the first one
    this.count = 0; // of all that have come
    this.size = 0; // characters of all lines that are here
    this.end = undefined; // null, or why the log ended
    this.open = new Map(); // rank and stream → its last line, which has no end yet
  }

  take(records) {
    for (const record of records) {
      const it = JSON.parse(record);
      if ("end" in it) { this.end = it.end; continue; }
      const [time, attempt, rank, stream, text, marks] = it;
      const key = `${rank}${stream}`;
      const parts = text.split("\n");
      const last = parts.pop();
      const begun = this.open.get(key);
      if (begun && parts.length) { this.extend(begun, parts.shift()); this.open.delete(key); }
      for (const [index, part] of parts.entries()) this.add({ time, attempt, rank, text: "", mark: marks?.[index] }, part);
      if (last && this.open.has(key)) this.extend(this.open.get(key), last);
      else if (last) this.open.set(key, this.add({ time, attempt, rank, text: "" }, last));
    }
    if (this.all.length > 1.25 * KEPT || this.size > 1.25 * MOST) this.drop();
  }

  add(line, text) {
    this.all.push(line);
    this.count++;
    return this.extend(line, text);
  }

  extend(line, text) {
    const before = line.text.length;
    line.text = shortened(line.text + text, LONGEST);
    this.size += line.text.length - before;
    return line;
  }

  drop() {
    let first = this.all.length;
    for (this.size = 0; first > 0 && this.all.length - first < KEPT && this.size < MOST; first--) this.size += this.all[first - 1].text.length;
    this.dropped += first;
    this.all = this.all.slice(first);
  }
}

function Line({ line, several, times }) {
  const parts = pieces(line.text, line.mark ?? undefined).map(([text, style]) => {
    const names = ["bold", "dim", "underline"].filter((name) => style[name]);
    const css = {};
    for (const [name, property] of [["color", "color"], ["background", "backgroundColor"]]) {
      if (typeof style[name] === "number") names.push(`ansi-${name}-${style[name]}`);
      else if (style[name]) css[property] = style[name];
    }
    const tag = style.isMarked ? "mark" : "span";
    return html`<${tag} class=${names.join(" ")} style=${css}>${text}</${tag}>`;
  });
  return html`<div class="line">${times && html`<span class="weak">${new Date(line.time * 1000).toLocaleTimeString()} </span>`}${several && html`<span class="weak">[${line.rank}] </span>`}${parts}</div>`;
}

export function Logs({ job }) {
  const [asked, setAsked] = useState({ ranks: "0", attempt: "", grep: "", from: "end", skip: 0, tail: STEP });
  const [pattern, setPattern] = useState("");
  const [times, setTimes] = useState(false);
  const [cut, setCut] = useState(null); // why reading was interrupted; "": nobody looked
  const [, draw] = useState(0);
  const [top, setTop] = useState(0);
  const held = useRef(new Lines());
  const box = useRef();
  const sticks = useRef(true); // whether the end stays in view
  const path = pathOf(job.backend, job.name);
  const follows = asked.from === "end" && asked.tail === STEP;

  useEffect(() => {
    let stop = new AbortController(), into, frame = 0;
    sticks.current = asked.from === "end";
    const redraw = () => (frame ||= requestAnimationFrame(() => { frame = 0; draw((n) => n + 1); }));
    const { ranks, attempt, grep } = asked;
    const which = asked.from === "start" ? { skip: asked.skip || "", limit: STEP }
      : follows ? { tail: STEP, follow: 1 } : { tail: asked.tail, limit: STEP };
    const read = () => {
      const { signal } = (stop = new AbortController()), mine = (into = new Lines());
      setCut(null);
      lines(`${path}/logs?${query({ ranks, attempt, grep, ...(grep ? { follow: follows ? 1 : "" } : which) })}`, signal, (several) => {
        mine.take(several);
        held.current = mine; // what was there stays until now
        redraw();
      }).then(() => { if (mine.end === undefined) throw new Error(t("Connection lost; trying again…")); })
        .catch((failure) => signal.aborted || (stop.abort(), setCut(failure.status ? failure.message : t("Connection lost; trying again…"))))
        .finally(redraw);
    };
    const goOn = () => { if (stop.signal.aborted && into?.end === undefined && sticks.current && !document.hidden) read(); };
    const onChange = () => {
      if (!document.hidden) goOn();
      else if (follows && into?.end === undefined) { stop.abort(); setCut(""); }
    };
    held.current = new Lines();
    if (!sticks.current) { box.current.scrollTop = 0; setTop(0); }
    read();
    redraw();
    onChange();
    const ends = [onSeen(onChange), listen((changed) => changed === null && goOn())];
    return () => { stop.abort(); ends.forEach((end) => end()); cancelAnimationFrame(frame); };
  }, [path, asked]);

  const it = held.current;
  useLayoutEffect(() => { if (sticks.current) box.current.scrollTop = box.current.scrollHeight; });
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    sticks.current = follows && scrollTop + clientHeight > scrollHeight - 2 * ROW;
    setTop(scrollTop);
  };
  const shown = Math.ceil((box.current?.clientHeight ?? 600) / ROW) + 20;
  const first = Math.max(0, Math.floor((sticks.current ? it.all.length * ROW : top) / ROW) - (sticks.current ? shown : 10));
  const several = asked.ranks === "all" || asked.ranks.includes(",");
  const change = (what) => setAsked((before) => ({ ...before, from: "end", skip: 0, tail: STEP, ...what }));
  const waits = !it.count && ["PENDING", "STARTING"].includes(job.state);
  const state = cut || it.end || waits ? null : cut === "" ? t("paused") : it.end === null ? t("The log has ended.") : follows ? t("following") : t("reading");

  return html`<section aria-label=${t("Logs")} class="logs">
    <form class="bar" onSubmit=${(event) => { event.preventDefault(); change({ grep: pattern }); }}>
      <label>${t("Rank")} <input class="short" list="all-ranks" value=${asked.ranks} pattern="all|[0-9]+(,[0-9]+)*"
        onChange=${(event) => event.target.validity.valid && event.target.value && change({ ranks: event.target.value })} /></label>
      <datalist id="all-ranks"><option value="all">${t("all")}</option>${Array.from({ length: Math.min(job.ranks, 64) }, (_, rank) => html`<option value=${rank} />`)}</datalist>
      ${job.attempt > 0 && html`<label>${t("Attempt")} <select value=${asked.attempt} onChange=${(event) => change({ attempt: event.target.value })}>
        <option value="">${t("last")}</option>${Array.from({ length: job.attempt + 1 }, (_, attempt) => html`<option value=${attempt}>${attempt}</option>`)}</select></label>`}
      <input type="search" aria-label=${t("Search")} placeholder=${t("Regular expression")} value=${pattern}
        onInput=${(event) => setPattern(event.target.value)} />
      <button>${t("Search")}</button>
      <label><input type="checkbox" checked=${times} onChange=${() => setTimes(!times)} /> ${t("Times")}</label>
      <button type="button" disabled=${!!asked.grep} onClick=${() => change({ from: "start" })}>${t("From the start")}</button>
      ${asked.from === "start"
        ? html`<button type="button" disabled=${it.count < STEP} onClick=${() => change({ from: "start", skip: asked.skip + STEP })}>${t("More")}</button>`
        : html`<button type="button" disabled=${!!asked.grep || it.count < STEP} onClick=${() => change({ tail: (follows ? it.count : asked.tail) + STEP })}>${t("Earlier")}</button>`}
      <button type="button" onClick=${() => change({})}>${t("To the end")}</button>
      <span class="weak" id="log-count" data-count=${it.count}>${t(it.count === 1 ? "1 line" : "{n} lines", { n: whole(it.count) })}${state && ` · ${state}`}</span>
    </form>
    ${(cut || it.end) && html`<p class="error" role="alert">${cut || spoken(it.end.replace(/; correct -(i|-attempt)$/, ""))}</p>`}
    ${it.dropped > 0 && html`<p class="weak">${t("The page keeps the last {n} lines; see others with Earlier.", { n: whole(Math.min(KEPT, it.all.length)) })}</p>`}
    <div class="log" ref=${box} onScroll=${onScroll} tabindex="0" role="log" aria-live="off" aria-label=${t("Logs")}>
      <div style=${{ height: `${it.all.length * ROW}px` }}><div style=${{ transform: `translateY(${first * ROW}px)` }}>
        ${it.all.slice(first, first + shown + 20).map((line) => html`<${Line} line=${line} several=${several} times=${times} />`)}
      </div></div>
      ${waits && html`<p class="weak">${t("The job has not begun; its log appears here when it does.")} ${spoken(job.waiting)}</p>`}
      ${!waits && !it.count && it.end === null && html`<p class="weak">${t("Nothing was written yet.")}</p>`}
    </div>
  </section>`;
}

