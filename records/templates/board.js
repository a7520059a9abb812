"use strict";
const records = JSON.parse(document.getElementById("data").textContent);
const BOX = {left: 68, right: 14, top: 12, bottom: 40};
const EARLY = 0.1;  // fraction of a run's first steps that is hidden: the loss falls too far for one scale

function svg(name, parent, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  parent.append(element);
  return element;
}

// Return round numbers that divide [low, high] into about `count` parts
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return {found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9))};
}

function range(values, part = 0.06) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!(high > low)) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
  const pad = (high - low) * part;
  return [low - pad, high + pad];
}

// Clear an <svg>, draw its axes, and return the functions from data to pixels
function frame(root, height, xs, ys, xlabel, ylabel, xticks) {
  root.replaceChildren();
  const width = Math.max(200, root.parentElement.clientWidth);
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const right = width - BOX.right, bottom = height - BOX.bottom;
  const x = value => BOX.left + (value - xs[0]) / (xs[1] - xs[0]) * (right - BOX.left);
  const y = value => bottom - (value - ys[0]) / (ys[1] - ys[0]) * (bottom - BOX.top);
  const vertical = ticks(...ys, 5);
  for (const value of vertical.found) {
    svg("line", root, {class: "grid", x1: BOX.left, x2: right, y1: y(value), y2: y(value)});
    svg("text", root, {x: BOX.left - 8, y: y(value) + 4, "text-anchor": "end"}, value.toFixed(vertical.digits));
  }
  if (!xticks) {
    const horizontal = ticks(...xs, Math.max(2, Math.min(9, Math.floor(width / 90))));
    xticks = horizontal.found.map(value => [value, value.toFixed(horizontal.digits)]);
    for (const [value] of xticks) svg("line", root, {class: "grid", x1: x(value), x2: x(value), y1: BOX.top, y2: bottom});
  }
  for (const [value, label] of xticks) svg("text", root, {x: x(value), y: bottom + 17, "text-anchor": "middle"}, label);
  svg("path", root, {class: "axis", d: `M${BOX.left},${BOX.top}V${bottom}H${right}`});
  svg("text", root, {x: (BOX.left + right) / 2, y: height - 5, "text-anchor": "middle"}, xlabel);
  svg("text", root, {transform: `translate(13 ${(BOX.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle"}, ylabel);
  return {x, y, right, bottom, width};
}

function showTip(tip, x, y, width, lines) {
  tip.replaceChildren(...lines.flatMap((line, i) => i ? [document.createElement("br"), line] : [line]));
  tip.hidden = false;
  const inside = tip.parentElement.querySelector("svg").getBoundingClientRect().top - tip.parentElement.getBoundingClientRect().top;
  tip.style.left = `${Math.max(0, Math.min(x + 14, width - tip.offsetWidth))}px`;
  tip.style.top = `${inside + y - tip.offsetHeight - 12}px`;
}

const named = (side, run, i) => `${side.label.split(":")[0]}, ${run.seed === null ? `run ${i + 1}` : `seed ${run.seed}`}`;

class Record {
  constructor(article) {
    this.record = records[article.dataset.record];
    this.article = article;
    this.runs = this.record.sides.flatMap((side, s) => side.runs.map((run, i) => ({...run, s, i, value: Number(run.loss), name: named(side, run, i), shown: true})));
    this.lit = null;  // the highlighted run
    this.point = 0;
    article.querySelector(".drawing").hidden = false;
    this.curves = article.querySelector(".curves svg");
    this.tip = article.querySelector(".curves .tip");
    for (const control of article.querySelectorAll(".controls input")) control.addEventListener("change", () => { this.leave(); this.draw(); });
    for (const item of article.querySelectorAll(".run")) {
      const run = this.runs.find(one => one.s == item.dataset.side && one.i == item.dataset.run);
      run.item = item;
      item.querySelector("input").addEventListener("change", event => { run.shown = event.target.checked; this.draw(); });
      for (const kind of ["pointerenter", "focusin"]) item.addEventListener(kind, () => this.light(run));
      for (const kind of ["pointerleave", "focusout"]) item.addEventListener(kind, () => this.light(null));
    }
    for (const button of article.querySelectorAll("[data-side] button, button[data-side]")) button.addEventListener("click", () => {
      const own = this.runs.filter(run => run.s == button.dataset.side), show = !own.every(run => run.shown);
      for (const run of own) run.shown = run.item.querySelector("input").checked = show;
      this.draw();
    });
    this.curves.addEventListener("pointermove", event => this.hover(event));
    this.curves.addEventListener("pointerdown", event => this.hover(event));
    this.curves.addEventListener("pointerleave", () => this.leave());
    this.curves.addEventListener("blur", () => this.leave());
    this.curves.addEventListener("keydown", event => this.key(event));
    this.draw();
  }

  option(name) { return this.article.querySelector(`.controls [name=${name}]`).checked; }

  // Return the selected points (step, seconds, loss) of a run, one list for each kind
  lists(run) {
    const axis = this.by, whole = this.option("whole");
    const last = Math.max(...run.val.map(point => point[0]), ...run.train.map(point => point[0]), 1);
    return ["train", "val"].map(kind => this.option(kind) ? run[kind].filter(point =>
      point[axis] !== null && (whole || point[0] >= EARLY * last)) : []);
  }

  draw() {
    this.by = Number(this.article.querySelector(".controls [type=radio]:checked").value);
    const shown = this.runs.filter(run => run.shown);
    for (const run of shown) run.lists = this.lists(run);
    this.points = shown.flatMap(run => run.lists.flatMap((list, k) => list.map(point => ({run, k, point}))));
    const caption = this.article.querySelector(".curves figcaption span");
    const group = this.runs.map(run => run.train).find(list => list.length > 1);
    caption.textContent = `lines with dots: validation; faint: training${group && group[0][0] > 1 ? `, each point the mean of ${group[1][0] - group[0][0]} steps` : ""}` +
      (this.option("whole") ? "" : `; without the first ${100 * EARLY} % of the steps`);
    const {record} = this, xs = this.points.map(one => one.point[this.by]), ys = this.points.map(one => one.point[2]);
    const pad = range(xs.length ? xs : [0, 1], 0.02);
    this.at = frame(this.curves, 380, pad, range([...ys, record.target]), this.by ? "training time (s)" : "step", "loss");
    const {x, y, right} = this.at;
    svg("line", this.curves, {class: "target", x1: BOX.left, x2: right, y1: y(record.target), y2: y(record.target)});
    svg("text", this.curves, {x: BOX.left + 6, y: y(record.target) - 5}, `target ${record.target}`);
    for (const run of shown) {
      run.marks = [];
      run.lists.forEach((list, k) => {
        if (!list.length) return;
        const path = list.map(point => `${x(point[this.by]).toFixed(1)},${y(point[2]).toFixed(1)}`).join("L");
        run.marks.push(svg("path", this.curves, {class: `curve s${run.s} ${k ? "validation" : "training"}`, d: `M${path}`}));
        if (k) for (const point of list) run.marks.push(svg("circle", this.curves, {class: `dot f${run.s}`, cx: x(point[this.by]), cy: y(point[2]), r: 3.2}));
      });
    }
    this.cursor = svg("circle", this.curves, {class: "axis", r: 6, visibility: "hidden"});
    for (const figure of this.article.querySelectorAll(".strip")) this.strip(figure);
    const difference = this.article.querySelector(".difference svg");
    if (difference) this.difference(difference);
    if (this.lit && this.lit.shown) this.light(this.lit);
  }

  // Draw a dot for each run, and each side's mean with its interval over all its runs
  strip(figure) {
    const {key, interval} = figure.dataset, root = figure.querySelector("svg"), tip = figure.querySelector(".tip");
    const {sides, target} = this.record, loss = key === "value";
    const values = [...this.runs.map(run => run[key]), ...sides.flatMap(side => side[interval] ? side[interval].slice(1) : []), ...(loss ? [target] : [])];
    const at = frame(root, 300, [-0.5, sides.length - 0.4], range(values), "", loss ? "val_loss" : "train_time (s)",
      sides.map((side, s) => [s, `${side.label.split(":")[0]}, n = ${side.runs.length}`]));
    if (loss) svg("line", root, {class: "target", x1: BOX.left, x2: at.right, y1: at.y(target), y2: at.y(target)});
    for (const run of this.runs.filter(one => one.shown)) {
      const count = sides[run.s].runs.length, offset = count > 1 ? (run.i / (count - 1) - 0.5) * 0.3 : 0;
      const dot = svg("circle", root, {class: `dot f${run.s}`, cx: at.x(run.s + offset), cy: at.y(run[key]), r: 4.5});
      run.marks.push(dot);
      dot.addEventListener("pointerenter", () => {
        showTip(tip, at.x(run.s + offset), at.y(run[key]), at.width, [run.name, loss ? `val_loss ${run.loss}` : `${run.seconds.toFixed(3)} s`]);
        this.light(run);
      });
      dot.addEventListener("pointerleave", () => { tip.hidden = true; this.light(null); });
    }
    sides.forEach((side, s) => { if (side[interval]) this.bar(root, at, s + 0.3, side[interval], s); });
  }

  bar(root, {x, y}, at, [mean, low, high], s) {
    const middle = x(at);
    svg("path", root, {class: `bar s${s}`, fill: "none", d: `M${middle - 5},${y(low)}h10M${middle - 5},${y(high)}h10M${middle},${y(low)}V${y(high)}`});
    svg("path", root, {class: `f${s}`, d: `M${middle},${y(mean) - 5}l5,5l-5,5l-5,-5z`});
  }

  difference(root) {
    const {difference, interval} = this.record;
    const at = frame(root, 300, [-1, 1], range([...interval, 0]), "", "s", [[0, "below zero is faster"]]);
    svg("line", root, {class: "target", x1: BOX.left, x2: at.right, y1: at.y(0), y2: at.y(0)});
    this.bar(root, at, 0, [difference, ...interval], 0);
    const [low, middle, high] = [interval[0], difference, interval[1]].map(at.y), line = 13;
    for (const [value, y] of [[difference, middle], [interval[0], Math.max(low, middle + line)], [interval[1], Math.min(high, middle - line)]]) {
      svg("text", root, {x: at.x(0) + 12, y: y + 4}, (value > 0 ? "+" : "−") + Math.abs(value).toFixed(2));
    }
  }

  light(lit) {
    this.lit = lit;
    for (const run of this.runs) {
      run.item.classList.toggle("lit", run === lit);
      if (!run.shown) continue;
      for (const mark of run.marks) {
        mark.classList.toggle("lit", run === lit);
        mark.classList.toggle("dim", Boolean(lit && lit.shown) && run !== lit);
      }
    }
  }

  // Show one point: highlight its run and show its figures
  tell({run, k, point}) {
    const x = this.at.x(point[this.by]), y = this.at.y(point[2]);
    const lines = [run.name, `step ${point[0]}${point[1] === null ? "" : `, ${point[1].toFixed(1)} s`}`,
      `${k ? "val_loss" : "training loss"} ${point[2].toFixed(4)}`];
    const here = this.points.filter(one => one.run !== run && one.k === k && one.point[this.by] === point[this.by] && one.point[2] === point[2]);
    if (here.length) lines.push(`also here: ${here.slice(0, 3).map(one => one.run.name).join("; ")}${here.length > 3 ? " and more" : ""}`);
    this.light(run);
    this.cursor.setAttribute("cx", x);
    this.cursor.setAttribute("cy", y);
    this.cursor.setAttribute("visibility", "visible");
    showTip(this.tip, x, y, this.at.width, lines);
    return lines.join(", ");
  }

  hover(event) {
    const box = this.curves.getBoundingClientRect(), scale = this.at.width / box.width;
    const px = (event.clientX - box.left) * scale, py = (event.clientY - box.top) * scale;
    let best = null, least = 60 ** 2;
    for (const one of this.points) {
      const distance = (this.at.x(one.point[this.by]) - px) ** 2 + (this.at.y(one.point[2]) - py) ** 2;
      if (distance < least) [best, least] = [one, distance];
    }
    if (best) this.tell(best); else this.leave();
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
    this.light(null);
  }

  // Left and right move along a run's points, up and down between runs
  key(event) {
    const runs = [...new Set(this.points.map(one => one.run))];
    if (event.key === "Escape") { this.leave(); return; }
    const [dx, dy] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key] || [0, 0];
    if (!(dx || dy) || !runs.length) return;
    event.preventDefault();
    const before = runs.indexOf(this.lit), now = (Math.max(before, 0) + dy + runs.length) % runs.length;
    const own = this.points.filter(one => one.run === runs[now]).sort((a, b) => a.point[this.by] - b.point[this.by] || a.k - b.k);
    this.point = before < 0 ? 0 : Math.max(0, Math.min(own.length - 1, this.point + dx));
    this.article.querySelector(".curves [role=status]").textContent = this.tell(own[Math.min(this.point, own.length - 1)]);
  }
}

// One chart for each track: only records of the same machine and target are comparable
function history(section) {
  const timed = records.filter(record => record.sides[0].time_interval);
  const charts = [...new Set(timed.map(record => record.track))].map(track => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), tip = document.createElement("div");
    caption.textContent = track;
    tip.className = "tip";
    tip.hidden = true;
    figure.append(caption);
    const root = svg("svg", figure, {role: "img", "aria-label": `Time against date: ${track}`});
    figure.append(tip);
    return {figure, root, tip, own: timed.filter(record => record.track === track).sort((a, b) => a.date + a.name < b.date + b.name ? -1 : 1)};
  });
  section.querySelector(".charts").replaceChildren(...charts.map(chart => chart.figure));
  for (const {root, tip, own} of charts) {  // after all exist: they share the width
    const day = 864e5, days = own.map(record => Date.parse(record.date) / day);
    const first = Math.min(...days), last = Math.max(...days), pad = Math.max(1, 0.08 * (last - first));
    const marks = [...new Set(last > first ? [first, last] : [first])].map(value => [value, new Date(value * day).toISOString().slice(0, 10)]);
    const at = frame(root, 260, [first - pad, last + pad], range(own.flatMap(record => record.sides[0].time_interval), 0.1), "", "train_time (s)", marks);
    const steps = [], good = record => record.below && !record.broken;
    let best = Infinity;
    own.forEach((record, i) => {
      const mean = record.sides[0].time_interval[0];
      if (good(record) && mean < best) {
        steps.push(steps.length ? `H${at.x(days[i])}V${at.y(mean)}` : `M${at.x(days[i])},${at.y(mean)}`);
        best = mean;
      }
    });
    if (steps.length) svg("path", root, {class: "curve s0", d: `${steps.join("")}H${at.right}`});
    own.forEach((record, i) => {
      const [mean, low, high] = record.sides[0].time_interval, x = at.x(days[i]), y = at.y(mean);
      const link = svg("a", root, {href: `#${record.name}`, "aria-label": `${record.title}: ${mean.toFixed(2)} s`});
      svg("path", link, {class: "bar s0", d: `M${x - 4},${at.y(low)}h8M${x - 4},${at.y(high)}h8M${x},${at.y(low)}V${at.y(high)}`, fill: "none"});
      svg("circle", link, good(record) ? {class: "f0", cx: x, cy: y, r: 5.5} : {class: "s0", fill: "var(--paper)", "stroke-width": 2, cx: x, cy: y, r: 5});
      const tell = () => showTip(tip, x, y, at.width, [record.title, `${mean.toFixed(2)} s, ${record.confidence} % CI ${low.toFixed(2)} … ${high.toFixed(2)}`,
        `${record.below ? "loss below the target" : "loss not shown to be below the target"}${record.broken ? `, rules broken: ${record.broken}` : ""}`]);
      for (const kind of ["pointerenter", "focus"]) link.addEventListener(kind, tell);
      for (const kind of ["pointerleave", "blur"]) link.addEventListener(kind, () => { tip.hidden = true; });
    });
  }
}

const drawings = [...document.querySelectorAll("article")].map(article => new Record(article));
const times = document.getElementById("history");
history(times);
let width = document.body.clientWidth;
addEventListener("resize", () => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  for (const drawing of drawings) { drawing.leave(); drawing.draw(); }
  history(times);
});
