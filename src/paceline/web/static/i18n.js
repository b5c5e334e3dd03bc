// The page's own texts, in English and Chinese: the English text is the key.
const ZH = {
  "Jobs": "任务", "Machines": "机器", "Submit": "提交", "Language": "语言", "Search": "搜索", "Columns": "列",
  "name": "名称", "state": "状态", "target": "目标", "kind": "类型", "ranks": "rank", "done": "进度", "left": "剩余",
  "loss": "损失", "samples/s": "样本/秒", "devices": "设备", "age": "已提交", "duration": "时长", "restarts": "重启", "why": "原因",
  "nodes": "节点", "All targets": "所有目标", "{n} jobs": "{n} 个任务", "1 job": "1 个任务", "No job matches.": "没有符合条件的任务。",
  "Notifications: on": "通知：开", "Notifications: off": "通知：关", "{name} hangs": "{name} 卡住了", "{name} has failed": "{name} 失败了",
  "{name} has ended: {state}": "{name} 已结束：{state}",
  "Connection lost; trying again…": "连接中断，正在重试…",
  "Open the address that paceline web has printed.": "请打开 paceline web 输出的地址。",
  "Loading…": "加载中…", "Logs": "日志", "Overview": "概览", "Back": "返回", "Stop": "停止", "Resubmit": "重新提交",
  "Delete": "删除", "Scale": "伸缩", "TensorBoard": "TensorBoard", "Cancel": "取消", "Copy": "复制", "Copied": "已复制",
  "The same on the command line": "等效的命令行", "Rank": "Rank", "all": "全部", "Attempt": "尝试", "last": "最后一次",
  "Follow": "跟随", "Earlier": "更早", "From the start": "从头开始", "To the end": "到末尾", "More": "更多",
  "Regular expression": "正则表达式", "{n} lines": "{n} 行", "1 line": "1 行", "The log has ended.": "日志已结束。", "following": "跟随中",
  "reading": "读取中", "paused": "已暂停", "Nothing was written yet.": "尚无输出。", "Times": "时间",
  "The page keeps the last {n} lines; see others with Earlier.": "页面保留最后 {n} 行；其他行请点“更早”。",
  "Stop {name}": "停止 {name}", "Stop at once; nothing is saved": "立即停止；不保存任何内容",
  "Its ranks get SIGTERM. A script that uses the library saves a checkpoint, and has {s} s for it.":
    "各 rank 将收到 SIGTERM。使用本库的脚本会在 {s} 秒内保存检查点。",
  "Its ranks are killed. What they have not saved is lost.": "各 rank 将被强制结束，未保存的内容会丢失。",
  "Suspend": "暂停", "Suspend {name}": "暂停 {name}", "Resume": "继续", "Resume {name}": "继续 {name}",
  "Its ranks end, and its devices are given back, until it is resumed.": "各 rank 结束，设备释放，直到继续为止。",
  "It has saved step {step}; a script that uses the library saves again.": "已保存第 {step} 步；使用本库的脚本会再次保存。",
  "No checkpoint of it is known: unless its script saves, it begins anew then.": "没有已知的检查点：如果脚本不保存，之后将重新开始。",
  "It goes on from step {step}, once it has its devices again.": "重新得到设备后，从第 {step} 步继续。", "hangs": "卡住", "1 hangs": "1 个卡住", "{n} hang": "{n} 个卡住",
  "No checkpoint of it is known: it begins anew, once it has its devices again.": "没有已知的检查点：重新得到设备后，将重新开始。",
  "Runs again, with these changes. No checkpoint of it is known, so it begins anew.": "按如下更改再次运行。没有已知的检查点，因此重新开始。",
  "Delete {name}": "删除 {name}",
  "Removes its folder with logs and checkpoints: {n} checkpoints, {size}. This cannot be undone.":
    "删除其目录，包括日志和检查点：{n} 个检查点，{size}。此操作无法撤销。",
  "Removes its folder with logs and checkpoints. This cannot be undone.": "删除其目录，包括日志和检查点。此操作无法撤销。",
  "Resubmit {name}": "重新提交 {name}", "Runs again, from its newest checkpoint, with these changes.": "从最新检查点再次运行，并作如下更改。",
  "Begin anew, without its checkpoints": "重新开始，不使用其检查点", "Ranks per node": "每节点 rank 数", "Nodes": "节点数",
  "Devices per node": "每节点设备数", "Time limit": "时间限制", "Restarts after failures": "失败后重启次数", "Arguments": "参数",
  "Variables (NAME=VALUE, a line each)": "环境变量（每行一个 NAME=VALUE）", "unchanged": "不变", "Target": "目标",
  "Dry run": "试运行", "What would be started": "将要启动的内容", "Scale {name}": "伸缩 {name}",
  "Nodes are added or removed; its ranks start again from the last checkpoint.": "添加或移除节点；各 rank 从最后的检查点重新开始。",
  "Nodes to add (negative: to remove)": "要添加的节点数（负数为移除）", "Job file": "任务文件", "Open a file": "打开文件",
  "Submitted from the folder {folder}, as user {user} on {host}.": "从 {host} 上用户 {user} 的目录 {folder} 提交。",
  "as the file says": "按文件", "Try it with a dry run first.": "请先试运行。", "Use in a new job": "用于新任务",
  "This server is read-only.": "此服务器为只读。", "node": "节点", "CPU": "CPU", "memory": "内存", "disk": "磁盘", "jobs": "任务",
  "GPUs": "GPU", "{used} of {all} devices in use": "{all} 个设备中已用 {used} 个", "of": "/", "Events": "事件", "time": "时间",
  "event": "事件", "details": "详情", "No machine.": "没有机器。", "Show": "显示", "Compare": "比较", "Theme": "主题", "Report": "报告",
  "exit code": "退出码", "epoch": "轮", "step": "步", "progress": "进度", "command": "命令", "folder": "目录", "labels": "标签", "error": "错误",
  "advice": "建议", "waiting": "等待", "slow": "变慢原因", "created": "创建", "started": "开始", "finished": "结束", "checkpoint": "检查点",
  "Metrics": "指标", "Use": "资源使用", "Why": "原因", "Ranks": "Rank", "rank": "rank", "Last lines": "最后的输出", "Job file and code": "任务文件与代码",
  "What is missing": "缺失内容", "Logarithmic": "对数坐标", "Over time": "按时间", "Smoothing": "平滑", "as logged": "原始值",
  "Drag to zoom; double-click shows all.": "拖动以放大；双击显示全部。", "What the ranks spend their time on": "各 rank 的时间分布", "As a table": "以表格显示",
  "{low} to {high}, last {last}": "{low} 至 {high}，最后 {last}", "data": "数据", "compute": "计算", "exchange": "通信", "other": "其他", "unknown": "未知",
  "steps/s": "步/秒", "GPUs in use": "GPU 使用率", "GPU memory": "显存", "CPU cores": "CPU 核", "Memory": "内存", "Network": "网络", "Disk": "磁盘",
  "Power": "功率", "Temperature": "温度", "this job": "本任务", "the machines": "机器", "received": "接收", "sent": "发送", "read": "读", "written": "写",
  "mean": "平均", "sum": "合计", "most": "最高", "all together": "全部合计", "Job file": "任务文件", "Changes since the commit": "提交之后的更改",
  "source": "来源", "branch": "分支", "commit": "提交", "Seconds of a step": "每步的秒数", "made {time} by paceline {version}": "由 paceline {version} 于 {time} 生成",
  "dark": "深色", "light": "浅色", "system": "跟随系统", "{name} was submitted.": "{name} 已提交。",
  "PENDING": "等待中", "STARTING": "启动中", "RUNNING": "运行中", "RESTARTING": "重启中", "SUSPENDED": "已暂停", "SUCCEEDED": "成功", "FAILED": "失败",
  "STOPPED": "已停止", "LOST": "失联", "running": "运行中", "failed in 24 hours": "24 小时内失败", "on 1 device": "使用 1 个设备",
  "on {n} devices": "使用 {n} 个设备", "Group by": "分组", "Not grouped": "不分组", "Grouped by name": "按名称分组", "Grouped by command": "按命令分组",
  "Grouped by {label}": "按 {label} 分组", "group": "组", "best loss": "最低损失", "As usual": "默认", "1 rank": "1 个 rank", "{n} ranks": "{n} 个 rank",
  "The newest {n} of {all} groups; filter for others.": "共 {all} 组，显示最新的 {n} 组；用筛选查看其他组。",
  "environment": "环境", "submitted: {ranks}, {nodes}": "已提交：{ranks}，{nodes}", "waits for {need}, {ahead} ahead": "等待 {need}，前面有 {ahead}",
  "has devices {devices}": "得到设备 {devices}", "imports {what}": "导入 {what}", "imported, in {seconds} s": "导入完成，用时 {seconds} 秒", "begins in a new process: {why}": "在新进程中开始：{why}",
  "begins in a process that was kept warm": "在保持预热的进程中开始", "{world_size} began": "开始：{world_size}", "saved step {step}": "保存了第 {step} 步", "waits: {why}": "等待：{why}",
  "begins again, restart {restarts}: {why}": "重新开始，第 {restarts} 次重启：{why}", "is asked to stop by {signal}": "收到 {signal}，正在停止", "is suspended": "已暂停", "goes on": "继续运行", "ended: {state}": "结束：{state}",
  // what surrounds all views
  "Keys": "按键", "search": "搜索", "the next job, the one before": "下一个任务，上一个任务", "open it": "打开", "back, or close": "返回或关闭", "these keys": "显示按键", "Close": "关闭",
  "{n}s": "{n} 秒", "Settings": "设置", "Skip to the content": "跳到内容", "No jobs yet.": "还没有任务。",
  "Start one in a terminal, or with a job file on the page Submit. It appears here by itself.": "在终端中启动一个，或在“提交”页面用任务文件提交。它会自动出现在这里。",
  // the page of a job
  "Bar of time": "时间条", "now": "现在", "starting": "启动中", "hung": "卡住", "suspended": "已暂停", "restart": "重启", "attempt {n}": "尝试 {n}", "asked to stop": "请求停止",
  "1 restart": "1 次重启", "{n} restarts": "{n} 次重启", "1 checkpoint": "1 个检查点", "{n} checkpoints": "{n} 个检查点", "{time} left": "剩余 {time}", "More metrics": "更多指标", "Remarks": "说明", "{n} times until {time}": "{n} 次，至 {time}",
  "a step": "每步", "Result": "结果", "Code": "代码", "Environment": "环境", "Data": "数据", "Resources": "资源", "What differs": "差异", "lowest": "最低",
  "also {n} rows that are equal": "也显示 {n} 行相同的", "Nothing that is known of them differs.": "已知内容没有差异。", "Add": "添加", "Without {name}": "移除 {name}", "None": "清除选择",
  "Add another job to compare them.": "再添加一个任务即可比较。", "The first {n} of {all} jobs are compared.": "比较 {all} 个任务中的前 {n} 个。", "Compare {name}": "比较 {name}", "Compare {n}": "比较 {n} 个",
  "evaluation": "评估", "logging": "写日志", "script": "脚本", "idle": "空闲",
  "1 frame of {of}": "{of} 的 1 个栈帧", "{n} frames of {of}": "{of} 的 {n} 个栈帧",
  // machines and jobs in a list
  "user": "用户", "{n} nodes": "{n} 个节点", "on {n} of {all} devices": "使用 {all} 个设备中的 {n} 个", "on {n} of {all} slots": "使用 {all} 个槽位中的 {n} 个",
  "machine": "机器", "held by": "使用者", "silent": "不响应", "does not answer": "不响应", "unavailable": "不可用", "in use": "使用中", "free": "空闲",
  "this machine": "本机", "cores": "核", "slots": "槽位", "not measured": "未测量", "asked for": "（已申请）", "1 device": "1 个设备", "{n} devices": "{n} 个设备",
  "devices {list}": "设备 {list}", "slots {list}": "槽位 {list}", "since {time}": "自 {time}", "until {time} by its time limit": "按时间限制至 {time}",
  "not since {time}, when this page's server began": "自 {time} 此页面的服务器启动以来没有响应", "{what}: the last hour": "{what}：最近一小时",
  "1 machine": "1 台机器", "{n} machines": "{n} 台机器", "{used} of {all} slots in use": "{all} 个槽位中已用 {used} 个", "asking {target}…": "正在询问 {target}…",
  "{target} has not answered yet": "{target} 尚未响应", "Show {n} more of {all}": "再显示 {n} 台，共 {all} 台", "No machine matches.": "没有符合条件的机器。",
  "No machine. Name some in paceline.toml, or submit a job with --hosts.": "没有机器。请在 paceline.toml 中指定，或用 --hosts 提交任务。",
  // groups, logs of jobs that wait, tiles
  "Nothing is known of this job yet; it is shown when the server is back.": "尚不知道此任务的内容；服务器恢复后会显示。", "All groups": "所有组", "{n} others": "其他 {n} 个", "The job has not begun; its log appears here when it does.": "任务尚未开始；开始后日志会出现在这里。",
  "label {name}": "标签 {name}", "bytes sent": "发送的字节",
  // events
  "has loaded the checkpoint of step {step}": "已读取第 {step} 步的检查点", "the ranks do not work together: {why}": "各 rank 没有协同工作：{why}",
  "where its ranks were before they were stopped: {places}": "各 rank 被停止前的位置：{places}", "time: {spent}": "时间分布：{spent}", "hangs {why}": "卡住，{why}",
  "is queued again: {why}": "重新排队：{why}", "its ranks start one by one: {why}": "逐个启动各 rank：{why}",
};
const LANGUAGES = { en: "English", zh: "中文" };

