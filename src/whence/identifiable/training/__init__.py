"""Training the identifiable transformer on labelled texts."""
