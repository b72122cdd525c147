"""Running a traced text again, with something changed."""