let language = localStorage.getItem("paceline.language") || (navigator.language || "").slice(0, 2);
if (!(language in LANGUAGES)) language = "en";
document.documentElement.lang = language;

export { LANGUAGES };
export const current = () => language;
export function choose(name) {
  localStorage.setItem("paceline.language", name);
  location.reload();
}

export function t(text, values = {}) {
  const found = language === "zh" && Object.hasOwn(ZH, text) ? ZH[text] : text;
  return found.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
}

// -- what the server says in English: zh.json has sentences with places for values, {name}. A value is a text, which is
// looked up as well; behind a colon stands what else it is: a number, a word, a list of numbers, a line of a file, ranks,
// words in parentheses or others that may lack, or (m) a text that may have several sentences, of a user too.

const KINDS = { n: "[\\d.,]*\\d", w: "\\S+", l: "\\d[\\d, to]*", f: "\\S+:\\d+", r: "ranks? \\d[\\d, to]*(?: on \\S+)?(?: \\([^)]*\\))?", p: "(?: \\([^)]*\\))?", "?": ".*?" };
const PLACE = /\{(\w+)(?::(.))?\}/;
const SPOKEN = new Set(["error", "waiting", "advice", "slow", "problem", "missing", "notes", "reasons", "causes", "unreached", "sentence", "details", "about"]);
const LONGEST = 4000; // letters of a line that is looked up; longer ones are no sentences
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const known = new Map();
let sentences = {}, patterns = [];

