// Draws the plan: a grid of layers and ranks, the ops and communication of one block, the timeline.
const KINDS = ["whole", "columns", "rows", "sums"];
const HOLDS = ["parameters", "gradients", "optimizer", "activations"];
// A layer is wide enough to be touched. If the window is narrower than the grid, the grid scrolls.
const LEFT = 74, LAYER = 18, NARROW = 700;
const BARS = innerWidth < NARROW ? 130 : 230;
const ROW = Math.max(6, Math.min(22, Math.floor(600 / DATA.ranks)));
let chosen = Math.min(1, DATA.blocks.length - 1);

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const total = (memory) => memory.reduce((sum, bytes) => sum + bytes, 0);
const runsBlock = (rank, block) =>
  block.stage < 0 || DATA.stages[DATA.placeOf[rank]].includes(block.stage);
const shown = (kinds) => kinds.find((kind) => kind !== "whole") || "whole";

function drawHeader() {
  $("title").textContent = DATA.title;
  const peak = Math.max(...DATA.memory.map(total));
  const plan = DATA.mesh.map((count, i) => `${count} ${DATA.names[i]}`).join(" \u00d7 ");
  const how = DATA.training ? (DATA.recompute ? "training, recomputing" : "training") : "inference";
  $("subtitle").innerHTML = `<b>${escapeText(plan)}</b>, ${plural(DATA.ranks, "rank")}, ${how}: ` +
    `<b>${timeText(DATA.us)}</b> a step, at most <b>${bytesText(peak)}</b> a rank`;
  const mark = (name) => `<i style="background:var(--${name})"></i>${name}`;
  $("legend2").innerHTML = KINDS.map(mark).join("") + " | memory:" + HOLDS.map(mark).join("");
}

function drawGrid() {
  $("grid").style.minWidth = `${LEFT + BARS + LAYER * DATA.blocks.length}px`;
  const { context, width, height } = fitCanvas($("grid"), DATA.ranks * ROW + 20);
  const across = (width - LEFT - BARS) / DATA.blocks.length;
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui";
  const most = Math.max(...DATA.memory.map(total)) || 1;
  const step = Math.ceil(14 / ROW);
  for (let rank = 0; rank < DATA.ranks; rank++) {
    const y = 18 + rank * ROW, high = ROW - (ROW > 8 ? 2 : 1);
    context.fillStyle = colour("soft");
    if (rank % step === 0) context.fillText(`rank ${rank}`, 2, y + Math.min(ROW, 12));
    DATA.blocks.forEach((block, i) => {
      const x = LEFT + i * across, gap = across > 6 ? 1.5 : 0.3;
      context.fillStyle = colour("grid");
      context.fillRect(x, y, across - gap, high);
      if (!runsBlock(rank, block)) return;
      const strip = (across - gap) / block.ops.length;
      block.ops.forEach((op, k) => {
        context.fillStyle = colour(shown(op.state));
        context.fillRect(x + k * strip, y, Math.max(strip, 0.5), high);
      });
    });
    let x = width - BARS + 12;
    DATA.memory[DATA.placeOf[rank]].forEach((bytes, k) => {
      const wide = (bytes / most) * (BARS - 90);
      context.fillStyle = colour(HOLDS[k]);
      context.fillRect(x, y, wide, high);
      x += wide;
    });
    context.fillStyle = colour("soft");
    if (rank % step === 0) {
      context.fillText(bytesText(total(DATA.memory[DATA.placeOf[rank]])), x + 6, y + Math.min(ROW, 12));
    }
  }
  $("grid").setAttribute("aria-label", `Layers across, ranks down; layer ${chosen + 1} of ` +
    `${DATA.blocks.length} is chosen: ${DATA.blocks[chosen].name}. Arrow keys choose another.`);
  context.strokeStyle = colour("cursor");
  context.strokeRect(LEFT + chosen * across - 0.5, 16, Math.max(across, 2), DATA.ranks * ROW + 2);
}

function gridAt(event) {
  const box = $("grid").getBoundingClientRect();
  const across = (box.width - LEFT - BARS) / DATA.blocks.length;
  const block = Math.floor((event.clientX - box.left - LEFT) / across);
  const rank = Math.floor((event.clientY - box.top - 18) / ROW);
  return { block: DATA.blocks[block] ? block : -1, rank: rank >= 0 && rank < DATA.ranks ? rank : -1 };
}

