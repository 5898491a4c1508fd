"""The browser for the tests of pages."""

from browser import browser, show

__all__ = ["browser", "show"]
