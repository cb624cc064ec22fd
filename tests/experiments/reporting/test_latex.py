"""LaTeX tables: rows and columns by choice, the best marked, braces in pairs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refused

from adapterswap.cli import main
from adapterswap.core.planning.describe import error_text
from adapterswap.experiments.reporting import Report
from adapterswap.experiments.reporting.latex import COLUMNS, TableStyle, latex_table
from adapterswap.experiments.reporting.output import render_page
from adapterswap.kit.errors import ArgumentError

from .conftest import Written
from .reading import row


def body(text: str) -> list[list[str]]:
    """The cells of the lines between \\midrule and \\bottomrule."""
    lines = text.split("\\midrule\n")[1].split("\\bottomrule")[0].splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix("\\\\"))] for line in lines if "&" in line
    ]


def plain(cell: str) -> str:
    return re.sub(r"\\(textbf|underline|mathbf)\{([^}]*)\}", r"\2", cell).replace("$", "")


def test_rows_and_columns_in_the_requested_order(written: Written) -> None:
    style = TableStyle(rows=["task expert", "layer_swap", "base"], columns=["max", "mean", "difference", "effect", "p"])
    text = latex_table(written.report, style)
    rows = body(text)
    assert [cells[0] for cells in rows] == ["task expert", "layer\\_swap, default", "layer\\_swap, selected", "base"]
    for cells in rows:
        spread = row(written.report, cells[0].replace("\\", "")).spread
        assert spread is not None
        most = f"{spread.max:.3f}" if spread.units > 1 else "--"  # one unit has no maximum beside its mean
        assert [plain(cell) for cell in cells[1:3]] == [most, f"{spread.mean:.3f}"]
    assert rows[0][3:] == ["--", "--", "--"]
    ranking = written.report.ranking
    assert ranking is not None
    pair = {"task expert", "layer_swap, selected"}
    (found,) = (each for each in ranking.ranks.comparisons if {each.one, each.other} == pair)
    assert found.wilcoxon is not None
    sign = 1 if found.one == "layer_swap, selected" else -1
    assert plain(rows[2][4]) == f"{sign * found.effect:.3f}"
    assert rows[2][5] == f"{found.wilcoxon:.3f}"
    assert "corrected by Holm" in text
    assert "\\multicolumn{3}{c}{against task expert}" in text


def test_a_single_column_of_differences_leaves_its_reference_to_the_caption(written: Written) -> None:
    for columns, in_head in ((["mean", "difference"], False), (["difference", "interval"], True)):
        head, caption = latex_table(written.report, TableStyle(columns=columns)).split("\\midrule")
        assert ("against task expert" in head) == in_head
        assert ("Compared with task expert." in caption) != in_head


def test_the_best_is_bold_and_the_second_underlined(written: Written) -> None:
    for higher in (True, False):
        target = replace(written.report.targets[0], higher_is_better=higher)
        rows = body(
            latex_table(replace(written.report, targets=(target,)), TableStyle(columns=["n", "mean", "stderr"]))
        )
        values = sorted({float(plain(cells[2])) for cells in rows}, reverse=higher)
        for cells in rows:
            value = float(plain(cells[2]))
            assert ("\\textbf" in cells[2]) == (value == values[0])
            assert ("\\underline" in cells[2]) == (value == values[1])
            assert "\\" not in cells[1] + cells[3]


def test_one_table_for_several_languages(two: Report) -> None:
    text = latex_table(two, TableStyle(percent=True))
    assert text.count("\\begin{table}") == 1
    assert "\\multicolumn{2}{c}{sw} & \\multicolumn{2}{c}{te}" in text
    for cells in body(text):
        for at, target in enumerate(two.targets):
            (found,) = (each for each in target.rows if each.label == cells[0].replace("\\", ""))
            assert found.spread is not None
            most = f"{100 * found.spread.max:.1f}" if found.spread.units > 1 else "--"
            expected = [f"{100 * found.spread.mean:.1f}", most]
            assert [plain(cell) for cell in cells[1 + 2 * at : 3 + 2 * at]] == expected


def test_targets_with_other_methods_and_the_same_language(two: Report) -> None:
    sw, te = two.targets
    reduced = [replace(target.rows[0], relative_error=e) for target, e in ((sw, 0.3), (te, 0.1))]
    rows = (reduced[1], *(row for row in te.rows[1:] if row.family != "soup"))
    targets = (replace(sw, rows=(reduced[0], *sw.rows[1:])), replace(te, language="sw", rows=rows))
    report, style = replace(two, targets=targets), TableStyle(rows=["soup", "base"])
    text = latex_table(report, style)
    for target in targets:
        assert f"\\multicolumn{{2}}{{c}}{{{target.task.replace('_', chr(92) + '_')}}}" in text
    assert [cells[0] for cells in body(text)] == ["soup", "base"]
    assert body(text)[0][3:] == ["--", "--"]
    assert f"base {error_text(0.3)}." in text
    assert render_page(report, (), style).count("table-mgsm_native_cot_te.tex") == 1


def test_label_caption_and_both_columns(two: Report) -> None:
    text = latex_table(two, TableStyle(label="tab:main", caption="Scores of \\emph{ours}", wide=True))
    assert re.findall(r"\\label\{(.*?)\}", text) == ["tab:main"]
    assert text.count("\\caption{Scores of \\emph{ours}}") == text.count("\\end{table*}") == 1


def test_lines_are_as_wide_as_the_table(written: Written, two: Report) -> None:
    for report in (written.report, two):
        for columns in (None, list(COLUMNS), ["mean"]):
            text = latex_table(report, TableStyle(columns=columns))
            assert text.count("{") == text.count("}")
            for table in text.split("% needs")[1:]:
                spec = re.search(r"@\{\}(\w+)@\{\}", table)
                assert spec is not None
                for line in [line for line in table.splitlines() if line.endswith("\\\\")]:
                    spanned = sum(int(size) - 1 for size in re.findall(r"multicolumn\{(\d+)\}", line))
                    assert len(re.split(r"(?<!\\)&", line)) + spanned == len(spec[1])


@pytest.mark.parametrize(
    ("style", "parameter"),
    [
        ({"columns": ["average"]}, "columns"), ({"columns": []}, "columns"), ({"label": "a}b"}, "label"),
        ({"label": ""}, "label"), ({"caption": "a}b{"}, "caption"), ({"caption": "50\\"}, "caption"),
    ],
)  # fmt: skip
def test_invalid_styles_are_refused_before_anything_is_computed(style: dict[str, Any], parameter: str) -> None:
    with refused(ArgumentError, parameter):
        TableStyle(**style)


@pytest.mark.parametrize("rows", [["sou"], []])
def test_unknown_rows(written: Written, rows: list[str]) -> None:
    with refused(ArgumentError, "rows"):
        latex_table(written.report, TableStyle(rows=rows))


def test_only_shares_have_percent(written: Written) -> None:
    target = written.report.targets[0]
    rows = [each for each in target.rows if each.spread is not None]
    assert rows[0].spread is not None
    high = replace(rows[0], spread=replace(rows[0].spread, max=31.0))
    with pytest.raises(ArgumentError) as caught:
        latex_table(replace(written.report, targets=(replace(target, rows=(high,)),)), TableStyle(percent=True))
    assert caught.value.parameter == "percent"


def test_the_command_takes_a_style(written: Written, tmp_path: Path) -> None:
    arguments = ["report", str(written.run), "-o", str(tmp_path / "out")]
    wrong = CliRunner().invoke(main, [*arguments, "--columns", "men", "--dry-run"])
    assert wrong.exit_code == 2
    assert "Did you mean 'mean'" in wrong.stderr
    options = ["--rows", "soup", "--rows", "layer_swap, selected", "--percent", "--wide"]
    result = CliRunner().invoke(main, [*arguments, *options, "--columns", "mean,max", "--label", "tab:x"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "tables.tex").read_text()
    assert [cells[0] for cells in body(text)] == ["soup", "layer\\_swap, selected"]
    assert "method & mean & max \\\\" in text
    assert "\\label{tab:x}" in text
