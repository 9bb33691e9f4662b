"""The page: everything from a log is escaped, and nothing but the two things written here may run or style."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from urllib.parse import quote

from collapse_monitor import __version__
from collapse_monitor.judge.wording import number
from collapse_monitor.records import Evidence
from collapse_monitor.report.columns import Columns
from collapse_monitor.report.html.blocks import Block, describe_runs, encode, gather
from collapse_monitor.report.html.picture import picture
from collapse_monitor.report.html.script import bundle, read_static
from collapse_monitor.report.html.story import MOST, Chapter, Story, tell
from collapse_monitor.report.reader import Run


def compose(runs: Mapping[str, Run]) -> str:
    """The whole file."""
    script, style = bundle("report"), read_static("style.css") + read_static("report.css")
    stories = {name: tell(run) for name, run in runs.items()}
    order = sorted(stories, key=lambda name: -(severity.rank if (severity := stories[name].severity) else 0))
    runs = {name: runs[name] for name in order}  # the gravest first
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = f"Collapse report: {', '.join(runs)}"
    blocks = gather(runs)
    texts = "\n".join(f'<script type="text/plain" id="{escape(key)}">{text}</script>' for key, text in encode(blocks, list(runs)))
    index = json.dumps(describe_runs(runs, blocks), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header class="report"><h1>Collapse report</h1>
<p class="soft">{len(runs)} {"run" if len(runs) == 1 else "runs"}, written by collapse_monitor {escape(__version__)}</p></header>
<main>
{"".join(_run(name, stories[name], blocks) for name in runs)}
<section class="report"><h2>All readings</h2>
<noscript><p>The drawings below need JavaScript; what is said above does not.</p></noscript></section>
<div id="view"></div>
</main>
<script type="application/json" id="index">{index}</script>
{texts}
<script>{script}</script>
</body>
</html>
"""


def _run(name: str, story: Story, blocks: Sequence[Block]) -> str:
    severity = story.severity
    own = {block.metric: block.columns for block in blocks if block.run == name and block.kind == "series"}
    shown, rest = story.chapters[:MOST], story.chapters[MOST:]
    more = f'<p class="soft">Also: {escape(", ".join(chapter.title for chapter in rest))}.</p>' if rest else ""
    return f"""<section class="report run {severity or "healthy"}"><h2>{escape(name)}</h2>
<p class="verdict">{escape(story.verdict)}</p>
{_picture(story, own)}{"".join(_chapter(name, story.run, chapter) for chapter in shown)}{more}</section>
"""


def _picture(story: Story, blocks: Mapping[str, Columns]) -> str:
    drawn = picture(story, blocks)
    if drawn is None:
        return ""
    metric, data = drawn
    text = f"{metric.replace('_', ' ')} by layer (first at the bottom) and step, bright towards collapse"
    image = f'<img alt="{escape(text)}" src="data:image/png;base64,{data}">'
    return f'<figure>{image}<figcaption class="soft">{escape(text)}</figcaption></figure>\n'


def _chapter(name: str, run: Run, chapter: Chapter) -> str:
    alert = chapter.alert
    place = {"run": name, "metric": alert.metric, "step": str(alert.step)}
    if alert.layers:
        place["layer"] = str(alert.layers[0])
    link = "&".join(f"{key}={quote(value, safe='')}" for key, value in place.items())
    return f"""<article><h3>{escape(chapter.title)} <span class="soft">{alert.severity}</span></h3>
<dl><dt>When</dt><dd>{escape(chapter.when)}</dd>
<dt>Where</dt><dd>{escape(chapter.where(run.layers))} (<a data-show href="#{escape(link)}">show</a>)</dd>
<dt>Why</dt><dd>{escape(chapter.why)}{_evidence(chapter.evidence)}{_list("Usual causes:", chapter.causes)}</dd>
<dt>What to do</dt><dd>{_list("", chapter.actions)}</dd></dl></article>
"""


def _evidence(evidence: Iterable[Evidence]) -> str:
    cells = [
        (
            item.metric.replace("_", " "),
            number(item.value),
            "none yet" if item.baseline is None else number(item.baseline),
            "" if item.bound is None else number(item.bound),
        )
        for item in evidence
    ]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    head = '<tr><th scope="col">reading</th><th scope="col">value</th><th scope="col">baseline</th><th scope="col">bound</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>" if rows else ""


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"{f'<p>{title}</p>' if title else ''}<ul>{items}</ul>" if items else ""


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