export function learn(given) {
  sentences = given;
  known.clear();
  patterns = Object.keys(given).filter((key) => PLACE.test(key)).map((key) => {
    const parts = key.split(PLACE); // words, then name, kind and words of each place
    const words = parts.filter((_, at) => at % 3 === 0), kinds = Object.fromEntries(parts.flatMap((name, at) => (at % 3 === 1 ? [[name, parts[at + 1]]] : [])));
    const source = words.map((text, at) => escaped(text) + (at < words.length - 1 ? `(?<${parts[3 * at + 1]}>${KINDS[parts[3 * at + 2]] ?? ".+?"})` : "")).join("");
    return { key, kinds, source, weight: words.join("").length, longest: words.reduce((one, other) => (other.length > one.length ? other : one)) };
  }).sort((one, other) => other.weight - one.weight);
}

// A sentence of the server in Chinese; what has none, as a user's own words, stays as it is.
export function spoken(text) {
  if (language !== "zh" || typeof text !== "string" || !text) return text;
  if (text.includes("\n")) return text.split("\n").map(spoken).join("\n");
  if (text.length > LONGEST) return text;
  if (known.size > 5000) known.clear();
  if (!known.has(text)) known.set(text, inChinese(text));
  return known.get(text);
}

function inChinese(text) {
  const it = text.trim();
  const whole = (found) => text.slice(0, text.indexOf(it)) + found;
  if (Object.hasOwn(sentences, it)) return whole(sentences[it]);
  let loose = null; // a sentence with a value that may be several sentences: only if these are not told one by one
  for (const one of patterns) {
    const found = it.includes(one.longest) && (one.pattern ??= new RegExp(`^${one.source}$`, "s")).exec(it);
    if (!found) continue;
    if (Object.entries(found.groups).every(([name, value]) => one.kinds[name] === "m" || !value.includes("; "))) return whole(filled(one, found.groups));
    loose ??= [one, found.groups];
  }
  for (let at = it.indexOf("; "); at > 0; at = it.indexOf("; ", at + 1)) {
    const head = it.slice(0, at), tail = it.slice(at + 2);
    if (head.split("(").length === head.split(")").length && spoken(head) !== head) return whole(`${spoken(head)}${spoken(tail) === tail ? "; " : "；"}${spoken(tail)}`);
  }
  if (loose) return whole(filled(...loose));
  const parts = it.split(", ");
  return parts.length > 1 && parts.every((part) => spoken(part) !== part) ? whole(parts.map(spoken).join("，")) : text;
}

