// The page's state (the chosen run, the mode and the clock) and the functions that update all
// views.
const State = { run: DATA.runs[0], mode: "load", time: 0, playing: false, seconds: 8, last: 0 };
const NOTES = {
  load: "how busy each link is over the whole run",
  flow: "what moves at the cursor\u2019s moment",
  tree: "the way of one chunk, a hop at a time",
};

function header() {
  const optimum = DATA.bound ? ` The network allows <b>${timeText(DATA.bound)}</b>` +
    ` (${(DATA.size / DATA.bound / 1e3).toPrecision(4)} GB/s), latency aside.` : "";
  const name = DATA.collective.replaceAll("_", "-");
  $("title").textContent = `${name[0].toUpperCase()}${name.slice(1)} on ${DATA.topology}`;
  document.title = $("title").textContent;
  const best = DATA.runs.reduce((a, b) => (a.time <= b.time ? a : b));
  const reduction = DATA.reduction ? `, ${escapeText(DATA.reduction)}` : "";
  $("subtitle").innerHTML = `${DATA.ranks} ranks, ${bytesText(DATA.size)}${reduction}. Fastest: ` +
    `<b>${escapeText(words(best.name))}</b>, ${timeText(best.time)}.${optimum}`;
}

function comparison() {
  const box = $("compare");
  box.replaceChildren();
  const optimum = DATA.bound ? DATA.size / DATA.bound / 1e3 : 0;
  const top = Math.max(...DATA.runs.map((r) => r.algbw), optimum);
  for (const run of DATA.runs) {
    const row = document.createElement("button");
    row.className = `row${run === State.run ? " on" : ""}`;
    const share = optimum ? `${((100 * DATA.bound) / run.time).toFixed(0)}% of opt.`
      : `${run.algbw.toPrecision(3)} GB/s`;
    const mark = optimum
      ? `<div class="mark" style="left:calc(${(100 * optimum) / top}% - 2px)"></div>` : "";
    const fill = `<span class="fill" style="width:${(100 * run.algbw) / top}%"></span>`;
    row.innerHTML = `<span class="name" title="${escapeText(run.title)}">` +
      `${escapeText(words(run.name))}</span><span class="track">${fill}${mark}</span>` +
      `<span class="num">${timeText(run.time)}<small>${share}</small></span>`;
    row.setAttribute("aria-pressed", String(run === State.run));
    row.addEventListener("click", async () => {
      await choose(run);
      $("compare").querySelector('[aria-pressed="true"]').focus();
    });
    box.appendChild(row);
  }
  const run = State.run, busiest = Math.max(...run.busy), idle = run.busy.filter((b) => !b).length;
  const facts = [["algorithm bandwidth", `${run.algbw.toPrecision(4)} GB/s`],
    ["steps, puts", `${run.steps}, ${run.puts.toLocaleString("en")}`],
    ["chunks, pieces of each", `${run.chunks}, ${run.pieces}`],
    ["busiest link", `${(100 * busiest).toFixed(1)}%`],
    ["links never used", `${idle} of ${run.busy.length}`]];
  const list = document.createElement("dl");
  list.className = "facts";
  list.innerHTML = facts.map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join("");
  box.appendChild(list);
}

async function choose(run) {
  await unpack(run);
  State.run = run;
  State.time = Math.min(State.time, run.time);
  comparison();
  Trees.collect();
  Timeline.build();
  Network.paint();
}

function setMode(mode) {
  if (mode !== "tree" && Trees.timer) Trees.walk(false);
  State.mode = mode;
  for (const [id, name] of [["modeLoad", "load"], ["modeFlow", "flow"], ["modeTree", "tree"]]) {
    $(id).classList.toggle("on", name === mode);
    $(id).setAttribute("aria-selected", String(name === mode));
  }
  $("modeNote").textContent = NOTES[mode];
  Network.paint();
}

function setTime(time) {
  State.time = time;
  if (time < Timeline.from || time > Timeline.from + Timeline.span()) Timeline.move(time);
  Timeline.paint();
  if (State.mode === "flow") Network.overlay();
}

function play(on) {
  if (on && State.mode !== "flow") setMode("flow");
  if (on && State.time >= State.run.time) State.time = 0;
  State.playing = on;
  State.last = 0;
  $("play").textContent = on ? "pause" : "play";
  $("play").classList.toggle("on", on);
  if (on) requestAnimationFrame(tick);
}

function tick(now) {
  if (!State.playing) return;
  const passed = State.last ? (now - State.last) / 1000 : 0;
  State.last = now;
  const time = State.time + (passed / State.seconds) * State.run.time;
  setTime(Math.min(time, State.run.time));
  if (time >= State.run.time) play(false);
  else requestAnimationFrame(tick);
}

function setSpeed(seconds) {
  State.seconds = Math.max(2, Math.min(64, seconds));
  $("speed").textContent = `${State.seconds} s`;
}

async function start() {
  header();
  comparison();
  Network.build();
  setSpeed(8);
  $("modeLoad").addEventListener("click", () => setMode("load"));
  $("modeFlow").addEventListener("click", () => setMode("flow"));
  $("modeTree").addEventListener("click", () => setMode("tree"));
  $("treeBack").addEventListener("click", () => { Trees.walk(false); Trees.step(-1); });
  $("treeNext").addEventListener("click", () => { Trees.walk(false); Trees.step(1); });
  $("treePlay").addEventListener("click", () => Trees.walk(!Trees.timer));
  $("play").addEventListener("click", () => play(!State.playing));
  $("zoomOut").addEventListener("click", () => Timeline.zoomTo(0.5));
  $("zoomIn").addEventListener("click", () => Timeline.zoomTo(2));
  $("slower").addEventListener("click", () => setSpeed(State.seconds * 2));
  $("faster").addEventListener("click", () => setSpeed(State.seconds / 2));
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "BUTTON" && event.key === " ") return;
    if (event.key === " ") { event.preventDefault(); play(!State.playing); }
    if (event.key === "ArrowLeft") Trees.step(-1);
    if (event.key === "ArrowRight") Trees.step(1);
  });
  Timeline.listen();
  await choose(DATA.runs[0]);
  // The URL fragment #tree=3 opens the page on tree 3; #time=0.4 opens it at 40% of the run's time.
  const [key, value] = location.hash.slice(1).split("=");
  setMode(key === "tree" ? "tree" : key === "time" ? "flow" : "load");
  if (key === "tree") Trees.choose(Number(value) || 0);
  if (key === "time") setTime((Number(value) || 0) * State.run.time);
  let pending = 0;
  const redraw = () => {
    clearTimeout(pending);
    pending = setTimeout(() => {
      Network.build();
      Trees.diagram();
      Timeline.build();
      Network.paint();
    }, 80);
  };
  new ResizeObserver(redraw).observe($("stage"));
  LIGHT.addEventListener("change", redraw);
}
start();
