"""A run behind a local page and a web interface: try images, mark them, train again (`lopsided serve`)."""