// Beside Chinese letters and marks a value stands without a space.
function filled({ key, kinds }, values) {
  return sentences[key].split(/( ?\{\w+\} ?)/).map((part, at) => {
    if (at % 2 === 0) return part;
    const [, before, name, after] = /^( ?)\{(\w+)\}( ?)$/.exec(part), given = values[name].trim();
    const value = kinds[name] === "n" ? given.replace(/^0+(?=\d)/, "") : kinds[name] === "l" ? given.replaceAll(", ", "、").replaceAll(" to ", " 至 ") : "wf".includes(kinds[name] ?? "-") ? given : spoken(given);
    const isOpen = /^[\u3000-\u9fff\uff00-\uffef]|^$/.test(value), isClosed = /[\u3000-\u9fff\uff00-\uffef]$/.test(value);
    return `${isOpen ? "" : before}${value}${isClosed ? "" : after}`;
  }).join("");
}

// An answer of the server, with what it says in words in the reader's language.
export function heard(answer) {
  const told = (it) => (typeof it === "string" ? spoken(it) : Array.isArray(it) ? it.map(told) : it && typeof it === "object" ? Object.fromEntries(Object.entries(it).map(([key, one]) => [key, told(one)])) : it);
  const look = (it) => {
    if (Array.isArray(it)) return typeof it[0] === "object" && it.forEach(look);
    for (const [key, value] of Object.entries(it ?? {})) {
      if (SPOKEN.has(key)) it[key] = told(value);
      else if (key === "told") value.forEach((block) => { if (block.kind === "text") block.text = spoken(block.text); });
      else if (value && typeof value === "object" && key !== "labels" && key !== "metrics") look(value);
    }
  };
  if (language === "zh") look(answer);
  return answer;
}

