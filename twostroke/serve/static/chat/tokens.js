// Shows the tokens of an answer, coloured by the gap before each token or by its probability.
// Arrow keys go from token to token; the text below the tokens describes the selected token.
import {el} from "../shared/dom.js";
import {CAUSES, CAUSE_NAMES, causeOf, causeText, formatMs, gapsOf, median} from "./figures.js";

const LEVELS = [[0.9, 0], [0.5, 1], [0.1, 2], [0, 3]]; // minimum probability → shade
const MODES = {gap: "Gap before each token", probability: "Probability"};
let numViews = 0; // for unique ids of the elements of each view

export class TokenView {
  constructor(answer) {
    this.answer = answer;
    this.gaps = gapsOf(answer);
    this.usualMs = median(this.gaps.filter((gap) => gap !== null).map((gap) => gap.ms));
    this.longestMs = Math.max(1e-9, ...this.gaps.map((gap) => gap?.ms ?? 0));
    this.name = `tokens-${numViews += 1}`;
    this.chosen = 0;
    this.legend = el("div", {class: "legend"});
    this.about = el("div", {class: "about-token", "aria-live": "polite"});
    this.tokens = answer.tokens.map((token, n) => this.#token(token, n));
    this.list = el("div", {
      class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens of this answer",
      onkeydown: (event) => this.#onKey(event), onclick: (event) => this.#onClick(event),
    }, this.tokens);
    this.modes = Object.keys(MODES).map((mode) =>
      el("button", {type: "button", class: "quiet small-button", onclick: () => this.show(mode)}, MODES[mode]));
    this.element = el("section", {class: "token-view", "aria-label": "Tokens"},
      el("div", {class: "modes", role: "group", "aria-label": "Colour by"}, this.modes),
      this.legend, this.list, this.about);
    this.show("gap");
    this.#choose(0);
  }

  show(mode) {
    this.mode = mode;
    this.modes.forEach((button, n) => button.setAttribute("aria-pressed", Object.keys(MODES)[n] === mode));
    this.tokens.forEach((token, n) => {
      token.className = mode === "gap" ? this.#gapClass(n) : `shade-${this.#shade(n)}`;
      token.style.setProperty("--share", mode === "gap" ? this.#gapShare(n) : "1");
    });
    this.legend.replaceChildren(...(mode === "gap" ? this.#gapLegend() : probabilityLegend()));
  }

  #token([text], n) {
    const shown = text.replaceAll("\n", "↵\n") || "·"; // "·": the token is a part of a character
    const label = shown.trim() ? null : "space"; // a name for invisible text
    return el("span", {role: "option", id: `${this.name}-${n}`, "aria-label": label, "aria-selected": "false", dataset: {n}}, shown);
  }

  #gapClass(n) {
    const cause = causeOf(this.gaps[n], this.usualMs);
    return cause ? `c-${cause}` : this.gaps[n] ? "c-unknown" : "first";
  }

  // The strength of a gap's colour: weak for a usual gap, full for the longest gap.
  #gapShare(n) {
    const gap = this.gaps[n];
    if (!gap || gap.ms <= 0) return "0";
    const span = Math.log(Math.max(this.longestMs / Math.max(this.usualMs, 1e-3), 2));
    const above = Math.log(Math.max(gap.ms / Math.max(this.usualMs, 1e-3), 1)) / span;
    return (0.25 + 0.75 * Math.min(1, above)).toFixed(3);
  }

  #shade(n) {
    const probability = Math.exp(this.answer.tokens[n][1]);
    return LEVELS.find(([minimum]) => probability >= minimum)[1];
  }

  #gapLegend() {
    const sums = this.answer.timings?.gaps_ms;
    if (!sums) {
      return [el("p", {class: "soft small"}, "This answer was stopped, so the engine has sent no causes. The gaps are the times between the arrivals of tokens in this page.")];
    }
    const total = CAUSES.reduce((sum, cause) => sum + sums[cause], 0) || 1;
    const shown = CAUSES.filter((cause) => sums[cause] > 0);
    const bar = el("div", {class: "bar", "aria-hidden": "true"}, shown.map((cause) => {
      const part = el("i", {class: `c-${cause}`});
      part.style.width = `${(100 * sums[cause]) / total}%`;
      return part;
    }));
    const keys = shown.map((cause) => el("span", {title: causeText(cause)},
      el("i", {class: `key c-${cause}`}), `${CAUSE_NAMES[cause]} ${formatMs(sums[cause])}`));
    return [bar, el("p", {class: "keys small"}, keys)];
  }

  #onKey(event) {
    const last = this.tokens.length - 1;
    const to = {
      ArrowRight: Math.min(last, this.chosen + 1), ArrowLeft: Math.max(0, this.chosen - 1),
      ArrowDown: Math.min(last, this.chosen + 10), ArrowUp: Math.max(0, this.chosen - 10),
      Home: 0, End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(to);
    this.tokens[to].scrollIntoView({block: "nearest"});
  }

  #onClick(event) {
    const token = event.target.closest("[role=option]");
    if (token) this.#choose(Number(token.dataset.n));
  }

  #choose(n) {
    if (!this.tokens[n]) return;
    this.tokens[this.chosen].setAttribute("aria-selected", "false");
    this.tokens[n].setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", this.tokens[n].id);
    this.chosen = n;
    this.about.replaceChildren(...this.#describe(n));
  }

  #describe(n) {
    const [text, logprob, others] = this.answer.tokens[n];
    const gap = this.gaps[n];
    let when = "The first token: prefill computed it.";
    if (gap?.causes) {
      const parts = CAUSES.map((cause, at) => [cause, gap.causes[at]]).filter(([, ms]) => ms >= 0.05);
      when = `${formatMs(gap.ms)} after the previous token: ${parts.map(([cause, ms]) => `${CAUSE_NAMES[cause]} ${formatMs(ms)}`).join(", ")}.`;
    } else if (gap) {
      when = `Arrived ${formatMs(gap.ms)} after the previous token.`;
    }
    const rows = [[text, logprob], ...others.filter(([other], at) => at > 0 || other !== text)];
    return [
      el("p", {}, el("b", {}, `Token ${n + 1} of ${this.tokens.length}: `), el("code", {}, visible(text)), ` ${when}`),
      el("table", {class: "alternatives"},
        el("caption", {class: "sr"}, "This token and the likeliest alternatives"),
        el("thead", {class: "sr"}, el("tr", {}, ["Token", "Probability", "Log-probability"].map((name) => el("th", {scope: "col"}, name)))),
        el("tbody", {}, rows.map(([other, value], at) => alternative(other, value, at === 0)))),
    ];
  }
}

function alternative(text, logprob, isChosen) {
  const probability = Math.exp(logprob);
  const meter = el("i", {class: "meter", "aria-hidden": "true"});
  meter.style.width = `${(100 * probability).toFixed(1)}%`;
  return el("tr", {class: isChosen ? "chosen" : null},
    el("td", {}, el("code", {}, visible(text)), isChosen && el("span", {class: "sr"}, " (chosen)")),
    el("td", {class: "share"}, meter, el("span", {}, `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)}%`)),
    el("td", {class: "soft"}, logprob.toFixed(3)));
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(part of a character)";

function probabilityLegend() {
  const names = ["90% or more", "50% to 90%", "10% to 50%", "below 10%"];
  const keys = names.map((name, shade) => el("span", {}, el("i", {class: `key shade-${shade}`}), name));
  return [el("p", {class: "keys small"}, keys)];
}
