"""The landing page says what the records say; its buttons lead somewhere."""

import built
import landing
import nbformat
import pdf
import pytest

from flashlib import plot, records


def test_the_picture_has_the_numbers_of_the_records():
    notebook = nbformat.read(built.ROOT / "book/index.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.id == "reached")
    picture = eval(cell.source, {"plot": plot, "records": records})
    (output,) = (o for o in cell.outputs if "image/svg+xml" in o.data)
    assert output.data["image/svg+xml"] == picture.svg()
    names = [text.get_text() for text in picture.axes[0].get_yticklabels()]
    numbers = [text.get_text() for text in picture.axes[0].texts]
    assert len(names) == len(numbers) >= 6
    at = {"d": 128, "causal": False, "direction": "forward", "T_q": 8192, "H": 16}
    for name, number in zip(names, numbers, strict=True):
        (method,) = (m for m in plot.REACHED if plot.METHODS[m][0] == name)
        source = "forward" if method in ("standard", "flash1") else "hopper"
        rate = records.load(source).cell(method=method, **at)["tflops"]
        assert number == f"{rate:.0f}"


@pytest.mark.parametrize("repository", ["", "https://example.org/book"])
def test_buttons_depend_on_the_build(repository, tmp_path):
    page = landing.buttons(f"<p>{landing.CITE}Cite</a></p>", repository)
    assert (f'href="{repository}">Source' in page) is bool(repository)
    (tmp_path / "site/book").mkdir(parents=True)
    file = tmp_path / "site/book/index.html"
    file.write_text(page)
    assert "PDF</a>" not in page and ".pdf" not in page
    (tmp_path / "one.pdf").write_bytes(b"%" * 2_000_000)
    pdf.publish(tmp_path / "one.pdf", tmp_path / "site")
    assert (
        '<a class="reference external" href="../one.pdf">PDF, 2 MB</a>'
        in file.read_text()
    )
    assert (tmp_path / "site/one.pdf").exists()


def test_the_button_of_the_pdf_is_there_when_the_pdf_is():
    page = (built.HTML / "book/index.html").read_text()
    there = (built.HTML / "flashattention-book.pdf").exists()
    assert ("flashattention-book.pdf" in page) is there
