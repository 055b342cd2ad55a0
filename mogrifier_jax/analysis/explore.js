"use strict";
// Reads the data of the page, keeps one state, and draws everything from it. `explore.py` makes the
// data; N is the number of tokens, U that of the units of a map. Tokens, layers and runs count from 0.

const DATA = JSON.parse(document.getElementById("data").textContent);
const N = DATA.tokens.length;
const PAPER = "1909.01792", REWIRED_PAPER = "2211.01848";
const WORDS = DATA.level === "word";
const MOST_BITS = WORDS ? 14 : 8; // Where the shading of surprisal is strongest,
const MOST_APART = WORDS ? 3 : 2; // and that of differences.
const LANE = 46, GAP = 6;
let GUTTER = 132, LABEL = 0; // Labels are to the left of the plots, or above them where it is narrow.
const ORDERS = { mean: "mean", pattern: "pattern", change: "change", token: "this token", unit: "unit" };
const GATES = ["f", "i", "j", "o", "c", "r", "u", "n", "h"];

const $ = (id) => document.getElementById(id);
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const sum = (list) => list.reduce((a, b) => a + b, 0);
const escape = (s) => s.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const up = (n) => String(n).replace(/./g, (c) => ({ "-": "⁻" })[c] || "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);
const digits = (v, d = 3) => v.toFixed(d).replace(/^-(0\.?0*)$/, "$1").replace("-", "−");
const signed = (v, d = 3) => (v > 0 && !/^[0.]+$/.test(digits(v, d)) ? "+" : "") + digits(v, d);
const percent = (p) => (p < 0.0005 ? "<0.1%" : (100 * p).toFixed(1) + "%");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Data.

async function unpack(run) {
  const text = atob(run.data);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const types = { f4: Float32Array, i2: Int16Array, i4: Int32Array };
  const arrays = {};
  let start = 0;
  for (const [name, type, size] of run.index) {
    const width = Number(type[1]), whole = new Uint8Array(width * size);
    for (let k = 0; k < width; k++)
      for (let i = 0; i < size; i++) whole[i * width + k] = bytes[start + k * size + i];
    arrays[name] = new types[type](whole.buffer);
    start += width * size;
  }
  Object.assign(run, arrays);
  run.maps = run.layers.map((listed, layer) => {
    const maps = {};
    for (const about of listed) {
      const parts = {};
      for (const part of ["values", "kept", "mean", "strength"]) parts[part] = arrays[`${layer}/${about.name}/${part}`];
      maps[about.name] = { ...about, ...parts, unit: 10 ** -about.decimals };
    }
    return maps;
  });
  run.names = [...Array(run.rounds).keys()].map((i) => `round${i + 1}`);
  run.names.push(...["x_scale", "h_scale", ...GATES].filter((name) => name in run.maps[0]));
  delete run.data;
}

// Models keep their colours, whichever comes first.
function colourRuns() {
  const free = [0, 1, 2, 3], usual = { Mogrifier: 0, LSTM: 1 };
  for (const named of [true, false])
    for (const run of DATA.runs.filter((each) => each.name in usual === named)) run.colour = `--run${free.splice(named ? free.indexOf(usual[run.name]) : 0, 1)[0]}`;
}

const spell = (word) => (word === DATA.eos ? "↵" : word === " " ? "␣" : word === DATA.unknown ? "unknown" : word);
const isUnknown = (word) => word === DATA.unknown; // The vocabulary lacks it.
const isRare = (word) => word === "<unk>" && DATA.unknown !== "<unk>"; // The corpus itself writes so.
const kind = { word: "word", character: "character", byte: "byte" }[DATA.level];
const wordAt = (t) => DATA.words[DATA.tokens[t]];
const shown = (t) => (t in DATA.spelling ? DATA.spelling[t] : spell(wordAt(t)));
const current = () => DATA.runs[state.run];
const map = (run = current()) => (run.maps[state.layer] || {})[state.map];
const valueOf = (m, row, t) => m.values[row * N + t] * m.unit;

const state = {
  run: 0, against: -1, layer: 0, map: "", token: 0, pin: -1, unit: -1, shade: "surprisal",
  order: "pattern", contrast: "change", zoom: 0, theme: "", hover: -1, hoverUnit: -1,
};

// Colours. A palette goes from its first to its last colour, with what is neutral at the background.

const PALETTES = {
  light: {
    neutral: [250, 248, 244], up: [[243, 168, 125], [190, 45, 25]], down: [[143, 188, 232], [24, 86, 170]],
    plus: [[150, 205, 150], [26, 110, 60]], minus: [[200, 165, 220], [106, 50, 150]],
    open: [[132, 196, 190], [9, 82, 92]], surprise: [[246, 160, 60], [222, 84, 20]], better: [[95, 190, 175], [0, 128, 120]], worse: [[225, 140, 185], [190, 30, 110]],
  },
  dark: {
    neutral: [27, 30, 36], up: [[160, 72, 42], [255, 158, 112]], down: [[40, 88, 150], [128, 190, 255]],
    plus: [[40, 110, 66], [150, 232, 160]], minus: [[104, 66, 140], [216, 170, 250]],
    open: [[24, 104, 106], [130, 236, 214]], surprise: [[235, 140, 40], [255, 110, 30]], better: [[40, 160, 145], [20, 180, 160]], worse: [[205, 80, 150], [235, 60, 150]],
  },
};
const palette = () => PALETTES[state.theme];
const mix = (a, b, t) => a.map((v, k) => Math.round(v + (b[k] - v) * t));
function ramp([middle, end], t) { // t from 0, neutral, to 1.
  return t < 0.5 ? mix(palette().neutral, middle, 2 * t) : mix(middle, end, 2 * t - 1);
}
function colour(kind, t) { // t in [-1, 1], or in [0, 1] for gates.
  const p = palette();
  if (kind === "gate") return ramp(p.open, clamp(t, 0, 1));
  const sides = kind === "factor" ? [p.up, p.down] : [p.plus, p.minus];
  return ramp(sides[t < 0 ? 1 : 0], Math.min(1, Math.abs(t)));
}
const rgb = (c, alpha = 1) => `rgba(${c.join(",")},${alpha})`;

// The position of a value on its colour scale. Factors are on a log2 scale. The scale is that of all
// such maps, or of this map, or a unit's distance from its own mean.
const CONTRASTS = { range: "colours: whole range", map: "colours: this map", change: "colours: change of each unit" };
const raw = (m, v) => (m.kind === "factor" ? Math.log2(Math.max(v, m.unit / 2)) : v);
function rowMeans(m) {
  m.means = m.means || Float64Array.from(m.kept, (_, row) => {
    let total = 0;
    for (let t = 0; t < N; t++) total += raw(m, valueOf(m, row, t));
    return total / N;
  });
  return m.means;
}
function reach(m) {
  if (state.contrast === "range") return m.kind === "signed" ? m.reach : m.kind === "gate" ? 1 : m.name.startsWith("round") ? 2 : 3;
  const key = `reach of ${state.contrast}`;
  if (!m[key]) {
    const means = rowMeans(m), centre = state.contrast === "change";
    const sizes = Float64Array.from(m.values, (v, k) => Math.abs(raw(m, v * m.unit) - (centre ? means[Math.floor(k / N)] : 0))).sort();
    m[key] = clamp(sizes[Math.floor(0.97 * (sizes.length - 1))], 0.02, 4);
  }
  return m[key];
}
const scaled = (m, v, row) => (raw(m, v) - (state.contrast === "change" ? rowMeans(m)[row] : 0)) / reach(m);
const kindOf = (m) => (m.kind === "gate" && state.contrast === "change" ? "signed" : m.kind); // Of colours.
function ends(m) {
  const r = reach(m), power = (e) => `×${digits(2 ** e, e > 0 ? 1 : 3).replace(/\.?0+$/, "")}`;
  if (m.kind === "factor") return [power(-r), power(r)];
  return [kindOf(m) === "gate" ? "0" : digits(-r, r % 1 ? 2 : 0), digits(r, r % 1 ? 2 : 0)];
}

function gradient(at, low, high) {
  return `linear-gradient(90deg,${[...Array(13).keys()].map((k) => at(low + ((high - low) * k) / 12)).join(",")})`;
}
function showScale(element, at, low, high, from, to, what) {
  element.innerHTML = `<span>${from}</span><i style="background:${gradient(at, low, high)}"></i><span>${to}</span><span>${what}</span>`;
}

// Names and sentences, as in the paper.

const side = (name) => (name.endsWith("_scale") ? name[0] : Number(name.slice(5)) % 2 ? "x" : "h");
function short(name) {
  if (name.startsWith("round")) return side(name) + up(name.slice(5));
  return name.endsWith("_scale") ? `∏ on ${name[0]}` : name;
}
const X = (i) => `<i>x</i><sup>${i}</sup>`, H = (i) => `<i>h</i><sup>${i}</sup><sub>prev</sub>`;
const rewired = (run) => run.cell === "rewired_lstm";
// Where these differ from the LSTM's: what the gates of the Rewired LSTM read.
const rewiredSentence = {
  f: ["<i>f</i> = σ(W<sup>fu</sup>(<i>i</i> ⊙ <i>j</i>) + W<sup>fh</sup><i>h</i><sub>prev</sub> + b<sup>f</sup>)", "the forget gate: how much of the cell state is kept, from 0 to 1; it reads the proposed update <i>i</i> ⊙ <i>j</i>, with <i>i</i> before it is capped"],
  i: ["<i>i</i> = min(σ(W<sup>ix</sup><i>x</i> + W<sup>ih</sup><i>h</i><sub>prev</sub> + b<sup>i</sup>), 1 − <i>f</i>)", "the input gate: how much of the candidate is let in"],
  o: ["<i>o</i> = σ(W<sup>oc</sup><i>c</i> + b<sup>o</sup>)", "the output gate: how much of the cell state is shown, from 0 to 1; it reads the new cell state"],
};
const gateSentence = (run) => ({
  f: ["<i>f</i> = σ(W<sup>fx</sup><i>x</i> + W<sup>fh</sup><i>h</i><sub>prev</sub> + b<sup>f</sup>)", "the forget gate: how much of the cell state is kept, from 0 to 1"],
  i: [run.tied ? "<i>i</i> = 1 − <i>f</i>" : "<i>i</i> = σ(W<sup>ix</sup><i>x</i> + W<sup>ih</sup><i>h</i><sub>prev</sub> + b<sup>i</sup>)", "the input gate: how much of the candidate is let in" + (run.capped && !run.tied ? ", here never more than 1 − <i>f</i>" : "")],
  j: ["<i>j</i> = tanh(W<sup>jx</sup><i>x</i> + W<sup>jh</sup><i>h</i><sub>prev</sub> + b<sup>j</sup>)", "the candidate for the cell state, from −1 to 1"],
  o: ["<i>o</i> = σ(W<sup>ox</sup><i>x</i> + W<sup>oh</sup><i>h</i><sub>prev</sub> + b<sup>o</sup>)", "the output gate: how much of the cell state is shown, from 0 to 1"],
  c: ["<i>c</i> = <i>f</i> ⊙ <i>c</i><sub>prev</sub> + <i>i</i> ⊙ <i>j</i>", "the cell state"],
  r: ["<i>r</i>", "the reset gate of the GRU: how much of the state the candidate sees"],
  u: ["<i>u</i>", "the update gate of the GRU: how much of the state is kept"],
  n: ["<i>n</i>", "the candidate of the GRU, from −1 to 1"],
  h: ["<i>h</i> = tanh(W<i>x</i> + U<i>h</i><sub>prev</sub> + b)", "the state, from −1 to 1"],
  ...(rewired(run) ? rewiredSentence : {}),
});
const link = (what, paper = PAPER) => `<a href="https://arxiv.org/abs/${paper}" target="_blank" rel="noopener">arXiv:${paper}${what}</a>`;
function sentence() {
  const run = current(), name = state.map, layer = state.layer + 1;
  const none = run.rounds ? "" : `<b>${escape(run.name)} has no Mogrifier rounds</b> (rounds = 0): x and h do not gate each other. `;
  if (!name.startsWith("round") && !name.endsWith("_scale")) {
    const [formula, words] = gateSentence(run)[name];
    return `${none}Layer ${layer}: <span class="formula">${formula}</span>, ${words}. A row is a unit of the layer, a column the moment when a token is read (${rewired(run) ? link("", REWIRED_PAPER) : link(", section 2")}).`;
  }
  const colours = `A column is the moment when a token is read; red is ${state.contrast === "change" ? "above the unit’s own mean, blue below it" : "scaled up, blue is scaled down"}`;
  const what = side(name) === "x" ? `<span class="math"><i>x</i></span>, ${state.layer ? `the output of layer ${layer - 1}` : "the embedded token"}` : '<span class="math"><i>h</i><sub>prev</sub></span>, the layer’s output before the token';
  if (name.endsWith("_scale")) {
    const first = name[0] === "x" ? 1 : 2, all = [];
    for (let i = first; i <= run.rounds; i += 2) all.push(i);
    return `Layer ${layer}: by how much all rounds together scale ${what}; the product of the gates of round${all.length > 1 ? "s" : ""} ${all.join(", ")}. A row is a unit of it. ${colours} (${link(", equations 1 and 2")}).`;
  }
  const i = Number(name.slice(5)), odd = i % 2;
  const source = run.zigzag ? i - 1 : odd ? 0 : -1;
  const formula = odd ? `${X(i)} = 2σ(Q<sup>${i}</sup> ${H(source)}) ⊙ ${X(i - 2)}` : `${H(i)} = 2σ(R<sup>${i}</sup> ${X(source)}) ⊙ ${H(i - 2)}`;
  return `Layer ${layer}, round ${i} of ${run.rounds}: <span class="formula">${formula}</span>. The map shows the gate 2σ(·); a row is a unit of ${what}. ${colours} (${link(`, equation ${odd ? 1 : 2}`)}).`;
}

// State.

function update(changes = {}) {
  const started = performance.now();
  const before = { ...state };
  Object.assign(state, changes);
  const run = current();
  if (state.against === state.run || state.against < 0) state.against = DATA.runs.length > 1 ? (state.run + 1) % DATA.runs.length : -1;
  if (state.against < 0 && state.shade === "difference") state.shade = "surprisal";
  state.token = clamp(state.token, 0, N - 1);
  if (!(state.pin < N)) state.pin = -1;
  state.layer = clamp(state.layer, 0, run.maps.length - 1);
  if (!(state.map in run.maps[state.layer])) state.map = run.rounds ? "x_scale" : "f" in run.maps[0] ? "f" : run.names[0];
  if (!map().kept.includes(state.unit)) state.unit = -1;
  if (state.shade === "unit" && state.unit < 0) state.shade = "surprisal";
  const changed = (...keys) => keys.some((key) => before[key] !== state[key]);
  if (changed("theme")) document.documentElement.dataset.theme = state.theme;
  const all = changed("run", "theme", "layer", "map", "contrast") || !heats.length;
  if (all || changed("shade", "unit")) shadeText();
  if (all || changed("shade", "unit")) showControls();
  if (all || changed("order") || (state.order === "token" && changed("token"))) makeHeats();
  if (all || changed("token", "pin")) { markText(); showDiagram(); showCard(); }
  drawPlots();
  state.took = performance.now() - started; // Milliseconds, for whoever wants to know.
}

// The text.

let spans = [];
function writeText() {
  $("text").classList.toggle("words", WORDS);
  if (WORDS) $("card").style.setProperty("--token", "84px");
  spans = DATA.tokens.map((_, t) => {
    const span = document.createElement("span");
    const end = wordAt(t) === DATA.eos;
    span.textContent = end ? "↵" : t in DATA.spelling ? DATA.spelling[t] : isUnknown(wordAt(t)) ? "unknown" : wordAt(t);
    span.dataset.token = t;
    if (end) span.className = "eos";
    if (isUnknown(wordAt(t))) {
      span.classList.add("unknown");
      span.title = `This ${kind} is not in the vocabulary. The model reads all of them as one token.`;
    }
    if (isRare(wordAt(t))) {
      span.classList.add("rare");
      span.title = "The corpus itself has replaced a rare word by this token.";
    }
    $("text").append(span, end ? "\n" : WORDS ? " " : "");
    return span;
  });
  const count = (name) => spans.filter((span) => span.classList.contains(name)).length;
  const [unknown, rare] = [count("unknown"), count("rare")];
  $("source").textContent = `${DATA.source[0].toUpperCase()}${DATA.source.slice(1)}; ${N} tokens, each a ${kind}` + (unknown ? `; ${unknown} unknown to the vocabulary, underlined` : "") + (rare ? `; ${rare} written <unk> by the corpus, dotted` : "") + ".";
}

function shadeOf() {
  const run = current(), p = palette(), other = DATA.runs[state.against], m = map();
  const strong = (pair, t) => rgb(mix(pair[0], pair[1], t), 0.06 + 0.66 * t);
  if (state.shade === "difference") {
    const at = (t) => (t === 0 ? "transparent" : strong(t < 0 ? p.better : p.worse, Math.min(1, Math.abs(t))));
    return { at, low: -1, high: 1, from: `−${MOST_APART}`, to: `+${MOST_APART}`, what: `bits more than ${other.name}`, value: (t) => (run.bits[t] - other.bits[t]) / MOST_APART };
  }
  if (state.shade === "mean") {
    const low = Math.min(...m.mean), high = Math.max(...m.mean);
    return { at: (t) => strong(m.kind === "factor" ? p.up : p.open, clamp(t, 0, 1)), low: 0, high: 1, from: digits(low, 2), to: digits(high, 2), what: `mean of ${short(m.name)} over units`, value: (t) => (m.mean[t] - low) / (high - low || 1) };
  }
  if (state.shade === "unit") {
    const row = m.kept.indexOf(state.unit), kind = kindOf(m), [from, to] = ends(m);
    const pairs = { factor: [p.up, p.down], gate: [p.open, p.open], signed: [p.plus, p.minus] }[kind];
    return { at: (t) => strong(pairs[t < 0 ? 1 : 0], Math.min(1, Math.abs(t))), low: kind === "gate" ? 0 : -1, high: 1, from, to, what: `unit ${state.unit} of ${short(m.name)}`, value: (t) => scaled(m, valueOf(m, row, t), row) };
  }
  return { at: (t) => strong(p.surprise, clamp(t, 0, 1)), low: 0, high: 1, from: "0", to: `${MOST_BITS}+`, what: `bits of surprise, ${run.name}`, value: (t) => run.bits[t] / MOST_BITS };
}
function shadeText() {
  const shade = shadeOf();
  spans.forEach((span, t) => { span.style.backgroundColor = shade.at(shade.value(t)); });
  showScale($("scale"), shade.at, shade.low, shade.high, shade.from, shade.to, escape(shade.what));
}
function markText() {
  const count = DATA.tokens.filter((id) => id === DATA.tokens[state.token]).length;
  spans.forEach((span, t) => {
    span.classList.toggle("picked", t === state.token);
    span.classList.toggle("pinned", t === state.pin);
    span.classList.toggle("same", count < N / 8 && DATA.tokens[t] === DATA.tokens[state.token]);
  });
  const box = $("text"), span = spans[state.token];
  if (span.offsetTop < box.scrollTop || span.offsetTop + 24 > box.scrollTop + box.clientHeight) box.scrollTop = span.offsetTop - box.clientHeight / 2;
}

// Controls.

function choices(element, list, chosen, pick) {
  element.replaceChildren(...list.map(([key, label, title]) => {
    const button = document.createElement("button");
    button.innerHTML = label;
    button.dataset.key = key;
    if (title) button.title = title;
    button.setAttribute("aria-pressed", key === chosen);
    button.onclick = () => pick(key);
    return button;
  }));
}
const shades = () => ["surprisal", ...(state.against >= 0 ? ["difference"] : []), "mean", ...(state.unit >= 0 ? ["unit"] : [])];
function showControls() {
  const run = current(), other = DATA.runs[state.against];
  choices($("runs"), DATA.runs.map((r, k) => {
    const score = DATA.unit === "ppl" ? `perplexity ${digits(r.perplexity, 2)}` : `${digits(r.bits_per_token)} bits per ${DATA.unit === "bpb" ? "byte" : "character"}`;
    const sizes = `${r.maps.length} layer${r.maps.length > 1 ? "s" : ""} of ${r.hidden}, ${r.rounds ? `${r.rounds} rounds` : "no rounds"}`;
    return [k, `<b>${escape(r.name)}</b><span class="score number">${score}</span><span class="note">${sizes}</span>`, `${r.folder}, step ${r.step}, ${r.parameters.toLocaleString("en")} parameters`];
  }), state.run, (k) => update({ run: k }));
  [...$("runs").children].forEach((button, k) => { button.classList.add("run"); button.style.setProperty("--own", `var(${DATA.runs[k].colour})`); });
  const labels = { surprisal: "surprisal", difference: other && `${run.name} − ${other.name}`, mean: `mean of ${short(state.map)}`, unit: `unit ${state.unit}` };
  choices($("shades"), shades().map((key) => [key, escape(labels[key])]), state.shade, (shade) => update({ shade }));
  choices($("layers"), run.maps.map((_, k) => [k, `layer ${k + 1}`]), state.layer, (layer) => update({ layer }));
  $("sentence").innerHTML = sentence();
  $("order").value = state.order;
  $("contrast").textContent = CONTRASTS[state.contrast];
  const m = map(), kind = kindOf(m), what = state.contrast === "change" ? "from its mean" : short(m.name);
  showScale($("legend"), (t) => rgb(colour(kind, t)), kind === "gate" ? 0 : -1, 1, ...ends(m), m.kind === "factor" ? `${what}, log₂ scale` : what);
}

// The diagram: the paper's figure, with what each gate is on average as the picked token is read.

function showDiagram() {
  const run = current(), maps = run.maps[state.layer], t = state.token;
  const step = 84, width = 62, height = 38, top = 4, below = 62, left = 34;
  const parts = [], nodes = [];
  const node = (name, x, y, w = width) => {
    const m = maps[name];
    const back = m.kind === "factor" ? Math.log2(Math.max(m.mean[t], 1e-6)) / (name.startsWith("round") ? 2 : 3) : m.mean[t] / (m.kind === "gate" ? 1 : m.reach);
    nodes.push(`<g class="node${name === state.map ? " chosen" : ""}" data-map="${name}" tabindex="0" role="button" aria-label="${short(name)}"><title>${short(name)}: mean over units as this token is read</title>
      <rect x="${x}" y="${y}" width="${w}" height="${height}" rx="7" fill="${rgb(mix(palette().neutral, colour(m.kind, back), 0.6))}"/>
      <text class="name" x="${x + w / 2}" y="${y + 17}">${short(name)}</text><text class="value" x="${x + w / 2}" y="${y + 31}">${digits(m.mean[t])}</text></g>`);
  };
  const line = (kind, x1, y1, x2, y2) => parts.push(`<line class="edge ${kind}" x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" marker-end="url(#tip)"/>`);
  let x = 8;
  if (run.rounds) {
    const row = { x: top, h: below };
    const at = (i) => left + i * step; // Where round i is; x⁻¹ and h⁰ are in column 0.
    for (const s of ["x", "h"]) {
      parts.push(`<text class="start" x="20" y="${row[s] + 24}">${s}${s === "x" ? "⁻¹" : "⁰"}</text>`);
      let end = 36;
      for (let i = s === "x" ? 1 : 2; i <= run.rounds; i += 2) {
        line("", end, row[s] + height / 2, at(i) - 4, row[s] + height / 2);
        end = at(i) + width;
      }
      const total = at(run.rounds + 1) + 8;
      line("", end, row[s] + height / 2, total - 4, row[s] + height / 2);
      if (`${s}_scale` in maps) node(`${s}_scale`, total, row[s], 74);
    }
    for (let i = 1; i <= run.rounds; i++) {
      const s = i % 2 ? "x" : "h", other = i % 2 ? "h" : "x";
      const source = run.zigzag && i > 1 ? at(i - 1) + width / 2 + 8 : 24;
      const bottom = other === "x" ? row.x + height : row.h, goal = s === "x" ? row.x + height : row.h;
      line("gating", source, bottom, at(i) + width / 2 - 6, goal + (s === "x" ? 3 : -3));
      parts.push(`<text x="${(source + at(i) + width / 2) / 2 + (s === "x" ? 14 : -14)}" y="${(bottom + goal) / 2 + 4}" font-style="italic">${i % 2 ? "Q" : "R"}${up(i)}</text>`);
      node(`round${i}`, at(i), row[s]);
    }
    x = at(run.rounds + 1) + 104;
  }
  const flow = ["i", "j", "f", "c", "o"]; // Of the Rewired LSTM: each arrow is a map, or the update of c.
  const gates = rewired(run) ? flow : run.names.filter((name) => GATES.includes(name));
  const pitch = rewired(run) ? 66 : 54;
  if (run.rounds) {
    line("", x - 22, top + height / 2, x + 8, 46);
    line("", x - 22, below + height / 2, x + 8, 58);
    x += 14;
  }
  const y = run.rounds ? (top + below) / 2 : top;
  gates.forEach((name, k) => node(name, x + k * pitch, y, 48));
  if (rewired(run)) for (const k of [1, 2, 3]) line("", x + k * pitch + 48, y + height / 2, x + (k + 1) * pitch - 3, y + height / 2);
  const cell = rewired(run) ? "Rewired LSTM: i ⊙ j to f, then c, then o" : `${run.cell.includes("gru") ? "GRU" : run.cell.includes("elman") ? "Elman" : "LSTM"} gates and state`;
  parts.push(`<text x="${x + (gates.length * pitch - 6) / 2}" y="${y + height + 16}">${cell}</text>`);
  const wide = x + gates.length * pitch + 4;
  $("diagram").innerHTML = `<svg width="${wide}" viewBox="0 0 ${wide} ${run.rounds ? below + height + 6 : 64}" role="group" aria-label="Rounds and gates"><defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="${css("--hover")}"/></marker></defs>${parts.join("")}${nodes.join("")}</svg>`;
  const box = $("diagram"), chosen = box.querySelector(".chosen").getBoundingClientRect(), around = box.getBoundingClientRect();
  box.scrollLeft += chosen.left + chosen.width / 2 - around.left - around.width / 2; // Where it is too wide.
}

