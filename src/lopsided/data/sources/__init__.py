"""Sources of images: folders, tables and known data sets, all opened as a ``Source``."""

from lopsided.data.sources.source import SOURCE_NAMES, Source, check_splits, name_of, open_source, source_from_arrays

__all__ = ["SOURCE_NAMES", "Source", "check_splits", "name_of", "open_source", "source_from_arrays"]
