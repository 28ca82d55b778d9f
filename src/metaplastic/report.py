"""One HTML page per report: tables, plots and the facts to repeat it, in a single file that opens anywhere."""

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #d8dee4; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #d8dee4; }
th { text-align: left; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; white-space: pre-wrap; } img { max-width: 100%; }
figure { margin: 1rem 0; } figcaption { color: #57606a; font-size: .9rem; }
details { margin-top: 2rem; color: #57606a; } .wide { overflow-x: auto; }
"""


class Report:
    """Collects sections and writes them as one page; everything given to it is escaped.

    >>> report = Report("Recall")                                     # doctest: +SKIP
    >>> report.table(["model", "accuracy"], [["palimpsa_d", 0.93]])   # doctest: +SKIP
    >>> report.write("report.html")                                   # doctest: +SKIP
    """

    def __init__(self, title: str):
        self.title, self._parts = title, []

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def preformatted(self, text: str) -> None:
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        head = "".join(f"<th>{html.escape(str(c))}</th>" for c in columns)
        body = "".join(f"<tr>{''.join(_cell(c) for c in row)}</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._parts.append(f'<div class="wide">{table}</div>')  # may be wider than the page

    def figure(self, figure: Any, caption: str, *, save: str | Path | None = None) -> None:
        """Embeds a matplotlib figure as PNG over its caption, read aloud in its stead; ``save`` also writes a file."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
        if save is not None:
            Path(save).write_bytes(buffer.getvalue())
        encoded = base64.b64encode(buffer.getvalue()).decode()
        shown = html.escape(caption)
        image = f'<img alt="{shown}" src="data:image/png;base64,{encoded}">'
        self._parts.append(f"<figure>{image}<figcaption>{shown}</figcaption></figure>")

    def facts(self, record: dict[str, Any]) -> None:
        """The whole result record, folded away."""
        self._parts.append(
            "<details><summary>Settings, environment and raw numbers</summary>"
            f"<pre>{html.escape(json.dumps(record, indent=1, default=str))}</pre></details>"
        )

    def write(self, path: str | Path) -> Path:
        title, body = html.escape(self.title), "\n".join(self._parts)
        Path(path).write_text(
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>\n'
            f"<h1>{title}</h1>\n{body}\n</html>\n",
            encoding="utf-8",
        )
        return Path(path)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{html.escape(str(value))}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f'<td class="number">{shown}</td>'
