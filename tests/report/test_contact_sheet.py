"""A contact sheet: every image once, under its class, the surest first; names are text."""

import base64
import re

from lockstep.report.page.contact_sheet import MOST_IMAGES, Shot, build_contact_sheet

JPEG = base64.b64encode(b"\xff\xd8\xff\xe0 a small picture").decode()


def shot(name: str, best: str, probability: float, jpeg: str = JPEG) -> Shot:
    return Shot(name, [(best, probability), ("other", (1 - probability) / 2)], jpeg)


def test_images_stand_under_their_class_the_surest_first() -> None:
    page = build_contact_sheet(
        "a run", [shot("1.png", "cat", 0.6), shot("2.png", "ant", 0.9), shot("3.png", "cat", 0.8)], []
    )
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page) == ["ant", "cat"]
    assert re.findall(r'title="([^"]*)"', page) == ["2.png", "3.png", "1.png"]
    assert "cat, 80.0 %" in page
    assert "other 10.0 %" in page
    assert "3 images" in page
    assert page.count(JPEG) == 3


def test_it_needs_nothing_from_elsewhere_and_carries_no_charts() -> None:
    page = build_contact_sheet("a run", [shot("1.png", "cat", 0.6)], [])
    assert len(page) < 60_000
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.search(r'(src|href)="https?:', page)
    assert 'id="plotly"' not in page


def test_hostile_names_are_shown_as_text() -> None:
    page = build_contact_sheet(
        "<script>1</script>",
        [shot('"><script>alert(1)</script>.png', "<b onclick=x>", 0.6), shot("2\udcff.png", "cat", 0.5)],
        [("<i>", "</script>")],
    )
    assert "<b onclick" not in page
    assert "<i>" not in page
    assert "alert(1)</script>" not in page
    assert "&lt;b onclick=x&gt;" in page
    page.encode()


def test_what_is_no_jpeg_and_what_could_not_be_read_is_said_in_words() -> None:
    page = build_contact_sheet("a run", [shot("1.png", "cat", 0.6, "javascript:x")], [("bad.png", "the file is empty")])
    assert "javascript" not in page
    assert "bad.png: the file is empty" in page
    assert "1.png" in page


def test_a_great_many_images_are_counted_and_the_first_shown() -> None:
    page = build_contact_sheet("a run", [shot(f"{n}.png", "cat", 0.5, "") for n in range(MOST_IMAGES + 1)], [])
    assert f"{MOST_IMAGES + 1:,} images" in page
    assert f"The first {MOST_IMAGES:,} of them are shown." in page
    assert page.count("<figure>") == MOST_IMAGES
