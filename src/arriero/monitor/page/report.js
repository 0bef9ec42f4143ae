// The page: what is charted, the tables, the two languages, and newer data where the page is served.

const TEXTS = {
  en: {
    theme: "Colours", themeAuto: "Colours: as the system", themeLight: "Light", themeDark: "Dark", figures: "Figures", curves: "Curves", plans: "Plan against measured", sources: "Data by source", samples: "Samples",
    recipe: "Recipe and environment", differing: "Where the runs differ", by: "X axis", step: "step", tokens: "tokens", hours: "time", smooth: "Smoothing", log: "Logarithmic y", whole: "Whole run",
    keys: "Drag over a chart to zoom, double-click for the whole run. By keyboard: arrows, + and −, 0.", keysOfChart: "Arrow keys read the points, shift and arrows move, plus and minus zoom, 0 shows the whole run.",
    comparing: n => `${n} runs side by side`, numbers: "Numbers", latest: "last", nothing: "no values in this part", notFinite: "not finite", above: value => `↑ up to ${value} above the frame`,
    tableOf: "Of the part that is shown, as metrics.jsonl has them.", tableCut: (most, all) => `The first ${most} of ${all} rows of the part that is shown, as metrics.jsonl has them; zoom in for others.`,
    empty: "No training step has been logged yet.", missing: names => `Not in the run folder: ${names}.`, damaged: names => `Could not be read: ${names}.`, cutEvents: (kept, all) => `${kept} of ${all} events are shown, the most telling kinds first.`,
    thinned: (kept, all) => `The curves show ${kept} of ${all} logged steps. Of each stretch the first step, the lowest and the highest value of every curve and what isn't finite were kept, unchanged; metrics.jsonl has the rest.`,
    lostLink: "The server that made this page doesn't answer; these are the last numbers that it gave.", liveNow: "updated while the run goes on",
    status: {running: "running", completed: "completed", stopped: "stopped", preempted: "preempted", failed: "failed", unknown: "state unknown"},
    run: "Run", loss: "Loss", lastLoss: "Training loss", fromLoss: value => `${value} at the first step`, evalLoss: "Evaluation loss", evalBits: "Bits per byte", perplexity: value => `perplexity ${value}`, fromBits: (value, step) => `${value} at step ${step}`, bestEval: (value, step) => `best ${value}, step ${step}`,
    steps: "Steps", ofSteps: n => `of ${n}`, logged: n => `${n} logged`, tokensSeen: "Tokens", throughput: "Throughput", medianOf: "median of the logged steps", mfu: "MFU", peakMemory: "Peak memory", fullest: "of rank 0", trained: "Training time", began: when => `began ${when}`, skipped: "Skipped steps", rollbacks: n => n === 1 ? "1 rollback" : `${n} rollbacks`, resumes: n => n === 1 ? "resumed once" : `resumed ${n} times`, notFiniteLoss: n => `loss not finite in ${n}`, device: "Device",
    train: "train", evaluation: "evaluation", lost: "taken back by a resume", total: "all",
    timeline: "Time line", lossTitle: "Loss", perSource: "Training loss by source", perSourceOf: name => `Training loss, ${name}`, evalTitle: "Evaluation loss by source", bitsTitle: "Evaluation, bits per byte", rate: "Learning rate", norm: "Gradient norm", speed: "Throughput", stepTime: "Time of a step", memory: "Peak memory", epochs: "Data seen, by source", epochsUnit: "passes over its rows", scale: "Loss scale",
    nats: "nats per target", tokensPerS: "tokens/s", seconds: "s", gib: "GiB", share: "of the peak", bits: "bits", clip: "max_grad_norm", planned: "planned", wholeStep: "whole step", readingRows: "reading rows", checkpoints: "waiting for checkpoints", checkpointing: "Waiting for checkpoints",
    quantity: "Quantity", plan: "Planned", measured: "Measured", difference: "Measured against planned", memoryOf: "Memory of the fullest rank", stepOf: "Time of a step, median", noPlan: "not known for this device", upTo: step => `start that ended at step ${step}`,
    source: "Source", weight: "Weight", passes: "Passes", byRows: "by its rows", trainLoss: "Training loss", prompt: "Prompt", samplesCut: (kept, all) => `The newest ${kept} of ${all} steps with samples.`, textCut: all => `… cut, ${all} characters in all`, atStep: step => `Step ${step}`,
    when: "When", kind: "Kind", what: "What", takenBack: "taken back by a later resume",
    kinds: {checkpoint: "checkpoint", eval: "evaluation", skip: "skipped step", overflow: "skipped step (fp16)", rollback: "rollback", resume: "resume", stop: "end"},
    told: {
      checkpoint: e => `${e.path}, ${e.seconds?.toFixed(1) ?? "?"} s` + (e.stall_s > 0.05 ? `, training waited ${e.stall_s.toFixed(1)} s` : ""), eval: e => `loss ${four(e.eval_loss)}` + (isNumber(e.eval_bits_per_byte) ? `, ${four(e.eval_bits_per_byte)} bits per byte` : ""),
      skip: e => `${e.reason}. ${e.row_count} rows: ${(e.named ?? []).join(", ")}${e.row_count > (e.named ?? []).length ? " …" : ""}`, overflow: e => `the gradient overflowed fp16; loss scale ${e.loss_scale}`, rollback: e => `from step ${e.from_step} to ${e.checkpoint}; rows ${(e.passed_over ?? []).join(" to ")} are passed over`,
      resume: e => e.checkpoint ? `goes on from ${e.checkpoint}` : "begins again: there was no checkpoint yet", stop: e => [e.status, e.reason].filter(Boolean).join(": "),
    },
    key: "Key", config: "Recipe (config.yaml)", overrides: "Changed on the command line", noOverrides: "nothing", environment: "Environment", dsConfig: "DeepSpeed's configuration (ds_config.json)", unset: "unset", same: "Their recipes and environments are the same but for output_dir.",
    made: (version, when) => `Made by arriero ${version}, ${when}. The page holds all its data and loads nothing.`, units: {s: "s", min: "min", h: "h", d: "days"}, axisTime: unit => `time (${unit})`,
    lasting: s => s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : s < 86400 ? `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min` : `${Math.floor(s / 86400)} d ${Math.floor(s % 86400 / 3600)} h`,
  },
  zh: {
    theme: "配色", themeAuto: "配色：跟随系统", themeLight: "浅色", themeDark: "深色", figures: "关键数字", curves: "曲线", plans: "预测与实测", sources: "各数据源", samples: "生成样例",
    recipe: "配方与环境", differing: "各次运行的差异", by: "横轴", step: "步", tokens: "词元", hours: "时间", smooth: "平滑", log: "纵轴取对数", whole: "全部",
    keys: "在图上拖动可放大，双击恢复全部。键盘：方向键、+、−、0。", keysOfChart: "左右方向键逐点朗读，Shift 加方向键平移，加减键缩放，0 恢复全部。",
    comparing: n => `${n} 次运行并排比较`, numbers: "数值", latest: "最新", nothing: "此区间没有数值", notFinite: "非有限值", above: value => `↑ 图框之上最高 ${value}`,
    tableOf: "当前显示区间的数值，与 metrics.jsonl 一致。", tableCut: (most, all) => `当前显示区间共 ${all} 行，此处为前 ${most} 行，与 metrics.jsonl 一致；放大可查看其余部分。`,
    empty: "尚未记录任何训练步。", missing: names => `运行目录中缺少：${names}。`, damaged: names => `无法读取：${names}。`, cutEvents: (kept, all) => `共 ${all} 个事件，显示其中最重要的 ${kept} 个。`,
    thinned: (kept, all) => `曲线显示 ${all} 个已记录步中的 ${kept} 个：每一段保留首步、各曲线的最小值与最大值以及非有限值，数值未作改动；其余见 metrics.jsonl。`,
    lostLink: "生成此页的服务没有响应；以下是它最后给出的数值。", liveNow: "随运行更新",
    status: {running: "运行中", completed: "已完成", stopped: "已停止", preempted: "被抢占", failed: "失败", unknown: "状态未知"},
    run: "运行", loss: "损失", lastLoss: "训练损失", fromLoss: value => `首步为 ${value}`, evalLoss: "评估损失", evalBits: "每字节比特数", perplexity: value => `困惑度 ${value}`, fromBits: (value, step) => `第 ${step} 步为 ${value}`, bestEval: (value, step) => `最佳 ${value}，第 ${step} 步`,
    steps: "步数", ofSteps: n => `共 ${n} 步`, logged: n => `已记录 ${n} 步`, tokensSeen: "词元数", throughput: "吞吐量", medianOf: "已记录步的中位数", mfu: "MFU", peakMemory: "峰值内存", fullest: "0 号进程", trained: "训练时长", began: when => `开始于 ${when}`, skipped: "跳过的步", rollbacks: n => `回退 ${n} 次`, resumes: n => `续训 ${n} 次`, notFiniteLoss: n => `${n} 步的损失非有限值`, device: "设备",
    train: "训练", evaluation: "评估", lost: "被续训撤回", total: "合计",
    timeline: "时间线", lossTitle: "损失", perSource: "各数据源的训练损失", perSourceOf: name => `训练损失：${name}`, evalTitle: "各数据源的评估损失", bitsTitle: "评估：每字节比特数", rate: "学习率", norm: "梯度范数", speed: "吞吐量", stepTime: "每步用时", memory: "峰值内存", epochs: "各数据源已用数据", epochsUnit: "遍数", scale: "损失缩放",
    nats: "每目标词元的奈特", tokensPerS: "词元/秒", seconds: "秒", gib: "GiB", share: "占峰值算力", bits: "比特", clip: "max_grad_norm", planned: "预测", wholeStep: "整步", readingRows: "读取数据", checkpoints: "等待检查点", checkpointing: "等待检查点的用时",
    quantity: "项目", plan: "预测", measured: "实测", difference: "实测相对预测", memoryOf: "占用最多的进程的内存", stepOf: "每步用时（中位数）", noPlan: "此设备无预测", upTo: step => `止于第 ${step} 步的一次启动`,
    source: "数据源", weight: "权重", passes: "遍数", byRows: "按行数", trainLoss: "训练损失", prompt: "提示词", samplesCut: (kept, all) => `共 ${all} 个步有样例，显示最新 ${kept} 个。`, textCut: all => `……已截断，全文 ${all} 个字符`, atStep: step => `第 ${step} 步`,
    when: "时间", kind: "类型", what: "内容", takenBack: "已被后来的续训撤回",
    kinds: {checkpoint: "检查点", eval: "评估", skip: "跳过的步", overflow: "跳过的步（fp16）", rollback: "回退", resume: "续训", stop: "结束"},
    told: {
      checkpoint: e => `${e.path}，${e.seconds?.toFixed(1) ?? "?"} 秒` + (e.stall_s > 0.05 ? `，训练等待 ${e.stall_s.toFixed(1)} 秒` : ""), eval: e => `损失 ${four(e.eval_loss)}` + (isNumber(e.eval_bits_per_byte) ? `，每字节 ${four(e.eval_bits_per_byte)} 比特` : ""),
      skip: e => `${e.reason}。共 ${e.row_count} 行：${(e.named ?? []).join("、")}${e.row_count > (e.named ?? []).length ? " ……" : ""}`, overflow: e => `梯度超出 fp16 范围；损失缩放 ${e.loss_scale}`, rollback: e => `从第 ${e.from_step} 步退回 ${e.checkpoint}；略过第 ${(e.passed_over ?? []).join(" 至 ")} 行`,
      resume: e => e.checkpoint ? `从 ${e.checkpoint} 继续` : "重新开始：当时还没有检查点", stop: e => [TEXTS.zh.status[e.status] ?? e.status, e.reason].filter(Boolean).join("："),
    },
    key: "键", config: "配方（config.yaml）", overrides: "命令行改动", noOverrides: "无", environment: "环境", dsConfig: "DeepSpeed 配置（ds_config.json）", unset: "未设置", same: "除 output_dir 外，配方与环境完全相同。",
    made: (version, when) => `由 arriero ${version} 生成于 ${when}。所有数据都在此页内，不加载任何外部资源。`, units: {s: "秒", min: "分钟", h: "小时", d: "天"}, axisTime: unit => `时间（${unit}）`,
    lasting: s => s < 60 ? `${Math.round(s)} 秒` : s < 3600 ? `${Math.floor(s / 60)} 分 ${Math.round(s % 60)} 秒` : s < 86400 ? `${Math.floor(s / 3600)} 小时 ${Math.floor(s % 3600 / 60)} 分` : `${Math.floor(s / 86400)} 天 ${Math.floor(s % 86400 / 3600)} 小时`,
  },
};
const at = id => document.getElementById(id);
const four = value => isNumber(value) ? short(value) : "–";
const whole = value => isNumber(value) ? Math.round(value).toLocaleString("en") : "–";
const percent = value => isNumber(value) ? `${short(value * 100, 3)} %` : "–";
const sizeOf = value => isNumber(value) ? value < 2 ** 30 ? `${short(value / 2 ** 20, 3)} MiB` : `${short(value / 2 ** 30, 3)} GiB` : "–";
const timeOf = seconds => isNumber(seconds) ? seconds >= 0.1 ? `${short(seconds, 3)} s` : `${short(seconds * 1000, 3)} ms` : "–";
const dashes = ["", "7 3", "2 3", "9 3 2 3"];
let language = navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en", data = JSON.parse(at("data").textContent), linked = true;
const text = name => TEXTS[language][name];
const dated = seconds => isNumber(seconds) ? new Date(seconds * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en-GB", {dateStyle: "medium", timeStyle: "short"}) : "–";
const board = new Board(text);
board.said = words => { at("said").textContent = words; };
board.changed = () => { at("whole").disabled = board.range === null; };

// ------------------------------------------------------------------------------------------------------ what is charted

// A number that training rows have, at a step between two of them.
function between(run, key, step) {
  const steps = run.training.step ?? [], values = run.training[key] ?? [];
  let low = 0, high = steps.length - 1;
  if (high < 0 || !isNumber(step)) return 0;
  if (step <= steps[0]) return key === "tokens" ? values[0] * step / steps[0] : values[0];
  while (high - low > 1) { const middle = low + high >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  if (step >= steps[high]) return values[high];
  return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
}

function axes(run, columns, unit) {
  const step = columns.step ?? [];
  return {step, tokens: columns.tokens ?? step.map(one => one === null ? null : between(run, "tokens", one)), hours: (columns.hours ?? []).map(one => one === null ? null : one * unit)};
}

function describe(runs) {
  const longest = Math.max(...runs.map(run => run.figures.hours)), [name, unit] = longest < 0.05 ? ["s", 3600] : longest < 3 ? ["min", 60] : longest < 72 ? ["h", 1] : ["d", 1 / 24];
  board.timeUnit = text("units")[name];
  const several = runs.length > 1, kept = runs.map(run => ({run, training: axes(run, run.training, unit), evaluation: axes(run, run.evaluation, unit), lost: axes(run, run.taken_back, unit)}));
  const named = (run, label) => several ? label ? `${run.name} · ${label}` : run.name : label;
  const series = (n, place, key, label, more = {}) => {
    const ys = kept[n].run[place === "lost" ? "taken_back" : place][key];
    return ys && ys.some(y => y !== null) ? [{key, column: named(kept[n].run, key), name: named(kept[n].run, label), tone: (several ? n : 0) % 8, dash: several ? dashes[Math.floor(n / 8) % 4] : "", xs: kept[n][place], ys, ...more}] : [];
  };
  const each = (place, key, label, more) => runs.flatMap((_, n) => series(n, place, key, label, more));
  // Curves of key/source: a tone for each source, or with several runs for each run, and then a dash for each source.
  const bySource = (place, key, more = {}) => runs.flatMap((run, n) => sourcesOf(run, place, key).flatMap((source, m) => series(n, place, `${key}/${source}`, source, several ? {dash: dashes[m % 4], ...more} : {tone: (m + 2) % 8, dash: dashes[Math.floor(m / 6) % 4], ...more})));
  const plan = key => several ? [] : runs[0].plans.slice(-1).filter(one => isNumber(one[key])).map(one => ({name: text("planned"), value: one[key], always: true}));
  const clips = several || !runs[0].max_grad_norm ? [] : [{name: text("clip"), value: runs[0].max_grad_norm}];
  const evalTone = several ? {dash: "6 3"} : {tone: 1};
  const alone = (key, label) => each("training", key, several ? "" : label);
  const total = several ? {} : {tone: 1};
  const drawn = [
    {id: "timeline", title: text("timeline"), lanes: lanes(kept, unit), table: eventTable, broad: true},
    {id: "loss", title: text("lossTitle"), unit: text("nats"), broad: true, settles: true, series: [...each("training", "loss", text("train")), ...each("evaluation", "eval_loss", text("evaluation"), {marks: true, ...evalTone}), ...several ? [] : each("lost", "loss", text("lost"), {lost: true, dash: "2 3"})]},
    {id: "sources-loss", title: text("perSource"), unit: text("nats"), settles: true, series: bySource("training", "loss")},
    {id: "eval-loss", title: text("evalTitle"), unit: text("nats"), settles: true, series: withTotal("eval_loss")},
    {id: "bits", title: text("bitsTitle"), unit: text("bits"), settles: true, series: [...each("evaluation", "eval_bits_per_byte", several ? "" : text("total"), {marks: true, ...total}), ...bySource("evaluation", "eval_bits_per_byte", {marks: true})]},
    {id: "rate", title: text("rate"), zero: true, series: alone("learning_rate", text("rate"))},
    {id: "norm", title: text("norm"), settles: true, series: alone("grad_norm", text("norm")), levels: clips},
    {id: "speed", title: text("speed"), unit: text("tokensPerS"), zero: true, series: alone("tokens_per_second", text("speed"))},
    {id: "time", title: text("stepTime"), unit: text("seconds"), zero: true, series: [...alone("step_time_s", text("wholeStep")), ...several ? [] : each("training", "data_time_s", text("readingRows"), {tone: 1})], levels: plan("planned_step_time_s")},
    {id: "mfu", title: text("mfu"), unit: text("share"), zero: true, format: percent, series: alone("mfu", text("mfu"))},
    {id: "memory", title: text("memory"), unit: text("gib"), zero: true, scale: 1 / 2 ** 30, series: alone("memory_bytes", text("memory")), levels: plan("planned_memory_bytes")},
    {id: "epochs", title: text("epochs"), unit: text("epochsUnit"), zero: true, series: bySource("training", "epoch")},
    {id: "stall", title: text("checkpointing"), unit: text("seconds"), zero: true, series: runs.some(run => run.training.checkpoint_time_s?.some(one => one > 0)) ? alone("checkpoint_time_s", text("checkpoints")) : []},
    {id: "scale", title: text("scale"), series: runs.some(run => run.training.loss_scale?.some(one => one !== 1)) ? alone("loss_scale", text("scale")) : []},
    ...others(),
  ];
  function withTotal(key) {
    const found = bySource("evaluation", key, {marks: true});
    return found.length ? [...each("evaluation", key, several ? "" : text("total"), {marks: true, ...total}), ...found] : [];
  }
  // A number that nobody has placed has a chart of its own, so that a new metric is never lost.
  function others() {
    const known = new Set(["step", "hours", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_time_s", "data_time_s", "checkpoint_time_s", "mfu", "memory_bytes", "loss_scale"]);
    const found = new Set(runs.flatMap(run => Object.keys(run.training)).filter(key => !known.has(key) && !/^(loss|epoch)\//.test(key)));
    return [...found].map((key, n) => ({id: `other-${n}`, title: key, series: alone(key, key)}));
  }
  return drawn.filter(spec => spec.lanes ? spec.lanes.length : spec.series.length);
}

const sourcesOf = (run, place, key) => Object.keys(run[place]).filter(name => name.startsWith(`${key}/`)).map(name => name.slice(key.length + 1));

const LOOKS = {checkpoint: {tone: "t2", sign: "dot", plain: true}, eval: {tone: "t1", sign: "diamond", plain: true}, skip: {tone: "wrong", sign: "cross"}, overflow: {tone: "wrong", sign: "cross"}, rollback: {tone: "turn", sign: "back", full: true}, resume: {tone: "quiet", sign: "on", full: true}, stop: {tone: "quiet", sign: "square", plain: true}};
const nameOf = event => text("kinds")[event.kind] ?? event.kind;
const wordsOf = event => {
  const rest = () => Object.entries(event).filter(([key]) => !["step", "time", "hours", "kind", "taken_back"].includes(key)).map(([key, value]) => `${key} ${value}`).join(", ");
  return (text("told")[event.kind]?.(event) ?? rest()) + (event.taken_back ? ` (${text("takenBack")})` : "");
};

// The events of one run in a row for each kind, of several in a row for each run.
function lanes(kept, unit) {
  const found = kept.flatMap(({run}, n) => run.events.map(event => ({
    ...LOOKS[event.kind] ?? {tone: "quiet", sign: "square", plain: true}, run: n, kind: event.kind,
    xs: {step: event.step, tokens: between(run, "tokens", event.step), hours: event.hours * unit},
    name: () => `${kept.length > 1 ? run.name + " · " : ""}${nameOf(event)}, ${text("step")} ${event.step}`, text: () => (kept.length > 1 ? `${run.name}: ` : "") + `${nameOf(event)}: ${wordsOf(event)}`,
  }))).filter(event => isNumber(event.xs.step));
  board.events = found;
  if (kept.length > 1) return kept.map(({run}, n) => ({name: run.name, events: found.filter(event => event.run === n)})).filter(lane => lane.events.length);
  const grouped = kind => kind === "overflow" ? "skip" : kind;
  return [...new Set(found.map(event => grouped(event.kind)))].map(kind => ({name: text("kinds")[kind] ?? kind, events: found.filter(event => grouped(event.kind) === kind)}));
}

// ------------------------------------------------------------------------------------------------------------ the tables

const head = (...cells) => make("thead", {}, make("tr", {}, cells.map(([cell, number]) => make("th", {scope: "col", class: number ? "number" : null}, cell))));
const swatch = n => data.runs.length > 1 ? make("span", {class: `swatch t${n % 8}`, "aria-hidden": "true"}) : "";
const boxed = (...inside) => make("div", {class: "box"}, make("div", {class: "scroll", tabindex: 0}, ...inside));

function cardsOf(run) {
  const f = run.figures, found = [];
  const card = (id, name, value, ...notes) => found.push(make("div", {class: "card", "data-figure": id}, make("dt", {}, name), make("dd", {class: "big"}, value), ...notes.filter(Boolean).map(note => make("dd", {class: "small"}, note))));
  card("step", text("steps"), whole(f.step), run.max_steps ? text("ofSteps")(whole(run.max_steps)) : null, f.rows < f.step ? text("logged")(whole(f.rows)) : null);
  card("tokens", text("tokensSeen"), short(f.tokens, 3));
  card("loss", text("lastLoss"), four(f.loss), f.first_loss === null ? null : text("fromLoss")(four(f.first_loss)), f.not_finite ? text("notFiniteLoss")(f.not_finite) : null);
  if (f.eval) {
    card("eval_loss", text("evalLoss"), four(f.eval.eval_loss), isNumber(f.eval.eval_perplexity) ? text("perplexity")(short(f.eval.eval_perplexity)) : null, f.best_eval && f.best_eval.step !== f.eval.step ? text("bestEval")(four(f.best_eval.eval_loss), f.best_eval.step) : null);
    if (isNumber(f.eval.eval_bits_per_byte)) card("eval_bits_per_byte", text("evalBits"), four(f.eval.eval_bits_per_byte), isNumber(f.first_eval.eval_bits_per_byte) && f.first_eval.step !== f.eval.step ? text("fromBits")(four(f.first_eval.eval_bits_per_byte), f.first_eval.step) : null);
  }
  card("tokens_per_second", text("throughput"), isNumber(f.tokens_per_second) ? `${short(f.tokens_per_second, 3)}/s` : "–", text("medianOf"));
  if (isNumber(f.mfu)) card("mfu", text("mfu"), percent(f.mfu), text("medianOf"));
  card("memory", text("peakMemory"), sizeOf(f.peak_memory_bytes), text("fullest"));
  card("hours", text("trained"), text("lasting")(f.hours * 3600), f.began ? text("began")(dated(f.began)) : null);
  card("skipped", text("skipped"), whole(f.skipped), f.rollbacks ? text("rollbacks")(f.rollbacks) : null, f.resumes ? text("resumes")(f.resumes) : null);
  return make("dl", {class: "cards"}, found);
}

function figureTable(runs) {
  const columns = [
    [text("steps"), f => whole(f.step)], [text("tokensSeen"), f => short(f.tokens, 3)], [text("lastLoss"), f => four(f.loss)], [text("evalLoss"), f => four(f.eval?.eval_loss)], [text("evalBits"), f => four(f.eval?.eval_bits_per_byte)],
    [text("throughput"), f => isNumber(f.tokens_per_second) ? `${short(f.tokens_per_second, 3)}/s` : "–"], [text("mfu"), f => percent(f.mfu)], [text("peakMemory"), f => sizeOf(f.peak_memory_bytes)], [text("trained"), f => text("lasting")(f.hours * 3600)], [text("skipped"), f => whole(f.skipped)],
  ];
  return boxed(make("table", {}, head([text("run")], ...columns.map(([name]) => [name, true])), make("tbody", {}, runs.map((run, n) => make("tr", {}, make("th", {scope: "row"}, swatch(n), run.name, " ", pill(run)), columns.map(([, value]) => make("td", {class: "number"}, value(run.figures))))))));
}

function differingTable() {
  if (!data.differences.length) return make("p", {class: "box"}, text("same"));
  const spell = value => value === null || value === undefined ? text("unset") : typeof value === "object" ? JSON.stringify(value) : String(value);
  return boxed(make("table", {}, head([text("key")], ...data.runs.map((run, n) => [make("span", {}, swatch(n), run.name)])), make("tbody", {}, data.differences.map(one => make("tr", {}, make("th", {scope: "row"}, one.key), one.values.map(value => make("td", {class: "text"}, spell(value))))))));
}

function planTable() {
  const rows = data.runs.flatMap((run, n) => run.plans.flatMap((plan, m) => [["memory_bytes", text("memoryOf"), sizeOf], ["step_time_s", text("stepOf"), timeOf]].map(([key, name, spell]) => {
    const planned = plan[`planned_${key}`], measured = plan[key], known = isNumber(planned) && isNumber(measured), off = known ? measured / planned - 1 : 0;
    const where = data.runs.length > 1 ? make("span", {}, swatch(n), run.name) : run.plans.length > 1 ? text("upTo")(plan.step) : null;
    return make("tr", {"data-plan": key}, make("th", {scope: "row"}, where, where ? ": " : null, name), make("td", {class: "number"}, isNumber(planned) ? spell(planned) : text("noPlan")), make("td", {class: "number"}, spell(measured)), make("td", {class: "number"}, known ? `${off < 0 ? "−" : "+"}${short(Math.abs(off) * 100, 3)} %` : "–"));
  })));
  return rows.length ? boxed(make("table", {}, head([text("quantity")], [text("plan"), true], [text("measured"), true], [text("difference"), true]), make("tbody", {}, rows))) : null;
}

function sourceTable() {
  const last = (columns, key) => columns[key]?.findLast(isNumber);
  const rows = data.runs.flatMap((run, n) => Object.entries(run.figures.epochs).map(([source, passes]) => make("tr", {},
    make("th", {scope: "row"}, data.runs.length > 1 ? make("span", {}, swatch(n), `${run.name} · `) : null, source), make("td", {class: "number"}, isNumber(run.weights[source]) ? String(run.weights[source]) : text("byRows")), make("td", {class: "number"}, four(passes)),
    make("td", {class: "number"}, four(last(run.training, `loss/${source}`) ?? (Object.keys(run.figures.epochs).length === 1 ? run.figures.loss : undefined))), ...["eval_loss", "eval_bits_per_byte"].map(key => make("td", {class: "number"}, four(run.figures.eval?.[`${key}/${source}`] ?? (Object.keys(run.figures.epochs).length === 1 ? run.figures.eval?.[key] : undefined)))))));
  return rows.length ? boxed(make("table", {}, head([text("source")], [text("weight"), true], [text("passes"), true], [text("trainLoss"), true], [text("evalLoss"), true], [text("evalBits"), true]), make("tbody", {}, rows))) : null;
}

function eventTable() {
  return make("table", {}, head(...data.runs.length > 1 ? [[text("run")]] : [], [text("step"), true], [text("when")], [text("kind")], [text("what")]), make("tbody", {}, data.runs.flatMap((run, n) => run.events.map(event => make("tr", {},
    data.runs.length > 1 ? make("td", {}, swatch(n), run.name) : null, make("td", {class: "number"}, String(event.step)), make("td", {}, dated(event.time)), make("td", {}, nameOf(event)), make("td", {class: "text"}, wordsOf(event)))))));
}

function sampleList(run) {
  const steps = [...new Set(run.samples.map(one => one.step))];
  return [run.sample_steps > steps.length ? make("p", {class: "hint"}, text("samplesCut")(steps.length, run.sample_steps)) : null, ...steps.map((step, n) => make("details", {class: "box", open: n === 0, "data-keep": `sample-${run.name}-${step}`}, make("summary", {}, data.runs.length > 1 ? `${run.name} · ${text("atStep")(step)}` : text("atStep")(step)),
    run.samples.filter(one => one.step === step).map(one => make("pre", {class: "sample", tabindex: 0}, make("span", {class: "prompt"}, one.prompt), one.text, one.characters ? make("span", {class: "prompt"}, `\n${text("textCut")(one.characters)}`) : null))))];
}

function recipeOf(run) {
  const flat = (value, path) => value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([key, inner]) => flat(inner, path ? `${path}.${key}` : key)) : [[path, Array.isArray(value) ? JSON.stringify(value) : String(value)]];
  const fold = (id, title, inside, open) => make("details", {class: "box", open, "data-keep": `${id}-${run.name}`}, make("summary", {}, data.runs.length > 1 ? `${run.name} · ${title}` : title), inside);
  return make("div", {class: "columns"},
    make("div", {}, run.config ? fold("config", text("config"), make("pre", {tabindex: 0}, run.config.trim()), false) : null),
    make("div", {}, fold("overrides", text("overrides"), make("pre", {}, run.overrides.join("\n") || text("noOverrides")), false),
      Object.keys(run.environment).length ? fold("environment", text("environment"), make("table", {}, make("tbody", {}, flat(run.environment, "").map(([key, value]) => make("tr", {}, make("th", {scope: "row"}, key), make("td", {class: "text"}, value))))), false) : null,
      Object.keys(run.ds_config).length ? fold("ds", text("dsConfig"), make("pre", {tabindex: 0}, JSON.stringify(run.ds_config, null, 2)), false) : null));
}

// --------------------------------------------------------------------------------------------------------------- the page

function pill(run) {
  const status = run.state.status ?? "unknown";
  return make("span", {class: `pill ${status}`}, text("status")[status] ?? status);
}

function notes() {
  const found = [], note = (words, bad) => found.push(make("p", {class: bad ? "note bad" : "note", role: bad ? "alert" : null}, words)), several = data.runs.length > 1;
  if (!linked) note(text("lostLink"), true);
  for (const run of data.runs) {
    const of = several ? [make("strong", {}, `${run.name}: `)] : [], say = (words, bad) => note([...of, words], bad);
    if (run.state.status === "failed") say(make("strong", {}, run.state.reason ?? ""), true);
    if (!run.figures.rows) say(text("empty"));
    if (run.damaged.length) say(text("damaged")(run.damaged.join(", ")), true);
    if (run.missing.length) say(text("missing")(run.missing.join(", ")));
    if (run.rows_shown < run.figures.rows) say(text("thinned")(whole(run.rows_shown), whole(run.figures.rows)));
    if (run.events.length < run.events_total) say(text("cutEvents")(whole(run.events.length), whole(run.events_total)));
  }
  return found;
}

function fill(id, ...inside) {
  const section = at(id), found = inside.flat().filter(Boolean), box = section.lastElementChild;
  const open = new Map([...box.querySelectorAll("details[data-keep]")].map(one => [one.dataset.keep, one.open]));
  section.hidden = !found.length;
  box.replaceChildren(...found);
  for (const one of box.querySelectorAll("details[data-keep]")) if (open.has(one.dataset.keep)) one.open = open.get(one.dataset.keep);
}

function show() {
  const {runs} = data, alone = runs.length === 1;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  document.title = `${runs.map(run => run.name).join(", ")} · arriero`;
  for (const one of document.querySelectorAll("[data-text]")) one.textContent = text(one.dataset.text);
  at("tools").setAttribute("aria-label", text("curves"));
  at("name").textContent = alone ? runs[0].name : text("comparing")(runs.length);
  const {status, reason} = runs[0].state;
  at("status").replaceChildren(...alone ? [pill(runs[0]), status !== "failed" && reason ? ` ${reason}` : "", data.live ? ` · ${text("liveNow")}` : ""] : []);
  at("notes").replaceChildren(...notes());
  fill("figures", alone ? cardsOf(runs[0]) : figureTable(runs));
  fill("differing", alone ? [] : differingTable());
  const specs = describe(runs);
  at("by").options[2].textContent = text("axisTime")(board.timeUnit);
  board.by = at("by").value;
  if (specs.map(spec => spec.id).join() === board.charts.map(chart => chart.spec.id).join()) board.charts.forEach((chart, n) => chart.take(specs[n]));
  else {
    board.charts = specs.map(spec => new Chart(board, spec));
    at("charts").replaceChildren(...board.charts.map(chart => chart.figure));
  }
  board.measure();
  board.redraw();
  at("curves").hidden = !specs.length;
  fill("plans", planTable());
  fill("sources", sourceTable());
  fill("samples", runs.flatMap(sampleList));
  fill("recipe", runs.map(recipeOf));
  at("made").textContent = text("made")(data.version, dated(data.made));
}

async function follow() {
  if (document.visibilityState === "visible") {
    try {
      const answer = await fetch("data.json", {headers: {"If-None-Match": data.tag ?? ""}, cache: "no-store"});
      const back = !linked;
      linked = answer.ok || answer.status === 304;
      if (answer.status === 200) data = {...await answer.json(), tag: answer.headers.get("ETag")};
      if (answer.status === 200 || back) show();
    } catch { if (linked) { linked = false; show(); } }
  }
  setTimeout(follow, 2000);
}

at("language").addEventListener("change", event => { language = event.target.value; show(); });
at("theme").addEventListener("change", event => { document.documentElement.dataset.theme = event.target.value; });
at("by").addEventListener("change", event => board.set({by: event.target.value}));
at("log").addEventListener("change", event => board.set({log: event.target.checked}));
at("smooth").addEventListener("input", event => { at("smoothed").textContent = event.target.value; board.set({smooth: Number(event.target.value)}); });
at("whole").addEventListener("click", () => board.set({range: null}));
at("language").value = language;
show();
if (data.live) setTimeout(follow, 2000);
