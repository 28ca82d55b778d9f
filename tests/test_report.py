import re

from matplotlib.figure import Figure

from metaplastic.report import Report


def test_one_page_with_everything_in_it(tmp_path):
    report = Report("A <title>")
    report.heading("Heading & more")
    report.table(["name", "value"], [["<b>", 0.123456], ["count", 12345], ["flag", True]])
    figure = Figure()
    figure.subplots().plot([0, 1])
    report.figure(figure, "A line & <more>", save=tmp_path / "plot.png")
    report.figure(figure, "Another line")
    report.preformatted("a < b\n  c")
    report.facts({"command": ["<x>"]})
    page = report.write(tmp_path / "index.html").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<b>" not in page
    assert "<x>" not in page
    assert re.findall('<img alt="(.*?)"', page) == ["A line &amp; &lt;more&gt;", "Another line"]
    assert "<figcaption>Another line</figcaption>" in page
    assert "&lt;b&gt;" in page
    assert "0.1235" in page
    assert '<div class="wide"><table>' in page and "</table></div>" in page and ".wide { overflow-x: auto; }" in page
    assert "12,345" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)  # nothing is loaded from elsewhere
