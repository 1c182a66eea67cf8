"use strict";
// Code that all views of the page share: the data, colours, number formats and the tooltip.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const EVENT = { rank: 0, peer: 1, route: 2, chunk: 3, source: 4, reduced: 5, step: 6, piece: 7,
  start: 8, left: 9, end: 10, count: 11 };

// Decodes the puts of a run into run.events: one array for each piece of a put, with fields at the
// indices of EVENT. Times are in microseconds.
async function unpack(run) {
  if (run.events) return;
  const bytes = Uint8Array.from(atob(run.packed), (c) => c.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const [ops, times] = await new Response(inflated).json();
  const tick = run.time / run.ticks;
  run.reduces = DATA.reduction !== null;
  run.events = times.map(([number, piece, start, length]) => {
    const [rank, peer, route, chunk, source, reduced, step, count] = ops[number];
    const left = (start + length) * tick;
    return [rank, peer, route, chunk, source, reduced, step, piece, start * tick, left,
      left + run.latency[route], count];
  });
}

// Colours are read from the style sheet, which follows the reader's preference for light or dark.
const LIGHT = matchMedia("(prefers-color-scheme: light)");
const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const RAMP = [[0.03, [45, 84, 120]], [0.35, [38, 150, 158]],
  [0.65, [112, 193, 108]], [0.85, [244, 193, 82]], [1, [240, 98, 88]]];

// The colours of links by load, from idle (near the background's colour) to busy.
const rampStops = () => [[0, LIGHT.matches ? [206, 214, 224] : [42, 52, 66]], ...RAMP];

function rampColour(value) {
  const stops = rampStops();
  const v = Math.max(0, Math.min(1, value));
  let i = 1;
  while (i < stops.length - 1 && stops[i][0] < v) i++;
  const [a, from] = stops[i - 1], [b, to] = stops[i];
  const t = (v - a) / (b - a);
  return `rgb(${from.map((c, k) => Math.round(c + (to[k] - c) * t)).join(",")})`;
}

// Colours of equal lightness. Consecutive numbers get clearly different hues.
const ownerColour = (n) => `hsl(${(n * 137.508 + 205) % 360} 62% ${LIGHT.matches ? 45 : 63}%)`;
const stepColour = (s, count) => `hsl(${205 - 175 * (count < 2 ? 0 : s / (count - 1))} 75% ${LIGHT.matches ? 42 : 64}%)`;

function bytesText(bytes) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0, v = bytes;
  while (v >= 1024 && i < names.length - 1) { v /= 1024; i++; }
  return `${v >= 100 || Number.isInteger(v) ? Math.round(v) : v.toPrecision(3)} ${names[i]}`;
}

// Formats a time. The size of `scale`, another time, selects the unit (us, ms or s), so that all
// ticks of an axis have the same unit.
function timeText(us, scale = us) {
  const [unit, name] = scale >= 1e6 ? [1e6, "s"] : scale >= 1e4 ? [1e3, "ms"] : [1, "\u00b5s"];
  const value = us / unit;
  return `${value >= 1000 ? Math.round(value) : Number(value.toPrecision(4))} ${name}`;
}

const words = (name) => name.replaceAll("_", " ");
const rankName = (rank) => DATA.nodes[rank].id;

function showTip(event, html) {
  const tip = $("tip");
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 16;
  const y = below + box.height > innerHeight ? event.clientY - box.height - 10 : below;
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}
const hideTip = () => { $("tip").hidden = true; };
const escapeText = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}

function fitCanvas(canvas, height) {
  const ratio = devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const h = height || box.height;
  if (height) canvas.style.height = `${height}px`;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(h * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width: box.width, height: h };
}
