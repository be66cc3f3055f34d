"""Exports the page `/learn` as one HTML file with recorded data, which needs no server.

The modules of the page become `data:` addresses of an import map, and styles and scripts become
inline. The recorded responses of the routes become JSON in the page, which `static/learn/source.js`
reads.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from twostroke.observe.forecast import Workload
from twostroke.serve.fields.protocol import LearnRunRequest
from twostroke.serve.fields.response_json import Json
from twostroke.serve.learn.lab import EXAMPLE_TEXT
from twostroke.serve.learn.learn_routes import LearnData

# The settings that a recording offers for "predict, then run" (prompt and output tokens, streams).
SETTINGS = ((64, 32, 1), (256, 32, 1), (256, 64, 1), (512, 16, 1), (1024, 32, 1), (256, 32, 4))
# Further settings, which the lessons' questions need.
QUESTION_SETTINGS = (
    *((512, 32, 1), (128, 24, 1), (128, 48, 1), (256, 2, 1), (512, 2, 1), (64, 16, 1)),
    *((64, 24, 1), (1024, 16, 1), (32, 96, 1), (512, 24, 1), (64, 48, 1)),
)
ROUNDS = 3  # runs for each prediction, as on the page
ATTENDED = 64  # tokens whose attention the page shows
STEP_FIELDS = ("step", "committed_s", "device_s", "prefill", "decode", "kv")
NO_SERVER = (
    'const none = async () => { throw new Error("A recording has no server."); };\n'
    "export const getJson = none, postJson = none;\n"
)
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)
IMPORT = re.compile(r'(from |import\()"\.{1,2}/(?:([a-z]+)/)?([a-z_]+\.js)"')


async def recorded(data: LearnData) -> Json:
    """Run every experiment of the page once, and return the recording."""
    runs: dict[str, list[Json]] = {}
    await data.run(LearnRunRequest(experiment="calibration"))
    for name in ("batch", "context", "prefix", "stall", "full_cache"):
        runs[name] = [_slim(await data.run(LearnRunRequest(experiment=name)))]
    text = LearnRunRequest(experiment="text", text=EXAMPLE_TEXT)
    runs["text"] = [_slim(await data.run(text)), _slim(await data.run(text))]
    runs["predict"] = [await _predicted(data, settings) for settings in _settings(data)]
    ids = [token["id"] for token in runs["text"][0]["tokens"]][:ATTENDED]
    return {"facts": data.facts(), "runs": runs, "attention": await _attention(data, ids)}


def _settings(data: LearnData) -> list[tuple[int, int, int]]:
    """Return all settings that the page can ask for, within the limits of the model."""
    facts = data.facts()
    longest = facts["limits"]["prompt_tokens"]
    in_chunks = (round(2.5 * facts["max_num_batched_tokens"]), 2, 1)
    settings = [
        (min(prompt, longest), answer, streams)
        for prompt, answer, streams in (*SETTINGS, *QUESTION_SETTINGS, in_chunks)
    ]
    return list(dict.fromkeys(settings))


async def _predicted(data: LearnData, settings: tuple[int, int, int]) -> Json:
    workload = Workload(*settings)
    offered = settings[1:] in [each[1:] for each in SETTINGS]
    prediction = await data.predict(workload)
    rounds = ROUNDS if offered else 1
    request = LearnRunRequest(experiment="predict", **asdict(workload), rounds=rounds)
    run = await data.run(request)
    return {
        "settings": asdict(workload),
        "offered": offered,
        "prediction": prediction,
        "run": _slim(run),
    }


async def _attention(data: LearnData, ids: list[int]) -> Json:
    """Return all maps with one byte for each probability. A map is the concatenation of its rows; a
    row ends at the position of its token."""
    heads = (await data.attention(ids, 0, 0))["heads"]
    maps = []
    for layer, count in enumerate(heads):
        rows = [(await data.attention(ids, layer, head))["rows"] for head in range(count)]
        packed = [bytes(round(255 * value) for row in each for value in row) for each in rows]
        maps.append([base64.b64encode(each).decode() for each in packed])
    return {"heads": heads, "maps": maps}


def _slim(run: Json) -> Json:
    """Remove the fields of a run that the page does not use."""
    for arm in run["arms"]:
        arm["steps"] = [{name: step[name] for name in STEP_FIELDS} for step in arm["steps"]]
        for request in arm["requests"]:
            for name in ("prefix_marks", "stays", "worst_gap", "gaps"):
                del request[name]
    return run


def exported(recording: Json) -> bytes:
    """Return the page with a recording in it."""
    folder = files("twostroke.serve").joinpath("static")

    def text(path: str) -> str:
        return folder.joinpath(path).read_text(encoding="utf-8")

    modules = {
        f"learn/{file.name}": file.read_text(encoding="utf-8")
        for file in folder.joinpath("learn").iterdir()
        if file.name.endswith(".js")
    }
    modules |= {"shared/dom.js": text("shared/dom.js"), "shared/api.js": NO_SERVER}
    imports = {name: _address(name, source) for name, source in sorted(modules.items())}
    page = text("learn/index.html").replace("static/shared/icon.svg", "data:,")
    button = '<button type="button" data-theme-switch hidden></button>'
    page = page.replace("<!-- nav -->", f'<nav class="pages" aria-label="Page">{button}</nav>')
    page = re.sub(
        r'<link rel="stylesheet" href="static/(.*?)">',
        lambda found: f"<style>{text(found[1])}</style>",
        page,
    )
    page = page.replace(
        '<script src="static/shared/theme.js"></script>',
        f"<script>{text('shared/theme.js')}</script>",
    )
    start = (
        f'<script type="application/json" id="recording">{_json(recording)}</script>\n'
        f'<script type="importmap">{_json({"imports": imports})}</script>\n'
        '<script type="module">import "learn/main.js";</script>'
    )
    page = page.replace('<script type="module" src="static/learn/main.js"></script>', start)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return page.replace("<title>", f"{policy}\n<title>", 1).encode()


def _address(name: str, source: str) -> str:
    """Return a module as a `data:` address, with the names of the import map in its imports."""
    here = name.partition("/")[0]
    source = IMPORT.sub(lambda match: f'{match[1]}"{match[2] or here}/{match[3]}"', source)
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _json(content: Any) -> str:
    """Return JSON without `<`, which an HTML parser could read as a tag."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
