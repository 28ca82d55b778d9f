"""The known rules as special cases of design models: each declared once, tested once, and a row of a table.

``TABLES`` holds the rows of the two papers' tables. The tests run over it, and :func:`table` writes it as Markdown for
docs/design_models.md:

    python -c "from metaplastic.rules.special_cases import table; print(table('palimpsa'))"
"""

import re
import textwrap

from ..design import EXACT
from . import bayesian_layer, latent_write, palimpsa
from .case import Answer, Inputs, SpecialCase, draw

__all__ = ["TABLES", "Answer", "Inputs", "SpecialCase", "apart", "draw", "table"]

TITLES = "rule | state transition | write | read-out | kept of the belief | equals | what is equal | from exact"
TABLES: dict[str, list[SpecialCase]] = {
    "bayesian_layer": bayesian_layer.CASES + latent_write.CASES,
    "palimpsa": palimpsa.CASES,
}


def apart(case: SpecialCase, inputs: Inputs) -> float:
    """How far the case's approximation takes the outputs from its design model's exact filter, relative."""
    exact = case.filtered(inputs, EXACT).output
    return ((case.filtered(inputs).output - exact).norm() / exact.norm()).item()


def table(name: str) -> str:
    """One table as Markdown, its notes below it; distances are measured on ``draw()``."""
    inputs = draw()
    lines, notes = [TITLES, re.sub(r"[^|]+", " --- ", TITLES).strip()], []
    for case in TABLES[name]:
        belief = case.model(inputs)[2].name
        answer = case.expected(inputs)
        equal = ", ".join(part for part in Answer._fields if getattr(answer, part) is not None)
        distance = "-" if belief == EXACT.name else f"{apart(case, inputs):.2f}"
        pieces = [case.name, case.transition, case.write, case.read_out, belief, case.equals, equal, distance]
        lines.append(" | ".join(pieces))
        if case.note:
            notes.append(textwrap.fill(f"* **{case.name}**: {case.note}", 118, subsequent_indent="  "))
    return "\n".join([*(f"| {line} |" for line in lines), "", *notes])
