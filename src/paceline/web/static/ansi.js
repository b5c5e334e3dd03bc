// Text of a terminal as pieces with their style: colours and bold are kept, everything else of a terminal is left out.
// eslint-disable-next-line no-control-regex
const ESCAPE = /\x1b(?:\[([0-9;:]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\|$)|[PX^_][^\x1b]*(?:\x1b\\|$)|[ -/]*[0-~]|$)/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f\u0080-\u009f\u202a-\u202e\u2066-\u2069]/g;
const LEVELS = [0, 95, 135, 175, 215, 255];

const rgb = (r, g, b) => `rgb(${r & 255},${g & 255},${b & 255})`;

function indexed(number) {
  if (number < 16) return number;
  if (number > 231) return rgb(...Array(3).fill(8 + 10 * (number - 232)));
  const it = number - 16;
  return rgb(LEVELS[Math.floor(it / 36)], LEVELS[Math.floor(it / 6) % 6], LEVELS[it % 6]);
}

function changed(style, codes) {
  const now = { ...style };
  for (let at = 0; at < codes.length; at++) {
    const code = codes[at];
    if (code === 0) for (const name in now) delete now[name];
    else if (code === 1) now.bold = true;
    else if (code === 2) now.dim = true;
    else if (code === 4) now.underline = true;
    else if (code === 22) delete now.bold, delete now.dim;
    else if (code === 24) delete now.underline;
    else if (code === 39) delete now.color;
    else if (code === 49) delete now.background;
    else if (code >= 30 && code <= 37) now.color = code - 30;
    else if (code >= 90 && code <= 97) now.color = code - 82;
    else if (code >= 40 && code <= 47) now.background = code - 40;
    else if (code >= 100 && code <= 107) now.background = code - 92;
    else if (code === 38 || code === 48) {
      const name = code === 38 ? "color" : "background";
      if (codes[at + 1] === 5) now[name] = indexed(codes[at + 2] & 255), at += 2;
      else if (codes[at + 1] === 2) now[name] = rgb(codes[at + 2], codes[at + 3], codes[at + 4]), at += 4;
    }
  }
  return now;
}

// What a terminal shows of a line: what follows its last carriage return.
const overwritten = (line) => line.lastIndexOf("\r", line.length - 2) + 1;

// `begin` and `end`: a part that is marked.
export function pieces(line, [begin, end] = [0, 0]) {
  const found = [];
  const whole = line.replace(/\r+$/, ""), text = whole.slice(overwritten(whole)), before = whole.length - text.length;
  let style = {}, from = 0;
  const add = (to) => {
    const cuts = [from, ...[begin - before, end - before].filter((cut) => cut > from && cut < to), to];
    for (let at = 1; at < cuts.length; at++) {
      const part = text.slice(cuts[at - 1], cuts[at]).replace(CONTROL, "");
      if (part) found.push([part, { ...style, isMarked: cuts[at - 1] >= begin - before && cuts[at] <= end - before }]);
    }
  };
  for (const match of text.matchAll(ESCAPE)) {
    add(match.index);
    if (match[2] === "m") style = changed(style, (match[1] || "0").split(/[;:]/).map(Number));
    from = match.index + match[0].length;
  }
  add(text.length);
  return found;
}

// At most so many characters, of what a terminal shows in the end.
export const shortened = (line, most) => (line.length > most ? line.slice(overwritten(line)).slice(0, most) : line);
