"""The web tools of the tool server: search, pages, HTTP, a browser, and what they may reach."""
