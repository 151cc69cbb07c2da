// Markdown as elements. Text of a model becomes text nodes and never HTML; images are left out, links are to the web alone.

const DEPTH = 6; // nested quotes, lists and emphasis beyond this stay text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])(?: +|$)/;
const INDENTED = /^(?: {2,}|\t)\s*\S/;
const DELIMITERS = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

// Lengths are bounded, so that a text of marks alone takes time in proportion to its length.
const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<ticks>`{1,8})(?!`)(?<code>.{1,1000}?)(?<!`)\k<ticks>(?!`)/,
    /\*\*(?=\S)(?<strong>.{1,500}?)(?<=\S)\*\*/,
    /(?<!\w)__(?=\S)(?<strong_>.{1,500}?)(?<=\S)__(?!\w)/,
    /\*(?=[^\s*])(?<em>.{1,500}?)(?<=[^\s*])\*(?!\*)/,
    /(?<!\w)_(?=[^\s_])(?<em_>.{1,500}?)(?<=[^\s_])_(?!\w)/,
    /~~(?=\S)(?<del>.{1,500}?)(?<=\S)~~/,
    /\[(?<label>[^\]\n]{1,500})\]\(<?(?<target>https?:\/\/[^\s<>)]{1,2000})>?(?: "[^"\n]{0,500}")?\)/,
    /(?<address>https?:\/\/[^\s<>"'`]{1,2000}[^\s<>"'`.,:;!?)\]}*_])/,
  ].map(({ source }) => source).join("|"),
  "s",
);

/** An element with attributes and children. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Let a container show a text. Blocks whose text is as before stay, so that what is selected in them does, too. */
export function showMarkdown(container, text) {
  const blocks = split(text.split(/\r?\n/));
  blocks.forEach((block, n) => {
    const before = container.children[n];
    if (before?.source === block.source) return;
    const made = build(block, 0);
    made.source = block.source;
    before ? before.replaceWith(made) : container.append(made);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

/** The blocks of some lines: kind, its lines, and their source. */
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) { at++; continue; }
    const kind = kindOf(lines, at);
    const end = ENDS[kind](lines, at);
    const own = lines.slice(at, end);
    blocks.push({ kind, lines: own, source: own.join("\n") });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

const until = (ends) => (lines, at) => {
  let end = at + 1;
  while (end < lines.length && !ends(lines, end, at)) end++;
  return end;
};

const ENDS = {
  code(lines, at) {
    const mark = FENCE.exec(lines[at])[1];
    const closed = lines.findIndex((line, n) => n > at && line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], ""));
    return closed < 0 ? lines.length : closed + 1;
  },
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: until((lines, n) => !QUOTE.test(lines[n])),
  table: until((lines, n) => !lines[n].includes("|")),
  // An item goes on in indented lines, and in plain ones without a blank line before; a list in items of its kind.
  list: until((lines, n, at) => {
    const [, indent, number] = ITEM.exec(lines[at]), next = ITEM.exec(lines[n]);
    if (next && !RULE.test(lines[n])) return next[1].length <= indent.length && !next[2] !== !number;
    if (!lines[n].trim()) return !INDENTED.test(lines[n + 1] ?? "") && !ITEM.test(lines[n + 1] ?? "");
    return !INDENTED.test(lines[n]) && (!lines[n - 1].trim() || kindOf(lines, n) !== "paragraph");
  }),
  paragraph: until((lines, n) => !lines[n].trim() || kindOf(lines, n) !== "paragraph"),
};

function build({ kind, lines, source }, depth) {
  if (depth > DEPTH) return element("p", {}, source);
  return BUILDERS[kind](lines, depth);
}

const inside = (lines, depth) => split(lines).map((block) => build(block, depth + 1));

const BUILDERS = {
  code(lines) {
    const [, mark, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    const copy = element("button", { type: "button", "data-copy": "code" }, "Copy code");
    const pre = element("pre", { tabindex: "0" }, element("code", {}, code));
    return element("figure", {}, element("figcaption", {}, element("span", {}, language || "code"), copy), pre);
  },
  heading(lines, depth) {
    const [, marks, text] = HEADING.exec(lines[0]);
    return element(`h${Math.min(marks.length + 1, 6)}`, {}, ...inline(text, depth)); // h1 is the page's
  },
  rule: () => element("hr"),
  quote: (lines, depth) => element("blockquote", {}, ...inside(lines.map((line) => line.replace(QUOTE, "")), depth)),
  paragraph: (lines, depth) => element("p", {}, ...inline(lines.map((line) => line.trimEnd()).join("\n"), depth)),
  list(lines, depth) {
    const [, indent, number] = ITEM.exec(lines[0]);
    const items = [];
    let width = 0; // of what stands before an item's text, and of what its other lines are indented by
    for (const line of lines) {
      const begun = ITEM.exec(line);
      if (begun && begun[1].length <= indent.length + 1) {
        width = begun[0].length;
        items.push([line.slice(width)]);
      } else items.at(-1).push(line.replace(new RegExp(`^(?: {1,${width}}|\\t)`), ""));
    }
    const made = element(number ? "ol" : "ul", number ? { start: number } : {});
    for (const item of items) {
      const parts = inside(item, depth);
      // A paragraph alone in its item, or before a list in it, has no space around it.
      made.append(element("li", {}, ...parts.flatMap((part) => (part.tagName === "P" && !item.includes("") ? [...part.childNodes] : [part]))));
    }
    return made;
  },
  table(lines, depth) {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim(), depth));
    const row = (name, line) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...cell)));
    const body = element("tbody", {}, ...lines.slice(2).map((line) => row("td", line)));
    return element("div", { class: "table", tabindex: "0" }, element("table", {}, element("thead", {}, row("th", lines[0])), body));
  },
};

/** Text with marks as nodes. */
function inline(text, depth) {
  const nodes = [];
  while (text) {
    const found = depth <= DEPTH && INLINE.exec(text);
    if (!found) { nodes.push(text); break; }
    const { escaped, ticks, code, label, target, address, ...marks } = found.groups;
    if (found.index) nodes.push(text.slice(0, found.index));
    if (escaped) nodes.push(escaped);
    else if (code) nodes.push(element("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (target ?? address) {
      const attributes = { href: target ?? address, target: "_blank", rel: "noopener noreferrer" };
      nodes.push(element("a", attributes, label ?? address));
    } else {
      const [mark, content] = Object.entries(marks).find(([, value]) => value);
      nodes.push(element(mark.replace("_", ""), {}, ...inline(content, depth + 1)));
    }
    text = text.slice(found.index + found[0].length);
  }
  return nodes;
}
