"""DICOM files: their window, photometric interpretation, colours, and patients as groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pydicom
import pytest
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from lopsided.data.decoding import UnreadableImageError, decode_image, examine
from lopsided.data.dicom import windowed
from lopsided.data.prepare import Sources
from lopsided.data.sources import open_source
from lopsided.errors import DataError, InputError, MissingDependencyError
from lopsided.recipe import named_recipe
from lopsided.runs.run import settle


def write_dicom(path: Path, values: npt.NDArray[Any], photometric: str = "MONOCHROME2", **tags: Any) -> Path:
    content = pydicom.Dataset()
    content.file_meta = FileMetaDataset()
    content.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    content.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    content.file_meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(path)])
    colours = 3 if photometric == "RGB" else 1
    frames = values.ndim - (colours == 3) == 3
    content.Rows, content.Columns = values.shape[1:3] if frames else values.shape[:2]
    content.SamplesPerPixel, content.PhotometricInterpretation = colours, photometric
    if colours == 3:
        content.PlanarConfiguration = 0
    if frames:
        content.NumberOfFrames = len(values)
    bits = values.dtype.itemsize * 8
    content.BitsAllocated = content.BitsStored = bits
    content.HighBit, content.PixelRepresentation = bits - 1, int(values.dtype.kind == "i")
    for name, value in tags.items():
        setattr(content, name, value)
    content.PixelData = values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    content.save_as(path, enforce_file_format=True)
    return path


def grey(path: Path) -> list[list[int]]:
    return decode_image(path, None, 1)[0].tolist()


CT = np.array([[-1000, 40], [240, 3000]], dtype=np.int16)


def test_the_window_of_a_file_gives_its_greys(tmp_path: Path) -> None:
    # Stored values are 1024 higher than Hounsfield units; the window goes from -160 to 240.
    path = write_dicom(
        tmp_path / "ct.dcm", CT + 1024, RescaleSlope="1", RescaleIntercept="-1024", WindowCenter=["40", "600"],
        WindowWidth=["400", "1500"],
    )  # fmt: skip
    middle = round(255 * ((40 - 39.5) / 399 + 0.5))
    assert grey(path) == [[0, middle], [255, 255]]


def test_an_image_without_a_window_spans_all_greys(tmp_path: Path) -> None:
    assert grey(write_dicom(tmp_path / "x.dcm", np.array([[100, 150], [200, 300]], dtype=np.uint16))) == [
        [0, round(255 / 4)],
        [round(255 / 2), 255],
    ]
    assert grey(write_dicom(tmp_path / "flat.dcm", np.full((2, 2), 7, dtype=np.uint16))) == [[0, 0], [0, 0]]


def test_small_values_are_bright_in_monochrome1(tmp_path: Path) -> None:
    values = np.array([[0, 255]], dtype=np.uint8)
    assert grey(write_dicom(tmp_path / "x.dcm", values, "MONOCHROME1")) == [[255, 0]]
    assert grey(write_dicom(tmp_path / "y.dcm", values, "MONOCHROME2")) == [[0, 255]]


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_windows_are_those_of_pydicom(function: str) -> None:
    values = np.arange(-50, 4000, 7, dtype=np.int16)
    content = pydicom.Dataset()
    content.WindowCenter, content.WindowWidth, content.VOILUTFunction = 500, 700, function
    content.PhotometricInterpretation, content.BitsStored, content.PixelRepresentation = "MONOCHROME2", 16, 0
    expected = pydicom.pixels.apply_windowing(values.astype(np.float64), content) / 65535
    np.testing.assert_allclose(windowed(values.astype(np.float64), 500, 700, function), expected, atol=1e-9)


def test_colours_stay_and_the_first_frame_is_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), dtype=np.uint8)
    path = write_dicom(tmp_path / "x.dcm", pixels, "RGB")
    assert np.array_equal(decode_image(path, None, 3), pixels[0].transpose(2, 0, 1))
    header = examine(path).header
    assert header is not None
    assert (header.size, header.grey) == ((3, 4), False)


def test_damaged_and_empty_files_are_unreadable_images(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "x.dcm", CT)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UnreadableImageError, match=r"Cannot read the image .*x\.dcm"):
        decode_image(path, None, 1)
    report = pydicom.Dataset()
    report.file_meta, report.PatientID = pydicom.dcmread(write_dicom(tmp_path / "y.dcm", CT)).file_meta, "p"
    report.save_as(tmp_path / "y.dcm", enforce_file_format=True)
    assert examine(tmp_path / "y.dcm").error == "a DICOM file without an image"
    huge = pydicom.dcmread(write_dicom(tmp_path / "z.dcm", CT))
    huge.Rows = huge.Columns = 30000
    huge.save_as(tmp_path / "z.dcm")
    assert "30000 x 30000 pixels" in examine(tmp_path / "z.dcm").error


def folder_of(tmp_path: Path, patients: dict[str, list[str]]) -> Path:
    for label, ids in patients.items():
        for i, patient in enumerate(ids):
            values = np.full((8, 8), i, dtype=np.uint8)
            values[0, 0] = len(label)
            write_dicom(tmp_path / "scans" / label / f"{i}.dcm", values, PatientID=patient)
    return tmp_path / "scans"


def test_patients_are_groups(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"ill": ["p1", "p1", "p2"], "well": ["p1", "p3"]})
    source = open_source(folder, group="PatientID")
    assert source.groups is not None
    assert source.groups.tolist() == ["p1", "p1", "p2", "p1", "p3"]
    with pytest.raises(InputError, match=r"must be PatientID or another keyword of DICOM, or parent, got 'patient'\."):
        open_source(folder, group="patient")
    write_dicom(folder / "ill" / "9.dcm", CT)
    with pytest.raises(DataError, match=r"every DICOM file must have a PatientID, got 1 of 6 without .* ill/9\.dcm"):
        open_source(folder, group="PatientID")


def test_patients_with_several_images_are_a_caution_without_groups(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"ill": ["p1", "p1", "p2"], "well": ["p1", "p3"]})
    recipe = settle(named_recipe("quick"), folder)
    (fact,) = Sources().open(recipe)[0].facts
    assert (fact.kind, fact.values) == ("same_patients", {"patients": 1, "images": 3})
    assert Sources().open(recipe.override(**{"data.group": "PatientID"}))[0].facts == ()


def test_without_pydicom_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dicom(tmp_path / "x.dcm", CT)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingDependencyError, match=r"lopsided\[dicom\]"):
        decode_image(path, None, 1)