// -- numbers and times, in the reader's zone

export function number(value, digits = 4) {
  if (value == null) return "";
  const magnitude = Math.abs(value), isOdd = magnitude >= 1e12 || (magnitude > 0 && magnitude < 1e-5);
  return Number(value).toLocaleString(language, { maximumSignificantDigits: digits, notation: isOdd ? "scientific" : "standard" });
}
export const whole = (value) => Number(value).toLocaleString(language);
export const moment = (iso) =>
  iso ? new Date(iso).toLocaleString(language, { dateStyle: "medium", timeStyle: "medium" }) : "";
export const dayOf = (iso) => new Date(iso).toLocaleDateString(language, { dateStyle: "medium" });
export const clockOf = (iso) => new Date(iso).toLocaleTimeString(language, { timeStyle: "medium", hourCycle: "h23" });
// A time of today by its clock alone, another one with its day.
export function clock(iso) {
  const when = new Date(iso), isToday = when.toDateString() === new Date().toDateString();
  return when.toLocaleString(language, { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(isToday ? {} : { day: "numeric", month: "short" }) });
}
// The times of an axis, in seconds since the epoch: by the clock, and below the first one of a day its date.
export function ticks(times, step) {
  let day = "";
  return times.map((time) => {
    const when = new Date(1000 * time), date = when.toLocaleDateString(language, { day: "numeric", month: "short" }), isNew = date !== day;
    day = date;
    if (step >= 86400) return date;
    const at = when.toLocaleTimeString(language, { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hourCycle: "h23" });
    return isNew ? `${at}\n${date}` : at;
  });
}
export const zoned = (text) => text.replace(/\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g, moment);

const CHINESE = { s: "秒", m: "分", h: "小时", d: "天" };

export function span(seconds) {
  if (seconds == null) return "";
  const it = Math.max(0, Math.round(seconds)), isChinese = language === "zh";
  const two = (large, small, units) => (isChinese ? `${large} ${CHINESE[units[0]]} ${small} ${CHINESE[units[1]]}` : `${large}${units[0]}${String(small).padStart(2, "0")}${units[1]}`);
  if (it < 60) return isChinese ? `${it} 秒` : `${it}s`;
  if (it < 3600) return two(Math.floor(it / 60), it % 60, "ms");
  if (it < 86400) return two(Math.floor(it / 3600), Math.floor((it % 3600) / 60), "hm");
  return two(Math.floor(it / 86400), Math.floor((it % 86400) / 3600), "dh");
}

export function size(bytes) {
  if (bytes == null) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${number(bytes, 3)} ${unit}`;
    bytes /= 1024;
  }
  return `${number(bytes, 3)} TiB`;
}
