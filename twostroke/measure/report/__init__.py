"""Charts, HTML pages and terminal tables of all reports."""
