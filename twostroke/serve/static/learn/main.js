// The page /learn: its contents, and the screen of a lesson or the tool that the URL selects.
import {byId, el} from "../shared/dom.js";
import {company, experiment} from "./company.js";
import {LESSONS} from "./lessons.js";
import {predict} from "./predict.js";
import {prompt} from "./prompt.js";
import {question} from "./question.js";
import {myths, quiz} from "./quiz.js";
import {roofline} from "./roofline.js";
import {sliders} from "./sliders.js";
import {getFacts, isRecorded, knownFacts} from "./source.js";
import {current, linkTo, onChange} from "./state.js";
import {paragraphs} from "./widgets.js";

const TOOLS = {
  sliders: {title: "Sliders first", text: "How long will an answer take? Move the sliders; nothing has to run.", make: sliders},
  prompt: {title: "Your own prompt", text: "Run a text on the engine and look at every step of it.", make: prompt},
  roofline: {title: "The roofline", text: "Each step of the engine between its two limits.", make: roofline},
  predict: {title: "Predict, then run", text: "The engine predicts how long requests take. Look at the prediction, then check it with a run.", make: predict},
  company: {title: "Company", text: "What happens to one stream when others arrive. Each experiment is a real run.", make: company},
  quiz: {title: "Quiz", text: "Choose an answer, then let the engine check it. The page explains every answer.", make: quiz},
  myths: {title: "Five myths", text: "A run on this engine tests each of them.", make: myths},
};
const EXPERIMENT_TOOLS = ["stall", "batch", "context", "prefix", "full_cache"];

let newest = 0;

async function draw() {
  const number = ++newest, {path} = current();
  drawContents(path);
  const view = byId("view");
  let content;
  try {
    await getFacts();
    content = path[0] === "lesson" ? await lesson(path) : await tool(path[0] ?? "start");
  } catch (error) {
    content = [el("p", {class: "error", role: "alert"}, error.message), el("button", {type: "button", onclick: draw}, "Try again")];
  }
  if (number !== newest) return;
  view.replaceChildren(...content);
  document.title = `${view.querySelector("h2")?.textContent ?? "Learn"} · twostroke`;
  scrollTo(0, 0);
  if (document.activeElement && document.activeElement !== document.body) view.focus({preventScroll: true});
  view.dataset.ready = path.join("/") || "start";
}

async function tool(name) {
  if (name === "start" || !TOOLS[name]) return start();
  const {title, text, make} = TOOLS[name];
  return [el("h2", {}, title), el("p", {class: "lead"}, text), await make()];
}

async function start() {
  const facts = knownFacts();
  return [
    el("h2", {}, "Why is an answer slow to start, or slow to stream?"),
    el("p", {class: "lead"}, `Two different things make you wait. This page shows both, with ${facts.model} on ${isRecorded ? "the machine where it was recorded" : "this machine"}: real steps of a real engine, no drawings.`),
    await sliders(),
    el("p", {class: "next"}, el("a", {class: "button primary", href: linkTo("lesson/1/1")}, "Start with lesson 1")),
  ];
}

// ── lessons ──────────────────────────────────────────────────────────────────────────────────────

async function lesson([, given, at]) {
  const number = Math.min(LESSONS.length, Math.max(1, Number(given) || 1)), {title, screens, links} = LESSONS[number - 1];
  const place = Math.min(screens.length, Math.max(1, Number(at) || 1)), screen = screens[place - 1];
  return [
    el("p", {class: "where"}, `Lesson ${number} of ${LESSONS.length}: ${title}`),
    el("ol", {class: "progress", "aria-label": "Screens of this lesson"}, screens.map((one, n) => el("li", {},
      el("a", {href: linkTo(`lesson/${number}/${n + 1}`), "aria-current": n + 1 === place ? "step" : null, title: one.title}, String(n + 1))))),
    el("h2", {}, screen.title),
    ...await body(screen),
    el("nav", {class: "steps", "aria-label": "Screens"}, back(number, place), forward(number, place, screens.length)),
    el("p", {class: "links small soft"}, "The code: ", links.map((link, n) => [n ? " · " : "", el("a", {href: link.href, rel: "noreferrer"}, link.text)]).flat()),
  ];
}

async function body(screen) {
  if (screen.kind === "question") return [question(screen.make())];
  const made = EXPERIMENT_TOOLS.includes(screen.tool) ? await experiment(screen.tool) : await TOOLS[screen.tool].make();
  return [el("div", {class: "lead"}, paragraphs(screen.text)), made];
}

function back(number, place) {
  if (place > 1) return el("a", {class: "button", href: linkTo(`lesson/${number}/${place - 1}`)}, "Back");
  return el("a", {class: "button", href: number > 1 ? linkTo(`lesson/${number - 1}/${LESSONS[number - 2].screens.length}`) : linkTo("")}, "Back");
}

function forward(number, place, screens) {
  if (place < screens) return el("a", {class: "button primary", "data-next": true, href: linkTo(`lesson/${number}/${place + 1}`)}, "Next");
  if (number < LESSONS.length) return el("a", {class: "button primary", "data-next": true, href: linkTo(`lesson/${number + 1}/1`)}, `Lesson ${number + 1}: ${LESSONS[number].title}`);
  return el("a", {class: "button primary", "data-next": true, href: linkTo("quiz")}, "Now the quiz");
}

// ── contents ─────────────────────────────────────────────────────────────────────────────────────

function drawContents(path) {
  const here = path.join("/");
  const entry = (href, text, now) => el("li", {}, el("a", {href, "aria-current": now ? "page" : null}, text));
  byId("contents").replaceChildren(
    el("ul", {}, entry(linkTo(""), "Start", here === "")),
    el("h2", {}, "Lessons"),
    el("ol", {}, LESSONS.map(({title}, n) => entry(linkTo(`lesson/${n + 1}/1`), title, path[0] === "lesson" && path[1] === String(n + 1)))),
    el("h2", {}, "Tools"),
    el("ul", {}, Object.entries(TOOLS).map(([name, {title}]) => entry(linkTo(name), title, here === name))),
    isRecorded ? el("p", {class: "small soft"}, "A recording: the numbers are from a run, and no server is needed.") : "");
}

onChange(draw);
draw();
