// Lines and heat maps over tokens, the card of a token, keys and mouse.

// Lines and heat maps share their columns.

let heats = [];
const view = { first: 0, column: 1, count: N, width: 0 };
function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const size = [Math.round(view.width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) { [canvas.width, canvas.height] = size; canvas.style.height = `${height}px`; }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, view.width, height);
  return context;
}
const isNarrow = () => $("plots").clientWidth < 560;
function layOut() {
  view.width = $("plots").clientWidth;
  [GUTTER, LABEL] = isNarrow() ? [1, 17] : [132, 0];
  document.body.classList.toggle("narrow", isNarrow());
  const space = view.width - GUTTER - 2;
  const fit = Math.min(space / N, 34);
  view.column = state.zoom ? Math.max(fit, state.zoom) : fit;
  view.count = Math.min(N, Math.floor(space / view.column + 1e-6));
  view.first = clamp(Math.round(state.token - view.count / 2), 0, N - view.count);
}
const left = (t) => GUTTER + (t - view.first) * view.column;
function tokenAt(event) {
  const t = view.first + Math.floor((event.offsetX - GUTTER) / view.column);
  return event.offsetX >= GUTTER && t < view.first + view.count ? t : -1;
}

function sortUnits(m) {
  const size = m.kept.length, keys = new Float64Array(size);
  const at = (row, t) => raw(m, valueOf(m, row, t));
  if (state.order === "pattern") {
    // The first principal component over tokens, by power iteration: units that move alike are near.
    const rows = [...Array(size).keys()].map((row) => {
      const values = Float64Array.from({ length: N }, (_, t) => at(row, t));
      const mean = sum(Array.from(values)) / N;
      return values.map((v) => v - mean);
    });
    let direction = Float64Array.from({ length: N }, (_, t) => Math.sin(t + 1));
    for (let round = 0; round < 12; round++) {
      rows.forEach((row, k) => { keys[k] = row.reduce((a, v, t) => a + v * direction[t], 0); });
      direction = direction.map((_, t) => rows.reduce((a, row, k) => a + row[t] * keys[k], 0));
      const length = Math.hypot(...direction) || 1;
      direction = direction.map((v) => v / length);
    }
  } else {
    for (let row = 0; row < size; row++) {
      let first = 0, second = 0;
      for (let t = 0; t < N; t++) { const v = at(row, t); first += v; second += v * v; }
      keys[row] = { mean: first / N, change: second / N - (first / N) ** 2, token: at(row, state.token), unit: -m.kept[row] }[state.order];
    }
  }
  return [...keys.keys()].sort((a, b) => keys[b] - keys[a]);
}
function paint(m, order) {
  const image = new ImageData(N, order.length), pixels = new Uint32Array(image.data.buffer);
  const colours = Uint32Array.from({ length: 513 }, (_, k) => {
    const [red, green, blue] = colour(kindOf(m), k / 256 - 1);
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
  order.forEach((row, k) => {
    for (let t = 0; t < N; t++) pixels[k * N + t] = colours[Math.round(256 * (clamp(scaled(m, valueOf(m, row, t), row), -1, 1) + 1))];
  });
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [N, order.length];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
function makeHeats() {
  const runs = [state.run, ...(state.against >= 0 ? [state.against] : [])];
  heats = [];
  $("heats").replaceChildren(...runs.map((k) => {
    const run = DATA.runs[k], m = map(run), box = document.createElement("div");
    if (!m) {
      box.className = "note missing";
      box.textContent = run.maps[state.layer] ? `${run.name} has no ${short(state.map)}: ${run.rounds ? `it has ${run.rounds} rounds` : "it has no rounds"}.` : `${run.name} has no layer ${state.layer + 1}.`;
      return box;
    }
    const canvas = document.createElement("canvas"), order = sortUnits(m);
    const heat = { m, order, canvas, height: clamp(2 * order.length, 110, runs.length > 1 ? 220 : 300), image: paint(m, order) };
    const some = order.length < m.units ? `${order.length} of ${m.units} units, those that vary most` : `${m.units} units`;
    box.className = "plot";
    box.innerHTML = `<div class="gutter" style="top:4px"><b style="color:var(${DATA.runs[k].colour})">${escape(run.name)}</b><br> <span class="math"><i>${short(m.name)}</i></span><br> ${some}</div>`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${run.name}, layer ${state.layer + 1}, ${short(m.name)}: units by tokens`);
    const find = (event) => {
      const row = order[Math.floor(event.offsetY / (heat.height / order.length))];
      return { hover: tokenAt(event), hoverUnit: row === undefined ? -1 : m.kept[row], hoverHeat: heat };
    };
    canvas.onmousemove = (event) => hover(find(event));
    canvas.onmouseleave = () => hover({ hover: -1, hoverUnit: -1 });
    canvas.onclick = (event) => {
      const { hover: t, hoverUnit } = find(event);
      if (t < 0) return;
      update(k === state.run ? { token: t, unit: hoverUnit } : { token: t });
    };
    box.append(canvas);
    heats.push(heat);
    return box;
  }));
}

function lanes() {
  const run = current(), other = DATA.runs[state.against], m = map(), theirs = other && map(other);
  const maps = run.maps[state.layer], own = run.colour, their = other && other.colour;
  const list = [{ id: "surprisal", name: "surprisal, bits", base: 0, lines: [[run.bits, own], ...(other ? [[other.bits, their]] : [])] }];
  const means = [[m.mean, own], ...(theirs ? [[theirs.mean, their]] : [])];
  if (state.unit >= 0) {
    const row = m.kept.indexOf(state.unit);
    means.push([Float32Array.from({ length: N }, (_, t) => valueOf(m, row, t)), "--soft"]);
  }
  list.push({ id: "mean", name: `mean of ${short(m.name)}${state.unit >= 0 ? `, unit ${state.unit}` : ""}`, lines: means });
  const strengths = ["x_scale", "h_scale"].filter((name) => name in maps);
  if (strengths.length) list.push({ id: "strength", name: "gating |log₂|: " + strengths.map((name) => name[0]).join(", "), lines: strengths.map((name) => [maps[name].strength, name[0] === "x" ? "--ink" : "--hover"]) });
  return list;
}
function drawLines(t) {
  const list = lanes(), box = $("lines");
  let canvas = box.querySelector("canvas");
  if (!canvas) {
    box.append((canvas = document.createElement("canvas")));
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Surprisal, mean over units and strength of gating, token by token");
    canvas.onmousemove = (event) => hover({ hover: tokenAt(event), hoverUnit: -1 });
    canvas.onmouseleave = () => hover({ hover: -1, hoverUnit: -1 });
    canvas.onclick = (event) => tokenAt(event) >= 0 && update({ token: tokenAt(event) });
  }
  box.querySelectorAll(".gutter").forEach((element) => element.remove());
  const tall = LABEL + LANE + GAP, context = surface(canvas, list.length * tall);
  list.forEach((lane, k) => {
    const top = k * tall + LABEL + 4, bottom = top + LANE - 4;
    let low = lane.base, high = lane.base;
    if (low === undefined) [low, high] = [Infinity, -Infinity];
    for (const [values] of lane.lines) for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
    const y = (v) => bottom - ((v - low) / (high - low || 1)) * (bottom - top);
    context.fillStyle = context.strokeStyle = css("--line");
    context.fillRect(GUTTER, lane.base === undefined ? bottom : y(lane.base), view.count * view.column, 1);
    lane.lines.forEach(([values, name], which) => {
      context.strokeStyle = context.fillStyle = css(name);
      if (lane.id === "surprisal" && !which) { // Bars.
        context.globalAlpha = 0.75;
        const inset = view.column > 5 ? 1 : 0;
        for (let u = view.first; u < view.first + view.count; u++) context.fillRect(left(u) + inset, y(values[u]), Math.max(0.8, view.column - 2 * inset - (view.column > 2 ? 0.5 : 0)), y(0) - y(values[u]));
        context.globalAlpha = 1;
        return;
      }
      context.lineWidth = name === "--soft" ? 0.9 : 1.4;
      context.lineJoin = "round";
      context.beginPath();
      for (let u = view.first; u < view.first + view.count; u++) context.lineTo(left(u) + view.column / 2, y(values[u]));
      context.stroke();
    });
    const now = lane.lines.map(([values, name]) => `<b style="color:var(${name})">${digits(values[t])}</b>`).join(" ");
    box.insertAdjacentHTML("beforeend", `<div class="gutter" id="lane-${lane.id}" style="top:${top - LABEL + 2}px">${lane.name}<br> ${now}<br> ${digits(low, 2)} to ${digits(high, 2)}</div>`);
  });
  mark(context, list.length * tall);
}
function mark(context, height) {
  for (const [t, name] of [[state.hover, "--hover"], [state.pin, "--pin"], [state.token, "--pick"]]) {
    if (t < view.first || t >= view.first + view.count) continue;
    context.strokeStyle = css(name);
    context.lineWidth = name === "--hover" ? 1 : 1.5;
    context.strokeRect(left(t) - 0.75, -2, view.column + 1.5, height + 4);
  }
}
function drawPlots() {
  layOut();
  drawLines(state.hover >= 0 ? state.hover : state.token);
  for (const heat of heats) {
    const context = surface(heat.canvas, heat.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(heat.image, view.first, 0, view.count, heat.order.length, GUTTER, 0, view.count * view.column, heat.height);
    mark(context, heat.height);
    const tall = heat.height / heat.order.length;
    for (const [unit, name] of [[state.hoverUnit, "--hover"], [heat.m === map() ? state.unit : -1, "--pick"]]) {
      const k = unit < 0 ? -1 : heat.order.indexOf(heat.m.kept.indexOf(unit));
      if (k < 0) continue;
      context.strokeStyle = css(name);
      context.lineWidth = 1;
      context.strokeRect(GUTTER - 5, k * tall - 0.5, view.count * view.column + 5, tall + 1);
    }
  }
  drawAxis();
  readOut();
}
function drawAxis() {
  const tilted = WORDS && view.column < 60;
  const context = surface($("axis"), WORDS && view.column > 11 ? (isNarrow() ? 120 : 106) : 24);
  context.textAlign = "center";
  const label = (t, name) => {
    context.fillStyle = css(name);
    context.font = `${name === "--pick" ? "bold " : ""}${clamp(view.column + 1, 9, 13)}px ${css("--mono")}`;
    context.save();
    context.translate(left(t) + view.column / 2, 15);
    if (tilted) { context.rotate(isNarrow() ? -1.5 : -1); context.textAlign = "right"; context.translate(0, 2); }
    const word = shown(t);
    context.fillText(word.length > 12 ? `${word.slice(0, 11)}…` : word, 0, 0);
    context.restore();
  };
  if (view.column > (WORDS ? 11 : 6.5)) {
    for (let t = view.first; t < view.first + view.count; t++) label(t, t === state.token ? "--pick" : t === state.hover ? "--ink" : "--soft");
    return;
  }
  context.fillStyle = css("--soft");
  context.font = `11px ${css("--sans")}`;
  const every = [10, 20, 50, 100, 200, 500].find((n) => n * view.column > 50);
  for (let t = every - 1; t < N; t += every)
    if (t >= view.first && t < view.first + view.count && Math.abs(t - state.token) * view.column > 40) {
      const half = context.measureText(t + 1).width / 2 + 1; // The last one must not leave the canvas.
      context.fillText(t + 1, clamp(left(t) + view.column / 2, half, view.width - half), 13);
    }
  context.fillStyle = css("--pick");
  context.font = `bold 12px ${css("--mono")}`;
  const word = shown(state.token).slice(0, 16), half = context.measureText(word).width / 2 + 1;
  context.fillText(word, clamp(left(state.token) + view.column / 2, GUTTER + half, view.width - half), 14);
}
const quote = (t) => `<b>${escape(shown(t))}</b>`;
function factor(m, v) {
  const value = digits(v, m.decimals);
  return m.kind === "factor" ? `×<b>${value}</b>` + (v > 0 ? `, log₂ ${signed(Math.log2(v), 2)}` : "") : `<b>${value}</b>`;
}
function readOut() {
  const t = state.hover >= 0 ? state.hover : state.token;
  const heat = state.hoverUnit >= 0 ? state.hoverHeat : heats.find((each) => each.m === map());
  const unit = state.hoverUnit >= 0 ? state.hoverUnit : state.unit;
  const row = heat && unit >= 0 ? heat.m.kept.indexOf(unit) : -1;
  $("readout").innerHTML = row < 0 ? "Point at a cell to read it; click to pick its token and unit." : `token ${t + 1} ${quote(t)}, unit ${unit}: ${factor(heat.m, valueOf(heat.m, row, t))}`;
  const other = DATA.runs[state.against];
  $("peek").innerHTML = state.hover < 0 ? "" : `token ${t + 1} ${quote(t)}: <b>${digits(current().bits[t])}</b> bits` + (other ? `, ${escape(other.name)} <b>${digits(other.bits[t])}</b>` : "");
}
let hovered = null;
function hover(changes) {
  if (state.hover === changes.hover && state.hoverUnit === changes.hoverUnit) return;
  Object.assign(state, changes);
  if (hovered) hovered.classList.remove("hover");
  hovered = state.hover >= 0 ? spans[state.hover] : null;
  if (hovered) hovered.classList.add("hover");
  drawPlots();
}

// The card.

function context(t) {
  const reachOf = WORDS ? 5 : 18, between = WORDS ? " " : "";
  const range = (from, to) => [...Array(Math.max(0, to - from)).keys()].map((k) => escape(shown(from + k).replace("␣", " "))).join(between);
  return `${t > reachOf ? "…" : ""}${range(Math.max(0, t - reachOf), t)}${between}<em>${escape(shown(t))}</em>${between}${range(t + 1, Math.min(N, t + 1 + Math.floor(reachOf / 2)))}`;
}
function head(t, pin) {
  const unknown = isUnknown(wordAt(t)) ? "<br>unknown to the vocabulary" : "";
  return `<div class="head${pin ? " pin" : ""}"><div class="glyph${shown(t).length > 2 ? " long" : ""}${isUnknown(wordAt(t)) ? " unknown" : ""}">${escape(shown(t))}</div>
    <div><span class="note">${pin ? "pinned: " : ""}token <b>${t + 1}</b> of ${N}${unknown}</span><br><span class="context">${context(t)}</span></div></div>`;
}
function facts(run, t) {
  const maps = run.maps[state.layer] || {}, m = map(run);
  const rows = { surprisal: `${digits(run.bits[t])} bits`, probability: percent(2 ** -run.bits[t]), rank: run.ranks[t], "entropy before": `${digits(run.entropy[t])} bits`, "entropy after": `${digits(run.entropy[t + 1])} bits` };
  rows[`mean of ${short(state.map)}`] = m ? digits(m.mean[t]) : "–";
  if (DATA.runs.some((each) => each.rounds)) for (const s of ["x", "h"]) rows[`gating of ${s}, layer ${state.layer + 1}`] = maps[`${s}_scale`] ? digits(maps[`${s}_scale`].strength[t]) : "–";
  return rows;
}
function guesses(run, t, actual) { // What is expected after t tokens.
  const K = run.ids.length / (N + 1), rows = [];
  for (let k = 0; k < K; k++) rows.push([run.ids[t * K + k], run.probabilities[t * K + k]]);
  const real = actual < N ? DATA.tokens[actual] : -1;
  const list = rows.map(([id, p]) => [id, p, id === real]);
  if (real >= 0 && !list.some((row) => row[2])) list.splice(K - 1, 1, [real, 2 ** -run.bits[actual], true]);
  const most = list[0][1];
  return `<div style="--own:var(${run.colour})">${DATA.runs.length > 1 ? `<h3 style="color:var(--own)">${escape(run.name)}</h3>` : ""}${list.map(([id, p, is]) => `<div class="guess${is ? " real" : ""}"><code${isUnknown(DATA.words[id]) ? ' class="unknown"' : ""} title="${escape(DATA.words[id])}">${escape(spell(DATA.words[id]))}</code><i style="width:${(100 * p) / most}%"></i><span>${percent(p)}</span></div>`).join("")}</div>`;
}
function showCard() {
  const t = state.token, runs = state.against < 0 ? [state.run] : [state.run, state.against];
  const columns = runs.map((k) => facts(DATA.runs[k], t));
  const names = runs.map((k) => `<th style="color:var(${DATA.runs[k].colour})">${escape(DATA.runs[k].name)}</th>`).join("");
  const table = Object.keys(columns[0]).map((key) => `<tr data-fact="${key}"><td>${key}</td>${columns.map((column) => `<td><span class="number">${column[key]}</span></td>`).join("")}</tr>`).join("");
  const same = DATA.tokens.filter((id) => id === DATA.tokens[t]).length;
  const another = isUnknown(wordAt(t)) ? `unknown ${kind}` : escape(shown(t));
  const lists = (at, actual) => `<div class="lists">${runs.map((k) => guesses(DATA.runs[k], at, actual)).join("")}</div>`;
  $("card").innerHTML = `${head(t, false)}
    <div class="bar" style="margin-top:8px"><span class="choices"><button id="back" title="Previous token (←)" aria-label="Previous token">←</button><button id="forth" title="Next token (→)" aria-label="Next token">→</button></span><button id="pin">${state.pin === t ? "unpin" : "pin this token"}</button><button id="next" ${same < 2 ? "disabled" : ""}>next ${another}, ${same} in all</button></div>
    <table id="facts" style="margin-top:8px">${runs.length > 1 ? `<tr><th></th>${names}</tr>` : ""}${table}</table>
    ${state.pin >= 0 && state.pin !== t ? comparison(t) : ""}
    <h2>Expected in its place</h2><div id="expected">${lists(t, t)}</div>
    <h2>Expected after it</h2><div id="following">${lists(t + 1, t + 1)}</div>`;
  $("pin").onclick = () => update({ pin: state.pin === t ? -1 : t });
  $("next").onclick = () => sameToken(1);
  $("back").onclick = KEYS.ArrowLeft;
  $("forth").onclick = KEYS.ArrowRight;
  if ($("scatter")) drawScatter(t);
}
function comparison(t) {
  const run = current(), here = facts(run, t), there = facts(run, state.pin);
  const rows = Object.keys(here).map((key) => `<tr data-fact="${key}"><td>${key}</td><td><span class="number">${here[key]}</span></td><td><span class="number">${there[key]}</span></td></tr>`).join("");
  return `<div id="comparison"><h2>Against the pinned token</h2>${head(state.pin, true)}
    <table style="margin-top:6px"><tr><th></th><th>${escape(shown(t))} at ${t + 1}</th><th style="color:var(--pin)">${escape(shown(state.pin))} at ${state.pin + 1}</th></tr>${rows}</table>
    <canvas id="scatter" role="img" aria-label="Every unit at both tokens"></canvas><p class="note" id="apart"></p></div>`;
}
function drawScatter(t) {
  const m = map(), canvas = $("scatter"), size = 190, ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  [canvas.width, canvas.height] = [width * ratio, size * ratio];
  canvas.style.height = `${size}px`;
  const c = canvas.getContext("2d"), low = kindOf(m) === "gate" ? 0 : -1, start = (width - size) / 2 + 10, end = size - 22;
  const at = (v, row) => (clamp(scaled(m, v, row), low, 1) - low) / (1 - low) * (end - 8);
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.strokeStyle = css("--line");
  c.strokeRect(start, 4, end - 4, end - 4);
  c.beginPath(); c.moveTo(start, end); c.lineTo(start + end - 4, 4); c.stroke();
  let apart = 0;
  for (let row = 0; row < m.kept.length; row++) {
    const here = valueOf(m, row, t), there = valueOf(m, row, state.pin);
    apart += Math.abs(m.kind === "factor" ? raw(m, here) - raw(m, there) : here - there);
    c.fillStyle = rgb(colour(kindOf(m), scaled(m, here, row)));
    c.strokeStyle = css(m.kept[row] === state.unit ? "--pick" : "--hover");
    c.beginPath(); c.arc(start + 2 + at(there, row), end - 2 - at(here, row), m.kept[row] === state.unit ? 4.5 : 2.6, 0, 7); c.fill(); c.stroke();
  }
  c.fillStyle = css("--soft");
  c.font = `11px ${css("--sans")}`;
  c.textAlign = "center";
  c.fillText(`pinned, at ${state.pin + 1}`, start + end / 2, size - 6);
  c.save(); c.translate(start - 8, end / 2); c.rotate(-Math.PI / 2); c.fillText(`this one, at ${t + 1}`, 0, 0); c.restore();
  $("apart").innerHTML = `Each dot is a unit of <span class="math"><i>${short(m.name)}</i></span>, layer ${state.layer + 1}; on the diagonal it is the same at both. On average they are <b>${digits(apart / m.kept.length, 2)}</b> ${m.kind === "factor" ? "apart in log₂" : "apart"}.`;
}

// Keys and mouse.

const step = (list, item, by) => list[(list.indexOf(item) + by + list.length) % list.length];
function sameToken(by) {
  const same = [...Array(N).keys()].filter((t) => DATA.tokens[t] === DATA.tokens[state.token]);
  update({ token: step(same, state.token, by) });
}
const zoomBy = (by) => {
  const levels = [0, 4, 7, 11, 16, 24].filter((w) => !w || w > (view.width - GUTTER) / N);
  update({ zoom: levels[clamp(levels.indexOf(state.zoom) + by, 0, levels.length - 1)] });
};
const changeMap = (by) => update({ map: step(current().names.filter((name) => name in current().maps[state.layer]), state.map, by) });
const KEYS = {
  ArrowLeft: () => update({ token: state.token - 1 }), ArrowRight: () => update({ token: state.token + 1 }),
  Home: () => update({ token: 0 }), End: () => update({ token: N - 1 }),
  ArrowUp: () => changeMap(-1), ArrowDown: () => changeMap(1), "[": () => changeMap(-1), "]": () => changeMap(1),
  r: () => update({ run: (state.run + 1) % DATA.runs.length }), s: () => update({ shade: step(shades(), state.shade, 1) }),
  o: () => update({ order: step(Object.keys(ORDERS), state.order, 1) }), p: () => update({ pin: state.pin === state.token ? -1 : state.token }),
  n: () => sameToken(1), N: () => sameToken(-1), "+": () => zoomBy(1), "=": () => zoomBy(1), "-": () => zoomBy(-1),
  c: () => update({ contrast: step(Object.keys(CONTRASTS), state.contrast, 1) }), t: () => update({ theme: state.theme === "dark" ? "light" : "dark" }),
  Escape: () => update({ pin: -1, unit: -1 }),
};
function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const node = event.target.closest && event.target.closest(".node");
    if (node && (event.key === "Enter" || event.key === " ")) update({ map: node.dataset.map });
    else if (/^[1-9]$/.test(event.key)) update({ layer: Number(event.key) - 1 });
    else if (KEYS[event.key]) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
  const tokenOf = (event) => (event.target.dataset.token === undefined ? -1 : Number(event.target.dataset.token));
  $("text").onmouseover = (event) => hover({ hover: tokenOf(event), hoverUnit: -1 });
  $("text").onmouseleave = () => hover({ hover: -1, hoverUnit: -1 });
  $("text").onclick = (event) => tokenOf(event) >= 0 && update(event.shiftKey ? { pin: tokenOf(event) } : { token: tokenOf(event) });
  $("diagram").onclick = (event) => { const node = event.target.closest(".node"); if (node) update({ map: node.dataset.map }); };
  $("order").innerHTML = Object.entries(ORDERS).map(([key, label]) => `<option value="${key}">${label}</option>`).join("");
  $("order").onchange = (event) => update({ order: event.target.value });
  for (const [id, key] of [["contrast", "c"], ["theme", "t"], ["in", "+"], ["out", "-"]]) $(id).onclick = KEYS[key];
  window.addEventListener("resize", drawPlots);
  window.addEventListener("hashchange", () => update(fromHash()));
}
// explore.html#token=12&layer=2&map=round3 opens with that; numbers count from 1.
function fromHash() {
  const given = {};
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (["token", "layer", "run", "pin"].includes(key)) given[key] = Number(value) - 1;
    else if (["zoom", "unit"].includes(key)) given[key] = Number(value);
    else if (["map", "shade", "order", "contrast", "theme"].includes(key)) given[key] = value;
  return given;
}
async function start() {
  await Promise.all(DATA.runs.map(unpack));
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const surprising = current().bits.reduce((best, v, t) => (t && v > current().bits[best] ? t : best), 0);
  colourRuns();
  writeText();
  listen();
  layOut(); // Decides what is narrow before anything is shown.
  const zoom = isNarrow() && N > 60 ? 7 : 0; // So that a finger finds a column.
  update({ theme, token: surprising, zoom, ...fromHash() });
  document.body.dataset.ready = "true";
}
start();
