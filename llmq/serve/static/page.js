
"use strict";
// A chat over the server's own API. Text of the model becomes DOM nodes, never HTML.
const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEY = "llmq-key";
let messages = [];
let running = null;

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// ---- Markdown: fences, headings, lists, quotes, rules; inside a line: code, bold, italic.

function inline(parent, text) {
  const pattern = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|(?<![\w*])\*(?=\S)([^*\n]*?\S)\*(?![\w*])/g;
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    parent.append(text.slice(end, match.index));
    if (match[1]) parent.append(element("code", "", match[2].trim() || match[2]));
    else if (match[3] !== undefined) inline(parent.appendChild(element("strong")), match[3]);
    else inline(parent.appendChild(element("em")), match[4]);
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
}

function codeBlock(language, code) {
  const block = element("div", "block");
  const bar = block.appendChild(element("div", "bar"));
  bar.append(element("span", "", language || "text"), copyButton(() => code));
  const pre = block.appendChild(element("pre"));
  pre.tabIndex = 0;
  pre.append(element("code", "", code));
  return block;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function list(lines, start) {
  // One list: items of the same indentation; deeper ones are lists inside the last item.
  const [, indent, marker] = lines[start].match(ITEM);
  const ordered = /\d/.test(marker);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(marker, 10);
  let i = start;
  let item = null;
  while (i < lines.length) {
    const match = lines[i].match(ITEM);
    if (match && match[1].length === indent.length && /\d/.test(match[2]) === ordered) {
      item = node.appendChild(element("li"));
      inline(item, match[3]);
      i += 1;
    } else if (match && match[1].length > indent.length) {
      const [inner, next] = list(lines, i);
      item.append(inner);
      i = next;
    } else if (!match && /^\s{2,}\S/.test(lines[i])) {
      item.append("\n");
      inline(item, lines[i].trim());
      i += 1;
    } else if (!lines[i].trim() && i + 1 < lines.length && ITEM.test(lines[i + 1])) {
      i += 1;
    } else break;
  }
  return [node, i];
}

function render(parent, text) {
  const lines = text.split("\n");
  const nodes = [];
  const paragraph = [];
  const flush = () => {
    if (paragraph.length) inline(nodes[nodes.push(element("p")) - 1], paragraph.splice(0).join("\n"));
  };
  for (let i = 0; i < lines.length;) {
    const fence = lines[i].match(/^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/);
    const heading = lines[i].match(/^(#{1,6})\s+(.*?)\s*#*$/);
    if (fence) {
      flush();
      const code = [];
      for (i += 1; i < lines.length && !lines[i].trim().startsWith(fence[1]); i += 1) code.push(lines[i]);
      nodes.push(codeBlock(fence[2], code.join("\n")));
      i += 1;
    } else if (heading) {
      flush();
      inline(nodes[nodes.push(element("h" + Math.min(4, heading[1].length + 1))) - 1], heading[2]);
      i += 1;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[i])) {
      flush();
      nodes.push(element("hr"));
      i += 1;
    } else if (ITEM.test(lines[i])) {
      flush();
      const [node, next] = list(lines, i);
      nodes.push(node);
      i = next;
    } else if (/^>\s?/.test(lines[i])) {
      flush();
      const quoted = [];
      for (; i < lines.length && /^>\s?/.test(lines[i]); i += 1) quoted.push(lines[i].replace(/^>\s?/, ""));
      render(nodes[nodes.push(element("blockquote")) - 1], quoted.join("\n"));
    } else {
      if (lines[i].trim()) paragraph.push(lines[i]);
      else flush();
      i += 1;
    }
  }
  flush();
  parent.replaceChildren(...nodes);
}

function copyButton(text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Cannot copy";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// ---- The server

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const error = new Error(told?.error?.message || `The server answered ${response.status}.`);
  error.status = response.status;
  throw error;
}

async function connect() {
  try {
    const { data } = await (await call("/v1/models")).json();
    const select = $("model");
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    select.disabled = data.length < 2;
    $("forget").hidden = !sessionStorage.getItem(KEY);
    $("status").textContent = "";
    if ($("gate").open) $("gate").close();
    $("input").focus();
  } catch (error) {
    if (error.status === 401) ask(sessionStorage.getItem(KEY) ? error.message : "");
    else {
      $("model").replaceChildren(new Option("not connected"));
      $("status").textContent = error.status ? error.message : "The server cannot be reached.";
    }
  }
}

function ask(message) {
  sessionStorage.removeItem(KEY);
  $("gate-error").textContent = message;
  if (!$("gate").open) $("gate").showModal();
  $("key").focus();
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection was lost.");
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// ---- The conversation

function turn(role) {
  $("welcome").hidden = true;
  const node = element("div", `turn ${role}`);
  node.append(element("span", "unseen", role === "user" ? "You:" : "Model:"), element("div", "content"));
  $("log").append(node);
  return node;
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function body() {
  const system = $("system").value.trim();
  const wanted = { model: $("model").value, stream: true, stream_options: { include_usage: true }, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  for (const name of SETTINGS) if ($(name).value !== "") wanted[name] = Number($(name).value);
  return JSON.stringify(wanted);
}

async function answer() {
  const node = turn("assistant");
  const content = node.querySelector(".content");
  const meta = node.appendChild(element("div", "meta"));
  content.classList.add("waiting");
  running = new AbortController();
  busy(true);
  toEnd();
  const conversation = messages;
  let text = "", usage = null, reason = "", first = 0, drawn = true;
  const draw = () => {
    drawn = true;
    const follow = atEnd();
    render(content, text);
    if (follow) toEnd();
  };
  try {
    const response = await call("/v1/chat/completions", { method: "POST", body: body(), signal: running.signal });
    for await (const chunk of events(response)) {
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.delta.content) {
        first ||= performance.now();
        text += choice.delta.content;
        content.classList.remove("waiting");
        if (drawn) {
          drawn = false;
          requestAnimationFrame(draw);
        }
      }
      reason = choice.finish_reason || reason;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else {
      reason = "failed";
      node.insertBefore(element("p", "failure", error.status || !(error instanceof TypeError) ? error.message : "The server cannot be reached."), meta);
      if (error.status === 401) ask(error.message);
    }
  }
  content.classList.remove("waiting");
  draw();
  if (conversation === messages) finish(node, meta, { text, usage, reason, seconds: first ? (performance.now() - first) / 1000 : 0 });
  running = null;
  busy(false);
}

function finish(node, meta, { text, usage, reason, seconds }) {
  if (text) {
    messages.push({ role: "assistant", content: text });
    meta.append(copyButton(() => text));
  }
  const again = element("button", "quiet", reason === "failed" ? "Try again" : "Regenerate");
  again.type = "button";
  again.dataset.again = "";
  again.addEventListener("click", () => {
    if (running) return;
    if (text) messages.pop();
    node.remove();
    answer();
  });
  document.querySelectorAll("[data-again]").forEach((old) => old.remove());
  meta.append(again);
  const count = usage?.completion_tokens;
  const notes = [
    count && `${count} tokens`,
    count > 1 && seconds && `${((count - 1) / seconds).toFixed(1)} tokens/s`,
    reason === "length" && "cut at the token limit",
    reason === "stopped" && "stopped",
  ];
  meta.append(element("span", "", notes.filter(Boolean).join(" · ")));
  $("status").textContent = reason === "failed" ? "The answer failed." : "";
  if (atEnd()) toEnd();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("log").setAttribute("aria-busy", String(is));
  $("status").textContent = is ? "Answering…" : $("status").textContent;
  if (!is) $("input").focus();
}

// ---- Controls

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  $("send").disabled = !input.value.trim();
}

function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  const invalid = SETTINGS.map($).find((field) => !field.checkValidity());
  if (invalid) {
    settings(true);
    invalid.reportValidity();
    return;
  }
  turn("user").querySelector(".content").textContent = text;
  if (messages.at(-1)?.role === "user") messages.pop(); // it was never answered
  messages.push({ role: "user", content: text });
  $("input").value = "";
  grow();
  answer();
}

function settings(open) {
  $("settings").hidden = !open;
  $("toggle").setAttribute("aria-expanded", String(open));
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("gate").open) running?.abort(); });
$("toggle").addEventListener("click", () => settings($("settings").hidden));
$("fresh").addEventListener("click", () => {
  running?.abort();
  messages = [];
  document.querySelectorAll(".turn").forEach((node) => node.remove());
  $("welcome").hidden = false;
  $("status").textContent = "";
  $("input").focus();
});
$("forget").addEventListener("click", () => ask(""));
$("gate-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  connect();
});
$("gate").addEventListener("cancel", (event) => event.preventDefault());
grow();
connect();