// Arrows above the ops are forward communication, below them that of gradients; each has a label.
function drawBlock() {
  const block = DATA.blocks[chosen], svg = $("block"), wide = 108;
  svg.replaceChildren();
  const labels = { true: 0, false: 0 };
  for (const move of block.moves) labels[move.backward]++;
  const top = 24 + labels.false * 17, high = top + 72 + labels.true * 17 + 14;
  svg.setAttribute("width", 60 + block.ops.length * wide);
  svg.setAttribute("height", high);
  $("blockTitle").textContent = block.name;
  svg.setAttribute("aria-label", `${plural(block.ops.length, "op")} of ${block.name}, and ` +
    `${plural(block.moves.length, "transfer")} between ranks.`);
  const way = DATA.training ? `, ${timeText(block.backward)} back` : "";
  $("blockNote").textContent = `${timeText(block.forward)}${way} a micro-batch, ` +
    `${bytesText(block.parameters)} of parameters a rank`;
  const place = (index) => (index < 0 ? 8 : 50 + index * wide + wide / 2 - 4);
  block.ops.forEach((op, i) => {
    const group = element("g", { class: "op" }, svg);
    element("rect", { x: 50 + i * wide, y: top, width: wide - 10, height: 40, rx: 6,
      fill: `var(--${shown(op.state)})` }, group);
    const name = element("text", { x: place(i), y: top + 16 }, group);
    name.textContent = op.type.slice(0, 20).replaceAll("_", " ");
    if (op.type.length > 12) {
      name.setAttribute("textLength", wide - 18);
      name.setAttribute("lengthAdjust", "spacingAndGlyphs");
    }
    element("text", { x: place(i), y: top + 31 }, group).textContent = op.state.join(" \u00d7 ");
    const below = (y, text) =>
      (element("text", { x: place(i), y: top + y, class: "soft" }, svg).textContent = text);
    below(53, op.shape.join("\u00d7"));
    below(65, timeText(op.us));
  });
  const level = { true: 0, false: 0 };
  for (const move of block.moves) {
    const from = place(move.from), to = place(move.to), n = level[move.backward]++;
    const edge = move.backward ? top + 70 : top, y = move.backward ? edge + 14 + n * 17 : edge - 12 - n * 17;
    const [start, end] = move.backward ? [to, from] : [from, to];
    element("path", { d: `M${start} ${edge} V${y} H${end} V${edge}`,
      class: move.backward ? "backward" : "forward" }, svg);
    element("text", { x: (from + to) / 2, y: y - 3, class: "soft" }, svg).textContent =
      move.steps.map(([op, , bytes]) => `${words(op)} ${bytesText(bytes)}`).join(", ");
  }
}

function drawTime() {
  const places = DATA.memory.length, high = 24;
  $("time").style.minWidth = "480px";
  const { context, width } = fitCanvas($("time"), places * high + 24);
  const ends = DATA.makespan * DATA.tick, scale = (width - LEFT - 10) / DATA.us;
  context.clearRect(0, 0, width, places * high + 24);
  context.font = "11px system-ui";
  for (let p = 0; p < places; p++) {
    context.fillStyle = colour("soft");
    context.fillText(places > 1 ? `stage ${p}` : "all", 2, p * high + 16);
    context.fillStyle = colour("grid");
    context.fillRect(LEFT, p * high + 2, DATA.us * scale, high - 4);
    let x = LEFT + ends * scale;
    for (const [name, us] of [["gradients", DATA.synced[1]], ["optimizer", DATA.update]]) {
      context.fillStyle = colour(name);
      context.fillRect(x, p * high + 2, us * scale, high - 4);
      x += us * scale;
    }
  }
  for (const [block, batch, start, span, devices] of DATA.spans) {
    for (const d of devices) {
      const x = LEFT + start * DATA.tick * scale, wide = span * DATA.tick * scale;
      context.fillStyle = ownerColour(batch);
      context.globalAlpha = block[0] === "f" ? 0.95 : block[0] === "w" ? 0.35 : 0.6;
      context.fillRect(x, d * high + 2, Math.max(wide - 0.6, 0.4), high - 4);
      context.globalAlpha = 1;
      context.fillStyle = colour("ways");
      if (wide > 20) context.fillText(String(batch), x + 3, d * high + 16);
    }
  }
  context.fillStyle = colour("soft");
  for (let k = 0; k <= 5; k++) {
    context.fillText(timeText((DATA.us * k) / 5, DATA.us), LEFT + (DATA.us * k * scale) / 5 - (k > 4 ? 46 : 0), places * high + 16);
  }
  const send = DATA.send[0] ? `${bytesText(DATA.send[0])} sent between stages; ` : "";
  const sum = DATA.synced[0] ? `${bytesText(DATA.synced[0])} of gradients sent by a rank; ` : "";
  $("time").setAttribute("aria-label", `${plural(places, "stage")} over ${timeText(DATA.us)}; ` +
    `${plural(DATA.spans.length, "block")} of micro-batches.`);
  $("timeNote").textContent = `${send}${sum}colours are micro-batches, paler is backward`;
}

function chooseLayer(block) {
  chosen = block;
  drawGrid();
  drawBlock();
}

function drawAll() { drawHeader(); drawGrid(); drawBlock(); drawTime(); }

$("grid").addEventListener("click", (event) => {
  const { block } = gridAt(event);
  if (block >= 0) chooseLayer(block);
});
$("grid").addEventListener("keydown", (event) => {
  const last = DATA.blocks.length - 1;
  const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  chooseLayer(Math.max(0, Math.min(last, to)));
});
$("layerBack").addEventListener("click", () => chooseLayer(Math.max(0, chosen - 1)));
$("layerNext").addEventListener("click", () =>
  chooseLayer(Math.min(DATA.blocks.length - 1, chosen + 1)));
$("grid").addEventListener("mousemove", (event) => {
  const { block, rank } = gridAt(event);
  if (block < 0 || rank < 0) { hideTip(); return; }
  const found = DATA.blocks[block], stage = found.stage < 0 ? "all ranks" : `stage ${found.stage}`;
  const computes = runsBlock(rank, found) ? `${stage}` : `${stage}, not here`;
  showTip(event, `<b>${escapeText(found.name)}</b> on rank ${rank}<br><span>${computes}</span>`);
});
$("grid").addEventListener("mouseleave", hideTip);
LIGHT.addEventListener("change", drawAll);
addEventListener("resize", drawAll);
drawAll();
