"""Draws the two pictures of the README: ``python -m tools.readme_figures``.

The architecture is drawn from the boxes and arrows below. The chart is drawn from the figures that
``loadtest.research.peers.long_prompts`` has written to docs/images/long-prompts.json.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from planning.common.plots import Line, draw_lines

IMAGES = Path(__file__).parent.parent / "docs" / "images"
_TITLES = {
    "baton": "Baton, 1 prefill + 1 decode worker",
    "vllm": "vLLM, 2048 tokens per step",
    "vllm-small-steps": "vLLM, 256 tokens per step",
}
_WIDTH, _HEIGHT = 880, 330
_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .small { font-size: 12px; fill: #59636e; }
  .box { fill: #f6f8fa; stroke: #818b98; rx: 8; }
  .pool { fill: none; stroke: #818b98; stroke-dasharray: 5 4; rx: 12; }
  .arrow { stroke: #1f2328; stroke-width: 1.5; fill: none; marker-end: url(#head); }
  .kv { stroke: #bc4c00; stroke-width: 4; fill: none; marker-end: url(#kv-head); }
  .kv-text { fill: #bc4c00; font-weight: 600; }
  .control { stroke: #818b98; stroke-width: 1; stroke-dasharray: 3 3; fill: none; }
  #head path { fill: #1f2328; } #kv-head path { fill: #bc4c00; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; }
    .box { fill: #151b23; stroke: #656c76; } .pool, .control { stroke: #656c76; }
    .arrow { stroke: #f0f6fc; } #head path { fill: #f0f6fc; }
    .kv { stroke: #ffa657; } .kv-text { fill: #ffa657; } #kv-head path { fill: #ffa657; }
  }
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A labeled rectangle; coordinates in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    text: str = ""
    kind: str = "box"

    def svg(self) -> str:
        """Return the SVG of the box: a rectangle, with the title at the top and a line of small
        text below."""
        middle = self.x + self.width // 2
        if self.kind == "pool":
            title_y, text_y = self.y + 22, self.y + self.height - 12
        else:
            title_y = self.y + self.height // 2 + (-3 if self.text else 5)
            text_y = title_y + 18
        parts = [
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}"'
            f' height="{self.height}"/>',
            _text(middle, title_y, self.title, "title"),
        ]
        if self.text:
            parts.append(_text(middle, text_y, self.text, "small"))
        return "\n".join(parts)


_BOXES = (
    Box(10, 120, 90, 56, "Clients", "HTTP, gRPC"),
    Box(165, 108, 140, 80, "Router", "class, placement"),
    Box(375, 62, 190, 176, "Prefill pool", "compute-bound", kind="pool"),
    Box(395, 98, 150, 44, "Prefill worker"),
    Box(395, 156, 150, 44, "Prefill worker"),
    Box(680, 62, 190, 176, "Decode pool", "bandwidth-bound", kind="pool"),
    Box(700, 98, 150, 44, "Decode worker"),
    Box(700, 156, 150, 44, "Decode worker"),
    Box(165, 262, 140, 56, "Redis or Valkey", "registry, prefix index"),
    Box(552, 262, 140, 56, "Ray", "places and heals"),
)
_ARROWS = (
    ("arrow", "M100 140 H161"),
    ("arrow", "M305 132 H391"),
    ("kv", "M545 120 H697"),
    ("kv", "M545 178 H697"),
    ("arrow", "M775 62 V24 H235 V104"),
    ("arrow", "M165 164 H104"),
    ("control", "M235 188 V262"),
    ("control", "M305 290 H470 V238"),
    ("control", "M470 290 H552"),
    ("control", "M692 290 H775 V238"),
)
_LABELS = (
    (132, 132, "prompt", "small"),
    (132, 182, "tokens", "small"),
    (345, 124, "prompt", "small"),
    (620, 108, "KV cache", "kv-text"),
    (622, 200, "shm, gRPC, NCCL", "small"),
    (622, 216, "CUDA IPC, NIXL", "small"),
    (505, 18, "tokens, one message per step", "small"),
)


def architecture() -> str:
    """Draw the path of a request, as an SVG that follows the reader's light or dark theme."""
    heads = "\n".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="{size}"'
        f' markerHeight="{size}" orient="auto"><path d="M0 0 L10 5 L0 10 z"/></marker>'
        for name, size in (("head", 8), ("kv-head", 4))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        ' aria-label="Clients send prompts to a router. A prefill worker computes the KV cache and'
        ' sends it to a decode worker, which streams tokens back through the router.">',
        f"<style>{_STYLE}</style>",
        f"<defs>{heads}</defs>",
        *(box.svg() for box in _BOXES),
        *(f'<path class="{kind}" d="{path}"/>' for kind, path in _ARROWS),
        *(_text(x, y, text, kind) for x, y, text, kind in _LABELS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def long_prompts(measured: dict[str, Any]) -> str:
    """Draw the chart on long prompts as an SVG. ``measured`` has the figures; the chart shows
    medians over the repetitions."""
    runs = measured["runs"]
    lengths = sorted({run["document_tokens"] for run in runs})
    lines = {}
    for server in dict.fromkeys(run["server"] for run in runs):
        medians = [
            statistics.median(
                run["itl_p99_ms"]
                for run in runs
                if (run["server"], run["document_tokens"]) == (server, tokens)
            )
            for tokens in lengths
        ]
        lines[_TITLES[server]] = Line(lengths, medians, marked=True)
    return draw_lines(
        lines,
        title="Time per output token of running chats while long prompts arrive",
        x="tokens of each long prompt (0: none arrive)",
        y="99th percentile, ms",
    )


def main() -> None:
    """Write both pictures."""
    (IMAGES / "architecture.svg").write_text(architecture())
    measured = json.loads((IMAGES / "long-prompts.json").read_text())
    (IMAGES / "long-prompts.svg").write_text(long_prompts(measured) + "\n")


if __name__ == "__main__":
    main()
