"""`tests/defects.py` replaces texts of the package: each text must still be there, once."""

from tests.defects import DEFECTS, ROOT


def test_every_defect_can_be_inserted() -> None:
    for defect in DEFECTS:
        text = (ROOT / "twostroke" / defect.file).read_text()
        assert text.count(defect.right) == 1, defect.name
        assert all((ROOT / "tests" / folder).is_dir() for folder in defect.folders), defect.name
