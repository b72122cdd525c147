"""The page, live: a small server on this machine that runs the measures for it."""
